"""A private next-item recommender: which item follows which, released in a few rounds.

One linear attention head over the history, S_j = Σ_k ρ^k W[i_k, j] with i_k the k-th last item, whose weights
W come from noisy counts of transitions instead of noisy gradient steps. The counts are released in rounds.
A user adds a matrix of Frobenius norm 1 to each, so that whoever has many pairs of items says little
about each of them; therefore a round leaves out the pairs that the rounds before it have not found, and every
user's norm goes to those that remain.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from scipy import sparse

from dpx import _validate, noise, privacy
from dpx.data.histories import Histories
from dpx.partial import Partial, Passes, Statistic, drive
from dpx.recommend import popularity
from dpx.recommend.rounds import Round, flat, places, release_rounds


class Transitions(NamedTuple):
    """A private release about which item follows which, and its cost.

    Attributes:
      items: (K,) numbers of the kept items, the most popular ones first.
      estimate: (K, K) float32; row i, column j: how strongly j follows i, in users of one pair each.
      standard_error: (K, K) float32, of the noise in `estimate`.
      weights: (K, K) float32, what `scores` uses: `attention_weights` of the two.
      log_popularity: (M,) log of a noisy distribution over the catalogue.
      guarantee: Of the popularity and all rounds together.
      prior_weight: What `scores` multiplies the log popularity by.
    """

    items: np.ndarray
    estimate: np.ndarray
    standard_error: np.ndarray
    weights: np.ndarray
    log_popularity: np.ndarray
    guarantee: privacy.PrivacyGuarantee
    prior_weight: float = 0.03

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
        """
        if not 0 <= recency <= 1:
            raise ValueError(f"recency={recency} must be in [0, 1]")
        kept = recency_vectors(histories, self.items, len(self.log_popularity), recency)
        prior = (self.prior_weight if prior_weight is None else prior_weight) * self.log_popularity
        return popularity.add_to_prior(prior, self.items, kept @ self.weights)


