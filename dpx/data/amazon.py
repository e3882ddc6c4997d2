"""Amazon ratings as histories."""

import math
from pathlib import Path

import numpy as np

from dpx.data import files
from dpx.data.histories import Histories, from_events


def load_amazon(path: str | Path, *, min_count: int | None = None) -> Histories:
    """Amazon ratings from either of the two forms in which they are passed around.

    Args:
      path: A `.csv` of `user,item,rating,timestamp` lines, or a text file of `user item` lines, numbered
        from 1 and in time order within a user (the form that SASRec's authors publish).
      min_count: The k of the k-core filter; by default 5 for the csv and 0 for the text, which is filtered.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: for a malformed line, with its number.
    """
    path = files.existing(path)
    lines = files.read_text(path).split("\n")
    if path.suffix == ".csv":
        parse, expected = _parse_rating, "user,item,rating,timestamp"
    else:
        parse, expected = _parse_pair, "two ids from 1, `user item`"
    events = list(files.parse_lines(path, lines, parse, expected))
    if not events:
        raise ValueError(f"{path} holds no ratings")
    users, items, times = (np.array(column) for column in zip(*events, strict=True))
    if min_count is None:
        min_count = 5 if path.suffix == ".csv" else 0
    return from_events(users, items, times, min_count=min_count)


def _parse_rating(line: str) -> tuple[str, str, float]:
    user, item, _, time = line.split(",")
    if not (user and item and math.isfinite(float(time))):
        raise ValueError("a user, an item and a time")
    return user, item, float(time)


def _parse_pair(line: str) -> tuple[int, int, float]:
    user, item = (files.whole_number(word) for word in line.split())
    if min(user, item) < 1:
        raise ValueError("ids start at 1")
    return user, item, 0.0
