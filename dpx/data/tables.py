"""A reader of tables of interactions: each line holds a user, an item and, optionally, a time."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from dpx._validate import check_integer
from dpx.data import files, parquet
from dpx.data.histories import Histories, from_events


def load_table(
    path: str | Path,
    *,
    user: str = "user",
    item: str = "item",
    time: str | None = None,
    header: bool | None = None,
    separator: str | None = None,
    min_count: int = 0,
) -> Histories:
    """Histories from a .csv, .tsv or .parquet table with a column of users and one of items.

    Users and items are `dpx.data.cells.identifier`s, and times are read by `dpx.data.cells.times`: each cell
    by itself, and in the same way from every kind of file.

    Args:
      path: The table. Text has to be in UTF-8, and may be compressed, as in .csv.gz.
      user, item: The names of the columns, or their numbers from 1 if there is no header.
      time: The column of times, all numbers or all ISO dates; None keeps the order of the lines.
      header: Whether the first line names the columns. With None it does, unless it is a line of numbers,
        which may be names or a row and is refused.
      separator: The separator of cells, such as ";" or "::"; None is a comma, or a tab in a .tsv or .tab
        file. If it is given, a text file may have any name.
      min_count: The k of `dpx.data.k_core`; 0 keeps every event.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: for an unknown column, or a cell that cannot be used, with its line.
    """
    check_integer(min_count, "min_count", 0)
    names = (user, item) if time is None else (user, item, time)
    table = read(path, names, header=header, separator=separator)
    return from_events(*table.columns, min_count=min_count, place=table.place)


class Table(NamedTuple):
    """Columns of a file, and a function that names a cell, given its row and the number of its column."""

    columns: list
    place: Callable[[int, int], str]


def read(
    path: str | Path, names: Sequence[str], *, header: bool | None, separator: str | None
) -> Table:
    """The columns of these names; arguments and errors are those of `load_table`."""
    path = files.existing(path)
    kind = files.kind(path)
    if kind == ".parquet":
        if header is not None or separator is not None:
            raise ValueError(
                f"{path}: parquet names its columns: leave out config.data.header and config.data.separator"
            )
        columns, where = parquet.read_columns(path, names), lambda row: f"row {row + 1}"
    elif kind in files.SEPARATORS or separator:
        columns, where = _text(path, names, header, separator or files.SEPARATORS[kind])
    else:
        raise ValueError(
            f"{path}: give a table whose name ends in .csv, .tsv, .tab or .parquet (text may have .gz after "
            "that), or say what separates its cells by --config.data.separator"
        )
    if not len(columns[0]):
        raise ValueError(f"{path}: the table holds no interaction: check --config.data.path")
    return Table(columns, lambda row, column: f"{path}: {where(row)}, column {names[column]!r}")


def _text(path: Path, names: Sequence[str], header: bool | None, separator: str):
    """The columns of a text file, and a function that names the line of a row."""
    text = files.read_text(path).removeprefix("\ufeff")
    places: list[int] | None = None
    columns, lines = [[] for _ in names], []
    for line, row in files.table_rows(path, text, separator):
        if places is None:
            guess = None if all(files.number(cell) is not None for cell in row) else True
            named = files.has_header(path, row, header, guess)
            places = [_place(path, name, row, named) for name in names]
            if named:
                continue
        for name, column, place in zip(names, columns, places, strict=True):
            if place >= len(row):
                raise ValueError(
                    f"{path}: line {line} has {len(row)} cells and column {name!r} is number {place + 1}: "
                    "complete the line, or quote cells that hold the separator"
                )
            column.append(row[place])
        lines.append(line)
    return columns, lambda row: f"line {lines[row]}"


def _place(path: Path, name: str, first: Sequence[str], header: bool) -> int:
    """The index of a column, in a table with this first line."""
    first = [cell.strip() for cell in first]
    other = files.other_separator(first)
    if header:
        if name not in first:
            raise ValueError(
                f"{path}: has no column {name!r}: set config.data.user, item and time to some of "
                f"{', '.join(first)}, or use --config.data.header=False and numbers from 1{other}"
            )
        files.check_once(path, [name], first)
        return first.index(name)
    if not (name.isdecimal() and 1 <= int(name) <= len(first)):
        raise ValueError(
            f"{path}: has no header, so column {name!r} must be a number from 1 to {len(first)}: set "
            f"config.data.user, item and time to numbers{other}"
        )
    return int(name) - 1
