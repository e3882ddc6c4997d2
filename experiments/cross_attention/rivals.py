"""A memory against what each query pays for: accuracy against the number of queries, and who wins when."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpx.runs.experiment import Measure
from experiments import lines
from experiments.repeated import over_runs

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
    panels = []
    for epsilon, of in sorted(groups.items()):
        paid, points = (
            best_paid(of),
            [
                lines.Point(measure, None)
                for run in of
                for measure in run.measures
                if measure.row in LEVELS
            ],
        )
        for row, by_count in paid.items():
            for count, (value, error) in by_count.items():
                points.append(lines.Point(Measure(row, "accuracy", value, error), count))
        level, _ = over_runs([p.measure for p in points if p.measure.row == "sketch"])
        title = f"ε = {epsilon:g}\n{_words(wins_from(paid, level))}"
        panels.append(lines.Panel(points, "number of queries", "accuracy", title))
    path = folder / "accuracy_against_queries.png"
    title = "Accuracy against the number of queries that the budget has to last for"
    of_rows = {row: runs[0].titles[row] for row in (*LEVELS, *PAID)}
    return [lines.draw(path, title, panels, of_rows, dashed=LEVELS, sharey=True)]


def best_paid(runs: Sequence[Any]) -> dict[str, dict[int, tuple[float, float]]]:
    """For each row, by number of queries: mean accuracy over runs and its standard error, of the best k.

    The best k is chosen on those who ask, in favour of what the memory is compared with.
    """
    found: dict = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for measure in (m for run in runs for m in run.measures if m.row in PAID):
        about = measure.settings
        found[measure.row][about["queries"]][about.get("neighbours")].append(measure)
    return {
        row: {
            queries: max(over_runs(measures) for measures in by_neighbours.values())
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
