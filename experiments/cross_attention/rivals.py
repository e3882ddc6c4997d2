"""A memory against what each query pays for: accuracy against the number of queries, and who wins when."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from dpx.launch import plotting

LEVELS = ("sketch", "class_means", "logistic_regression", "majority")  # for any number of queries
PAID = ("fresh_noise", "nearest")


def draw(runs: Sequence[Any], folder: Path) -> list[Path]:
    """A panel for each ε, of means over runs with their standard errors; none without paid answers."""
    groups = defaultdict(list)
    for run in runs:
        if any(measure.row == "nearest" for measure in run.measures):
            groups[run.config["epsilon"]].append(run)
    if not groups:
        return []
    size = (max(3.4 * len(groups), 7), 5)
    figure, panels = plotting.pyplot().subplots(
        1, len(groups), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (epsilon, of) in zip(panels[0], sorted(groups.items()), strict=True):
        levels, paid = _levels(of), best_paid(of)
        for (row, level), style in zip(levels.items(), ("-", "--", ":", "-."), strict=False):
            color = f"C{LEVELS.index(row)}"
            axes.axhline(level, color=color, linestyle=style, label=of[0].titles[row])
        for row, points in paid.items():
            xs = sorted(points)
            means, errors = zip(*(points[x] for x in xs), strict=True)
            color, label = f"C{len(LEVELS) + PAID.index(row)}", of[0].titles[row]
            axes.errorbar(xs, means, yerr=errors, marker="o", color=color, capsize=2, label=label)
        words = _words(wins_from(paid, levels["sketch"]))
        axes.set(xscale="log", xlabel="number of queries", title=f"ε = {epsilon:g}\n{words}")
        axes.title.set_fontsize("small")
    panels[0, 0].set_ylabel("accuracy")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize="small")
    title = "Accuracy against the number of queries that the budget has to last for"
    return [plotting.save(figure, folder / "accuracy_against_queries.png", title)]


def best_paid(runs: Sequence[Any]) -> dict[str, dict[int, tuple[float, float]]]:
    """For each row, by number of queries: mean accuracy over runs and its standard error, of the best k.

    The best k is chosen on those who ask, in favour of what the memory is compared with.
    """
    found: dict = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for run in runs:
        for measure in run.measures:
            if measure.row in PAID:
                about = measure.settings
                found[measure.row][about["queries"]][about.get("neighbours")].append(measure.value)
    return {
        row: {
            queries: max((float(np.mean(x)), _error(x)) for x in by_neighbours.values())
            for queries, by_neighbours in of_row.items()
        }
        for row, of_row in found.items()
    }


def wins_from(
    paid: dict[str, dict[int, tuple[float, float]]], memory: float, errors: float = 2.0
) -> float | None:
    """From how many queries on the memory is clearly better than every row that is paid for.

    Two standard errors count in favour of what is paid for. Between the numbers that were measured,
    accuracies are lines over the logarithm of the number.

    Returns:
      The number, 0.0 where the memory is better at all that were measured, or None where at none of the
      largest ones.
    """
    counts = sorted({count for points in paid.values() for count in points})
    best = np.array(
        [
            max(
                mean + errors * error for mean, error in (points[count] for points in paid.values())
            )
            for count in counts
        ]
    )
    loses = np.flatnonzero(best >= memory)
    if not len(loses):
        return 0.0
    last = int(loses[-1])
    if last == len(counts) - 1:
        return None
    share = (best[last] - memory) / (best[last] - best[last + 1])
    return float(np.exp(np.interp(share, [0, 1], np.log(counts[last : last + 2]))))


def _words(when: float | None) -> str:
    """What `wins_from` says, as the title of a panel."""
    if when is None:
        return "the memory never wins"
    if when == 0:
        return "the memory clearly wins at all numbers"
    return f"the memory clearly wins from {float(f'{when:.1g}'):,.0f} queries"


def _levels(runs: Sequence[Any]) -> dict[str, float]:
    values = defaultdict(list)
    for run in runs:
        for measure in run.measures:
            if measure.row in LEVELS:
                values[measure.row].append(measure.value)
    return {row: float(np.mean(values[row])) for row in LEVELS if row in values}


def _error(values: list[float]) -> float:
    return float(stats.sem(values)) if len(values) > 1 else 0.0
