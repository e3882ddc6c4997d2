"""The popularity of items, from one noisy histogram with bounded contributions."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from dpx import _validate, _watch, privacy
from dpx.data.histories import Histories, last_occurrences
from dpx.noise import release_integers, sum_sparse
from dpx.noise import secure as exact_arithmetic
from dpx.release import Blocks, Partial, total

_LARGEST_K = 4096  # a K × K matrix of this size is inverted or multiplied in seconds


class Popularity(NamedTuple):
    """The noisy number of users of each item (M,), the standard deviation of the noise, and the guarantee."""

    counts: np.ndarray
    noise_std: float
    guarantee: privacy.PrivacyGuarantee

    def log_probabilities(self) -> np.ndarray:
        """The log (M,) of the smoothed distribution of the next item; it is post-processing of the counts."""
        return _log_probabilities(self.counts, self.noise_std)


def fit(
    key: jax.Array | None,
    histories: Histories | Blocks | Partial,
    *,
    epsilon: float,
    delta: float,
    l2_clip_norm: float = 1.0,
    age_decay: float = 1.0,
    unit: str = "user",
    secure: bool = False,
) -> Popularity:
    """Counts, privately, the histories in which each item occurs.

    Guarantee: (ε, δ)-DP for adding or removing one user. A user's vector, of at most 1 for each item of the
    history and 0 elsewhere, is rescaled to l2 norm at most `l2_clip_norm`, which is therefore the exact
    sensitivity of the sum. The sum is released once with Gaussian noise.

    Args:
      key: The JAX key of the noise.
      histories: Histories of N users over M items, `dpx.release.Blocks` of them, or a sum that `statistic`
        made of them. The catalogue counts as public.
      epsilon, delta: The budget.
      l2_clip_norm: A user with n distinct items counts min(1, l2_clip_norm/√n) at each of them.
      age_decay: In (0, 1]. Below 1, an item counts age_decay^a before the norm is taken, where a is the
        number of items after its last occurrence: late items say more about what comes next.
      unit: What one history is.
      secure: Sums integers and draws discrete noise (`dpx.noise.secure`); `key` must then be None.

    Raises:
      ValueError: for an argument out of range.
    """
    options = _checked(l2_clip_norm, age_decay)
    multiplier = privacy.gaussian_noise_multiplier(epsilon, delta)
    exact_arithmetic.check(key, secure)
    counts = total(functools.partial(statistic, **options), histories)
    l2_clip_norm = options["l2_clip_norm"]
    guarantee = privacy.gaussian_guarantee(
        epsilon,
        delta,
        neighboring=privacy.ADD_OR_REMOVE_ONE,
        unit=unit,
        mechanism=f"item popularity, each {unit}'s items rescaled to l2 norm {l2_clip_norm:g}, one Gaussian "
        f"release with noise multiplier {multiplier:.6g}",
        assumptions=("the catalogue of items is public",),
    )
    noisy = _noisy(key, counts, multiplier, **options)
    return Popularity(noisy, multiplier * l2_clip_norm, guarantee)


def statistic(
    histories: Histories, *, l2_clip_norm: float = 1.0, age_decay: float = 1.0
) -> Partial:
    """The exact sum of users' vectors, each rescaled to norm at most `l2_clip_norm`. It is private data.

    Raises:
      ValueError: for arguments out of range, or anything but histories.
    """
    check_histories(histories)
    options = _checked(l2_clip_norm, age_decay)
    l2_clip_norm, age_decay = options.values()
    num_users, num_items = len(histories.items), histories.num_items
    users, items, after = last_occurrences(histories)
    weights = np.float64(age_decay) ** after
    norms = np.sqrt(np.bincount(users, weights**2, minlength=num_users))
    weights *= np.minimum(1.0, l2_clip_norm / np.maximum(norms, 1))[users]
    counts, largest = sum_sparse(weights, users, items, num_items, l2_clip_norm=l2_clip_norm)
    options["num_items"] = num_items
    return Partial("item popularity", options, (counts,), num_users, largest)


def _checked(l2_clip_norm: float, age_decay: float) -> dict[str, float]:
    return {
        "l2_clip_norm": _validate.check_clip_of_counts(l2_clip_norm),
        "age_decay": _validate.check_decay(age_decay, "age_decay"),
    }


def _noisy(
    key: jax.Array | None, counts: Partial, noise_multiplier: float, **options: float
) -> np.ndarray:
    """The noisy sum (M,), in users."""
    (exact,) = counts.check("item popularity", **options).sums
    noisy = release_integers(
        key,
        exact,
        sensitivity=counts.largest,
        unit=options["l2_clip_norm"] / exact_arithmetic.STEPS,
        noise_multiplier=noise_multiplier,
        label="item popularity",
    )
    return np.asarray(noisy)


class Leading(NamedTuple):
    """The most popular items by a noisy popularity, and the noise multiplier that the budget leaves.

    Attributes:
      items: (K,) the numbers of the items, the most popular first.
      counts: (K,) the noisy number of users of each of them, raised to at least the noise std.
      log_popularity: (M,) the log of a noisy distribution over the catalogue.
      noise_multiplier: That of a Gaussian mechanism which spends the rest of the budget.
      num_users: N, which counts as public.
    """

    items: np.ndarray
    counts: np.ndarray
    log_popularity: np.ndarray
    noise_multiplier: float
    num_users: int


def leading(
    key: jax.Array | None,
    histories: Histories | Blocks,
    *,
    noise_multiplier: float,
    budget_fraction: float,
    num_kept: int | None = None,
    rule: Callable[[float, int, int], int] | None = None,
    age_decay: float = 1.0,
    secure: bool = False,
) -> Leading:
    """Spends a share of a budget on the popularity, by which a recommender's K items are chosen.

    Let m be the noise multiplier of one Gaussian mechanism that spends the whole budget. The popularity has
    m/√s and the rest m/√(1 − s), where s is the share. Since μ² = 1/m² adds up, both together cost exactly as
    much as that mechanism. `guarantee` states this once the rest has been released.

    Args:
      key: The JAX key of the noise.
      histories: Histories of N users over M items, or blocks of them; N and the catalogue count as public.
      noise_multiplier: m.
      budget_fraction: The share s of μ², in (0, 1).
      num_kept: K, by default the result of `rule`.
      rule: A function of the rest's noise multiplier, N and M that returns K; by default `default_num_kept`.
      age_decay, secure: As in `fit`.

    Raises:
      ValueError: for an argument out of range, or a `dpx.release.Partial`, since other sums have to follow.
    """
    if isinstance(histories, Partial):
        raise ValueError(
            f"histories={histories} must be records or dpx.release.Blocks of them, which are summed more "
            "than once: pass those"
        )
    budget_fraction = _validate.check_number(budget_fraction, "popularity_budget_fraction")
    if not 0 < budget_fraction < 1:
        raise ValueError(
            f"popularity_budget_fraction={budget_fraction} must be strictly between 0 and 1"
        )
    options = _checked(1.0, age_decay)
    exact_arithmetic.check(key, secure)
    if num_kept is not None:
        num_kept = _validate.check_integer(num_kept, "num_kept")
    of_popularity = noise_multiplier / math.sqrt(budget_fraction)
    of_rest = noise_multiplier / math.sqrt(1 - budget_fraction)
    counts = total(functools.partial(statistic, **options), histories)
    num_users = _watch.public(counts.num_records, "the number of users")
    num_items = counts.options["num_items"]
    if num_kept is None:
        num_kept = (rule or default_num_kept)(of_rest, num_users, num_items)
    if num_kept > num_items:
        raise ValueError(f"num_kept={num_kept} must be in [1, {num_items}], the number of items")
    noisy = _noisy(key, counts, of_popularity, **options)
    items = np.argsort(-noisy, kind="stable")[:num_kept]
    return Leading(
        items=items,
        counts=np.maximum(noisy[items], of_popularity),
        log_popularity=_log_probabilities(noisy, of_popularity),
        noise_multiplier=of_rest,
        num_users=num_users,
    )


def guarantee(epsilon: float, delta: float, mechanism: str) -> privacy.PrivacyGuarantee:
    """The guarantee of a popularity (`leading`) and the rest of a release together, for a user's history.

    Args:
      epsilon, delta: The budget, which one Gaussian mechanism spends with the noise multiplier of `leading`.
      mechanism: What was released, in words.
    """
    return privacy.gaussian_guarantee(
        epsilon,
        delta,
        neighboring=privacy.ADD_OR_REMOVE_ONE,
        unit="user",
        mechanism=mechanism,
        assumptions=("the catalogue of items is public", "the number of users is public"),
    )


def default_num_kept(noise_std: float, num_users: int, num_items: int) -> int:
    """The number K = N/(30σ) of items for a K × K matrix, within [20, 4096] and at most the catalogue.

    In a long tail the k-th item has about N/k users, so that the kept items have counts above a fixed
    multiple of the noise. The 30 was chosen on Amazon Games' next-to-last items.
    """
    return min(num_items, _LARGEST_K, max(20, int(num_users / (30 * noise_std))))


def add_to_prior(prior: np.ndarray, items: np.ndarray, kept_scores: np.ndarray) -> np.ndarray:
    """The prior (M,) of all items plus the scores (U, K) of the kept items: (U, M) float32."""
    scored = np.tile(prior.astype(np.float32), (len(kept_scores), 1))
    scored[:, items] += kept_scores
    return scored


def count(histories: Histories) -> np.ndarray:
    """The exact number of users of each item (M,), which is not private."""
    counts = np.zeros(histories.num_items)
    for items in histories.items:
        counts[np.unique(items)] += 1
    return counts


def check_histories(histories: Histories) -> None:
    """Raises ValueError for anything but histories."""
    if not isinstance(histories, Histories):
        raise ValueError(
            f"histories of type {type(histories).__name__} must be dpx.data.Histories, which knows the size "
            "of the catalogue: make one of the lists of items"
        )


def _log_probabilities(counts: np.ndarray, noise_std: float) -> np.ndarray:
    floor = max(noise_std, 1.0)
    smoothed = floor * np.logaddexp(0, counts / floor)
    return np.log(smoothed / smoothed.sum())
