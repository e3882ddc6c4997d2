"""Ranking metrics over all items, without sampled negatives."""

import jax
import jax.numpy as jnp


def target_ranks(
    scores: jax.Array, target: jax.Array, *, exclude: jax.Array | None = None
) -> jax.Array:
    """The rank of each target among all items, 1 for the best.

    An item that ties with the target counts half, which gives the expected rank if ties are broken at random.

    Args:
      scores: (B, M) the score of each item.
      target: (B,) the item that came next.
      exclude: (B, M) bool, True at items that are left out of the ranking, such as those that the user has
        seen. The target itself is never left out.

    Returns:
      (B,) float ranks, infinite where the target's score is not a number.
    """
    own = jnp.take_along_axis(scores, target[:, None], axis=1)
    counts = (scores > own) + 0.5 * (scores == own)
    if exclude is not None:
        target_itself = jnp.arange(scores.shape[1]) == target[:, None]
        counts = jnp.where(exclude & ~target_itself, 0, counts)
    return jnp.where(jnp.isnan(own[:, 0]), jnp.inf, 0.5 + counts.sum(axis=1))


def hit_rate(ranks: jax.Array, k: int) -> jax.Array:
    """HIT@k: the share of targets with rank at most k."""
    return jnp.mean(ranks <= k)


def ndcg(ranks: jax.Array, k: int) -> jax.Array:
    """NDCG@k for one relevant item: the mean of 1/log₂(1 + rank), with 0 for ranks above k."""
    return jnp.mean(jnp.where(ranks <= k, 1 / jnp.log2(1 + ranks), 0.0))
