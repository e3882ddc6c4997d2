"""Figures of lines: a mean and its standard error against a setting, for each row of a table."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dpx.runs import plotting
from dpx.runs.experiment import Measure
from experiments.repeated import over_runs

_MARKERS = "osv^D*X<>"


class Point(NamedTuple):
    """A number on a line.

    Attributes:
      measure: The number, of one run; several of one place are averaged.
      x: Its place, or None for a level line.
      marker: What tells lines of a row apart, in words.
    """

    measure: Measure
    x: float | None
    marker: str = ""


class Panel(NamedTuple):
    """A panel of a figure: its lines, and the words at it."""

    points: Sequence[Point]
    xlabel: str
    ylabel: str
    title: str = ""


def draw(
    path: Path,
    title: str,
    panels: Iterable[Panel],
    titles: Mapping[str, str],
    *,
    dashed: Collection[str] = (),
    sharey: bool = False,
) -> Path:
    """Draws panels beside each other: colours tell rows, markers what else differs.

    Args:
      path: Of the figure, which is returned.
      title: Above all panels.
      panels: From left to right.
      titles: The words of the rows, in the order of their colours.
      dashed: The rows that look at no private data, or are not private.
      sharey: Whether all panels have one vertical axis.
    """
    plt, panels = plotting.pyplot(), list(panels)
    size = (max(7, 5 * len(panels)), 5)
    figure, grid = plt.subplots(
        1, len(panels), figsize=size, squeeze=False, layout="constrained", sharey=sharey
    )
    present = dict.fromkeys(point.measure.row for panel in panels for point in panel.points)
    rows = dict.fromkeys([row for row in titles if row in present] + list(present))
    colours = {row: f"C{number % 10}" for number, row in enumerate(rows)}
    styles = {row: "--" if row in dashed else "-" for row in colours}
    shapes: dict[str, str] = {}
    for axes, panel in zip(grid[0], panels, strict=True):
        lines: Any = defaultdict(lambda: defaultdict(list))
        for point in panel.points:
            lines[point.measure.row, point.marker][point.x].append(point.measure)
        for (row, marker), by_x in lines.items():
            style: dict[str, Any] = {
                "color": colours[row],
                "linestyle": styles[row],
                "linewidth": 1,
            }
            if None in by_x:
                axes.axhline(over_runs(by_x[None])[0], **style)
                continue
            shape = shapes.setdefault(marker, _MARKERS[len(shapes) % len(_MARKERS)])
            xs = sorted(by_x)
            means, errors = zip(*(over_runs(by_x[x]) for x in xs), strict=True)
            axes.errorbar(xs, means, errors, marker=shape, markersize=4, capsize=2, **style)
        _scale(axes, panel.points)
        axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
        axes.set_title(panel.title, fontsize="small")
    handles = [
        plt.Line2D([], [], color=colour, linestyle=styles[row], label=titles.get(row, row))
        for row, colour in colours.items()
    ]
    handles += [
        plt.Line2D([], [], color="grey", linestyle="", marker=shape, label=marker)
        for marker, shape in sorted(shapes.items())
        if marker
    ]
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=2)
    return plotting.save(figure, path, title)


def _scale(axes: Any, points: Sequence[Point]) -> None:
    """Logarithmic axes where numbers span a decade; ticks where there are points."""
    values = [point.measure.value for point in points]
    if values and max(values) >= 10 * min(values) > 0:
        axes.set_yscale("log", nonpositive="clip")
    ticks = sorted({point.x for point in points if point.x is not None})
    if not ticks:
        return
    if ticks[-1] >= 10 * ticks[0] > 0:
        axes.set_xscale("log")
    if len(ticks) <= 8:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
