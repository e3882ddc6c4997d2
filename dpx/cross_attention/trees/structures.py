"""The trees behind one private memory: their features, the contribution of a row, and the noise of nodes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from dpx import _validate
from dpx.cross_attention.domain import Domain
from dpx.cross_attention.features import PolynomialFeatures, check_features
from dpx.cross_attention.trees import leaf_sums, node_noise
from dpx.cross_attention.trees.node_sums import distance_table, distances, leaf_moments
from dpx.noise import TruncatedLaplace

MOMENTS = 3  # the moments of each feature: p + 1 for p = 2


def check(domain: Domain, features: PolynomialFeatures, noise: str, budget: str) -> None:
    """Raises ValueError for a domain, features or options that trees do not support."""
    if domain.kind != "box" or domain.query_bound != domain.key_bound:
        raise ValueError(
            f'domain={domain.kind!r} with query_bound={domain.query_bound} must be "box" with the bound of '
            "the keys, since trees need features ≥ 0 in one range: use the sketch for any other"
        )
    if not domain.public_count:
        raise ValueError(
            "neighboring='add_or_remove_one' must be 'replace_one' for trees, whose bins and denominators "
            "use the number of rows: use mechanism='sketch'"
        )
    check_features(features, domain)
    _validate.check_choice(budget, "budget", ("exact", "paper"))
    _validate.check_choice(noise, "noise", node_noise.NOISES)


def of_features(
    domain: Domain, features: PolynomialFeatures, budget: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The feature of each structure, its range, and the range that bins and noise assume: (S,) each.

    The first structure, of the constant feature, gives Σ w. With the paper's budget there is another one for
    that feature, as for any other, and one range is assumed for all.
    """
    index, own = np.arange(features.num_features), features.ranges(domain.key_bound)
    if budget == "exact":
        return index, own, own
    index = np.insert(index, 0, 0)
    return index, own[index], np.full(len(index), own.max())


def noise_of(noise, budget, ranges, domain: Domain, depth, copies, epsilon, delta):
    """The noise of each feature, arrays (r, 3), and the DpEvent if there is one.

    Replacing a row moves a level by 2·V in l2, and each column of it by 2·R_w in l1, plus rounding.
    """
    count, columns = len(ranges), 1 + domain.value_dim
    longest = longest_weights(domain, noise)
    if noise == "gaussian":
        change = 2 * domain.value_norm + leaf_sums.rounding(longest, columns)
        change *= math.sqrt(copies)
        return node_noise.gaussian_nodes(ranges, MOMENTS - 1, depth, change, epsilon, delta)
    levels = depth * MOMENTS
    if budget == "exact":
        shares = [
            node_noise.split_budget(epsilon, delta, levels * count * columns * copies)
        ] * count
    else:
        first, others = node_noise.paper_budget(epsilon, delta, count - 1, columns * copies)
        shares = [(e / levels, d / levels) for e, d in [first] + [others] * (count - 1)]
    change = 2 * domain.value_bound + leaf_sums.rounding(longest, 1)
    laws = [TruncatedLaplace.calibrate(change, e, d) for e, d in shares]
    return node_noise.laplace_nodes(laws, MOMENTS - 1, depth * change), None


def constant(domain: Domain, noise: str) -> float:
    """The constant weight of a row, whose sum is the number of rows times it."""
    return domain.value_norm if noise == "gaussian" else domain.value_bound


def longest_weights(domain: Domain, noise: str) -> float:
    """The largest norm of a row's weights, which are the constant and its value."""
    return math.hypot(constant(domain, noise), domain.value_norm)


