"""Ranking metrics over all items, without sampled negatives."""

import jax
import jax.numpy as jnp


def target_ranks(
    scores: jax.Array, target: jax.Array, *, exclude: jax.Array | None = None
) -> jax.Array:
    """Rank of each target among all items, 1 for the best.

    Items that tie with the target count half each: the expected rank if ties are broken at random.

    Args:
      scores: (B, M) score of each item.
      target: (B,) the item that came next.
      exclude: (B, M) bool, True at items left out of the ranking, such as those that the user has seen. The
        target itself is never left out.

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
    """HIT@k: the share of targets ranked k-th or better."""
    return jnp.mean(ranks <= k)


def ndcg(ranks: jax.Array, k: int) -> jax.Array:
    """NDCG@k for one relevant item: the mean of 1/log₂(1 + rank) over ranks up to k, else 0."""
    return jnp.mean(jnp.where(ranks <= k, 1 / jnp.log2(1 + ranks), 0.0))
