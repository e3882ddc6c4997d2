"""Readers of blocks from files: .npz archives of NumPy, and .parquet files if pyarrow is installed."""

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dpx.data import cells, parquet
from dpx.data.histories import Histories, by_user


def read_arrays(path: str | Path, names: Sequence[str]) -> tuple[np.ndarray, ...]:
    """The named arrays of an .npz archive, or columns of a .parquet file.

    Their types are those that the file states, whatever its rows hold.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: naming the file, for another kind of file, a damaged one, a name that is not in it, or a
        column with a row that is missing.
    """
    arrays = []
    for name, column in zip(names, _columns(path, names), strict=True):
        if isinstance(column, list):
            if None in column:
                raise ValueError(
                    f"{path}: row {column.index(None) + 1}, column {name!r} is missing: fill it in, or "
                    "remove the row"
                )
            column = np.array(column, object)
        arrays.append(column)
    return tuple(arrays)


def _columns(path: str | Path, names: Sequence[str]) -> Sequence[np.ndarray | list]:
    path = Path(path)
    if path.suffix not in (".npz", ".parquet"):
        raise ValueError(f"path={path} must end in .npz or .parquet: give a function that reads it")
    if not path.is_file():
        raise FileNotFoundError(f"path={path}: no such file")
    if path.suffix == ".npz":
        return _archive(path, names)
    return parquet.read_columns(path, names)


def _archive(path: Path, names: Sequence[str]) -> tuple[np.ndarray, ...]:
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no archive")
        with np.load(path) as archive:
            _check_names(path, archive.files, names)
            return tuple(archive[name] for name in names)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"path={path} cannot be read as .npz ({error}): save it again") from None


def _check_names(path: Path, known: list[str], names: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(
                f"name={name!r} must be in {path}: it has {', '.join(map(str, known))}"
            )


def read_histories(
    path: str | Path,
    *,
    num_items: int,
    user: str = "user",
    item: str = "item",
    time: str | None = None,
) -> Histories:
    """The histories of the users of one file of events; all events of a user have to be in that file.

    Each event is read by itself (`dpx.data.cells`), so that no event changes which user another belongs to.

    Args:
      path: As `read_arrays`.
      num_items: Size of the catalogue, M, the same for all files: it is public.
      user, item, time: The names of arrays or columns, (E,) each. Users are identifiers, and items numbers in
        [0, M). The events of a user are ordered by `time`, or as in the file if that is None.

    Raises:
      FileNotFoundError: as `read_arrays`.
      ValueError: as `read_arrays`, for arrays of different lengths, for items outside the catalogue, or for
        an event whose user, item or time is missing or cannot be read.
    """
    names = [user, item] if time is None else [user, item, time]
    columns = _columns(path, names)
    shapes = {getattr(column, "shape", (len(column),)) for column in columns}
    if shapes != {(len(columns[0]),)}:
        raise ValueError(
            f"{path}: arrays {names} must have one length and one dimension: a value for each event"
        )

    def of(column: int):
        place = lambda row: f"{path}: row {row + 1}, {names[column]!r}"  # noqa: E731
        return columns[column], names[column], place

    users, _ = cells.identifiers(*of(0))
    codes, labels = cells.identifiers(*of(1))
    if len(labels) and isinstance(labels[-1], str):  # text comes last
        row = int(np.argmax(codes == len(labels) - 1))
        raise ValueError(
            f"{of(1)[2](row)} holds {labels[-1]!r}: items must be numbers in [0, {num_items})"
        )
    clock = np.zeros(len(users)) if time is None else cells.times(*of(2))
    return Histories(by_user(users, labels.astype(np.int64)[codes], clock), num_items)
