"""Histories of items by user, and functions that filter, split and pad them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dpx._validate import check_integer, check_unmasked
from dpx.data import cells


@dataclasses.dataclass(frozen=True)
class Histories:
    """One sequence of items per user, in time order.

    Attributes:
      items: For each user an int array, or a list, of item numbers in [0, num_items).
      num_items: The size of the catalogue, M.
      item_ids: (M,) the identifier of each item in the data; None if the data use item numbers.

    Raises:
      ValueError: for an item outside the catalogue, or an item or size that is not a whole number.
    """

    items: tuple[np.ndarray, ...]
    num_items: int
    item_ids: np.ndarray | None = None

    def __post_init__(self):
        object.__setattr__(self, "num_items", check_integer(self.num_items, "num_items", 0))
        # One type for all, set by the catalogue, since NumPy would join int64 and uint64 as floats.
        kind = np.int32 if self.num_items < 2**31 else np.int64
        kept = []
        for user, items in enumerate(map(item_numbers, self.items)):
            if len(items) and not (items.min() >= 0 and items.max() < self.num_items):
                raise ValueError(
                    f"user {user} has item {items.max() if items.min() >= 0 else items.min()} outside "
                    f"the vocabulary [0, {self.num_items}): give the catalogue's true size"
                )
            kept.append(items.astype(kind, copy=False))
        object.__setattr__(self, "items", tuple(kept))
        if self.item_ids is not None and len(self.item_ids) != self.num_items:
            raise ValueError(
                f"item_ids has {len(self.item_ids)} entries and num_items={self.num_items}: give one "
                "for each item"
            )


@dataclasses.dataclass(frozen=True)
class Split:
    """A leave-last-out split: each user's last item is for testing, and the one before it for tuning.

    `validation` and `test` are (n,) item ids of the users in `users`, who have three items or more. `train`
    holds every user's history without these two items.
    """

    train: Histories
    users: np.ndarray
    validation: np.ndarray
    test: np.ndarray

    @property
    def train_and_validation(self) -> Histories:
        """The histories without the test item, for the final evaluation."""
        items = list(self.train.items)
        for user, item in zip(self.users, self.validation, strict=True):
            items[user] = np.append(items[user], item)
        return dataclasses.replace(self.train, items=tuple(items))


def from_events(
    users: Any,
    items: Any,
    times: Any = None,
    *,
    min_count: int = 5,
    place: Callable[[int, int], str] | None = None,
) -> Histories:
    """Histories from events (user, item, time).

    Args:
      users: (E,) `dpx.data.cells.identifier`s, in a list, an array or a column of a DataFrame. Each is read
        by itself, so that no event changes which user another belongs to.
      items: (E,) likewise; they become the `item_ids` of the result.
      times: (E,) as in `dpx.data.cells.times`. Events with equal times, or all if None, keep their order.
      min_count: The k of `k_core`; 0 keeps all.
      place: A function that names an event in errors, given its number and that of the column, from 0.

    Raises:
      ValueError: for a min_count that is not a whole number, columns of other lengths, if no event is left,
        or for an event whose user, item or time is missing or cannot be read.
    """
    check_integer(min_count, "min_count", 0)
    columns = [users, items, *([] if times is None else [times])]
    names = ("users", "items", "times")
    place = place or (lambda event, column: f"{names[column]}: event {event}")

    def of(column: int) -> tuple[Any, str, cells.Place]:
        return columns[column], names[column], lambda event: place(event, column)

    users, _ = cells.identifiers(*of(0))
    items, labels = cells.identifiers(*of(1))
    clock = np.zeros(len(users)) if times is None else cells.times(*of(2))
    lengths = [len(users), len(items), *([] if times is None else [len(clock)])]
    if len(set(lengths)) > 1:
        raise ValueError(f"users, items and times have {lengths} entries: give one for each event")
    keep = k_core(users, items, min_count)
    users, items = users[keep], items[keep]
    if not len(users):
        raise ValueError(
            f"no events are left with min_count={min_count}: use a smaller one or more data"
        )
    kept, items = np.unique(items, return_inverse=True)
    rows = by_user(users, items, clock[keep])
    return Histories(rows, len(kept), labels[kept])


def by_user(users: np.ndarray, items: np.ndarray, clock: np.ndarray) -> tuple[np.ndarray, ...]:
    """The items of each user in time order, ordered by user.

    Args:
      users: (E,) int, the user of each event.
      items: (E,) int.
      clock: (E,) int, in the order of times; events with the same keep their order.
    """
    order = np.lexsort((clock, users))
    ends = np.flatnonzero(np.diff(users[order])) + 1
    return tuple(np.split(items[order], ends)) if len(users) else ()


def first_users(histories: Histories, count: int) -> Histories:
    """The histories of the first `count` users, with a catalogue of the items that these have."""
    rows = histories.items[:count]
    kept = np.unique(np.concatenate([np.zeros(0, np.int32), *rows]))
    ids = kept if histories.item_ids is None else histories.item_ids[kept]
    return Histories(
        tuple(np.searchsorted(kept, row).astype(np.int32) for row in rows), len(kept), ids
    )


def k_core(users: np.ndarray, items: np.ndarray, k: int) -> np.ndarray:
    """The mask (E,) of events that are left when users and items with fewer than k of them are removed."""
    keep = np.ones(len(users), bool)
    while k > 0:
        few = np.zeros(len(users), bool)
        for ids in (users, items):
            few |= np.bincount(ids[keep], minlength=ids.max(initial=0) + 1)[ids] < k
        if not (few & keep).any():
            break
        keep &= ~few
    return keep


def leave_last_out(histories: Histories) -> Split:
    """The leave-last-out split; users with fewer than three items are in `train` only."""
    users = np.array([u for u, items in enumerate(histories.items) if len(items) >= 3], np.int32)
    evaluated = set(users.tolist())
    train = tuple(
        items[:-2] if u in evaluated else items for u, items in enumerate(histories.items)
    )
    return Split(
        train=dataclasses.replace(histories, items=train),
        users=users,
        validation=np.array([histories.items[u][-2] for u in users], np.int32),
        test=np.array([histories.items[u][-1] for u in users], np.int32),
    )


def flatten(walks: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The user, the item and the number of later items of the user, (T,) each, for all events in order."""
    lengths = np.array([len(items) for items in walks], np.int64)
    users = np.repeat(np.arange(len(lengths)), lengths)
    after = np.cumsum(lengths)[users] - 1 - np.arange(len(users))
    return users, np.concatenate([np.zeros(0, np.int64), *walks]).astype(np.int64), after


def last_occurrences(histories: Histories) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same as `flatten`, (T,) each, but with only the last occurrence of each item of a user."""
    users, items, after = flatten(histories.items)
    pairs, place = np.unique((users * histories.num_items + items)[::-1], return_index=True)
    return pairs // histories.num_items, pairs % histories.num_items, after[::-1][place]


def left_pad(sequences, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The last `length` tokens of each sequence, right-aligned.

    Returns:
      tokens (n, length) int32, 0 where padded, and mask (n, length) bool, True at real tokens.
    """
    tokens = np.zeros((len(sequences), length), np.int32)
    mask = np.zeros((len(sequences), length), bool)
    for row, sequence in enumerate(sequences):
        if tail := len(sequence[-length:]):
            tokens[row, -tail:] = sequence[-length:]
            mask[row, -tail:] = True
    return tokens, mask


def item_numbers(items) -> np.ndarray:
    """The items of a user as an array; raises ValueError for anything but whole numbers."""
    check_unmasked(items, "a user's items")
    array = np.asarray(items)
    if not array.size and array.ndim == 1:
        return array if array.dtype.kind in "iu" else array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"a user's items={items!r:.60} must be a list of whole numbers: number the items from 0, or use "
            "dpx.data.from_events"
        )
    return array
