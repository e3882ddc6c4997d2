"""Figures of the NoisyHead experiments, drawn from the measures of a finished run."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dpx.launch import plotting

AXIS_NAMES = {
    "num_prompts": "N, prompts",
    "length": "L, tokens of a prompt",
    "dim": "D, dimension",
    "epsilon": "ε",
    "steps": "T, steps",
    "p": "p, where α = c Nᵖ",
}
MARKERS = "osv^D*X"


def draw(
    record,
    path: Path,
    metrics: Mapping[str, str],
    *,
    x: str,
    marker: str = "",
    dashed: Collection[str] = ("zero", "ridge"),
) -> Path:
    """A panel for each metric: the mean and its standard error against a setting.

    Args:
      record: The run, whose measures have the setting `x`, and `marker` too where they differ by it. Measures
        without any setting are horizontal lines.
      path: Of the figure.
      metrics: The words of the vertical axis, by metric.
      x: The setting of the horizontal axis.
      marker: The setting that markers tell apart; colours tell rows apart.
      dashed: The rows that look at no private data, or are not private.

    Returns:
      The path.
    """
    plt = plotting.pyplot()
    figure, panels = plt.subplots(
        1, len(metrics), figsize=(1.5 + 5 * len(metrics), 4), squeeze=False, layout="constrained"
    )
    colours: dict[str, str] = {}
    shapes: dict[Any, str] = {}
    for panel, (metric, words) in zip(panels[0], metrics.items(), strict=True):
        found = _lines(record, metric, x, marker)
        for (row, setting), line in found.items():
            colour = colours.setdefault(row, f"C{len(colours) % 10}")
            style = "--" if row in dashed else "-"
            if line[0][0] is None:
                panel.axhline(line[0][1], color=colour, linestyle=style, linewidth=1)
                continue
            shape = "." if setting is None else shapes.setdefault(setting, MARKERS[len(shapes) % 7])
            places, values, errors = zip(*sorted(line), strict=True)
            panel.errorbar(
                places, values, errors, color=colour, marker=shape, markersize=4, linestyle=style,
                linewidth=1, capsize=2,
            )  # fmt: skip
        drawn = [point for line in found.values() for point in line]
        _scale(panel, [place for place, *_ in drawn if place is not None], [y for _, y, _ in drawn])
        panel.set(xlabel=AXIS_NAMES[x], ylabel=words)
    styles = {row: "--" if row in dashed else "-" for row in colours}
    lines = [
        plt.Line2D([], [], color=colour, linestyle=styles[row], label=record.titles.get(row, row))
        for row, colour in colours.items()
    ]
    words = AXIS_NAMES.get(marker, marker)
    lines += [
        plt.Line2D([], [], color="grey", linestyle="", marker=shape, label=f"{words} = {setting}")
        for setting, shape in sorted(shapes.items())
    ]
    figure.legend(handles=lines, fontsize=8, loc="outside right upper")
    return plotting.save(figure, path, f"In-context regression, {record.title()}")


def _lines(record, metric: str, x: str, marker: str) -> dict[tuple, list[tuple]]:
    """(row, value of the marker's setting) -> (x or None, mean, standard error) of each point above 0."""
    lines: dict[tuple, list[tuple]] = {}
    varied = {m.row for m in record.measures if m.metric == metric and x in m.settings}
    for measure in record.measures:
        settings = measure.settings
        if measure.metric != metric or not measure.value > 0:
            continue
        if x in settings and set(settings) <= {x, marker}:
            setting = None if marker == x else settings.get(marker)
            line = lines.setdefault((measure.row, setting), [])
            line.append((settings[x], measure.value, measure.error or 0.0))
        elif not settings and measure.row not in varied:
            lines[measure.row, None] = [(None, measure.value, 0.0)]
    return lines


def _scale(panel, places: list[float], values: list[float]) -> None:
    """Logarithmic axes where the values span a decade; ticks where there is something, and at integers."""
    if not places:
        return
    ticks = sorted(set(places))
    if min(places) > 0 and max(places) >= 10 * min(places):
        panel.set_xscale("log")
    if len(ticks) <= 8:
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
    if max(values) >= 10 * min(values):
        panel.set_yscale("log", nonpositive="clip")
