"""The tables of a report: of one run, and of many runs side by side."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from dpx.runs import comparison, records
from dpx.runs.experiment import Measure
from dpx.runs.records import Record


def epsilon_of(spent: dict) -> str:
    """The ε of a guarantee in words."""
    return "∞" if spent["epsilon"] is None else f"{spent['epsilon']:.4g}"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def averaged(group: list[Record]) -> list[Measure]:
    """The measures of a run, or the means and standard errors of several runs."""
    means = []
    for measure in group[0].measures:
        values = [
            record.metrics[measure.name] for record in group if measure.name in record.metrics
        ]
        mean, error = mean_and_error(values, measure.error)
        means.append(dataclasses.replace(measure, value=mean, error=error))
    return means


def mean_and_error(values: Sequence[float], own: Any = None) -> tuple[float, Any]:
    """The mean of several values and its standard error, which of one value is its `own`."""
    return float(np.mean(values)), float(stats.sem(values)) if len(values) > 1 else own


def table(first: Record, measures: list[Measure]) -> list[str]:
    """A table with a line for each row and setting, and a column for each metric and each varying setting.

    The headline row is bold, and the best private baseline is marked. A value that a column would repeat in
    every line stands above the table instead.
    """
    releases, cells = first.releases, defaultdict(dict)
    for measure in measures:
        key = (measure.place, measure.row, tuple(measure.settings.items()))
        cells[key][measure.metric] = comparison.in_words(measure)
    best = defaultdict(list)
    for by in first.comparisons:
        best[comparison.best_baseline(by, measures)].append(by.metric)
    lines = []
    for (place, row, settings), values in cells.items():
        spent = releases.get(place, releases.get(row))
        about = {name: _shown(value) for name, value in settings}
        # If one run measures several ε, the ε of a row is that of its settings.
        tried_at = about.pop("epsilon", epsilon_of(spent) if spent else "")
        name = _row_name(first, row, best.get(row, []))
        lines.append(about | {"": name, "ε": tried_at} | values)
    columns = list(dict.fromkeys(column for line in lines for column in line))
    # ε and the row's name stand between the settings and the metrics.
    columns.sort(
        key=lambda column: (column in ("", "ε")) + 2 * any(column in c for c in cells.values())
    )
    said = []
    for column in [column for column in columns if column not in ("", "ε")]:
        seen = {line.get(column, "") for line in lines}
        if len(lines) > 1 and len(seen) == 1 and len(columns) > 3:
            columns.remove(column)
            said.append(f"{column} = {seen.pop()}")
    above = [f"In every row: {', '.join(said)}.", ""] if said else []
    return above + markdown(columns, lines)


def _row_name(record: Record, row: str, best_in: list[str]) -> str:
    words = record.titles.get(row, row)
    if row and row == record.headline_row:
        return f"**{words}**"
    if not row or not best_in:
        return words
    where = f" in {' and '.join(best_in)}" if len(record.comparisons) > 1 else ""
    return f"{words} (best private baseline{where})"


def overview(groups: Mapping[str, list[Record]]) -> list[str]:
    """For each config with several groups of runs, a table of their headline rows, as markdown.

    The columns are the values that differ, the total cost, the metrics of the headline row and, beside each
    metric by which rows are compared, the best private baseline.
    """
    by_source = defaultdict(list)
    for group in groups.values():
        by_source[group[0].source].append(group)
    sections = []
    for source, listed in by_source.items():
        names = records.varied([group[0] for group in listed])
        lines = [line for group in listed if (line := _line(group, names))]
        if len(lines) < 2:
            continue
        columns = list(dict.fromkeys(column for line in lines for column in line))
        headline = listed[0][0].headline_row
        title = f"## {source}: {listed[0][0].titles.get(headline, headline)}"
        fixed = records.fixed([group[0] for group in listed])
        said = ", ".join(f"{name} = {value}" for name, value in fixed.items())
        above = [f"In every run: {said}.", ""] if said else []
        sections.append("\n".join([title, "", *above, *markdown(columns, lines)]))
    return sections


def _line(group: list[Record], names: Sequence[str]) -> dict[str, str]:
    """The cells of a group in that table; none if its headline row is measured at several settings."""
    first, measures = group[0], averaged(group)
    own = [m for m in measures if m.row == first.headline_row and not m.settings]
    if not own:
        return {}
    flat = records.flatten(first.config)
    line = {"ε" if name == "epsilon" else name: _shown(flat[name]) for name in names}
    line["ε of all releases"] = epsilon_of(first.total)
    by_metric = {by.metric: by for by in first.comparisons}
    for measure in own:
        line[measure.metric] = comparison.in_words(measure)
        if by := by_metric.get(measure.metric):
            best = comparison.best_baseline(by, measures)
            values = [m for m in measures if (m.row, m.metric) == (best, by.metric)]
            if len(values) == 1:
                column = f"best private baseline in {by.metric}"
                name = first.titles.get(best, best)
                line[column] = f"{comparison.in_words(values[0])} ({name})"
    return line


def markdown(columns: Sequence[str], lines: Sequence[Mapping[str, str]]) -> list[str]:
    """A table with a line for each mapping from columns to cells."""
    table = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return table + [
        f"| {' | '.join(line.get(column, '') for column in columns)} |" for line in lines
    ]
