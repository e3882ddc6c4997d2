"""Figures of the attention error: along every swept axis, and the numbers of samples."""

from pathlib import Path

import numpy as np
from scipy import stats

from dpx import gram
from dpx.launch import plotting
from dpx.launch.experiment import Measure

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


def _line(records, axis: str, row: str, metric: str) -> tuple[list, list, list]:
    """Positions, means and standard errors of one row: over the seeds at a position, or of its one run."""
    points: dict[float, list[Measure]] = {}
    for record in records:
        for measure in record.measures:
            if (measure.row, measure.metric) == (row, metric):
                points.setdefault(record.config[axis], []).append(measure)
    places, means, errors = [], [], []
    for place, found in sorted(points.items()):
        values = [measure.value for measure in found]
        places.append(place)
        means.append(np.mean(values))
        errors.append(stats.sem(values) if len(found) > 1 else found[0].error or 0.0)
    return places, means, errors


def _draw_axis(records, axis: str, path: Path) -> Path:
    """Two panels of errors, one line a row, and one of bounds: colours are rows, line styles are bounds."""
    plt = plotting.pyplot()
    figure, panels = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    colours = {row: f"C{number}" for number, row in enumerate(ROWS)}
    for panel, (metric, words) in zip(panels, ERRORS.items(), strict=False):
        for row, colour in colours.items():
            x, y, bar = _line(records, axis, row, metric)
            panel.errorbar(x, y, yerr=bar, color=colour, marker="o", markersize=3, capsize=2)
        panel.set(ylabel=words, title="error of the attention matrix")
    styles = {"max_entry_error": "-", "bound": "--", "bound_paper": ":"}
    for row in ("gaussian", "sampling", "uniform"):
        for metric, style in styles.items():
            x, y, _ = _line(records, axis, row, metric)
            panels[2].plot(x, y, color=colours[row], linestyle=style)
    panels[2].set(
        ylabel=ERRORS["max_entry_error"], title=f"and its bounds, with probability {1 - FAILURE:g}"
    )
    ticks = sorted({record.config[axis] for record in records})
    for panel in panels:
        panel.set(yscale="log", xlabel=AXES[axis])
        if ticks[-1] >= 10 * ticks[0]:
            panel.set_xscale("log")
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
    lines = [
        plt.Line2D([], [], color=colours[row], marker="o", label=words)
        for row, words in ROWS.items()
    ]
    words = {"max_entry_error": "measured", "bound": "bound", "bound_paper": "the paper's bound"}
    lines += [
        plt.Line2D([], [], color="grey", linestyle=style, label=words[metric])
        for metric, style in styles.items()
    ]
    figure.legend(handles=lines, fontsize=8, loc="outside right upper")
    return plotting.save(figure, path, f"Private attention against {AXES[axis]}")


def _draw_samples(n: int, path: Path) -> Path:
    """The largest number of samples against t = F/η: colours are budgets, line styles are calibrations."""
    plt = plotting.pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    ratios = np.geomspace(1e-6, 0.5, 60)
    change = gram.frobenius_sensitivity(1.0, 2.0)
    budgets = (
        ("δ = 1e-06", [(f"ε = {epsilon:g}", epsilon, 1e-6) for epsilon in (0.09, 1.0, 8.0)]),
        ("ε = 1", [(f"δ = {delta:g}", 1.0, delta) for delta in (1e-3, 1e-6, 1e-9)]),
    )
    styles = {"exact": "-", "paper": "--"}
    for panel, (title, lines) in zip(panels, budgets, strict=True):
        for number, (_, epsilon, delta) in enumerate(lines):
            for calibration, style in styles.items():
                terms = {"column_bound": 1.0, "n": n, "calibration": calibration}
                admitted = np.array(
                    [gram.max_samples(epsilon, delta, eta=change / t, **terms) for t in ratios],
                    float,
                )
                shown = np.where(admitted > 0, admitted, np.nan)
                panel.plot(ratios, shown, color=f"C{number}", linestyle=style)
        handles = [
            plt.Line2D([], [], color=f"C{number}", label=words)
            for number, (words, *_) in enumerate(lines)
        ]
        panel.legend(handles=handles, fontsize=8, loc="upper right")
        panel.set(xscale="log", yscale="log", xlabel="t = F/η", title=f"{title}, n = {n}")
    panels[0].set_ylabel("largest number of samples k")
    handles = [
        plt.Line2D([], [], color="grey", linestyle=style, label=f"{calibration} calibration")
        for calibration, style in styles.items()
    ]
    figure.legend(handles=handles, fontsize=8, loc="outside right upper")
    return plotting.save(figure, path, "Samples that a budget admits")
