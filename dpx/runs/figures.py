"""The figures of finished runs: those that all experiments share, and those of each experiment."""

import os
import re
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import ml_collections

from dpx import _storage as storage
from dpx.runs import plotting, records
from dpx.runs.experiment import Measure
from dpx.runs.records import Record
from dpx.runs.tables import mean_and_error


def draw(runs: list[Record], folder: Path) -> list[Path]:
    """Draws all figures of these runs and returns their paths; none if matplotlib is not installed."""
    if not plotting.available():
        return []
    paths = [*_draw_training(runs, folder), *_draw_sweeps(runs, folder)]
    for module, group in _by_experiment(runs).items():
        if hasattr(module, "figures"):
            paths += module.figures(group, folder)
    return paths


def _by_experiment(runs: list[Record]) -> dict:
    groups = defaultdict(list)
    for record in runs:
        groups[_module(record)].append(record)
    return groups


def _module(record: Record) -> ModuleType:
    return records.experiment(ml_collections.ConfigDict(record.config))


def _draw_training(runs: list[Record], folder: Path) -> list[Path]:
    """Draws loss and ε against steps, with mean and standard error over runs that differ in the seed only.

    Only the owner of a run can read its losses; a report by somebody else has no such figure.
    """
    curves: dict = defaultdict(lambda: defaultdict(list))
    for title, group in records.by_seed(runs).items():
        for record in group:
            log = record.workdir / "metrics.jsonl"
            for entry in storage.read_lines(log) if os.access(log, os.R_OK) else ():
                if {"run", "step", "loss", "epsilon"} <= entry.keys():  # no evaluation called loss
                    row = re.sub(r"_seed\d+$", "", entry["run"])
                    name = record.titles.get(row, row) + title.removeprefix(record.source)
                    curves[title, name][entry["step"]].append((entry["loss"], entry["epsilon"]))
    if not curves:
        return []
    figure, axis = plotting.pyplot().subplots(figsize=(6.4, 4))
    right = axis.twinx()
    for (_, name), by_step in curves.items():
        steps = sorted(by_step)
        means, errors = zip(
            *(mean_and_error([x for x, _ in by_step[k]], 0.0) for k in steps), strict=True
        )
        line = axis.errorbar(steps, means, yerr=errors, label=name, capsize=2)
        spent = [by_step[step][0][1] for step in steps]
        if None not in spent:
            right.plot(steps, spent, linestyle=":", color=line.lines[0].get_color())
    axis.set(xlabel="step", ylabel="training loss")
    axis.xaxis.get_major_locator().set_params(integer=True)
    right.set_ylabel("ε spent (dotted)")
    right.set_ylim(bottom=0)
    if len(curves) <= 12:
        _legend(axis, beyond=0.12)
    return [plotting.save(figure, folder / "training.png", "Losses of training, and ε spent")]


def _draw_sweeps(runs: list[Record], folder: Path) -> list[Path]:
    """Draws each metric against each swept number, with a line for each row and each value of other axes.

    Axes that an experiment's own `figures` draw, which it names in `OWN_AXES`, are left out. Error bars are
    standard errors over the runs at a point; a single run states its own.
    """
    paths = []
    values = defaultdict(set)
    for record in runs:
        for name, value in records.flatten(record.config).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values[name].add(value)
    swept = [n for n, seen in values.items() if len(seen) > 1 and n not in ("seed", "noise_seed")]
    own = {module: getattr(module, "OWN_AXES", ()) for module in _by_experiment(runs)}
    columns = dict.fromkeys(m.metric for record in runs for m in record.measures)
    for name in swept:
        for column in columns:
            points = defaultdict(lambda: defaultdict(list))
            for record in (r for r in runs if name not in own[_module(r)]):
                flat = records.flatten(record.config)
                x, others = flat.get(name), {n: flat.get(n) for n in swept if n != name}
                for measure in record.measures:
                    if measure.metric == column and isinstance(x, int | float):
                        points[_line_name(record, measure, others)][x].append(measure)
            if not any(_varies(by_x) for by_x in points.values()):
                continue
            figure, axis = plotting.pyplot().subplots(figsize=(6.4, 4))
            for label, by_x in points.items():
                xs = sorted(by_x)
                pairs = [
                    mean_and_error([m.value for m in by_x[x]], by_x[x][0].error or 0.0) for x in xs
                ]
                means, errors = zip(*pairs, strict=True)
                axis.errorbar(xs, means, yerr=errors, marker="o", capsize=3, label=label or column)
            drawn = [m.value for p in points.values() for seen in p.values() for m in seen]
            for scale, numbers in ((axis.set_xscale, values[name]), (axis.set_yscale, drawn)):
                if min(numbers) > 0 and max(numbers) / min(numbers) >= 10:
                    scale("log")
            axis.set(xlabel="ε" if name == "epsilon" else name, ylabel=column)
            if name == "epsilon":
                axis.set_xticks(sorted(values[name]), [f"{x:g}" for x in sorted(values[name])])
                axis.minorticks_off()
            elif all(isinstance(x, int) for x in values[name]) and axis.get_xscale() == "linear":
                axis.xaxis.get_major_locator().set_params(integer=True)
            _legend(axis)
            file = f"{column}_against_{name}".replace("@", "_at_").replace("/", "_")
            title = f"{column} against {'ε' if name == 'epsilon' else name}"
            paths.append(plotting.save(figure, folder / f"{file}.png", title))
    return paths


def _varies(by_x: dict) -> bool:
    """Whether the means along a line differ."""
    return len({mean_and_error([m.value for m in seen])[0] for seen in by_x.values()}) > 1


def _line_name(record: Record, measure: Measure, others: dict) -> str:
    words = record.titles.get(measure.row, measure.row)
    return ", ".join([words, *(f"{k}={v}" for k, v in {**measure.settings, **others}.items())])


def _legend(axis, beyond: float = 0.0) -> None:
    """Draws a legend beside the axes, where it hides no data."""
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02 + beyond, 1), frameon=False)
