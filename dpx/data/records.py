"""Records as tokens, whose they are, and their split into those to train on and others."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Texts:
    """Records as tokens, which are units of privacy themselves or those of users.

    Attributes:
      tokens: (n, L) int32, each record followed by `end` up to the width; windows have no end.
      end: The token that ends a record, or None.
      ends: False where the end only fills the width, and no model has to predict it.
      users: (n,) the number of the user whose each record is, from 0 and without gaps; None for records that
        are units themselves.
    """

    tokens: np.ndarray
    end: int | None
    ends: bool = True
    users: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_units(self) -> int:
        """The number of users, or else of records."""
        return num_units(self.tokens, self.users)

    def take(self, units: np.ndarray | slice) -> "Texts":
        """The records of some users, or else some records."""
        rows, users = of_units(self.users, units)
        return dataclasses.replace(self, tokens=self.tokens[rows], users=users)

    @property
    def mask(self) -> np.ndarray:
        """(n, L) bool: what a model predicts: a record's characters and, with `ends`, the first end."""
        if self.end is None:
            return np.ones(self.tokens.shape, bool)
        is_end = self.tokens == self.end
        if not self.ends:
            return ~is_end
        return np.cumsum(is_end, axis=1) - is_end == 0


def num_units(records: np.ndarray, users: np.ndarray | None) -> int:
    """The number of users, who are numbered from 0 without gaps, or else of records."""
    return len(records) if users is None else int(users.max(initial=-1)) + 1


def of_units(users: np.ndarray | None, units: Any) -> tuple[Any, np.ndarray | None]:
    """Which records some units have, and the users of these, numbered anew in the order of `units`.

    Args:
      users: As in `Texts`.
      units: Numbers of users, or a slice of them. Without users, of records.
    """
    if users is None:
        return units, None
    chosen = np.arange(num_units(users, users))[units]
    place = np.full(num_units(users, users), -1)
    place[chosen] = np.arange(len(chosen))
    rows = np.flatnonzero(place[users] >= 0)
    return rows, place[users[rows]]


def split(texts: Texts, held_out: int, *, seed: int) -> tuple[Texts, Texts]:
    """A fixed random split, set by the number of records, into those to train on and `held_out` others.

    Where users have the records, it is a split of the users, set by their number: all records of one are in
    the same part.
    """
    count, unit = texts.num_units, "record" if texts.users is None else "user"
    if count < 2:
        raise ValueError(
            f"the data hold {count} {unit}: give at least two, to train on some and to hold others out"
        )
    if not 0 < held_out < count:
        raise ValueError(f"held_out={held_out} must be between 1 and {count - 1}")
    order = np.random.default_rng(seed).permutation(count)
    return texts.take(order[held_out:]), texts.take(order[:held_out])
