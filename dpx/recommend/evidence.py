"""How far above the noise a pair must be to be believed: less where other pairs speak for it.

Of the pairs that the last round still counts, most are noise. It costs nothing to ask whether two items come
at about the same time, and whether pairs that are sure lead from one to the other over a third item.
"""

import numpy as np

_TWO_STEPS = 3.0  # standard errors that a pair needs less, for one standard error in two steps
_LARGEST = 2.0  # standard errors that a pair needs less, at most
_SURE = 4.0  # standard errors above which a pair is no better evidence for others
_FEW = 2.0  # standard errors in all pairs of an item that it counts as having at least
_APART = (
    0.2  # standard errors that a pair needs more, for a standard deviation between its items' times
)


def thresholds(found: np.ndarray, standard_error: np.ndarray, lateness: np.ndarray) -> np.ndarray:
    """(K, K) standard errors to cut off, symmetric: 2 on average without pairs that speak for one another.

    With z what a pair is above that, in standard errors, d_i = max(Σ_j z_ij, 2) and c = min(z, 4), a pair
    needs min(3 Σ_k c_ik c_kj/√(d_i d_j), 2) less.

    Args:
      found, standard_error: (K, K), of which what is above the diagonal is used: how much two items occur
        together, with its noise.
      lateness: (K,), of `dpx.recommend.order.lateness`.
    """
    apart = np.abs(lateness - lateness[:, None])
    needed = 2 + _APART * (apart - apart.mean())
    found, error = np.triu(found, 1), np.triu(standard_error, 1)
    above = np.where(error > 0, found / np.where(error > 0, error, 1) - needed, 0)
    above = np.maximum(above + above.T, 0)
    degrees = np.maximum(above.sum(axis=1), _FEW)
    above = np.minimum(above, _SURE) / np.sqrt(degrees)[:, None]
    two_steps = above @ above.T
    return (needed - np.minimum(_TWO_STEPS * two_steps, _LARGEST)).astype(np.float32)
