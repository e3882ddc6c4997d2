"""Votes of private documents on a query: exact ones, and those with noise, for which every query pays."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dpx.noise import release
from dpx.privacy import PrivacyGuarantee, gaussian_noise_multiplier
from dpx.runs.experiment import Measure
from experiments.cross_attention.classifiers import guarantee
from experiments.cross_attention.labelled import Documents

_MOST_BLOCKS = 25  # of queries, of which each has a budget of its own
_BITS = 20  # of an entry of a key, of which the nearest are told
_PIECE = 100  # queries at a time


def exact_scores(data: Documents, values: np.ndarray, logit: float) -> np.ndarray:
    """Votes of the private documents, each at most 1, without privacy: (m, groups).

    In 64 bits: in 32 a sum over documents is rounded by more than is allowed for, and a vote may exceed 1.
    """
    keys, values = data.keys.astype(np.float64), values.astype(np.float64)
    pieces = np.array_split(data.queries.astype(np.float64), 1 + len(data.queries) // 1000)
    return np.concatenate(
        [np.exp(logit * np.minimum(some @ keys.T - 1, 0)) @ values for some in pieces]
    )


def nearest_votes(
    data: Documents, values: np.ndarray, neighbours: Sequence[int]
) -> dict[int, np.ndarray]:
    """For each k, the labels of the k documents nearest to a query, counted, without privacy: (m, groups).

    The order of two documents must not depend on a third one. So inner products are those of integers, which
    no order of summation rounds, and of equally near documents the first in the file is nearer.
    """
    keys, queries = (
        np.rint(np.ldexp(x.astype(np.float64), _BITS)) for x in (data.keys, data.queries)
    )
    found: dict[int, list[np.ndarray]] = {k: [] for k in neighbours}
    for start in range(0, len(queries), _PIECE):
        near = np.argsort(-(queries[start : start + _PIECE] @ keys.T), axis=1, kind="stable")
        for k, counts in found.items():
            counts.append(values[near[:, :k]].sum(axis=1, dtype=np.float64))
    return {k: np.concatenate(counts) for k, counts in found.items()}


class Paid(NamedTuple):
    """A block of queries that are answered from a budget of their own.

    Attributes:
      num_queries: How many queries the budget has to last for.
      neighbours: How many documents vote; None for all of them, each by its weight in attention.
      block: The number of the block.
    """

    num_queries: int
    neighbours: int | None
    block: int

    @property
    def change(self) -> float:
        """How far a document that comes or goes moves the votes on a query, in l2.

        In attention a document has a vote of at most 1 for its label, and moves no other one. Of the k
        nearest, a document that comes takes the place of the last one, unless there are fewer than k: one
        vote comes and at most one goes. These are at most √2 apart, whatever k is; they are as far apart
        where the labels differ.
        """
        return 1.0 if self.neighbours is None else np.sqrt(2)

    @property
    def label(self) -> str:
        """The name of the release, for the first block that of the row."""
        return self.measure(0.0).place + (f"_block{self.block}" if self.block else "")

    def measure(self, accuracy: float) -> Measure:
        """The number of a row, of which the blocks are parts."""
        if self.neighbours is None:
            return Measure("fresh_noise", "accuracy", accuracy, settings=self._settings)
        settings = {**self._settings, "neighbours": self.neighbours}
        return Measure("nearest", "accuracy", accuracy, settings=settings)

    @property
    def _settings(self) -> dict[str, int]:
        return {"queries": self.num_queries}

    @property
    def part(self) -> slice:
        """Which of the queries."""
        return slice(self.block * self.num_queries, (self.block + 1) * self.num_queries)


def paid(config, num_asking: int) -> Iterator[Paid]:
    """What is answered from which budget: several blocks, where few queries tell little of an accuracy."""
    for num_queries in config.query_counts:
        for neighbours in (None, *config.neighbours):
            for block in range(min(_MOST_BLOCKS, max(1, num_asking // num_queries))):
                yield Paid(num_queries, neighbours, block)


def fresh_noise(
    key: jax.Array,
    votes: np.ndarray,
    num_queries: int,
    *,
    change: float,
    epsilon: float,
    delta: float,
) -> tuple[np.ndarray, PrivacyGuarantee]:
    """Votes with noise of their own for each query, where the budget must last for so many queries.

    A document that comes or goes moves the votes on each query by at most `change`, and those on all queries
    by at most √num_queries times that. Only the first so many queries are within the guarantee.
    """
    spent = guarantee(epsilon, delta, "Gaussian mechanism on the votes of each query")
    noisy = release(
        key,
        votes[:num_queries].astype(np.float64),
        sensitivity=change * np.sqrt(num_queries) * (1 + 1e-6),
        noise_multiplier=gaussian_noise_multiplier(epsilon, delta),
        label="votes",
    )
    return np.asarray(noisy), spent
