"""A model over the leading items whose logits start from a private release of transitions.

Its vocabulary is the K items of the release, which a share of the budget has bought. Before any training its
logits are log(S_j + c·p_j): S the release's scores, p the noisy popularity, c a number of pseudo-counts.
Training adds what attention makes of the history, from embeddings that are the release's leading
singular vectors.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import linalg

import dpx
from dpx import privacy
from dpx.data import Histories
from dpx.noise import secure
from dpx.recommend import order, popularity, rounds, transitions
from experiments import checks
from experiments.dp_transformer import training

# Of exact transitions: gap_decay, max_gap and age_decay as by default, order alone beside what is together.
WEIGHTING = (0.9, 20, 0.95, 1.0, 0.0)


class Start(NamedTuple):
    """What the release gives to a model; a pytree of arrays.

    Attributes:
      items: (K,) numbers of the items that the model knows, by token.
      weights: (K, K) of `dpx.recommend.transitions.Transitions`.
      prior: (M,) c·p, in users.
      recency: By which an item counts less for each item after it.
      embeddings: (K, d) of standard deviation 1, the leading singular vectors of the transitions.
    """

    items: np.ndarray
    weights: np.ndarray
    prior: np.ndarray
    recency: np.ndarray
    embeddings: np.ndarray

    def restrict(self, histories: Histories) -> Histories:
        """The histories of kept items, as tokens in [0, K)."""
        tokens = np.full(histories.num_items, -1, np.int32)
        tokens[self.items] = np.arange(len(self.items))
        users = (tokens[np.asarray(items, np.int64)] for items in histories.items)
        return Histories(tuple(found[found >= 0] for found in users), len(self.items))

    def logits(self, tokens: jax.Array, mask: jax.Array, last_only: bool) -> jax.Array:
        """(..., L, K), or (..., 1, K) with `last_only`: before training, for tokens and mask (..., L)."""
        steps = jnp.arange(tokens.shape[-1])
        since = steps[:, None] - steps
        kernel = jnp.where(since >= 0, self.recency ** jnp.maximum(since, 0), 0.0)
        if last_only:
            kernel = kernel[-1:]
        rows = jnp.asarray(self.weights)[tokens] * mask[..., None]
        return jnp.log(kernel @ rows + jnp.asarray(self.prior[self.items]))

    def widen(self, logits: jax.Array) -> jax.Array:
        """(B, M): logits (B, K) of the kept items, and of the others what the popularity says."""
        wide = jnp.broadcast_to(jnp.log(self.prior), (len(logits), len(self.prior)))
        return wide.at[:, self.items].set(logits)


def fit(
    key: jax.Array, histories: Histories, config, budget_fraction: float
) -> tuple[Start, dpx.PrivacyGuarantee]:
    """Releases transitions for a share of μ² of the budget.

    Args:
      key: The JAX key of the noise.
      histories: To train on.
      config: With `epsilon`, `delta`, `start` and `model.dim`.
      budget_fraction: In (0, 1].
    """
    spent, at = budget(config, budget_fraction)
    multiplier = dpx.gaussian_noise_multiplier(spent, at)
    num_users = training.public_size(len(histories.items))
    kept = popularity.default_num_kept(multiplier, num_users, histories.num_items)
    release = transitions.fit(key, histories, epsilon=spent, delta=at, num_kept=kept)
    return _from_transitions(config, release), release.guarantee


def exact(histories: Histories, config) -> Start:
    """The same from exact counts and for as many items as are ever kept, under no guarantee."""
    counts = popularity.count(histories)
    kept = popularity.default_num_kept(1e-6, len(histories.items), histories.num_items)
    items = np.argsort(-counts, kind="stable")[:kept]
    alive, none = np.ones((kept, kept), bool), np.zeros((kept, kept), np.float32)
    (sums,) = rounds.Round(items, alive, *WEIGHTING)(histories).sums
    found = (sums.reshape(kept, kept) / secure.STEPS).astype(np.float32)
    together = np.triu(found, 1)
    estimate = order.shares(found, none, 1.0, none[0]) * (together + together.T)
    release = transitions.Transitions(
        items=items,
        estimate=estimate,
        standard_error=none,
        weights=transitions.attention_weights(estimate, none),
        log_popularity=np.log((counts + 1) / (counts + 1).sum()),
        guarantee=None,  # type: ignore[arg-type]
    )
    return _from_transitions(config, release)


def _from_transitions(config, release: transitions.Transitions) -> Start:
    return Start(
        items=release.items,
        weights=release.weights,
        prior=(config.start.pseudo_counts * np.exp(release.log_popularity)).astype(np.float32),
        recency=np.array(config.start.recency, np.float32),
        embeddings=_embeddings(release, config.model.dim),
    )


def budget(config, budget_fraction: float) -> tuple[float, float]:
    """(ε, δ) of a share of μ² of the budget."""
    whole = dpx.gaussian_noise_multiplier(config.epsilon, config.delta)
    return privacy.gaussian_budget(whole / math.sqrt(budget_fraction), config.delta)


def template(num_kept: int, num_items: int, dim: int) -> Start:
    """A start of the shapes that `fit` gives, to load a saved one into."""
    return Start(
        items=np.zeros(num_kept, np.int64),
        weights=np.zeros((num_kept, num_kept), np.float32),
        prior=np.zeros(num_items, np.float32),
        recency=np.zeros((), np.float32),
        embeddings=np.zeros((num_kept, dim), np.float32),
    )


def check(config, num_items: int) -> None:
    """Raises ValueError for a section `start` that cannot be used with so many items."""
    start = config.start
    why = "the rest pays for training, 0 starts cold"
    checks.share(config, "start.budget_fraction", budget=True, why=why)
    if start.budget_fraction == 0:
        return
    if num_items < 2:
        raise ValueError("the data hold 1 item: give interactions with 2 items at least")
    checks.positive(config, "start.pseudo_counts")
    if not 0 <= start.recency <= 1:
        raise ValueError(f"config.start.recency={start.recency} must be in [0, 1]")
    if config.model.kind != "transformer" or not config.model.tied:
        raise ValueError(
            "config.start.budget_fraction > 0 needs model.kind='transformer' and model.tied=True"
        )
    if config.popularity_budget_fraction > 0:
        raise ValueError(
            f"config.popularity_budget_fraction={config.popularity_budget_fraction} would pay twice for a "
            "popularity that the start contains: set it to 0"
        )


def _embeddings(release: transitions.Transitions, dim: int) -> np.ndarray:
    """Left plus right singular vectors of what stands out; zero in dimensions beyond its rank.

    Rows and columns are divided by the roots of their sums, lest the most popular items fill all vectors.
    """
    found = transitions.attention_weights(release.estimate, release.standard_error, second_step=0)
    rank = min(dim, len(found) - 1)
    if rank < 1 or not found.any():  # ARPACK takes neither
        return np.zeros((len(found), dim), np.float32)
    # Five users' worth of transitions keep items with next to none from large entries.
    out, into = (np.sqrt(found.sum(axis=axis) + 5) for axis in (1, 0))
    scaled = (found / np.outer(out, into)).astype(np.float64)
    left, values, right = linalg.svds(scaled, k=rank, v0=np.ones(len(found)))
    assert left is not None
    assert right is not None
    # The vectors of the others are arbitrary, and differ from call to call: a run could not resume with them.
    values = np.where(values > 1e-7 * values.max(), values, 0)
    vectors = (left + right.T) * np.sqrt(values)
    vectors /= max(float(vectors.std()), 1e-12)
    return np.pad(vectors, ((0, 0), (0, dim - rank))).astype(np.float32)
