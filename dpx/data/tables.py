"""A table of interactions, one a line: who took which item, and when if that is known."""

import contextlib
import datetime
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpx._validate import check_integer
from dpx.data import files
from dpx.data.histories import Histories, from_events

_DELIMITERS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}


def load_table(
    path: str | Path,
    *,
    user: str = "user",
    item: str = "item",
    time: str | None = None,
    header: bool = True,
    min_count: int = 0,
) -> Histories:
    """Histories from a .csv, .tsv or .parquet table with a column of users and one of items.

    Ids come back as they are in the table: as text, or as whole numbers where every value of the column is
    one in its usual form (007 stays text).

    Args:
      path: The table, in UTF-8 where it is text.
      user, item: The names of the columns, or their numbers from 1 where there is no header.
      time: The column of the times, all numbers or all ISO dates; None keeps the order of the lines.
      header: Whether the first line names the columns.
      min_count: The k of `dpx.data.k_core`; 0 keeps every event.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: for a column that is not there, or a cell that cannot be used, with its line.
    """
    check_integer(min_count, "min_count", 0)
    path = files.existing(path)
    if path.suffix.lower() == ".parquet":
        columns, where = _parquet(path, (user, item, time), header)
    elif path.suffix.lower() in _DELIMITERS:
        columns, where = _text(path, (user, item, time), header)
    else:
        raise ValueError(f"{path}: give a table whose name ends in .csv, .tsv, .tab or .parquet")
    if not columns[0]:
        raise ValueError(f"{path}: the table holds no interaction: check --config.data.path")

    def place(row: int, name: str) -> str:
        return f"{path}: {where(row)}, column {name!r}"

    users, items = _ids(columns[0], user, place), _ids(columns[1], item, place)
    times = None if time is None else _times(columns[2], time, place)
    return from_events(users, items, times, min_count=min_count)


def _text(path: Path, names: tuple[str, str, str | None], header: bool):
    """The columns (`[]` for a name that is None), and what names the line of a row."""
    text = files.read_text(path).removeprefix("\ufeff")
    wanted = [name for name in names if name is not None]
    places: list[int] | None = None
    columns, lines = [[] for _ in wanted], []
    for line, cells in files.table_rows(path, text, _DELIMITERS[path.suffix.lower()]):
        if places is None:
            places = [_place(path, name, cells, header) for name in wanted]
            if header:
                continue
        for name, column, place in zip(wanted, columns, places, strict=True):
            if place >= len(cells):
                raise ValueError(
                    f"{path}: line {line} has {len(cells)} cells and column {name!r} is number {place + 1}: "
                    "complete the line, or quote cells that hold the separator"
                )
            column.append(cells[place].strip())
        lines.append(line)
    return [*columns, *([[]] * (len(names) - len(columns)))], lambda row: f"line {lines[row]}"


def _place(path: Path, name: str, cells: list[str], header: bool) -> int:
    """Where the column is, in a first line of these cells."""
    cells = [cell.strip() for cell in cells]
    if header:
        if name not in cells:
            raise ValueError(
                f"{path}: has no column {name!r}: set config.data.user, item and time to some of "
                f"{', '.join(cells)}, or use --config.data.header=False and numbers from 1"
            )
        files.check_once(path, [name], cells)
        return cells.index(name)
    if not (name.isdecimal() and 1 <= int(name) <= len(cells)):
        raise ValueError(
            f"{path}: has no header, so column {name!r} must be a number from 1 to {len(cells)}: set "
            "config.data.user, item and time to numbers"
        )
    return int(name) - 1


def _parquet(path: Path, names: tuple[str, str, str | None], header: bool):
    if not header:
        raise ValueError(f"{path}: parquet names its columns: leave out --config.data.header=False")
    try:
        import pandas

        frame = pandas.read_parquet(path)
    except ImportError:
        raise ValueError(
            f"{path}: reading parquet needs pandas and pyarrow: pip install pandas pyarrow, or save the "
            "table as .csv"
        ) from None
    except Exception as error:  # the engines raise many types for files they cannot use
        raise ValueError(
            f"{path}: not a parquet file that can be read ({type(error).__name__}): write it again"
        ) from None
    known = [str(name) for name in frame.columns]
    columns = []
    for name in filter(None, names):
        column = frame.iloc[:, _place(path, name, known, True)]
        # NaN, NaT and NA alike: what is compared with NA is neither true nor false.
        pairs = zip(column.tolist(), pandas.isna(column), strict=True)
        columns.append([None if missing else value for value, missing in pairs])
    return [*columns, *([[]] * (len(names) - len(columns)))], lambda row: f"row {row + 1}"


def _ids(values: Sequence[Any], name: str, place: Callable[[int, str], str]) -> np.ndarray:
    """(E,) the labels, all text or all whole numbers."""
    for row, value in enumerate(values):
        if value is None or value == "":
            raise ValueError(f"{place(row, name)} is empty: fill it in, or remove the line")
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise ValueError(
                f"{place(row, name)} holds {value!r:.60}: ids must be text or whole numbers, so convert it"
            )
        if isinstance(value, str) != isinstance(values[0], str):
            raise ValueError(
                f"{place(row, name)} holds {value!r:.60}, and other lines another type: use text throughout"
            )
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(
                f"{place(row, name)} holds {value}, which does not fit into 64 bits: write ids as text"
            )
    if isinstance(values[0], str):
        if not all(value.isascii() and value.lstrip("-").isdigit() for value in values):
            return np.array(values)
        try:
            numbers = [files.whole_number(value) for value in values]
        except ValueError:  # of more than 64 bits
            return np.array(values)
        if any(str(number) != value for number, value in zip(numbers, values, strict=True)):
            return np.array(values)
        values = numbers
    return np.array(values, np.int64)


def _times(values: Sequence[Any], name: str, place: Callable[[int, str], str]) -> np.ndarray:
    """(E,) numbers that are in order of time."""
    read = _number if isinstance(values[0], int | float) or _is_number(values[0]) else _seconds
    found = []
    for row, value in enumerate(values):
        if value is None:
            raise ValueError(f"{place(row, name)} is empty: fill it in, or remove the line")
        try:
            found.append(read(value))
        except (ValueError, TypeError, AttributeError, OverflowError):
            raise ValueError(
                f"{place(row, name)} holds {str(value)!r:.60}, which is no time: give numbers throughout, or "
                "ISO dates such as 2024-05-31 12:00"
            ) from None
    return np.array(found)


def _number(value: Any) -> int | float:
    if isinstance(value, int | str):
        with contextlib.suppress(ValueError):
            return files.whole_number(value)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _is_number(value: Any) -> bool:
    try:
        _number(value)
    except (ValueError, TypeError):
        return False
    return True


def _seconds(value: Any) -> float:
    """Seconds since 1970 of an ISO date or a datetime; one without a zone counts as UTC."""
    moment = datetime.datetime.fromisoformat(value) if isinstance(value, str) else value
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment.timestamp()
