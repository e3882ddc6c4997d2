"""A private next-item recommender from noisy counts of which item follows which, released in a few rounds.

The model is one linear attention head over the history: the score of item j is S_j = Σ_k ρ^k W[i_k, j], where
i_k is the k-th last item. The weights W come from noisy counts of transitions instead of noisy gradient
steps. For two items, one count is how much they occur together; another one, for their order, is how much
more the first comes before the second than after it. The former has more signal, since both orders add to it.

The counts are released in rounds. In each, a user adds a matrix of Frobenius norm 1, so that a user with many
pairs contributes little to each of them. Therefore a round leaves out pairs that earlier rounds did not
detect, and each user's norm goes to the pairs that remain. The last round also counts the order of pairs and
the position of each item in the history. Most users have none of the pairs that remain, and all of their norm
goes to positions.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import sparse

from dpx import _validate, noise, privacy
from dpx.data.histories import Histories, flatten, item_numbers
from dpx.recommend import evidence, order, popularity
from dpx.recommend.rounds import Round, places, release_rounds
from dpx.release import Blocks


class Transitions(NamedTuple):
    """A private release of which item follows which, and its guarantee.

    Attributes:
      items: (K,) the numbers of the kept items, the most popular first.
      estimate: (K, K) float32; row i, column j is how strongly j follows i, in users who have one pair only.
      standard_error: (K, K) float32, the standard error of `estimate`, without that of the order of a pair.
      weights: (K, K) float32, the weights that `scores` uses: `attention_weights` of the two, with the
        thresholds of `dpx.recommend.evidence`.
      log_popularity: (M,) the log of a noisy distribution over the catalogue, in which late items are raised
        (`dpx.recommend.order.raise_late`).
      guarantee: The guarantee of the popularity and all rounds together.
      prior_weight: The factor of the log popularity in `scores`.
    """

    items: np.ndarray
    estimate: np.ndarray
    standard_error: np.ndarray
    weights: np.ndarray
    log_popularity: np.ndarray
    guarantee: privacy.PrivacyGuarantee
    prior_weight: float = 0.1

    def scores(
        self,
        histories: Sequence[np.ndarray],
        *,
        recency: float = 0.7,
        prior_weight: float | None = None,
    ) -> np.ndarray:
        """The scores of all items as the next one.

        Args:
          histories: For each of U users the items so far, as numbers in [0, M), in time order.
          recency: ρ in [0, 1], the factor by which an item counts less for each item after it.
          prior_weight: The factor of the log popularity, which ranks items that no transition reaches; by
            default that of the release.

        Returns:
          (U, M) float32, a row of M scores for each user; pass many users in pieces.

        Raises:
          ValueError: for a recency outside [0, 1], or an item that is not a whole number in [0, M).
        """
        if not 0 <= recency <= 1:
            raise ValueError(f"recency={recency} must be in [0, 1]")
        kept = recency_vectors(histories, self.items, len(self.log_popularity), recency)
        prior = (self.prior_weight if prior_weight is None else prior_weight) * self.log_popularity
        return popularity.add_to_prior(prior, self.items, kept @ self.weights)


def fit(
    key: jax.Array | None,
    histories: Histories | Blocks,
    *,
    epsilon: float,
    delta: float,
    num_kept: int | None = None,
    popularity_budget_fraction: float = 0.1,
    popularity_age_decay: float = 0.8,
    rounds: int = 6,
    gap_decay: float = 0.9,
    max_gap: int = 20,
    age_decay: float = 0.95,
    order_weight: float = 1.0,
    position_weight: float = 0.1,
    secure: bool = False,
) -> Transitions:
    """Releases the popularity of all items, and the transitions between the K most popular ones.

    Guarantee: (ε, δ)-DP for adding or removing one user with the whole history.

    Sensitivity: each round releases a sum over users of (K, K) matrices. A user's matrix depends only on that
    user's history and on earlier *outputs*, and is divided by its own Frobenius norm (an empty one stays
    zero). Adding or removing the user changes the sum by that matrix of norm 1, so that the l2 sensitivity is
    exactly 1. Entries that a history reaches more than once are added up before the norm is taken. Each of R
    rounds is a Gaussian mechanism with noise multiplier m√R/√(1 − s), and the popularity is one with m/√s
    (`dpx.recommend.popularity.leading`), where s is the popularity's share of the budget and m the exact
    multiplier of (ε, δ). Adaptive Gaussian mechanisms compose exactly in μ² (Dong, Roth, Su,
    arXiv:1905.02383, Corollary 3.3), so that all of it costs as much as one Gaussian mechanism with
    multiplier m.

    Args:
      key: The JAX key of the noise.
      histories: Histories of N users over M items, or `dpx.release.Blocks` of them, which are summed 1 + R
        times. N and the catalogue count as public.
      epsilon, delta: The budget.
      num_kept: K, by default `default_num_kept`, which depends on ε, δ and N alone.
      popularity_budget_fraction: s in (0, 1).
      popularity_age_decay: As `age_decay` of `dpx.recommend.popularity.fit`.
      rounds: R. With 1 there is a single noisy matrix of all pairs, which is less accurate and as private.
      gap_decay, max_gap: Two items of a history that are g ≤ max_gap positions apart weigh gap_decay^(g−1).
      age_decay: That weight is multiplied by age_decay^a, where a items follow the later one of the two.
      order_weight: The weight, in the last round, of the order of two items relative to their co-occurrence.
        With 0 order is not counted; 1 is as good as counting the two orders separately.
      position_weight: The weight, in the last round, of an item's position in the history, from −1 to 1.
      secure: Sums integers and draws discrete noise (`dpx.noise.secure`); `key` must then be None.

    Raises:
      ValueError: for an argument out of range.
    """
    weights: dict[str, Any] = {"gap_decay": gap_decay, "max_gap": max_gap, "age_decay": age_decay}
    weights |= {"order_weight": order_weight, "position_weight": position_weight}
    check_options(rounds, **weights, popularity_age_decay=popularity_age_decay)
    rounds = int(rounds)
    weights = {name: float(value) for name, value in weights.items()} | {"max_gap": int(max_gap)}
    order_weight, position_weight = weights["order_weight"], weights["position_weight"]
    multiplier = privacy.gaussian_noise_multiplier(epsilon, delta)
    popularity_key, rounds_key = noise.secure.split(key, secure)
    leading = popularity.leading(
        popularity_key,
        histories,
        noise_multiplier=multiplier,
        budget_fraction=popularity_budget_fraction,
        num_kept=num_kept,
        rule=default_num_kept,
        age_decay=popularity_age_decay,
        secure=secure,
    )
    std = leading.noise_multiplier * math.sqrt(rounds)
    entries = np.ones((len(leading.items),) * 2, bool)
    if not order_weight:
        entries = np.triu(entries)
    if not position_weight:
        np.fill_diagonal(entries, False)
    first = Round(leading.items, entries, **weights)
    counts, error = release_rounds(rounds_key, histories, first, std, rounds)
    lateness = order.lateness(np.diag(counts), np.diag(error), leading.counts)
    share = order.shares(counts, error, order_weight, lateness)
    thresholds = evidence.thresholds(counts, error, lateness)
    together, error = np.triu(counts, 1), np.triu(error, 1)
    estimate, error = (share * (half + half.T) for half in (together, error))
    return Transitions(
        items=leading.items,
        estimate=estimate,
        standard_error=error,
        weights=attention_weights(estimate, error, threshold=thresholds),
        log_popularity=order.raise_late(leading.log_popularity, leading.items, lateness),
        guarantee=popularity.guarantee(
            epsilon,
            delta,
            f"noisy popularity, and transitions between {len(leading.items)} items in {rounds} round(s) "
            f"with noise multiplier {std:.6g} each",
        ),
        prior_weight=0.2 * leading.noise_multiplier,
    )


def default_num_kept(noise_std: float, num_users: int, num_items: int) -> int:
    """The number K = N/(20σ) of items, within the bounds of `dpx.recommend.popularity.default_num_kept`.

    It is larger than there, because rounds leave out pairs. The 20 was chosen on Amazon Games' next-to-last
    items.
    """
    return popularity.default_num_kept(noise_std * 2 / 3, num_users, num_items)


def check_options(
    rounds: int,
    gap_decay: float,
    max_gap: int,
    age_decay: float,
    order_weight: float,
    position_weight: float,
    popularity_age_decay: float = 1.0,
) -> None:
    """Raises ValueError for an option of `fit` that is out of range."""
    _validate.check_integer(rounds, "rounds")
    _validate.check_integer(max_gap, "max_gap")
    _validate.check_decay(gap_decay, "gap_decay")
    _validate.check_decay(age_decay, "age_decay")
    _validate.check_decay(popularity_age_decay, "popularity_age_decay")
    for name, weight in (("order_weight", order_weight), ("position_weight", position_weight)):
        if _validate.check_number(weight, name) and not 1e-3 <= weight <= 1:
            raise ValueError(f"{name}={weight} must be in [0.001, 1], or 0 to count nothing")


def attention_weights(
    estimate: np.ndarray,
    standard_error: np.ndarray,
    *,
    threshold: float | np.ndarray = 2.0,
    second_step: float = 1.0,
) -> np.ndarray:
    """The weights W = S + second_step · D⁻¹S S of a release: counts without noise, and paths of two steps.

    S = max(estimate − threshold · standard_error, 0) removes noise, and D is its row sums. D⁻¹S S is the
    mean of S over the items that a transition leads to. The diagonal is zero. This is post-processing and
    costs no privacy.

    Args:
      estimate, standard_error: (K, K), of `Transitions`.
      threshold: The threshold in standard errors, (K, K) or one for all.
      second_step: The weight of the second term.

    Returns:
      (K, K) float32.
    """
    # An entry that no round has summed is 0.
    sparse_estimate = np.maximum(estimate - threshold * standard_error, 0)
    np.fill_diagonal(sparse_estimate, 0)
    if second_step == 0:
        return sparse_estimate
    totals = sparse_estimate.sum(axis=1, keepdims=True)
    further = sparse_estimate @ sparse_estimate
    further *= second_step / np.where(totals > 0, totals, 1)
    np.fill_diagonal(further, 0)
    return sparse_estimate + further


def recency_vectors(
    histories: Sequence[np.ndarray], items: np.ndarray, num_items: int, recency: float
) -> sparse.csr_array:
    """For each user and kept item, Σ recency^k over its occurrences, k items from the end: (U, K) float32."""
    users, tokens, after = flatten(tuple(map(item_numbers, histories)))
    outside = (tokens < 0) | (tokens >= num_items)
    if outside.any():
        raise ValueError(
            f"user {users[outside][0]} has item {tokens[outside][0]}, which must be in [0, {num_items}): "
            "number items as in the histories that were fitted"
        )
    place = places(items, num_items)[tokens]
    real = place >= 0
    weights = (recency ** after[real]).astype(np.float32)
    shape = (len(histories), len(items))
    return sparse.csr_array((weights, (users[real], place[real])), shape=shape)
