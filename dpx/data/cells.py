"""The identifiers and times in the cells of records, where each cell is read by itself.

NumPy and pandas choose one type for a whole column, so that a single record can change how all others are
read: one missing user turns 64-bit numbers into floats, in which several users may become one. Here no cell
changes how another one is read. A cell that cannot be read raises an error that names its row.

Equal cells are the same identifier in every format: 7, "7" and " 7 " are one user, and "007" is another.
"""

import datetime
import decimal
import re
import unicodedata
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np

from dpx._validate import check_unmasked

Identifier = int | str
Place = Callable[[int], str]  # gives the name of a row for errors
# What a guarantee about users assumes, who are told apart by identifiers.
ONE_EACH = "all records of a user stand under one identifier, which no other user has"

# The words for a missing value that pandas reads and writes; they are no identifiers.
_MISSING = """
    NA #NA <NA> N/A n/a #N/A NULL null \\N None NaT NaN nan -NaN -nan 1.#IND -1.#IND 1.#QNAN -1.#QNAN
"""
_MISSING = {"", "#N/A N/A", *_MISSING.split()}
_WHOLE = re.compile(r"0|-?[1-9][0-9]*")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]{1,3})?", re.IGNORECASE)
_FRACTION = re.compile(r"(.*:[0-9]{2})[.,]([0-9]{1,9})(?![0-9])(.*)")
_BILLION = 10**9
_EXACT = decimal.Context(prec=40)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def identifier(value: Any) -> Identifier:
    """The identifier that a cell holds: a whole number of 64 bits, or any other text.

    Space around text is removed, and Unicode is brought to its normal form C. Text that is a whole number in
    its usual form is that number (7, but not 007), and a number of more than 64 bits is its text.

    Raises:
      ValueError: for a cell that is empty or holds a word for a missing value, a fraction, or another type.
        The message says what is wrong; the caller has to add the place.
    """
    if is_missing(value):
        raise ValueError(f"{_shown(value)}: fill it in, or remove the row")
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            raise ValueError(f"holds {value!r:.60}, which is no UTF-8: write it as text") from None
    if isinstance(value, str):
        text = unicodedata.normalize("NFC", value.strip())
        if not _WHOLE.fullmatch(text) or len(text) > 20:
            return text
    elif isinstance(value, int | np.integer) and not isinstance(value, bool):
        text = str(value)
    else:
        raise ValueError(
            f"holds {value!r:.60}: ids must be text or whole numbers, so convert it (where pandas has made "
            'floats of whole numbers, read the column again with dtype="Int64")'
        )
    number = int(text)
    return number if -(2**63) <= number < 2**63 else text


def identifiers(values: Any, name: str, place: Place) -> tuple[np.ndarray, np.ndarray]:
    """The identifiers of a column as codes, and the identifier of each code.

    Args:
      values: (E,) cells, in a list, an array or a column of a DataFrame.
      name: The name of the column, for errors about all of it.
      place: A function that names a row, for errors about a cell.

    Returns:
      codes: (E,) int64 in [0, M).
      labels: (M,) Python's int and str, in order: first the numbers, then the texts.

    Raises:
      ValueError: for values that are not one column, or a cell that is not an `identifier`.
    """
    cells, known = _cells(values, name), {}

    def read_at(row: int, cell: Any) -> Identifier:
        if type(cell) not in (int, str):  # such as 1.0, which equals an identifier and is none
            return at(identifier, cell, row, place)
        if cell not in known:
            known[cell] = at(identifier, cell, row, place)
        return known[cell]

    codes: Any = slice(None)
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "iu":
        cells, codes = np.unique(cells, return_inverse=True)
    read = [read_at(row, cell) for row, cell in enumerate(cells)]
    labels = sorted(set(read), key=lambda label: (isinstance(label, str), label))
    number = {label: code for code, label in enumerate(labels)}
    # An array of objects, since in one of text the longest label would set the width of all.
    return np.array([number[label] for label in read], np.int64)[codes], np.array(labels, object)


def times(values: Any, name: str, place: Place) -> np.ndarray:
    """Whole numbers in the order of the times of a column, the same for the same time.

    A number is a time in any unit, rounded to the nearest billionth of it. A date is a time in seconds since
    1970, in UTC if it has no time zone. A column has either numbers or dates.

    Args:
      values: (E,) numbers, dates of Python, NumPy or pandas, or texts that are a number or an ISO date.
      name, place: As in `identifiers`, for a column in the same forms.

    Returns:
      (E,) int64.

    Raises:
      ValueError: for values that are not one column or have both kinds, a cell that is missing or is not a
        time, or a float so large that several whole numbers are rounded to it.
    """
    cells = _cells(values, name)
    if isinstance(cells, np.ndarray) and cells.dtype.kind == "M":
        if np.any(missing := np.isnat(cells)):
            row = int(np.argmax(missing))
            raise ValueError(f"{place(row)} is missing: fill it in, or remove the row")
        return cells.astype(np.int64)
    if isinstance(cells, np.ndarray) and np.can_cast(cells.dtype, np.int64):
        return cells.astype(np.int64)
    read = [at(_time, cell, row, place) for row, cell in enumerate(cells)]
    for row, (is_date, _) in enumerate(read):
        if is_date != read[0][0]:
            raise ValueError(
                f"{place(row)} holds {str(cells[row])!r:.60}, and {place(0)} a "
                f"{'number' if is_date else 'date'}: give numbers throughout, or dates"
            )
    order = {time: number for number, time in enumerate(sorted(set(read)))}
    return np.array([order[time] for time in read], np.int64)