def whole_leaves(K, V, domain: Domain, features, noise: str, budget: str, bins: int) -> np.ndarray:
    """The sums of all leaves over the rows, as integers: (S, bins, 3, 1 + d_v) int64."""
    unit = np.clip(np.asarray(K, np.float64) / domain.key_bound, 0, 1)
    V = np.asarray(V, np.float64)
    # Rows were clipped to bounds in 32 bits, which may exceed those in 64 bits.
    if domain.value_domain == "ball":
        length = np.sqrt(np.square(V).sum(axis=1, keepdims=True))
        V = V * (domain.value_bound / np.maximum(length, domain.value_bound))
    V = np.clip(V, -domain.value_bound, domain.value_bound)
    weights = np.concatenate([np.full((len(V), 1), constant(domain, noise)), V], axis=1)
    index, own, assumed = of_features(domain, features, budget)
    leaves = []
    for exponents, share in zip(features.exponents[index], own / assumed, strict=True):
        x = np.full(len(unit), share)
        for coordinate, exponent in enumerate(exponents):
            for _ in range(exponent):
                x = x * unit[:, coordinate]
        longest = longest_weights(domain, noise)
        leaves.append(leaf_sums.leaf_sums(x, weights, longest, MOMENTS - 1, bins))
    return np.stack(leaves)


@functools.partial(jax.jit, static_argnames=("domain", "features", "noise", "budget", "bins"))
def traced_leaves(K, V, domain: Domain, features, noise: str, budget: str, bins: int) -> jax.Array:
    """The same sums in the default float type, without rounding to integers."""
    mass = jnp.full((len(V), 1), constant(domain, noise), V.dtype)
    weights = jnp.concatenate([mass, V], axis=1)
    unit = K / domain.key_bound
    index, own, assumed = of_features(domain, features, budget)

    def structure(args):
        exponents, share = args
        x = share * jnp.prod(unit**exponents, axis=-1)
        return leaf_moments(x, weights, power=MOMENTS - 1, bins=bins)

    shares = jnp.asarray(own / assumed, K.dtype)
    return jax.lax.map(structure, (jnp.asarray(features.exponents[index]), shares))


@functools.partial(jax.jit, static_argnames="copies")
def tables(key, leaves, nodes: node_noise.NodeNoise, copies: int, unit: float) -> jax.Array:
    """The noisy tables of all structures: leaves (S, bins, 3, c) -> (copies, S, bins, 3, c)."""

    def structure(args):
        structure_key, leaves, own = args
        own = jax.tree.map(lambda a: a[:, None], own)
        return distance_table(structure_key, leaves, own, parts=parts, unit=unit)

    def copy(copy_key):
        return jax.lax.map(structure, (jax.random.split(copy_key, len(leaves)), leaves, nodes))

    parts = copies * len(leaves)
    return jax.lax.map(copy, jax.random.split(key, copies))


@functools.partial(jax.jit, static_argnames=("domain", "features", "budget", "n"))
def read(tables, Q: jax.Array, domain: Domain, features, budget: str, n: int) -> jax.Array:
    """The noisy sums Σ_i [V, v_i]·e^{⟨q, k_i⟩/scale} of n rows: (m, d) -> (m, 1 + d_v)."""
    index, _, ranges = of_features(domain, features, budget)
    ranges = jnp.asarray(ranges, tables.dtype)

    def one_copy(table):
        total = (
            (ranges[0] ** 2 * table[0, 0, -1]).at[0].set(n * domain.value_norm)
        )  # Σ w is the distance of all ones to 0
        # With the paper's budget, the constant feature is read from its own structure, with more noise.
        known = jnp.zeros_like(total) if budget == "paper" else total

        def chunk(q):
            y = jnp.clip(features(q)[index] / ranges, 0, 1)[1:]
            distance = distances(table[1:], y)
            squares = table[1:, 0, -1]  # the distances to 0
            cosines = squares + jnp.square(y)[:, None] * total - distance
            return known + 0.5 * jnp.einsum(
                "a,ac->c",
                jnp.square(ranges[1:]),
                cosines,
                precision=jax.lax.Precision.HIGHEST,
            )

        return jax.lax.map(chunk, Q, batch_size=256)

    return jnp.median(jax.lax.map(one_copy, tables), axis=0)
