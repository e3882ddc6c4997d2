"""A private next-item recommender: which item follows which, released in a few rounds.

One linear attention head over the history, S_j = Σ_k ρ^k W[i_k, j] with i_k the k-th last item, whose weights
W come from noisy counts of transitions instead of noisy gradient steps. Of two items it is counted how much
they occur together and, with less weight, how much more one of them comes before the other than after it:
the former has more signal, since both orders add to it. The counts are released in rounds. A user adds a
matrix of Frobenius norm 1 to each, so that whoever has many pairs of items says little about each of them;
therefore a round leaves out the pairs that the rounds before it have not found, and every user's norm goes to
those that remain. Which of two items comes first counts in the last round alone, and so does where in a
history an item stands: most users have none of the pairs that remain, and give all their norm to the latter.
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
    """A private release about which item follows which, and its cost.

    Attributes:
      items: (K,) numbers of the kept items, the most popular ones first.
      estimate: (K, K) float32; row i, column j: how strongly j follows i, in users of one pair each.
      standard_error: (K, K) float32, of the noise in `estimate`, with which of two items comes first given.
      weights: (K, K) float32, what `scores` uses: `attention_weights` of the two, with the thresholds of
        `dpx.recommend.evidence`.
      log_popularity: (M,) log of a noisy distribution over the catalogue, late items raised
        (`dpx.recommend.order.raise_late`).
      guarantee: Of the popularity and all rounds together.
      prior_weight: What `scores` multiplies the log popularity by.
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
        """Scores of all items as the next one.

        Args:
          histories: For each of U users the numbers in [0, M) of the items so far, in time order.
          recency: ρ in [0, 1], by which an item counts less for each item after it.
          prior_weight: Factor of the log popularity, which ranks what no transition reaches; by default the
            release's own.

        Returns:
          (U, M) float32: a row of M scores for each user, so pass large sets in pieces.

        Raises:
          ValueError: for a recency outside [0, 1], or an item that is no whole number in [0, M).
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
    """Releases the popularity of all items and the transitions between those that lead it.

    Guarantee: (ε, δ)-DP for adding or removing one user, with all that a user ever did.

    Sensitivity: in each round the release is a sum over users of (K, K) matrices. A user's matrix depends on
    that user's history and on earlier *outputs* alone, and is divided by its own Frobenius norm (an empty
    one stays zero): adding or removing the user changes the sum by that matrix, of norm 1, so the l2
    sensitivity is exactly 1. Entries that a history reaches more than once are added up before the norm
    is taken. Round r of R is a Gaussian mechanism with multiplier m√R/√(1 − s), s the popularity's share
    and m the exact multiplier of (ε, δ), and the popularity one with m/√s
    (`dpx.recommend.popularity.leading`). Adaptive Gaussian mechanisms compose exactly in μ² (Dong,
    Roth, Su, arXiv:1905.02383, Corollary 3.3), so all of it costs what one Gaussian mechanism with
    multiplier m does.

    Args:
      key: The JAX key of the noise.
      histories: Of N users over M items, or `dpx.release.Blocks` of them, which are summed 1 + R times; N
        and the catalogue count as public.
      epsilon, delta: The budget.
      num_kept: K, by default `default_num_kept`, which looks at ε, δ and N alone.
      popularity_budget_fraction: s in (0, 1).
      popularity_age_decay: As `age_decay` of `dpx.recommend.popularity.fit`.
      rounds: R. One is a single noisy matrix, with no pair left out, which costs accuracy and not privacy.
      gap_decay, max_gap: Two items of a history at a distance of g ≤ max_gap positions weigh gap_decay^(g−1).
      age_decay: ... times age_decay^a, where a items follow the later one of the two.
      order_weight: By which it counts in the last round which of two items comes first, beside how much they
        occur together. 0 counts the latter alone, and 1 is as good as counting both orders apart.
      position_weight: By which it counts in the last round where in a history an item stands, from −1 to 1.
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
    found, error = release_rounds(rounds_key, histories, first, std, rounds)
    lateness = order.lateness(np.diag(found), np.diag(error), leading.counts)
    share = order.shares(found, error, order_weight, lateness)
    thresholds = evidence.thresholds(found, error, lateness)
    together, error = np.triu(found, 1), np.triu(error, 1)
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
            multiplier,
            f"noisy popularity, and transitions between {len(leading.items)} items in {rounds} round(s) "
            f"with noise multiplier {std:.6g} each",
        ),
        prior_weight=0.2 * leading.noise_multiplier,
    )


def default_num_kept(noise_std: float, num_users: int, num_items: int) -> int:
    """K = N/(20σ) within the bounds of `dpx.recommend.popularity.default_num_kept`.

    It is more than there, because rounds thin the pairs out. The 20 was chosen on Amazon Games' next-to-last
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
    """W = S + second_step · D⁻¹S S: noise is cut off, and what lies two transitions away is filled in.

    S = max(estimate − threshold · standard_error, 0), D its row sums: the second term is S averaged over
    where a transition leads to. An item does not lead to itself. Post-processing: it costs nothing.

    Args:
      estimate, standard_error: (K, K), of `Transitions`.
      threshold: In standard errors, (K, K) or one for all.
      second_step: Weight of the second term.

    Returns:
      (K, K) float32.
    """
    sparse_estimate = np.maximum(
        estimate - threshold * standard_error, 0
    )  # 0 where nothing was summed
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
    """(U, K) float32: Σ recency^k over the places of an item, k the number of items after it."""
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
