"""The rounds in which `dpx.recommend.transitions` counts pairs of items: their statistic and sequence."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from scipy import sparse

from dpx import noise
from dpx._numerics import sum_entries
from dpx.data.histories import Histories, flatten, last_occurrences
from dpx.release import Blocks, Partial, merge, total

_LAST_CUT = 2.5  # the standard errors that a pair must reach to be counted in the last round
_PIECE_EVENTS = 2**17  # events whose pairs are in memory together: 120 MiB at 20 gaps


class Round(NamedTuple):
    """The statistic of one round: the sum over users of (K, K) matrices of norm 1, which is private data.

    It is called on histories, or on the `pairs` of histories. In a user's matrix, before it is normalised and
    for i < j,

    - (i, j), above the diagonal, is how much i and j occur together, in either order;
    - (j, i), below it, is `order_weight` times (how much i comes before j, minus how much it comes after);
    - (i, i) is `position_weight` times the position of i in the history, from −1 (first) to 1 (last).

    Attributes:
      items: (K,) the kept items.
      alive: (K, K) bool, the entries that are summed; other entries are zero.
      gap_decay, max_gap, age_decay, order_weight, position_weight: As in `fit`.
    """

    items: np.ndarray
    alive: np.ndarray
    gap_decay: float
    max_gap: int
    age_decay: float
    order_weight: float
    position_weight: float

    def __call__(self, histories: Histories | sparse.csr_array) -> Partial:
        if not isinstance(histories, Histories):
            return self.of_pairs(histories)
        # A few users at a time, because pairs take 40 times the memory of their events.
        parts = (
            self.of_pairs(self.pairs(histories, users)).as_block(f"from user {users.start}")
            for users in _pieces(histories)
        )
        return dataclasses.replace(functools.reduce(merge, parts), blocks=frozenset())

    def pairs(self, histories: Histories, users: slice = slice(None)) -> sparse.csr_array:
        """The matrices of all users, before they are normalised, as a sparse array (N, K²)."""
        _, _, *weighting = self
        part = Histories(histories.items[users], histories.num_items)
        return _pairs(part, self.items, *weighting)

    def of_pairs(self, pairs: sparse.csr_array) -> Partial:
        """The sum over users, given their `pairs`."""
        num_users = len(pairs.indptr) - 1
        users = np.repeat(np.arange(num_users), np.diff(pairs.indptr))
        weights = pairs.data * self.alive.ravel()[pairs.indices]
        # Scale each user's largest weight to 1 first, since squares of tiny weights would underflow.
        largest = np.zeros(num_users)
        np.maximum.at(largest, users, np.abs(weights))
        weights /= np.where(largest > 0, largest, 1)[users]
        squares = np.bincount(users, weights**2, minlength=num_users)
        weights /= np.sqrt(np.where(squares > 0, squares, 1))[users]
        counts, bound = noise.sum_sparse(
            weights, users, pairs.indices, self.alive.size, l2_clip_norm=1.0
        )
        return Partial("transitions", self._asdict(), (counts,), num_users, bound)


def release_rounds(
    key: jax.Array | None, histories: Histories | Blocks, first: Round, std: float, rounds: int
) -> tuple[np.ndarray, np.ndarray]:
    """Releases the noisy sums of all rounds; each round leaves out more pairs that look like noise.

    Only the last round has entries on and below the diagonal. In earlier rounds these would take a part of
    each user's norm from pairs that are still to be detected.

    Args:
      key: The JAX key of the noise.
      histories: The histories, or blocks of them.
      first: The statistic whose `alive` are the entries that are summed if no pair is left out.
      std: The standard deviation of the noise of a round.
      rounds: The number of rounds.

    Returns:
      The estimates (K, K), which are means over rounds, and their standard errors. An entry that no round has
      summed is zero, with infinite error.
    """
    # Pairs of records in memory are computed once for all rounds.
    records = first.pairs(histories) if isinstance(histories, Histories) else histories
    estimate = np.zeros(first.alive.shape, np.float32)
    counted = np.zeros(first.alive.shape, np.float32)  # in how many rounds
    kept = np.triu(first.alive, 1)
    for number in range(rounds):
        alive = kept
        if number == rounds - 1:
            alive = first.alive & (kept | kept.T | np.eye(len(kept), dtype=bool))
        summed = total(first._replace(alive=alive), records)
        (counts,) = summed.check("transitions").sums
        noisy = noise.release_integers(
            None if key is None else jax.random.fold_in(key, number),
            counts,
            sensitivity=summed.largest,
            unit=1 / noise.secure.STEPS,
            noise_multiplier=std,
            label=f"transitions, round {number + 1}",
        )
        # Noise is added before rounding to 32 bits, since a rounded sum may move by more than 1.
        estimate += np.where(alive, np.asarray(noisy, np.float32).reshape(estimate.shape), 0)
        counted += alive
        # The cut rises and a pair that was left out keeps its estimate, so that it stays out.
        cut = _LAST_CUT * number / max(rounds - 2, 1)
        kept = kept & (estimate > cut * std * np.sqrt(counted))
    rounds_of = np.maximum(counted, 1)
    return estimate / rounds_of, np.where(counted > 0, std / np.sqrt(rounds_of), np.inf)


def _pieces(histories: Histories) -> Iterator[slice]:
    """Yields slices of users with about `_PIECE_EVENTS` events each; a user is in one slice."""
    lengths = np.array([len(items) for items in histories.items], np.int64)
    before = np.cumsum(lengths) - lengths
    cuts = np.flatnonzero(np.diff(before // _PIECE_EVENTS)) + 1
    return itertools.starmap(slice, itertools.pairwise([0, *cuts.tolist(), len(lengths)]))


def _pairs(
    histories, items, gap_decay, max_gap, age_decay, order_weight, position_weight
) -> sparse.csr_array:
    users, tokens, after = flatten(histories.items)
    place = places(items, histories.num_items)[tokens]
    rows, entries, weights = [], [], []
    for gap in range(1, min(max_gap, len(tokens) - 1) + 1):
        first, second = place[:-gap], place[gap:]
        real = (users[:-gap] == users[gap:]) & (first >= 0) & (second >= 0) & (first != second)
        first, second = first[real], second[real]
        low, high = np.minimum(first, second), np.maximum(first, second)
        weight = gap_decay ** (gap - 1) * age_decay ** after[gap:][real]
        rows.append(users[gap:][real])
        entries.append(low * len(items) + high)
        weights.append(weight)
        if order_weight:
            rows.append(rows[-1])
            entries.append(high * len(items) + low)
            weights.append(np.where(first < second, order_weight, -order_weight) * weight)
    if position_weight:
        users, tokens, after = last_occurrences(histories)
        place = places(items, histories.num_items)[tokens]
        others = np.array([len(walk) - 1 for walk in histories.items], np.int64)[users]
        real = (place >= 0) & (others > 0)  # the position of a history's only item is undefined
        rows.append(users[real])
        entries.append(place[real] * (len(items) + 1))
        weights.append(position_weight * (1 - 2 * after[real] / others[real]))
    shape = (len(histories.items), len(items) ** 2)
    joined = _joined(weights, np.float64), _joined(rows, np.int64), _joined(entries, np.int64)
    sums, *coordinates = sum_entries(*joined, shape[1])  # a history may reach an entry often
    return sparse.csr_array((sums, tuple(coordinates)), shape=shape)


def places(items: np.ndarray, num_items: int) -> np.ndarray:
    """The index (M,) of each item among the kept items; -1 for the others."""
    places = np.full(num_items, -1, np.int64)
    places[items] = np.arange(len(items))
    return places


def _joined(arrays, dtype) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
