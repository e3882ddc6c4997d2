"""Blocks from files: NumPy's .npz archives, and .parquet by pandas where that is installed."""

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dpx.data.histories import Histories


def read_arrays(path: str | Path, names: Sequence[str]) -> tuple[np.ndarray, ...]:
    """Arrays of a file by their names, in an .npz archive, or columns, in a .parquet file.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: naming the file, for another kind of file, a damaged one, or a name that is not in it.
    """
    path = Path(path)
    if path.suffix not in (".npz", ".parquet"):
        raise ValueError(f"path={path} must end in .npz or .parquet: give a function that reads it")
    if not path.is_file():
        raise FileNotFoundError(f"path={path}: no such file")
    return _archive(path, names) if path.suffix == ".npz" else _table(path, names)


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


def _table(path: Path, names: Sequence[str]) -> tuple[np.ndarray, ...]:
    try:
        import pandas

        table = pandas.read_parquet(path)
    except ImportError:
        raise ValueError(
            f"path={path}: reading parquet needs pandas and pyarrow: pip install pandas pyarrow"
        ) from None
    except Exception as error:  # the engines raise many types for files they cannot use
        raise ValueError(
            f"path={path} cannot be read as .parquet ({type(error).__name__}): write it again"
        ) from None
    _check_names(path, list(table), names)
    return tuple(np.asarray(table[name]) for name in names)


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

    Args:
      path: As `read_arrays`.
      num_items: Size of the catalogue, M, the same for all files: it is public.
      user, item, time: The names of arrays or columns, (E,) each. Items are numbers in [0, M). Events of a
        user are in the order of `time`, and where that is None in the order of the file.

    Raises:
      FileNotFoundError: as `read_arrays`.
      ValueError: as `read_arrays`, for arrays of different lengths, for users or times that cannot be sorted,
        for events without a time, and for items outside the catalogue.
    """
    names = [user, item] if time is None else [user, item, time]
    users, items, *times = read_arrays(path, names)
    if {array.shape for array in (users, items, *times)} != {(users.size,)}:
        raise ValueError(
            f"{path}: arrays {names} must have one length and one dimension: a value for each event"
        )
    users = _ranks(users, f"{path}: user {user!r}")
    if time is not None:
        times = [_ranks(times[0], f"{path}: time {time!r}")]
        if (gone := times[0] == len(users)).any():
            raise ValueError(
                f"{path}: time {time!r} of event {np.argmax(gone)} is missing: fill it in, or remove that"
            )
    order = np.lexsort((*times, users))
    users, items = users[order], items[order]
    rows = np.split(items, np.flatnonzero(np.diff(users)) + 1) if len(items) else []
    return Histories(tuple(rows), num_items)


def _ranks(values: np.ndarray, place: str) -> np.ndarray:
    """(E,) numbers in the order of the values, E where one is missing: all without a user are one's."""
    if values.dtype == object:  # as pandas has text and what is missing
        import pandas

        missing = pandas.isna(values)
    else:
        missing = values != values  # of a number that is none, such as NaN
    ranks = np.full(len(values), len(values))
    try:
        ranks[~missing] = np.unique(values[~missing], return_inverse=True)[1]
    except TypeError:
        raise ValueError(
            f"{place} holds values of several types: use numbers or text throughout"
        ) from None
    return ranks
