"""The sums behind a memory's sketch: streamed over rows, as floats or integers, and read by queries.

A row contributes φ(λ(k − centre)) ⊗ [a₀, v] to M, as `dpx.cross_attention.sketch` defines and bounds it.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from dpx import noise
from dpx.cross_attention.domain import Domain
from dpx.cross_attention.features import Features, PolynomialFeatures, RandomFeatures

_LARGE_LOGIT = 40.0  # up to this, features and moments are below e^20, while 32 bits hold e^88
_CHUNK_ELEMENTS = 2**21  # features computed at a time: 8 MiB, which fit into the cache
_WHOLE_ELEMENTS = 2**18  # the same for integers, which need several arrays of 64 bits


def _stretch(domain: Domain) -> float:
    """λ, by which keys are multiplied and queries divided, so that their largest norms are equal."""
    return math.sqrt(domain.query_radius / domain.key_radius)


def contribution_sums(K, V, features: Features, domain: Domain, largest) -> jax.Array:
    """M without noise for one head, K (n, d), V (n, d_v) -> (r, 1 + d_v), summed by chunks of rows.

    Features depend on one row only and have the dtype of the keys; sums have the default one (`wide_sums`).
    """
    n = len(K)
    count = features.num_features
    chunk = min(max(n, 1), max(128, _CHUNK_ELEMENTS // count))
    K, V = (jnp.pad(a, ((0, -n % chunk), (0, 0))) for a in (K, V))
    real = jnp.arange(len(K)) < n

    def add(total, rows):
        K, V, real = rows
        phi, weights = _factors(K, V, features, domain, largest=largest, dtype=total.dtype)
        weights = jnp.where(real[:, None], weights, 0)
        return total + jnp.matmul(phi, weights, precision=jax.lax.Precision.HIGHEST), None

    zero = jnp.zeros((count, 1 + domain.value_dim), jnp.result_type(float))
    chunks = tuple(a.reshape(-1, chunk, *a.shape[1:]) for a in (K, V, real))
    return jax.lax.scan(add, zero, chunks)[0]


@functools.partial(jax.jit, static_argnames=("domain", "largest"))
def traced_sums(K, V, features: Features, domain: Domain, largest) -> jax.Array:
    """M without noise for all heads, (..., n, d), (..., n, d_v) -> (..., r, 1 + d_v), one after the other."""
    sums = functools.partial(contribution_sums, features=features, domain=domain, largest=largest)
    heads = K.shape[:-2]
    flat = tuple(a.reshape(math.prod(heads), *a.shape[-2:]) for a in (K, V))
    moments = jax.lax.map(lambda head: sums(*head), flat)
    return moments.reshape(*heads, *moments.shape[1:])


@functools.partial(jax.jit, static_argnames=("domain", "largest", "dtype"))
def _factors(K, V, features: Features, domain: Domain, *, largest, dtype):
    """The factors φ (r, n) and w (n, 1 + d_v) of the contributions of n rows, of norm at most `largest`."""
    mass = jnp.full((len(K), 1), domain.mass_weight, V.dtype)
    weights = jnp.concatenate([mass, V], axis=1).astype(dtype)
    keys = _stretch(domain) * (K - domain.centre)
    phi = features.rows(keys.T).astype(dtype)
    if isinstance(features, RandomFeatures):
        norms = jnp.linalg.norm(phi, axis=0) * jnp.linalg.norm(weights, axis=-1)
        # A key parallel to a direction may overflow the exponential; such a row counts as zero.
        phi = jnp.where(jnp.isfinite(norms), phi, 0)
        weights = weights * jnp.minimum(1, largest / jnp.maximum(norms, largest / 2))[:, None]
    return phi, weights


def whole_sums(K, V, features: Features, domain: Domain, largest) -> np.ndarray:
    """M without noise, as integers: (..., n, d), (..., n, d_v) -> (..., r, 1 + d_v) int64, in `whole_unit`.

    A contribution φ ⊗ w is the product of φ/‖φ‖ and ‖φ‖w. Both factors, the second in units of `largest`,
    have norms of at most 1, and are rounded to multiples of 1/2¹⁸ (`dpx.noise.secure`). The sum of integers
    does not depend on the order of rows or on blocks, and rows have entered with bits of their own
    (`Domain.enter`). Features are computed by a compiled program in 64 bits, whose last bit may depend on the
    number of rows that it is given: about one entry of random features in 1e11 is then rounded the other way.
    """
    heads, n = K.shape[:-2], K.shape[-2]
    K = _inside(np.asarray(K, np.float64), domain)
    K, V = (np.asarray(a, np.float64).reshape(math.prod(heads), *a.shape[-2:]) for a in (K, V))
    count = features.num_features
    noise.secure.check_sum(n, largest_whole(features, domain))
    total = np.zeros((len(K), count, 1 + domain.value_dim), np.int64)
    chunk = _whole_rows_at_once(count)
    for head, start in itertools.product(range(len(K)), range(0, n, chunk)):
        rows = [a[head, start : start + chunk] for a in (K, V)]
        size = len(rows[0])
        missing = (1 << (size - 1).bit_length()) - size  # so that few sizes are compiled
        rows = (np.pad(a, [(0, missing), (0, 0)]) for a in rows)
        total[head] += np.asarray(_whole_chunk(*rows, size, features, domain, largest=largest))
    return total.reshape(*heads, count, -1)


def _inside(K: np.ndarray, domain: Domain) -> np.ndarray:
    """The keys, clipped again to bounds in 64 bits, since they were clipped to the bounds in 32 bits.

    With large logits, the exponential would amplify that difference until the contribution of a row at the
    edge exceeds its bound, and the row would count as zero.
    """
    if domain.kind == "box":
        return np.clip(K, 0, domain.key_bound)
    length = np.sqrt(np.square(K / domain.key_bound).sum(axis=-1, keepdims=True))
    return K / np.maximum(length, 1)


def _whole_rows_at_once(num_features: int) -> int:
    return 1 << min(2**16, max(16, _WHOLE_ELEMENTS // num_features)).bit_length() - 1


def needed_bytes(num_features: int, domain: Domain, heads: int = 1) -> int:
    """The memory of a release beside its rows, in bytes: features of a chunk, and 64-bit sums with noise."""
    return (
        8
        * num_features
        * (5 * _whole_rows_at_once(num_features) + 4 * heads * (1 + domain.value_dim))
    )


@functools.partial(jax.jit, static_argnames=("domain", "largest"))
def _whole_chunk(K, V, size, features: Features, domain: Domain, *, largest):
    """The sum over the first `size` of at most 2¹⁶ rows, which is below 2⁵³ and so exact in floats."""
    steps = noise.secure.FACTOR_STEPS
    phi, weights = _factors(K, V, features, domain, largest=largest, dtype=jnp.float64)
    norms = jnp.linalg.norm(phi, axis=0)
    norms = jnp.where(jnp.isfinite(norms) & (norms > 0), norms, 1)
    first = noise.secure.whole_rows((phi / norms).T, steps, jnp)
    second = noise.secure.whole_rows(weights * norms[:, None] / largest, steps, jnp)
    second = jnp.where((jnp.arange(len(K)) < size)[:, None], second, 0)
    return jnp.matmul(first.T, second, precision=jax.lax.Precision.HIGHEST).astype(jnp.int64)


def _whole_norms(features: Features, domain: Domain) -> tuple[int, int]:
    """B and B', the largest norms of the two factors after rounding."""
    sizes = features.num_features, 1 + domain.value_dim
    first, second = (noise.secure.norm_bound(noise.secure.FACTOR_STEPS, size) for size in sizes)
    return first, second


