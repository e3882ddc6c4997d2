"""Item popularity from one noisy histogram with bounded contributions."""

from typing import NamedTuple

import dp_accounting
import jax
import numpy as np

from dpx import privacy
from dpx.data.histories import Histories


class Popularity(NamedTuple):
    """Noisy number of users per item (M,), its noise std, and the guarantee."""

    counts: np.ndarray
    noise_std: float
    guarantee: privacy.PrivacyGuarantee

    def log_probabilities(self) -> np.ndarray:
        """(M,) log of the smoothed distribution of the next item: post-processing of the counts."""
        floor = max(self.noise_std, 1.0)
        smoothed = floor * np.logaddexp(0, self.counts / floor)
        return np.log(smoothed / smoothed.sum())


def fit(
    key: jax.Array,
    histories: Histories,
    *,
    epsilon: float,
    delta: float,
    l2_clip: float = 1.0,
    unit: str = "user",
) -> Popularity:
    """Counts, privately, in how many histories each item occurs.

    Guarantee: (ε, δ)-DP for adding or removing one user. A user's 0/1 vector of the distinct items of the
    history is rescaled to l2 norm at most `l2_clip`, which is therefore the exact sensitivity of the sum;
    the sum is released once with Gaussian noise.

    Args:
      key: Of the noise.
      histories: Of N users over M items; the catalogue counts as public.
      epsilon, delta: The budget.
      l2_clip: A user with n distinct items counts min(1, l2_clip/√n) at each.
      unit: What one history is.

    Raises:
      ValueError: for an argument out of range.
    """
    if not l2_clip > 0:
        raise ValueError(f"l2_clip={l2_clip} must be positive")
    multiplier = privacy.gaussian_noise_multiplier(epsilon, delta)
    counts = np.zeros(histories.num_items)
    for items in histories.items:
        distinct = np.unique(items)
        counts[distinct] += min(1.0, l2_clip / np.sqrt(max(len(distinct), 1)))
    std = multiplier * l2_clip
    noise = std * np.asarray(jax.random.normal(key, counts.shape), np.float64)
    guarantee = privacy.PrivacyGuarantee(
        epsilon=epsilon,
        delta=delta,
        neighboring=privacy.ADD_OR_REMOVE_ONE,
        unit=unit,
        mechanism=f"item popularity, each user's items rescaled to l2 norm {l2_clip:g}, one Gaussian release "
        f"with noise multiplier {multiplier:.6g}",
        assumptions=("the catalogue of items is public",),
        event=dp_accounting.GaussianDpEvent(multiplier),
    )
    return Popularity(counts + noise, std, guarantee)


def count(histories: Histories) -> np.ndarray:
    """(M,) exact number of users per item: not private."""
    counts = np.zeros(histories.num_items)
    for items in histories.items:
        counts[np.unique(items)] += 1
    return counts
