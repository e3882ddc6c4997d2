"""The tables that benchmarks write: rows as CSV, with all digits, and in markdown."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpx.runs import tables


def markdown(lines: Sequence[Mapping[str, str]]) -> str:
    """Lines of one or more cells by column; all have the columns of the first."""
    return "\n".join(tables.markdown(list(lines[0]), lines)) + "\n"


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that `write` made, whose values are text; none without one."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Sequence[Mapping[str, Any]], table: str) -> None:
    """Rows as the CSV file `path`, and the table in markdown beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    path.with_suffix(".md").write_text(table)
