"""The moments of a memory's sketch: streamed sums of what its rows contribute, with noise, and their readout.

A row contributes φ(λ(k − centre)) ⊗ [V, v] to M, which `dpx.cross_attention.sketch` defines and bounds.
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

_CHUNK_ELEMENTS = 2**21  # features in flight: 8 MiB, so that they stay in the cache


def _stretch(domain: Domain) -> float:
    """λ: keys are multiplied by it and queries divided, which makes their largest norms equal."""
    return math.sqrt(domain.query_radius / domain.key_radius)


def contribution_sums(K, V, features: Features, domain: Domain, largest) -> jax.Array:
    """M without noise for one head: K (n, d), V (n, d_v) -> (r, 1 + d_v), a chunk of rows at a time.

    Features keep the keys' dtype, being a map of each row alone; sums have the default one (`wide_sums`).
    """
    n = len(K)
    count = features.num_features
    chunk = min(n, max(128, _CHUNK_ELEMENTS // count))
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


@functools.partial(jax.jit, static_argnames=("domain", "largest", "dtype"))
def _factors(K, V, features: Features, domain: Domain, *, largest, dtype):
    """φ (r, n) and w (n, 1 + d_v) of n rows, which contribute φ ⊗ w, of norm at most `largest`."""
    mass = jnp.full((len(K), 1), domain.value_norm, V.dtype)
    weights = jnp.concatenate([mass, V], axis=1).astype(dtype)
    keys = _stretch(domain) * (K - domain.centre)
    phi = features.rows(keys.T).astype(dtype)
    if isinstance(features, RandomFeatures):
        norms = jnp.linalg.norm(phi, axis=0) * jnp.linalg.norm(weights, axis=-1)
        # A key along a direction may overflow the exponential. Such a row counts as zero.
        phi = jnp.where(jnp.isfinite(norms), phi, 0)
        weights = weights * jnp.minimum(1, largest / jnp.maximum(norms, largest / 2))[:, None]
    return phi, weights


def release_whole_moments(K, V, features: Features, domain: Domain, largest, multiplier):
    """The moments, released in exact arithmetic (`dpx.noise.secure`), and their sensitivity.

    A contribution φ ⊗ w is the product of φ/‖φ‖ and ‖φ‖w, which in units of 1 and of `largest` have norms of
    at most 1. With S = 2¹⁸ and B, B' the norms of the two factors after rounding, a product errs by
    e ≤ (B − S)·B' + S·(B' − S), so that two of them are at most √2·S² + 2e apart in each head.
    """
    heads, n = K.shape[:-2], K.shape[-2]
    K, V = (np.asarray(a, np.float64).reshape(-1, *a.shape[-2:]) for a in (K, V))
    steps, count = noise.secure.FACTOR_STEPS, features.num_features
    bounds = [noise.secure.norm_bound(steps, size) for size in (count, 1 + domain.value_dim)]
    noise.secure.check_sum(n, math.prod(bounds))
    total = np.zeros((len(K), count, 1 + domain.value_dim), np.int64)
    chunk = max(128, _CHUNK_ELEMENTS // count)
    for head, start in itertools.product(range(len(K)), range(0, n, chunk)):
        rows = (a[head, start : start + chunk] for a in (K, V))
        phi, weights = _factors(*rows, features, domain, largest=largest, dtype=jnp.float64)
        phi, weights = np.asarray(phi).T, np.asarray(weights)
        norms = np.linalg.norm(phi, axis=1, keepdims=True)
        norms = np.where(np.isfinite(norms) & (norms > 0), norms, 1)
        pair = (phi / norms, weights * norms / largest)
        total[head] += noise.secure.product(*(noise.secure.whole_rows(a, steps) for a in pair))
    error = (bounds[0] - steps) * bounds[1] + steps * (bounds[1] - steps)
    change = math.sqrt(len(K)) * (math.sqrt(2) * steps**2 + 2 * error)
    noisy = noise.secure.release_whole(
        total, sensitivity=change, noise_multiplier=multiplier, label="attention sketch"
    )
    grid = largest / steps**2
    moments = (noisy * grid).reshape(*heads, count, -1)
    if isinstance(features, PolynomialFeatures):  # the constant feature sums to n, which is public
        moments[..., 0, 0] = n * domain.value_norm
    return jnp.asarray(moments), change * grid


@functools.partial(jax.jit, static_argnames=("domain", "largest"))
def release_moments(key, K, V, features: Features, domain: Domain, largest, change, multiplier):
    sums = functools.partial(contribution_sums, features=features, domain=domain, largest=largest)
    heads, (n, _) = K.shape[:-2], K.shape[-2:]
    flat = [a.reshape(-1, *a.shape[-2:]) for a in (K, V)]
    moments = jax.lax.map(lambda head: sums(*head), tuple(flat))
    moments = moments.reshape(*heads, *moments.shape[1:])
    moments = noise.release(
        key, moments, sensitivity=change, noise_multiplier=multiplier, label="attention sketch"
    )
    if isinstance(features, PolynomialFeatures):  # the constant feature sums to n, which is public
        moments = moments.at[..., 0, 0].set(n * domain.value_norm)
    return moments.astype(K.dtype)


@functools.partial(jax.jit, static_argnames="domain")
def read(moments, Q, domain: Domain, features: Features) -> jax.Array:
    def sums(Q):
        y = jnp.moveaxis(Q, -1, 0) / _stretch(domain)
        phi = features.rows(y)
        return jnp.einsum("r...m,...rv->...mv", phi, moments, precision=jax.lax.Precision.HIGHEST)

    m = Q.shape[-2]
    chunk = max(128, _CHUNK_ELEMENTS // moments.shape[-2])
    if m <= chunk:
        return sums(Q)
    padding = [(0, 0)] * (Q.ndim - 2) + [(0, -m % chunk), (0, 0)]
    chunks = jnp.pad(Q, padding).reshape(*Q.shape[:-2], -1, chunk, Q.shape[-1])
    answers = jnp.moveaxis(jax.lax.map(sums, jnp.moveaxis(chunks, -3, 0)), 0, -3)
    return answers.reshape(*answers.shape[:-3], -1, answers.shape[-1])[..., :m, :]
