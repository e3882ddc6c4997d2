"""Readers of arrays of numbers in .csv, .tsv, .npy and .npz files, with errors that name the place."""

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dpx.data import columns, files

_TABLES = (".csv", ".tsv")


def load_array(
    path: str | Path,
    name: str | None = None,
    *,
    header: bool | None = None,
    separator: str | None = None,
) -> np.ndarray:
    """The array of real numbers that a file holds.

    A .csv or .tsv table, which may end in .gz, becomes a matrix, one line a row. An .npy file is
    memory-mapped, so it may be larger than the memory.

    Args:
      path: A .csv, .tsv, .npy or .npz file. Pickled objects are refused.
      name: The name of the array in an .npz file; it may be left out if there is only one.
      header, separator: Of a table, as in `dpx.data.columns.read`. With None a line without numbers is the
        header, which is skipped.

    Returns:
      The array: float64 of shape (rows, columns) from a table, otherwise as it was saved.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: naming the file, and the line and column or the array if there is one, for another kind
        of file, a damaged one, a cell that is not a number, rows of different lengths, or an array that does
        not hold real numbers.
    """
    path = files.existing(path)
    kind = files.kind(path)
    if kind not in (*_TABLES, ".npy", ".npz"):
        raise ValueError(
            f"{path}: must be a .csv, .tsv, .npy or .npz file: save it as one of these"
        )
    if kind != ".npz" and name is not None:
        raise ValueError(
            f"{path}: holds one array without a name: leave out the name {name!r}, which is for .npz files"
        )
    if kind in _TABLES:
        return _read_table(path, header, separator)
    _check_no_table(path, header, separator)
    try:
        array = _read_npz(path, name) if kind == ".npz" else np.load(path, mmap_mode="r")
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if str(error).startswith(str(path)):
            raise
        raise ValueError(f"{path}: cannot be read as {kind} ({error}): save it again") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub":
        kind = getattr(array, "dtype", type(array).__name__)
        which = "" if name is None else f" array {name!r}"
        raise ValueError(f"{path}:{which} holds {kind}: save real numbers")
    return array


def load_columns(
    path: str | Path,
    names: Sequence[str],
    *,
    header: bool | None = None,
    separator: str | None = None,
) -> np.ndarray:
    """Columns of a table of numbers, in the order of `names`; other columns may hold anything.

    Args:
      path: A table as `dpx.data.columns.read` takes it, or an .npy file with a matrix.
      names: The names of the columns. Without a header, and in an .npy file, columns are counted from 1:
        "1", "2", ….
      header, separator: Of a table, as there. With None a line of numbers is a row.

    Returns:
      (rows, len(names)): float64 from a table, otherwise as it was saved.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: naming the file, and the column or the line, for another kind of file, an unknown column, or
        a cell that is not a number.
    """
    path = Path(path)
    if files.kind(path) == ".npy":
        _check_no_table(path, header, separator)
        array = load_array(path)
        if array.ndim != 2:
            raise ValueError(f"{path}: has shape {array.shape}: save a matrix, (rows, columns)")
        known = [str(number + 1) for number in range(array.shape[1])]
        return array[:, [files.index_of(path, name, known) for name in names]]
    table = columns.read(path, names, header=header, separator=separator, guess=_not_all)
    found = np.empty((len(table.columns[0]), len(names)))
    for number, column in enumerate(table.columns):
        if isinstance(column, np.ndarray) and column.dtype.kind in "fiub":
            found[:, number] = column
            continue
        for row, cell in enumerate(column):
            value = files.number(cell)
            if value is None:
                raise ValueError(
                    f"{table.place(row, number)} is {cell!r:.60}: write a number in every cell"
                )
            found[row, number] = value
    return found


def _not_all(numbers: Sequence[bool]) -> bool:
    return not all(numbers)


def _none(numbers: Sequence[bool]) -> bool:
    return not any(numbers)


def _check_no_table(path: Path, header: bool | None, separator: str | None) -> None:
    if header is not None or separator is not None:
        raise ValueError(
            f"{path}: is no table with lines: leave out --config.data.header and --config.data.separator"
        )


def _read_npz(path: Path, name: str | None) -> np.ndarray:
    with np.load(path) as arrays:
        known = ", ".join(arrays.files) or "no array at all"
        if name is None and len(arrays.files) != 1:
            raise ValueError(f"{path}: holds {known}: name one of its arrays")
        if name is not None and name not in arrays.files:
            raise ValueError(f"{path}: has no array {name!r}: it holds {known}")
        return arrays[arrays.files[0] if name is None else name]


def _read_table(path: Path, header: bool | None, separator: str | None) -> np.ndarray:
    known, _, lines = columns.text_rows(path, header, separator, _none)
    rows, other = [], files.other_separator(known)
    for line, cells in lines:
        numbers = [files.number(cell) for cell in cells]
        if len(cells) != len(known):
            raise ValueError(
                f"{path}: line {line} has {len(cells)} columns where the first has {len(known)}: give every "
                "line the same"
            )
        if None in numbers:
            column = numbers.index(None)
            raise ValueError(
                f"{path}: line {line}, column {column + 1} is {cells[column]!r}: write a number in every "
                f"cell{other}"
            )
        rows.append(np.array(numbers, np.float64))
    if not rows:
        raise ValueError(f"{path}: holds no row of numbers: write one line for each row{other}")
    return np.stack(rows)
