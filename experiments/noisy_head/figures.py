"""Figures of the NoisyHead experiments, drawn from the measures of a finished run."""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments import lines
from experiments.lines import Point

AXIS_NAMES = {
    "num_prompts": "N, prompts",
    "length": "L, tokens of a prompt",
    "dim": "D, dimension",
    "epsilon": "ε",
    "steps": "T, steps",
    "p": "p, where α = c Nᵖ",
}


def drawer(
    name: str,
    metrics: Mapping[str, str],
    *,
    x: str,
    marker: str = "",
    dashed: Collection[str] = ("zero", "ridge"),
) -> Callable[[Any, Path], list[Path]]:
    """The function `figures` of an experiment: for each run a panel for each metric, against a setting.

    Args:
      name: Of the file, with the run's folder.
      metrics: The words of the vertical axis, by metric.
      x: The setting of the horizontal axis. Measures without any setting are horizontal lines.
      marker: The setting that markers tell apart; colours tell rows apart.
      dashed: The rows that look at no private data, or are not private.
    """

    def figures(records, folder: Path) -> list[Path]:
        return [_draw(record, folder / f"{name}_{record.workdir.name}.png") for record in records]

    def _draw(record, path: Path) -> Path:
        panels = [
            lines.Panel(list(_points(record, metric, x, marker)), AXIS_NAMES[x], words)
            for metric, words in metrics.items()
        ]
        title = f"In-context regression, {record.title()}"
        return lines.draw(path, title, panels, record.titles, dashed=dashed)

    return figures


def _points(record, metric: str, x: str, marker: str) -> Iterator[Point]:
    """The points above 0 of a metric along the setting x, and levels of rows that do not have it."""
    found = [m for m in record.measures if m.metric == metric]
    varied = {m.row for m in found if x in m.settings}
    for measure in found:
        settings = measure.settings
        if not measure.value > 0:
            continue
        if x in settings and set(settings) <= {x, marker}:
            told = marker != x and marker in settings
            words = f"{AXIS_NAMES.get(marker, marker)} = {settings[marker]}" if told else ""
            yield Point(measure, settings[x], words)
        elif not settings and measure.row not in varied:
            yield Point(measure, None)
