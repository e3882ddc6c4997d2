"""Comparisons within a table: the best private baseline, and sentences about rows that do not beat it."""

import math
from collections.abc import Iterator, Mapping, Sequence

from dpx.runs.experiment import Comparison, Measure


def best_baseline(comparison: Comparison, measures: Sequence[Measure]) -> str:
    """The baseline that is best on average over the settings at which it was measured, or ""."""
    scores = {
        row: [
            _good(comparison, m) for m in measures if (m.row, m.metric) == (row, comparison.metric)
        ]
        for row in comparison.baselines
    }
    means = {row: math.fsum(values) / len(values) for row, values in scores.items() if values}
    return max(means, key=lambda row: means[row], default="")


def remarks(
    comparison: Comparison,
    measures: Sequence[Measure],
    headline_row: str,
    titles: Mapping[str, str],
) -> Iterator[str]:
    """Yields a sentence for each row that is worse than its start, and if a baseline beats the headline row.

    Args:
      comparison: The rows that are compared, and the metric.
      measures: The measures of the table.
      headline_row: The row that the table is about.
      titles: The title of each row.
    """

    def name(row: str) -> str:
        return titles.get(row, row)

    for row, start in comparison.starts.items():
        if lost := _lost(comparison, measures, row, start, or_level=False):
            yield f"{name(row)}: training made it worse than what it started from, {lost}."
    best = best_baseline(comparison, measures)
    lost = _lost(comparison, measures, headline_row, best, or_level=True)
    if lost and best != comparison.starts.get(headline_row):
        yield f"{name(headline_row)}: no better than {name(best)}, the best private baseline, {lost}."


def _lost(
    comparison: Comparison, measures: Sequence[Measure], row: str, other: str, *, or_level: bool
) -> str:
    """The settings at which the other row is better, with numbers; "" if there are none."""
    of_row, of_other = (
        [m for m in measures if (m.row, m.metric) == (name, comparison.metric)]
        for name in (row, other)
    )
    pairs = [
        (mine, its)
        for mine in of_row
        for its in of_other
        if its.settings.items() <= mine.settings.items()
    ]
    lost = []
    for mine, its in pairs:
        ahead = _good(comparison, its) - _good(comparison, mine)
        if ahead > 0 or (ahead == 0 and or_level):
            lost.append((mine, its))
    if not lost:
        return ""
    if len(pairs) > 1:
        return f"by {comparison.metric} at {len(lost)} of {len(pairs)} settings"
    ((mine, its),) = lost
    return f"by {comparison.metric}: {in_words(mine)} against {in_words(its)}"


def _good(comparison: Comparison, measure: Measure) -> float:
    """The value, with its sign changed if less is better; NaN is worst."""
    value = measure.value if comparison.more_is_better else -measure.value
    return -math.inf if math.isnan(value) else value


def in_words(measure: Measure) -> str:
    """The value, with its standard error if there is one."""
    return f"{measure.value:.4g}" + ("" if measure.error is None else f" ± {measure.error:.2g}")