def fit(
    key: jax.Array | None,
    histories: Histories,
    *,
    epsilon: float,
    delta: float,
    num_kept: int | None = None,
    popularity_budget_fraction: float = 0.05,
    rounds: int = 6,
    gap_decay: float = 0.9,
    max_gap: int = 20,
    age_decay: float = 0.95,
    backward: float = 0.3,
    ordered: bool | None = None,
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
    (`dpx.recommend.popularity.leading_passes`). Adaptive Gaussian mechanisms compose exactly in μ² (Dong,
    Roth, Su, arXiv:1905.02383, Corollary 3.3), so all of it costs what one Gaussian mechanism with
    multiplier m does.

    Args:
      key: The JAX key of the noise.
      histories: Of N users over M items; N and the catalogue count as public.
      epsilon, delta: The budget.
      num_kept: K, by default `default_num_kept`, which looks at ε, δ and N alone.
      popularity_budget_fraction: s in (0, 1).
      rounds: R. One is a single noisy matrix, with no pair left out.
      gap_decay, max_gap: Two items of a history at a distance of g ≤ max_gap positions weigh gap_decay^(g−1).
      age_decay: ... times age_decay^a, where a items follow the later one of the two.
      backward: Weight of the pair in the opposite order: 0 counts order only, 1 makes it symmetric.
      ordered: Whether it counts which of two items came first. If not, a pair is summed once for both orders,
        with more signal for the same noise, and `backward` plays no part. By default what pays for this
        noise and N (`default_ordered`).
      secure: Sums integers and draws discrete noise (`dpx.noise.secure`); `key` must then be None.

    Raises:
      ValueError: for an argument out of range.
    """
    pairs = None

    def sum_up(statistic: Statistic) -> Partial:
        nonlocal pairs
        if not isinstance(statistic, Round):
            return statistic(histories)
        pairs = statistic.pairs(histories) if pairs is None else pairs  # the same in all rounds
        return statistic.of_pairs(pairs)

    budget = {"epsilon": epsilon, "delta": delta, "secure": secure, "num_kept": num_kept}
    weights = {"gap_decay": gap_decay, "max_gap": max_gap, "age_decay": age_decay}
    options = {"popularity_budget_fraction": popularity_budget_fraction, "rounds": rounds}
    weights |= {"backward": backward, "ordered": ordered}
    return drive(passes(key, **budget, **options, **weights), sum_up)


def passes(
    key: jax.Array | None,
    *,
    epsilon: float,
    delta: float,
    num_kept: int | None = None,
    popularity_budget_fraction: float = 0.05,
    rounds: int = 6,
    gap_decay: float = 0.9,
    max_gap: int = 20,
    age_decay: float = 0.95,
    backward: float = 0.3,
    ordered: bool | None = None,
    secure: bool = False,
) -> Passes[Transitions]:
    """`fit` as its 1 + R passes over the data (`dpx.partial`): the popularity, and one for each round.

    What a round sums depends on what the rounds before it released, hence the passes. `rounds=1` takes two
    passes in all and leaves out no pair: it costs accuracy, not privacy.
    """
    check_options(rounds, gap_decay, max_gap, age_decay, backward, ordered)
    multiplier = privacy.gaussian_noise_multiplier(epsilon, delta)
    popularity_key, rounds_key = noise.secure.split(key, secure)
    leading = yield from popularity.leading_passes(
        popularity_key,
        noise_multiplier=multiplier,
        budget_fraction=popularity_budget_fraction,
        num_kept=num_kept,
        rule=functools.partial(default_num_kept, ordered=ordered),
        secure=secure,
    )
    if ordered is None:
        ordered = default_ordered(leading.noise_multiplier, leading.num_users)
    std = leading.noise_multiplier * math.sqrt(rounds)
    pairs = np.ones((len(leading.items), len(leading.items)), bool)
    if not ordered:
        pairs, backward = (
            np.triu(pairs, 1),
            1.0,
        )  # either order counts for the pair above the diagonal
    first = Round(leading.items, pairs, gap_decay, max_gap, age_decay, backward)
    estimate, error = yield from release_rounds(rounds_key, first, std, rounds)
    if not ordered:
        estimate, error = estimate + estimate.T, np.minimum(error, error.T)
    return Transitions(
        items=leading.items,
        estimate=estimate,
        standard_error=error,
        weights=attention_weights(estimate, error),
        log_popularity=leading.log_popularity,
        guarantee=popularity.guarantee(
            epsilon,
            delta,
            multiplier,
            f"noisy popularity, and transitions between {len(leading.items)} items "
            f"{'in order' if ordered else 'in either order'} in {rounds} round(s) with noise multiplier "
            f"{std:.6g} each",
        ),
        prior_weight=0.03 if ordered else 0.3 * leading.noise_multiplier,
    )


def default_ordered(noise_std: float, num_users: int) -> bool:
    """Whether the order of items pays: with at least 20,000 users for each unit of noise.

    The number was chosen on Amazon Games' next-to-last items.
    """
    return num_users >= 20_000 * noise_std


def default_num_kept(
    noise_std: float, num_users: int, num_items: int, *, ordered: bool | None = None
) -> int:
    """K by `dpx.recommend.popularity.default_num_kept`, and twice as many where order does not count.

    A pair then has more signal, and rounds have half as many pairs to thin out.
    """
    if ordered is None:
        ordered = default_ordered(noise_std, num_users)
    wide = noise_std if ordered else noise_std / 2
    return popularity.default_num_kept(wide, num_users, num_items)


def check_options(
    rounds: int,
    gap_decay: float,
    max_gap: int,
    age_decay: float,
    backward: float,
    ordered: bool | None = None,
) -> None:
    """Raises ValueError for an option of `fit` that is out of range."""
    if ordered not in (None, True, False):
        raise ValueError(f"ordered={ordered!r} must be True, False, or None for the rule")
    _validate.check_integer(rounds, "rounds")
    _validate.check_integer(max_gap, "max_gap")
    for name, value in (("gap_decay", gap_decay), ("age_decay", age_decay)):
        if not 0 < _validate.check_number(value, name) <= 1:
            raise ValueError(f"{name}={value} must be in (0, 1]")
    if _validate.check_positive(backward, "backward", zero=True) > 1e100:
        raise ValueError(
            f"backward={backward} must be at most 1e100: beyond it weights are not finite"
        )


def attention_weights(
    estimate: np.ndarray,
    standard_error: np.ndarray,
    *,
    threshold: float = 2.0,
    second_step: float = 1.0,
) -> np.ndarray:
    """W = S + second_step · D⁻¹S S: noise is cut off, and what lies two transitions away is filled in.

    S = max(estimate − threshold · standard_error, 0), D its row sums: the second term is S averaged over
    where a transition leads to. An item does not lead to itself. Post-processing: it costs nothing.

    Args:
      estimate, standard_error: (K, K), of `Transitions`.
      threshold: In standard errors.
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
    users, tokens, after = flat(histories)
    place = places(items, num_items)[tokens]
    real = place >= 0
    weights = (recency ** after[real]).astype(np.float32)
    shape = (len(histories), len(items))
    return sparse.csr_array((weights, (users[real], place[real])), shape=shape)