def largest_whole(features: Features, domain: Domain) -> int:
    """The largest norm of a row's rounded contribution in one head."""
    return math.prod(_whole_norms(features, domain))


def whole_change(features: Features, domain: Domain, heads: int) -> float:
    """The l2 sensitivity of the sum of integers, over all heads.

    Let S = 2¹⁸ and B, B' be the norms of the two factors after rounding. The rounding error of a product is
    e ≤ (B − S)·B' + S·(B' − S), so that two products are at most √2·S² + 2e apart in each head. Adding or
    removing a row changes the sum by one product.
    """
    if not domain.public_count:
        return math.sqrt(heads) * largest_whole(features, domain)
    steps, bounds = noise.secure.FACTOR_STEPS, _whole_norms(features, domain)
    error = (bounds[0] - steps) * bounds[1] + steps * (bounds[1] - steps)
    return math.sqrt(heads) * (math.sqrt(2) * steps**2 + 2 * error)


def whole_unit(largest: float) -> float:
    """The value of the integer 1 in M."""
    return largest / noise.secure.FACTOR_STEPS**2


def with_mass(moments: jax.Array, n: int, features: Features, domain: Domain) -> jax.Array:
    """Released moments with their first column rescaled from a₀ to V = sup‖v‖₂ times the mass."""
    mass = moments[..., 1:].sum(-1) / domain.value_bound
    if domain.mass_weight:
        mass = moments[..., 0] / domain.mass_weight
    if domain.public_count and isinstance(features, PolynomialFeatures):
        mass = mass.at[..., 0].set(n)  # the sum of the constant feature, which is public
    return moments.at[..., 0].set(mass * domain.value_norm)


@functools.partial(jax.jit, static_argnames="domain")
def read(moments, Q, domain: Domain, features: Features) -> tuple[jax.Array, jax.Array]:
    """The sums φ(q/λ)ᵀM of each query, (..., m, 1 + d_v), in units (..., m) that are returned too.

    With large logits, features and moments are large, and their product may overflow. Then the unit of a
    query is its largest feature; otherwise it is 1.
    """

    def sums(Q):
        phi = features.rows(jnp.moveaxis(Q, -1, 0) / _stretch(domain))
        unit = jnp.ones(phi.shape[1:], phi.dtype)
        if domain.largest_logit > _LARGE_LOGIT:
            unit = jnp.maximum(jnp.abs(phi).max(0), jnp.finfo(phi.dtype).tiny)
            phi = phi / unit
        scaled = jnp.einsum("r...m,...rv->...mv", phi, moments, precision=jax.lax.Precision.HIGHEST)
        return jnp.concatenate([scaled, unit[..., None]], -1)

    m = Q.shape[-2]
    chunk = max(128, _CHUNK_ELEMENTS // moments.shape[-2])
    if m <= chunk:
        answers = sums(Q)
    else:
        padding = [(0, 0)] * (Q.ndim - 2) + [(0, -m % chunk), (0, 0)]
        chunks = jnp.pad(Q, padding).reshape(*Q.shape[:-2], -1, chunk, Q.shape[-1])
        answers = jnp.moveaxis(jax.lax.map(sums, jnp.moveaxis(chunks, -3, 0)), 0, -3)
        answers = answers.reshape(*answers.shape[:-3], -1, answers.shape[-1])[..., :m, :]
    return answers[..., :-1], answers[..., -1]
