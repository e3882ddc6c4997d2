"""A reader of tables of interactions: each line holds a user, an item and, optionally, a time."""

from pathlib import Path

from dpx._validate import check_integer
from dpx.data import columns
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
    """Histories from a table with a column of users and one of items, of a kind in `dpx.data.columns.KINDS`.

    Users and items are `dpx.data.cells.identifier`s, and times are read by `dpx.data.cells.times`: each cell
    by itself, and in the same way from every kind of file.

    Args:
      path: The table, as `dpx.data.columns.read` takes it.
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
    table = columns.read(path, names, header=header, separator=separator)
    return from_events(*table.columns, min_count=min_count, place=table.place)
