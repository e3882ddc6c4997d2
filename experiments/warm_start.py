"""A model over the leading items whose logits start from a private release of transitions.

Its vocabulary is the K items of the release, which a share of the budget has bought. Before any training its
logits are log(S_j + c·p_j): S the release's scores, p the noisy popularity, c a number of pseudo-counts.
Training adds to them what attention makes of the history.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dpx
from dpx import privacy, transitions
from dpx.data import Histories


class Start(NamedTuple):
    """What the release gives to a model; a pytree of arrays.

    Attributes:
      items: (K,) ids of the items that the model knows, by token.
      weights: (K, K) of `dpx.transitions.Transitions`.
      prior: (M,) c·p, in users.
    """

    items: np.ndarray
    weights: np.ndarray
    prior: np.ndarray

    def restrict(self, histories: Histories) -> Histories:
        """The histories of kept items, as tokens in [0, K)."""
        tokens = np.full(histories.num_items, -1, np.int32)
        tokens[self.items] = np.arange(len(self.items))
        users = (tokens[items] for items in histories.items)
        return Histories(tuple(found[found >= 0] for found in users), len(self.items))

    def logits(
        self, recency: float, tokens: jax.Array, mask: jax.Array, last_only: bool
    ) -> jax.Array:
        """(..., L, K), or (..., 1, K) with `last_only`: before training, for tokens and mask (..., L)."""
        steps = jnp.arange(tokens.shape[-1])
        since = steps[:, None] - steps
        kernel = jnp.where(since >= 0, recency ** jnp.maximum(since, 0), 0.0)
        if last_only:
            kernel = kernel[-1:]
        rows = jnp.asarray(self.weights)[tokens] * mask[..., None]
        return jnp.log(kernel @ rows + self.prior[self.items])

    def widen(self, logits: jax.Array) -> jax.Array:
        """(B, M): logits (B, K) of the kept items, and of the others what the popularity says."""
        wide = jnp.broadcast_to(jnp.log(self.prior), (len(logits), len(self.prior)))
        return wide.at[:, self.items].set(logits)


def fit(
    key: jax.Array, histories: Histories, config
) -> tuple[Start, transitions.Transitions, dpx.PrivacyGuarantee]:
    """Releases transitions for a share of μ² of the budget.

    Args:
      key: Of the noise.
      histories: To train on.
      config: With `epsilon`, `delta` and `start`: `share` of the budget, `pseudo_counts`.
    """
    multiplier = dpx.gaussian_noise_multiplier(config.epsilon, config.delta)
    spent, at = privacy.gaussian_budget(multiplier / np.sqrt(config.start.share), config.delta)
    release = transitions.fit(key, histories, epsilon=spent, delta=at)
    prior = config.start.pseudo_counts * np.exp(release.log_popularity)
    start = Start(release.items, release.weights, prior.astype(np.float32))
    return start, release, release.guarantee


def check(config) -> None:
    """Raises ValueError for a section `start` that cannot be used."""
    start = config.start
    if not 0 <= start.share < 1:
        raise ValueError(
            f"config.start.share={start.share} must be in [0, 1): the rest pays for training, 0 starts cold"
        )
    if not start.pseudo_counts > 0:
        raise ValueError(f"config.start.pseudo_counts={start.pseudo_counts} must be positive")
    if not 0 <= start.recency <= 1:
        raise ValueError(f"config.start.recency={start.recency} must be in [0, 1]")
