"""Sums over the bins of trees as exact integers, so that blocks of records merge to the last bit.

A record puts w·x^t, x in [0, 1], into the leaf of x, for every moment t. Divided by `unit` it is rounded to
integers (`dpx.noise.secure`), whose sums, of a leaf and of every node above it, are exact. Rounding moves
each entry by at most 0.51, so that what two records change of a level is larger by `rounding`, which the
noise covers.

All arithmetic before rounding is NumPy's, entry by entry, in 64 bits: what a record adds does not depend on
the records beside it.
"""

import numpy as np
from scipy import sparse

from dpx.noise import secure

_STEPS = 2**24  # the norm of a record's weights, in units of the grid
_MOST_ROWS = 2**18  # at a time


def unit(longest: float) -> float:
    """What one of the integers is worth, where the weights of a record have that norm at most."""
    return longest / _STEPS


def rounding(longest: float, columns: int) -> float:
    """How much farther rounding lets two records move one level, in l2 over its columns of weights."""
    return 2 * secure.rounding(columns) * unit(longest)


def largest(structures: int, power: int, columns: int) -> int:
    """The largest norm of the integers of a record, which is in one leaf of each structure's trees."""
    entries = structures * (power + 1)
    return int(np.ceil(np.sqrt(entries) * secure.norm_bound(_STEPS, columns)))


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
        # Not on analysis alone: what is longer than it can be counts as zero.
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
