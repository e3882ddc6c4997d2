"""Figures of the attention error: along every swept axis, and the numbers of samples."""

import itertools
from pathlib import Path

import numpy as np

from dpx import gram
from dpx.runs.experiment import Measure
from experiments import lines
from experiments.lines import Point

FAILURE = 0.05  # of the high-probability bounds
ERRORS = {
    "max_entry_error": "largest entry error",
    "total_variation": "total variation of a row, mean",
}
AXES = {
    "epsilon": "ε",
    "rows": "n, rows of X",
    "columns": "d, columns of X",
    "max_column_change_fraction": "β / 2α",
    "slack": "α / length of a column",
}
ROWS = {
    "gaussian": "Gaussian noise on XXᵀ",
    "sampling": "sampling, Rényi k",
    "sampling_loose": "sampling, Rényi k at t = 2αβ/η",
    "sampling_paper": "sampling, paper's k",
    "uniform": "uniform, no data",
}


def draw(records, folder: Path) -> list[Path]:
    """A figure for every swept axis, and one of the numbers of samples."""
    paths = [_draw_samples(records[0].config["rows"], folder / "gram_samples.png")]
    for axis in AXES:
        rest = [name for name in AXES if name != axis]
        first = records[0].config
        line = [r for r in records if all(r.config[name] == first[name] for name in rest)]
        if len({r.config[axis] for r in line}) > 1:
            line.sort(key=lambda r: r.config[axis])
            paths.append(_draw_axis(line, axis, folder / f"gram_error_{axis}.png"))
    return paths


def _draw_axis(records, axis: str, path: Path) -> Path:
    """Two panels of errors, and one of the largest entry error beside its bounds."""

    def points(marker_of: dict[str, str], rows) -> list[Point]:
        return [
            Point(measure, record.config[axis], marker_of[measure.metric])
            for record in records
            for measure in record.measures
            if measure.metric in marker_of and measure.row in rows
        ]

    label = AXES[axis]
    bounds = {"max_entry_error": "measured", "bound": "bound", "bound_paper": "the paper's bound"}
    beside = f"and its bounds, with probability {1 - FAILURE:g}"
    panels = [
        *(
            lines.Panel(points({metric: ""}, ROWS), label, words, "error of the attention matrix")
            for metric, words in ERRORS.items()
        ),
        lines.Panel(
            points(bounds, ("gaussian", "sampling", "uniform")),
            label,
            ERRORS["max_entry_error"],
            beside,
        ),
    ]
    return lines.draw(path, f"Private attention against {label}", panels, ROWS)


def _draw_samples(n: int, path: Path) -> Path:
    """The largest number of samples against t = F/η: colours are budgets, markers are calibrations."""
    ratios, change = np.geomspace(1e-6, 0.5, 20), gram.frobenius_sensitivity(1.0, 2.0)
    panels, titles = [], {}
    for title, budgets in (
        ("δ = 1e-06", {f"ε = {epsilon:g}": (epsilon, 1e-6) for epsilon in (0.09, 1.0, 8.0)}),
        ("ε = 1", {f"δ = {delta:g}": (1.0, delta) for delta in (1e-3, 1e-6, 1e-9)}),
    ):
        titles |= {row: f"{row}, {title}" for row in budgets}
        points = []
        for (row, budget), calibration in itertools.product(budgets.items(), ("exact", "paper")):
            terms = {"column_bound": 1.0, "n": n, "calibration": calibration}
            for t in ratios.tolist():
                count = gram.max_samples(*budget, eta=change / t, **terms)
                if count:
                    words = f"{calibration} calibration"
                    points.append(Point(Measure(row, "samples", float(count)), t, words))
        title = f"{title}, n = {n}"
        panels.append(lines.Panel(points, "t = F/η", "largest number of samples k", title))
    return lines.draw(path, "Samples that a budget admits", panels, titles, sharey=True)
