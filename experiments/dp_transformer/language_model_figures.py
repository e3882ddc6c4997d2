"""The figure of a language model: what every row reaches, and how training got there."""

from collections import defaultdict
from pathlib import Path

from dpx import _storage as storage
from dpx.launch import plotting


def draw(records, folder: Path, *, unit: str = "character") -> list[Path]:
    """The rows of the last run as bars, and its training losses beside them, both in nats per `unit`."""
    record = records[-1]
    bars = [measure for measure in record.measures if measure.metric == f"nats_per_{unit}"]
    if not bars:
        return []
    figure, (left, right) = plotting.pyplot().subplots(1, 2, figsize=(11, 4), layout="constrained")
    for place, measure in enumerate(reversed(bars)):
        private = measure.row in record.releases
        color = "C0" if measure.row == record.headline_row else "C2" if private else "0.6"
        left.barh(place, measure.value, color=color)
        left.text(measure.value, place, f" {measure.value:.3f}", va="center", fontsize=8)
    titles = [record.titles.get(measure.row, measure.row) for measure in reversed(bars)]
    left.set_yticks(range(len(bars)), titles)
    lowest = min(measure.value for measure in bars)
    highest = max(measure.value for measure in bars)
    left.set_xlim(max(0.0, lowest - 0.5 * (highest - lowest) - 0.1), highest * 1.05)
    left.set_xlabel(f"nats per {unit}, held-out records (grey: not private)")
    curves = _curves(record)
    for row, points in curves.items():
        steps, losses = zip(*points, strict=True)
        right.plot(steps, losses, marker=".", label=record.titles.get(row, row))
    right.set(xlabel="step", ylabel=f"nats per {unit}, training batch")
    right.xaxis.get_major_locator().set_params(integer=True)
    if curves:
        right.legend(fontsize=8, frameon=False)
    return [plotting.save(figure, folder / "rows.png")]


def _curves(record) -> dict[str, list[tuple[int, float]]]:
    curves, log = defaultdict(list), record.workdir / "metrics.jsonl"
    shown = {measure.row for measure in record.measures}  # and not what was only tried
    for entry in storage.read_lines(log) if log.exists() else ():
        if {"run", "step", "loss"} <= entry.keys() and entry["run"] in shown:
            curves[entry["run"]].append((entry["step"], entry["loss"]))
    return curves
