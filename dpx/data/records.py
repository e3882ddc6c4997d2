"""Records as tokens, with the users to whom they belong, and a split of them to train and to measure."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Texts:
    """Records as tokens. The unit of privacy is a record or, if there are users, a user.

    Attributes:
      tokens: (n, L) int32, each record followed by `end` up to the width; windows have no end.
      end: The token that ends a record, or None.
      ends: Whether a model has to predict the end; False if the end only pads records.
      users: (n,) the number of the user of each record, from 0 and without gaps; None if the unit is a
        record.
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
        """The tokens that a model predicts, (n, L) bool: a record's characters and, with `ends`, its end."""
        if self.end is None:
            return np.ones(self.tokens.shape, bool)
        is_end = self.tokens == self.end
        if not self.ends:
            return ~is_end
        return np.cumsum(is_end, axis=1) - is_end == 0


def num_units(records: np.ndarray, users: np.ndarray | None) -> int:
    """The number of users, who are numbered from 0 without gaps; without users, the number of records."""
    return len(records) if users is None else int(users.max(initial=-1)) + 1


def of_units(users: np.ndarray | None, units: Any) -> tuple[Any, np.ndarray | None]:
    """The records of some units, and the users of these records, renumbered in the order of `units`.

    Args:
      users: As in `Texts`.
      units: Numbers of users, or a slice of them; without users, of records.
    """
    if users is None:
        return units, None
    chosen = np.arange(num_units(users, users))[units]
    place = np.full(num_units(users, users), -1)
    place[chosen] = np.arange(len(chosen))
    rows = np.flatnonzero(place[users] >= 0)
    return rows, place[users[rows]]


def split(texts: Texts, held_out: int, *, seed: int) -> tuple[Texts, Texts]:
    """A random split into records to train on and `held_out` others, which depends on their number alone.

    If there are users, it is a split of users that depends on their number: all records of a user are in the
    same part.
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