def is_missing(value: Any) -> bool:
    """Whether a cell has no value: None, NaN, NaT, NA, a word for one of them, or blank text."""
    if value is None or isinstance(value, str):
        return value is None or value.strip() in _MISSING
    try:
        return bool(value != value)
    except (TypeError, ValueError):
        return type(value).__name__ == "NAType"  # NA of pandas, for which a comparison is NA again


def _shown(value: Any) -> str:
    blank = not isinstance(value, str) or not value.strip()
    return "is missing" if blank else f"holds {value!r}, which stands for a missing value"


def at(read: Callable, cell: Any, row: int, place: Place) -> Any:
    """What `read` makes of a cell; its ValueError gets the name of the row."""
    try:
        return read(cell)
    except ValueError as error:
        raise ValueError(f"{place(row)} {error}") from None


def _cells(values: Any, name: str) -> np.ndarray | list:
    """The cells of a column: an array of integers or of NumPy's dates, or else a list of Python's values."""
    if isinstance(values, Mapping | Set):  # of which Python lists the keys, in some order
        raise ValueError(
            f"{name} is a {type(values).__name__}, which must be a sequence with one cell a record: give "
            "a list"
        )
    check_unmasked(values, name)
    dtype = getattr(values, "dtype", None)
    if isinstance(dtype, np.dtype):
        values = np.asarray(values)
        if values.ndim != 1:
            raise ValueError(
                f"{name} has shape {values.shape}, which must be (E,): give one an event"
            )
        return values if dtype.kind in "iuM" else values.tolist()
    # In an array, integers of an extension type of pandas would be floats if one of them is missing.
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _time(value: Any) -> tuple[bool, int]:
    """Whether a cell is a date, and its time in billionths."""
    if is_missing(value):
        raise ValueError(f"{_shown(value)}: fill it in, or remove the row")
    if isinstance(value, np.datetime64):
        second = value.astype("datetime64[s]")
        rest = (value - second).astype("timedelta64[ns]")
        return True, int(second.astype(np.int64)) * _BILLION + int(rest.astype(np.int64))
    if isinstance(value, bytes):
        value = value.decode("ascii", "replace")
    text, number = value.strip() if isinstance(value, str) else "", None
    if _WHOLE.fullmatch(text) and len(text) <= 20:
        value = int(text)  # faster than by decimals
    if isinstance(value, float | np.floating):
        number = decimal.Decimal(repr(float(value)))
        if 2.0**53 <= abs(value) < np.inf:
            raise ValueError(
                f"holds {value!r}, a float to which other numbers are rounded: give whole numbers or text"
            )
    elif isinstance(value, int | np.integer) and not isinstance(value, bool):
        if not -(2**63) <= value < 2**63:
            raise _no_time(value)
        return False, int(value) * _BILLION
    elif isinstance(value, decimal.Decimal):
        number = value
    elif _NUMBER.fullmatch(text):
        number = decimal.Decimal(text)
    if number is not None:
        if not number.copy_abs() < 2**63:
            raise _no_time(value)
        return False, int(number.scaleb(9, _EXACT).to_integral_value(context=_EXACT))
    try:
        return True, _date(text or value)
    except (ValueError, TypeError, AttributeError, OverflowError):
        raise _no_time(value) from None


def _no_time(value: Any) -> ValueError:
    return ValueError(
        f"holds {str(value)!r:.60}, which is no time: give numbers throughout, or ISO dates such as "
        "2024-05-31 12:00"
    )


def _date(value: Any) -> int:
    """An ISO date, or a date of Python or pandas, in billionths of a second since 1970."""
    more = 0
    if isinstance(value, str):
        if fraction := _FRACTION.fullmatch(value):
            value, more = fraction[1] + fraction[3], int(fraction[2].ljust(9, "0"))
        value = datetime.datetime.fromisoformat(value)
    elif not isinstance(value, datetime.datetime):
        value = datetime.datetime(value.year, value.month, value.day)
    since = (value if value.tzinfo else value.replace(tzinfo=datetime.UTC)) - _EPOCH
    seconds = 86_400 * since.days + since.seconds
    nanoseconds = 1000 * since.microseconds + getattr(since, "nanoseconds", 0)
    return seconds * _BILLION + nanoseconds + more
