"""Figures of query errors: colour tells the mechanism, markers tell what else runs differ in."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpx.runs.experiment import Measure
from experiments import lines
from experiments.lines import Panel, Point

# What runs may differ in, and its symbol on an axis.
AXES = {"data.n": "n", "data.dim": "d", "data.key_bound": "R", "epsilon": "ε"}
_ERROR = "mean |error| of an answer"


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
    def marker(run) -> str:
        return ", ".join(
            f"{AXES[other]} = {_value(run, other):g}" for other in swept if other != name
        )

    points = [Point(m, _value(run, name), marker(run)) for run in runs for m in _plain(run)]
    file = f"error_against_{name.split('.')[-1]}.png"
    return _draw(folder / file, AXES[name], [Panel(points, AXES[name], _ERROR)], runs[0])


def _against_setting(run, setting: str, label: str, folder: Path) -> Path:
    """One family of mechanisms, with rows that do not have the setting as level lines."""
    points = [Point(m, m.settings[setting]) for m in run.measures if setting in m.settings]
    family = points[0].measure.row
    points += [
        Point(m, None) for m in _plain(run) if m.row in ("sketch", "mean") and m.row != family
    ]
    data = run.config["data"]
    title = f"n = {data['n']:,}, d = {data['dim']}, ε = {run.config['epsilon']:g}"
    path = folder / f"error_against_{setting}.png"
    return _draw(path, label, [Panel(points, label, _ERROR, title)], run)


def _draw(path: Path, label: str, panels: list[Panel], run) -> Path:
    title = f"Error of private cross-attention against {label}"
    return lines.draw(path, title, panels, run.titles, dashed=("mean",))


def _plain(run) -> list[Measure]:
    """The rows that are measured at one setting."""
    return [measure for measure in run.measures if not measure.settings]


def _seconds(runs, folder: Path) -> Path:
    dim = max(run.config["data"]["dim"] for run in runs)
    entries = [
        json.loads(line)
        for run in runs
        if run.config["data"]["dim"] == dim
        for line in (run.workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    panels = [
        Panel(
            [
                Point(Measure(entry["mechanism"], what, entry[what]), entry["n"])
                for entry in entries
            ],
            "n",
            what.replace("_", " "),
            f"d = {dim}",
        )
        for what in ("build_seconds", "seconds_per_query")
    ]
    return lines.draw(folder / "seconds_against_n.png", "Time against n", panels, runs[0].titles)


def _value(run, name: str):
    return functools.reduce(lambda node, part: node[part], name.split("."), run.config)
