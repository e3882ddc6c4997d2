"""The tables of a report: of one run, and of many beside each other."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from dpx.launch import comparison, records
from dpx.launch.experiment import Measure
from dpx.launch.records import Record


def epsilon_of(spent: dict) -> str:
    """The ε of a guarantee in words."""
    return "∞" if spent["epsilon"] is None else f"{spent['epsilon']:.4g}"


def averaged(group: list[Record]) -> list[Measure]:
    """The measures of a run; of several their means and standard errors."""
    found = []
    for measure in group[0].measures:
        values = [
            record.metrics[measure.name] for record in group if measure.name in record.metrics
        ]
        error = float(stats.sem(values)) if len(values) > 1 else measure.error
        found.append(dataclasses.replace(measure, value=float(np.mean(values)), error=error))
    return found


def table(first: Record, measures: list[Measure]) -> list[str]:
    """A line for each row and setting, a column for each setting that varies and each metric.

    The headline row is bold, and the best private baseline says what it is. What a column would repeat in
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
        about = {
            name: f"{value:g}" if isinstance(value, float) else str(value)
            for name, value in settings
        }
        # Where one run tries several ε, the ε of a row is the one that it was tried at.
        tried_at = about.pop("epsilon", epsilon_of(spent) if spent else "")
        name = _row_name(first, row, best.get(row, []))
        lines.append(about | {"": name, "ε": tried_at} | values)
    columns = list(dict.fromkeys(column for line in lines for column in line))
    # ε and the row's name come behind the settings, in front of the metrics.
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


def overview(found: Sequence[Record], groups: Mapping[str, list[Record]]) -> list[str]:
    """For each config of which there are several groups: a line for each, with its headline row, as markdown.

    The columns are what differs between them, what all releases of one cost, the metrics of the headline row,
    and beside each metric by which rows are compared the best private baseline.
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
        said = (
            [f"In every run: {', '.join(f'{k} = {v}' for k, v in fixed.items())}.", ""]
            if fixed
            else []
        )
        sections.append("\n".join([title, "", *said, *markdown(columns, lines)]))
    return sections


def _line(group: list[Record], names: Sequence[str]) -> dict[str, str]:
    """A group in the table of all: nothing where its headline row is measured at several settings."""
    first, measures = group[0], averaged(group)
    own = [m for m in measures if m.row == first.headline_row and not m.settings]
    if not own:
        return {}
    flat = records.flatten(first.config)
    values = {n: f"{flat[n]:g}" if isinstance(flat[n], float) else str(flat[n]) for n in names}
    line = {"ε" if name == "epsilon" else name: value for name, value in values.items()}
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
