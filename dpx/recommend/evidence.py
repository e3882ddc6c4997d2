"""The thresholds, in standard errors, above which the noisy count of a pair of items is used.

Most pairs that the last round still counts are noise. A pair needs less evidence of its own if its two items
come at about the same time in histories, or if sure pairs lead from one to the other over a third item. This
is post-processing and costs no privacy.
"""

import numpy as np

# All are in standard errors.
_TWO_STEPS = 3.0  # by how much evidence over a third item lowers the threshold of a pair
_LARGEST = 2.0  # the most by which it lowers a threshold
_SURE = 4.0  # the excess at which a pair is full evidence for others
_FEW = 2.0  # the least total excess of an item's pairs by which evidence is divided
_APART = 0.2  # what a pair needs more for each standard deviation between the lateness of its items


def thresholds(
    estimate: np.ndarray, standard_error: np.ndarray, lateness: np.ndarray
) -> np.ndarray:
    """The threshold of each pair, symmetric (K, K), in standard errors.

    Without evidence from other pairs, thresholds are 2 on average. Let z be the excess of a pair over that,
    d_i = max(Σ_j z_ij, 2) and c = min(z, 4). Then the threshold of (i, j) is lowered by
    min(3 Σ_k c_ik c_kj/√(d_i d_j), 2).

    Args:
      estimate, standard_error: (K, K) noisy counts of how much two items occur together, and their standard
        errors; only entries above the diagonal are used.
      lateness: (K,), from `dpx.recommend.order.lateness`.
    """
    apart = np.abs(lateness - lateness[:, None])
    needed = 2 + _APART * (apart - apart.mean())
    together, error = np.triu(estimate, 1), np.triu(standard_error, 1)
    above = np.where(error > 0, together / np.where(error > 0, error, 1) - needed, 0)
    above = np.maximum(above + above.T, 0)
    degrees = np.maximum(above.sum(axis=1), _FEW)
    above = np.minimum(above, _SURE) / np.sqrt(degrees)[:, None]
    two_steps = above @ above.T
    return (needed - np.minimum(_TWO_STEPS * two_steps, _LARGEST)).astype(np.float32)
