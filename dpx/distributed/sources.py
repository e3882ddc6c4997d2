"""Blocks from files: NumPy's .npz archives, and .parquet by pandas where that is installed."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dpx.data.histories import Histories


def read_arrays(path: str | Path, names: Sequence[str]) -> tuple[np.ndarray, ...]:
    """Arrays of a file by their names, in an .npz archive, or columns, in a .parquet file.

    Raises:
      ValueError: for another kind of file, or a name that is not in it.
    """
    path = Path(path)
    if path.suffix == ".npz":
        with np.load(path) as archive:
            return tuple(_named(path, archive, archive.files, name) for name in names)
    if path.suffix == ".parquet":
        import pandas

        table = pandas.read_parquet(path)
        return tuple(_named(path, table, list(table), name) for name in names)
    raise ValueError(f"path={path} must end in .npz or .parquet: give a function that reads it")


def _named(path: Path, source, known: list[str], name: str) -> np.ndarray:
    if name not in known:
        raise ValueError(f"name={name!r} must be in {path}: it has {', '.join(known)}")
    return np.asarray(source[name])


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
      ValueError: as `read_arrays`, for arrays of different lengths, and for items outside the catalogue.
    """
    names = [user, item] if time is None else [user, item, time]
    users, items, *times = read_arrays(path, names)
    if {len(array) for array in (users, items, *times)} != {len(users)}:
        raise ValueError(f"{path}: arrays {names} must have one length, that of the events")
    order = np.argsort(users, kind="stable") if time is None else np.lexsort((*times, users))
    users, items = users[order], items[order]
    # A number that is none, such as NaN, differs from itself: all events without a user are one user's.
    missing = (users[1:] != users[1:]) & (users[:-1] != users[:-1])
    starts = np.flatnonzero((users[1:] != users[:-1]) & ~missing) + 1
    rows = np.split(items, starts) if len(items) else []
    return Histories(tuple(rows), num_items)
