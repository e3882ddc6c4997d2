"""Figures of query errors: colour tells the mechanism, markers tell what else runs differ in."""

import functools
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from dpx.launch import plotting
from dpx.launch.experiment import Measure

# What runs may differ in, and its symbol on an axis.
AXES = {"data.n": "n", "data.dim": "d", "data.key_bound": "R", "epsilon": "ε"}
_MARKERS = "osv^Dx<>"


def draw(runs: Sequence[Any], folder: Path) -> list[Path]:
    """Error against whatever the runs differ in, against degrees and numbers of queries; and seconds."""
    differ = {name: {_value(run, name) for run in runs} for name in AXES}
    swept = [name for name, values in differ.items() if len(values) > 1]
    paths = [_against_config(runs, name, swept, folder) for name in swept]
    largest = max(runs, key=lambda run: run.config["data"]["n"])
    for setting, label in (("degree", "degree s of the sketch"), ("queries", "number of queries")):
        paths.append(_against_setting(largest, setting, label, folder))
    if "data.n" in swept:
        paths.append(_seconds(runs, folder))
    return paths


def _against_config(runs, name: str, swept: list[str], folder: Path) -> Path:
    rest = [other for other in swept if other != name]

    def place(run, measure):
        marker = ", ".join(f"{AXES[other]} = {_value(run, other):g}" for other in rest)
        return measure.row, marker, _value(run, name)

    plain = [(run, measure) for run in runs for measure in _plain(run)]
    path = folder / f"error_against_{name.split('.')[-1]}.png"
    return _lines(plain, place, AXES[name], path)


def _against_setting(run, setting: str, label: str, folder: Path) -> Path:
    """One family of mechanisms, with rows that do not have the setting as level lines."""
    family = [m for m in run.measures if setting in m.settings]
    xs = sorted(m.settings[setting] for m in family)
    beside = ("sketch", "mean") if setting == "queries" else ("mean",)
    data = run.config["data"]
    figure, axes = plotting.pyplot().subplots(figsize=(7, 4), layout="constrained")
    points = sorted((m.settings[setting], m.value, m.error or 0) for m in family)
    words = run.titles[family[0].row]
    axes.errorbar(*zip(*points, strict=True), marker="o", capsize=3, label=words)
    for measure, style in zip(_plain(run), itertools.cycle(("--", ":")), strict=False):
        if measure.row in beside:
            axes.axhline(
                measure.value, color="grey", linestyle=style, label=run.titles[measure.row]
            )
    title = f"n = {data['n']:,}, d = {data['dim']}, ε = {run.config['epsilon']:g}"
    return _finish(figure, axes, label, title, xs, folder / f"error_against_{setting}.png")


def _plain(run) -> list[Measure]:
    """The rows that are measured at one setting."""
    return [measure for measure in run.measures if not measure.settings]


def _lines(found: list[tuple[Any, Measure]], place: Callable, label: str, path: Path) -> Path:
    """A line for each row and marker: the mean over runs at a point, and its standard error."""
    lines: dict = defaultdict(lambda: defaultdict(list))
    for run, measure in found:
        row, marker, x = place(run, measure)
        lines[row, marker][x].append(measure)
    titles = found[0][0].titles
    rows = list(dict.fromkeys(row for row, _ in lines))
    markers = sorted({marker for _, marker in lines})
    figure, axes = plotting.pyplot().subplots(figsize=(7, 4.5), layout="constrained")
    for (row, marker), points in lines.items():
        xs = sorted(points)
        means, errors = zip(*(_mean_and_error(points[x]) for x in xs), strict=True)
        axes.errorbar(
            xs,
            means,
            yerr=errors,
            color=f"C{rows.index(row)}",
            marker=_MARKERS[markers.index(marker) % len(_MARKERS)],
            capsize=2,
            linewidth=1,
            markersize=4,
        )
    for row in rows:
        axes.plot([], [], color=f"C{rows.index(row)}", label=titles[row])
    for marker in markers if markers != [""] else ():
        shape = _MARKERS[markers.index(marker) % len(_MARKERS)]
        axes.plot([], [], color="black", linestyle="", marker=shape, label=marker)
    ticks = sorted({x for points in lines.values() for x in points})
    return _finish(figure, axes, label, "", ticks, path)


def _finish(figure, axes, label: str, title: str, ticks: list, path: Path) -> Path:
    axes.set(xlabel=label, ylabel="mean |error| of an answer", title=title, yscale="log")
    if max(ticks) >= 10 * min(ticks) > 0:
        axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")
    return plotting.save(figure, path, f"Error of private cross-attention against {label}")


def _mean_and_error(measures: list[Measure]) -> tuple[float, float]:
    if len(measures) == 1:
        return measures[0].value, measures[0].error or 0.0
    values = [measure.value for measure in measures]
    return float(np.mean(values)), float(stats.sem(values))


def _seconds(runs, folder: Path) -> Path:
    dim = max(run.config["data"]["dim"] for run in runs)
    entries = [
        json.loads(line)
        for run in runs
        if run.config["data"]["dim"] == dim
        for line in (run.workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    figure, panels = plotting.pyplot().subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axes, what in zip(panels, ("build_seconds", "seconds_per_query"), strict=True):
        for name in dict.fromkeys(entry["mechanism"] for entry in entries):
            times = defaultdict(list)
            for entry in entries:
                if entry["mechanism"] == name:
                    times[entry["n"]].append(entry[what])
            ns = sorted(times)
            axes.loglog(ns, [np.mean(times[n]) for n in ns], marker="o", label=name)
        axes.set(xlabel="n", ylabel=what.replace("_", " "), title=f"d = {dim}")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return plotting.save(figure, folder / "seconds_against_n.png", "Time against n")


def _value(run, name: str):
    return functools.reduce(lambda node, part: node[part], name.split("."), run.config)
