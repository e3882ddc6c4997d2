"""The arithmetic of private binary trees: sums over bins, noise in nodes, and tables for queries.

These are Algorithms 2, 4 and 5 of Ke et al. (arXiv 2407.14717), with these corrections:

- A tree over 2^L bins has L + 1 levels, and the paper divides ε among L. Therefore the root is never
  released, and no query reads it. All L levels below it are released.
- A replaced record leaves one path and enters another, so that two nodes of a level may change. With values
  w·x^t, |w| ≤ R_w, x ∈ [0, R], a level changes by at most 2·R_w·R^t: in l1, because each of two nodes moves
  by at most R_w·R^t; in l2, because one node moves by 2·R_w·R^t if both records are in it with opposite
  weights. `TruncatedLaplace` covers an l1 change for any distribution over the nodes.
- A value at the upper end of the range belongs to the last bin.

The answer to a query depends on its leaf alone. So building tabulates, for every leaf, the sums of the noisy
nodes to its left and to its right, and a query is one lookup instead of a walk through the tree.
"""

import math

import jax
import jax.numpy as jnp

from dpx._validate import check_integer
from dpx.cross_attention.trees.node_noise import NodeNoise
from dpx.noise import Gaussian, release


def num_bins(bins: int | None, records: int | None = None) -> int:
    """The number of leaves: the least power of two ≥ `bins` (or ≥ the number of records), 2 at least.

    Raises:
      ValueError: for fewer than one bin, a number that is not whole, or neither number.
    """
    wanted = records if bins is None and records else check_integer(bins, "bins")
    return 2 ** max(1, math.ceil(math.log2(wanted)))


def leaf_index(x: jax.Array, bins: int) -> jax.Array:
    """The bin of x ∈ [0, 1]; x = 1 belongs to the last bin."""
    return jnp.clip(jnp.floor(x * bins).astype(jnp.int32), 0, bins - 1)


def tabulate(
    key: jax.Array, leaves: jax.Array, nodes: NodeNoise, parts: int = 1, unit: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """The noisy sums of the leaves to the left and to the right of every leaf.

    Args:
      key: The JAX key of the noise, which is drawn once for every node but the root.
      leaves: The sums of the bins, (2^L, ...).
      nodes: The noise; its arrays broadcast to (...).
      parts: The number of such trees that make one release together.
      unit: The value of the number 1 in `leaves`. Integers in floats are summed exactly up to 2⁵³.

    Returns:
      Two arrays of the shape of `leaves`. For each leaf they hold the sum of the noisy siblings to the left
      of its path from the root, and of those to the right. The leaf itself is in neither.
    """
    levels = [leaves]
    while len(levels[-1]) > 2:
        pairs = levels[-1].reshape(-1, 2, *leaves.shape[1:])
        levels.append(pairs.sum(1))
    # One draw for all 2 + 4 + … + 2^L nodes, since XLA compiles one for each level many times longer.
    gaussian = isinstance(nodes.law, Gaussian)
    released = release(
        key,
        jnp.concatenate(levels[::-1]) * unit,
        law=nodes.law,
        sensitivity=nodes.sensitivity,
        label="tree nodes",
        axis=None if gaussian else 0,
        parts=parts if gaussian else 1,
    )
    left = right = jnp.zeros((1, *leaves.shape[1:]), leaves.dtype)
    for level in reversed(levels):
        noisy = released[len(level) - 2 : 2 * len(level) - 2]
        pairs = noisy.reshape(-1, 2, *leaves.shape[1:])
        left = jnp.stack([left, left + pairs[:, 0]], 1).reshape(noisy.shape)
        right = jnp.stack([right + pairs[:, 1], right], 1).reshape(noisy.shape)
    return left, right


def leaf_moments(x: jax.Array, weights: jax.Array, *, power: int, bins: int) -> jax.Array:
    """The sums Σ w·x^t over the records of each leaf, for moments t ≤ p: (n,), (n, c) -> (bins, p + 1, c).

    They have the default float type and serve traced arrays; `dpx.cross_attention.trees.leaf_sums` computes
    exact integers.
    """
    moments = jnp.arange(power + 1)
    contributions = (x[:, None] ** moments)[:, :, None] * weights[:, None, :]
    contributions = contributions.astype(jnp.result_type(float))
    return jax.ops.segment_sum(contributions, leaf_index(x, bins), bins)


@jax.jit
def distance_tables(keys: jax.Array, leaves: jax.Array, nodes: NodeNoise, unit: float) -> jax.Array:
    """The tables by which distances are computed, for queries in each leaf: one release.

    Args:
      keys: A JAX key of the noise for each independent copy, (copies,).
      leaves: The moments of each leaf, (S, bins, p + 1, c), of S structures (coordinates) and c sets of
        weights; bins is a power of two.
      nodes: The noise, arrays of shape (S, p + 1).
      unit: The value of the number 1 in `leaves`.

    Returns:
      (copies, S, bins, p + 1, c). Row t of a leaf holds the coefficients of C(p, t)·y^{p−t} in
      Σ_i w_i |x_i − y|^p, which are (−1)^t·left + (−1)^{p−t}·right for the trees of Σ w_i x_i^t (Lemma C.1).
    """
    power = leaves.shape[2] - 1
    signs = (-1.0) ** jnp.arange(power + 1)[:, None]

    def structure(args):
        key, leaves, own = args
        own = jax.tree.map(lambda a: a[:, None], own)
        left, right = tabulate(key, leaves, own, parts, unit)
        return signs * left + (-1.0) ** power * signs * right

    def copy(key):
        return jax.lax.map(structure, (jax.random.split(key, len(leaves)), leaves, nodes))

    parts = len(keys) * len(leaves)
    return jax.lax.map(copy, keys)


def distances(table: jax.Array, y: jax.Array) -> jax.Array:
    """Σ_i w_i |x_i − y|^p: table (..., bins, p + 1, c), y (m, ...) in [0, 1] -> (m, ..., c)."""
    power = table.shape[-2] - 1
    lead = jnp.ogrid[tuple(slice(size) for size in table.shape[:-3])]
    rows = table[(*lead, leaf_index(y, table.shape[-3]))]
    binomials = jnp.asarray([math.comb(power, t) for t in range(power + 1)], table.dtype)
    terms = binomials * y[..., None] ** jnp.arange(power, -1, -1, dtype=y.dtype)
    return jnp.einsum("...t,...tc->...c", terms, rows, precision=jax.lax.Precision.HIGHEST)
