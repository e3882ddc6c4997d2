"""Exact integer sums over the bins of trees, so that blocks of records merge to the last bit.

A record adds w·x^t, x in [0, 1], to the leaf of x, for every moment t. It is divided by `unit` and rounded to
integers (`dpx.noise.secure`), whose sums, in leaves and in all nodes above, are exact. Rounding moves each
entry by at most 0.51, so that the sensitivity of a level is larger by `rounding`; the noise covers that.

All arithmetic before rounding is done entry by entry in NumPy with 64 bits, so that the contribution of a
record does not depend on other records.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy import sparse

from dpx.noise import secure
from dpx.release import Partial

_STEPS = 2**24  # the largest norm of a record's weights, in units of the grid
_MOST_ROWS = 2**18  # rows at a time


def unit(longest: float) -> float:
    """The value of the integer 1, if the weights of a record have norm at most `longest`."""
    return longest / _STEPS


def rounding(longest: float, columns: int) -> float:
    """The amount by which rounding raises the l2 sensitivity of one level, over all columns of weights."""
    return 2 * secure.rounding(columns) * unit(longest)


def partial(
    name: str,
    options: dict[str, Any],
    structures: Iterable[np.ndarray],
    weights: np.ndarray,
    longest: float,
) -> Partial:
    """The sums of all leaves of several structures over the same records, (S, bins, p + 1, c) int64.

    Args:
      name: The name of what is summed.
      options: What it depends on; "bins" is the number of leaves, and "power" the largest moment.
      structures: x of each structure; the other arguments are those of `leaf_sums`.
    """
    power, bins = options["power"], options["bins"]
    sums = [leaf_sums(x, weights, longest, power, bins) for x in structures]
    # A record is in one leaf of each structure's trees.
    norm = secure.norm_bound(_STEPS, weights.shape[1])
    largest = int(np.ceil(np.sqrt(len(sums) * (power + 1)) * norm))
    return Partial(name, options, (np.stack(sums),), len(weights), largest)


def leaf_sums(x: np.ndarray, weights: np.ndarray, longest: float, power: int, bins: int):
    """The sums of all leaves of the trees of one structure.

    Args:
      x: (n,) in [0, 1].
      weights: (n, c), of norm at most `longest` in each row.
      longest: That norm.
      power: p, the largest moment.
      bins: The number of leaves.

    Returns:
      (bins, p + 1, c) int64, in units of `unit(longest)`.
    """
    total = np.zeros((bins, power + 1, weights.shape[1]), np.int64)
    for start in range(0, len(x), _MOST_ROWS):
        here, rows = x[start : start + _MOST_ROWS], weights[start : start + _MOST_ROWS]
        rows = rows / unit(longest)
        # The bound is enforced and not only proven: a row that is longer counts as zero.
        squares = np.square(np.rint(rows)).sum(axis=1)
        bound = secure.norm_bound(_STEPS, rows.shape[1])
        rows = np.where((squares <= bound**2)[:, None], rows, 0)
        leaf = np.minimum((here * bins).astype(np.int64), bins - 1)
        ones, ends = np.ones(len(here), np.int64), np.arange(len(here) + 1)
        places = sparse.csr_array((ones, leaf, ends), shape=(len(here), bins)).T
        for moment in range(power + 1):
            total[:, moment] += places @ np.rint(rows).astype(np.int64)
            rows = rows * here[:, None]
    return total
