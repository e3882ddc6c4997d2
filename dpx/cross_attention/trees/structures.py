"""The trees behind one private memory: their features, the contribution of a row, and the noise of nodes."""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dpx import _validate
from dpx.cross_attention.domain import Domain
from dpx.cross_attention.features import PolynomialFeatures, check_features
from dpx.cross_attention.trees import leaf_sums, node_noise
from dpx.cross_attention.trees.node_sums import distances, leaf_moments

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
    gaussian, columns = noise == "gaussian", 1 + domain.value_dim
    rounding = leaf_sums.rounding(longest_weights(domain, noise), columns if gaussian else 1)
    change = 2 * constant(domain, noise) + rounding
    power = MOMENTS - 1
    if budget == "exact" or gaussian:
        shared = (change, epsilon, delta, columns, copies)
        return node_noise.calibrated(noise, ranges, power, depth, *shared)
    levels = depth * MOMENTS
    first, others = node_noise.paper_budget(epsilon, delta, len(ranges) - 1, columns * copies)
    shares = [(e / levels, d / levels) for e, d in [first] + [others] * (len(ranges) - 1)]
    return node_noise.laplace_nodes(shares, power, depth, change), None


def constant(domain: Domain, noise: str) -> float:
    """The constant weight of a row, whose sum is the number of rows times it."""
    return domain.value_norm if noise == "gaussian" else domain.value_bound


def longest_weights(domain: Domain, noise: str) -> float:
    """The largest norm of a row's weights, which are the constant and its value."""
    return math.hypot(constant(domain, noise), domain.value_norm)


def partial(K, V, domain: Domain, features, noise: str, budget: str, bins: int, clip: bool):
    """The exact sums of all leaves over the rows."""
    V = np.asarray(V, np.float64)
    # Rows were clipped to bounds in 32 bits, which may exceed those in 64 bits.
    if domain.value_domain == "ball":
        length = np.sqrt(np.square(V).sum(axis=1, keepdims=True))
        V = V * (domain.value_bound / np.maximum(length, domain.value_bound))
    V = np.clip(V, -domain.value_bound, domain.value_bound)
    weights = np.concatenate([np.full((len(V), 1), constant(domain, noise)), V], axis=1)
    options = {"domain": domain, "features": features, "bins": bins, "clip": clip}
    options |= {"noise": noise, "budget": budget, "power": MOMENTS - 1}
    structures = _structures(np.asarray(K, np.float64), domain, features, budget)
    longest = longest_weights(domain, noise)
    return leaf_sums.partial("trees of a memory", options, structures, weights, longest)


def _structures(K: np.ndarray, domain: Domain, features, budget: str) -> Iterator[np.ndarray]:
    """Yields the feature of each structure, (n,) within [0, 1], as a share of its range."""
    unit = np.clip(K / domain.key_bound, 0, 1)
    index, own, assumed = of_features(domain, features, budget)
    for exponents, share in zip(features.exponents[index], own / assumed, strict=True):
        x = np.full(len(unit), share)
        for coordinate, exponent in enumerate(exponents):
            for _ in range(exponent):
                x = x * unit[:, coordinate]
        yield x


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


@functools.partial(jax.jit, static_argnames=("domain", "features", "budget", "n"))
def read(tables, Q: jax.Array, domain: Domain, features, budget: str, n: int) -> jax.Array:
    """The noisy sums Σ_i [V, v_i]·e^{⟨q, k_i⟩/scale} of n rows: (m, d) -> (m, 1 + d_v)."""
    index, _, ranges = of_features(domain, features, budget)
    ranges = jnp.asarray(ranges, tables.dtype)

    def one_copy(table):
        # Σ w is the distance of all ones to 0.
        total = (ranges[0] ** 2 * table[0, 0, -1]).at[0].set(n * domain.value_norm)
        # With the paper's budget, the constant feature is read from its own structure, with more noise.
        known = jnp.zeros_like(total) if budget == "paper" else total

        def chunk(q):
            y = jnp.clip(features(q)[index] / ranges, 0, 1)[1:]
            distance = distances(table[1:], y)
            squares = table[1:, 0, -1]  # the distances to 0
            cosines = squares + jnp.square(y)[:, None] * total - distance
            highest = jax.lax.Precision.HIGHEST
            sums = jnp.einsum("a,ac->c", jnp.square(ranges[1:]), cosines, precision=highest)
            return known + 0.5 * sums

        return jax.lax.map(chunk, Q, batch_size=256)

    return jnp.median(jax.lax.map(one_copy, tables), axis=0)
