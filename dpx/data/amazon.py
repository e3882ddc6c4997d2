"""Amazon ratings as histories."""

import re
from pathlib import Path

import numpy as np

from dpx._validate import check_integer
from dpx.data import columns, files
from dpx.data.histories import Histories, from_events

# For each year, the columns of users, items, times and ratings, and whether files have a header.
_COLUMNS = {
    2014: (("1", "2", "4", "3"), False),  # user,item,rating,timestamp
    2018: (("2", "1", "4", "3"), False),  # item,user,rating,timestamp
    2023: (("user_id", "parent_asin", "timestamp", "rating"), True),
}
_PRODUCT = re.compile("[0-9B][0-9A-Z]{9}")
_USER = re.compile("A[0-9A-Z]{11,27}")


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
    if check_integer(year, "year") not in _COLUMNS:
        raise ValueError(
            f"year={year} must be 2014, 2018 or 2023: use that in which the ratings appeared"
        )
    path = files.existing(path)
    if files.kind(path) != ".csv":
        parse, expected = _parse_pair, "two ids from 1, `user item`"
        lines = files.read_text(path).split("\n")
        events = np.array(list(files.parse_lines(path, lines, parse, expected)), np.int64)
        if not len(events):
            raise ValueError(f"{path} holds no ratings")
        return from_events(*events.T, min_count=0 if min_count is None else min_count)
    names, header = _COLUMNS[year]
    try:
        table = columns.read(path, names, header=header)
    except ValueError as error:
        raise ValueError(f"{error}; config.data.year={year} is read") from None
    _check(table, year)
    *events, _ = table.columns
    core = 5 if min_count is None else min_count
    return from_events(*events, min_count=core, place=table.place)


def _check(table: columns.Table, year: int) -> None:
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


def _parse_pair(line: str) -> tuple[int, int]:
    user, item = (files.whole_number(word) for word in line.split())
    if min(user, item) < 1:
        raise ValueError("ids start at 1")
    return user, item
