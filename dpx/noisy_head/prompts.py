"""In-context regression prompts and their rank-one features.

A prompt consists of L labelled tokens (x_i, y_i) and a query token x_{L+1}, whose response y_{L+1} is to be
predicted. The prediction of a linear attention head depends on the prompt through one matrix Z (eq. 2.5):

    Z = x_{L+1} sᵀ,   s = L⁻¹ Σ_{i≤L} y_i x_i,   ŷ = ⟨Γ, Z⟩ = x_{L+1}ᵀ Γ s.

Z has rank one, so that N prompts are kept as two N×D arrays and N targets, never as an N×D×D array.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from dpx._numerics import as_float64, in_float64, norm
from dpx._validate import check_finite, check_integer, check_number, check_positive, check_real

_DRAWS_PER_CHUNK = 2**15  # normals drawn at a time: they vectorise and fit into the cache


class Prompts(NamedTuple):
    """N prompts: features x (N, L+1, D) and responses y (N, L+1); the last token is the query."""

    x: jax.Array
    y: jax.Array


class Features(NamedTuple):
    """The features Z_k = query_k context_kᵀ of N prompts, and their targets.

    query (N, D) holds x_{L+1}, context (N, D) holds s and target (N,) holds y_{L+1}.
    """

    query: jax.Array
    context: jax.Array
    target: jax.Array


@in_float64
def sample_prompts(
    key: jax.Array, num_prompts: int, length: int, dim: int, *, noise_std: float = 0.0
) -> Prompts:
    """Draws prompts from the paper's model (Section 2).

    x_i is uniform on the unit sphere, w ~ N(0, I_D) is drawn anew for each prompt and y_i = wᵀx_i + τ ε_i.

    Args:
      key: A JAX key. Each prompt has its own key, so that it does not depend on how many are drawn at a time.
      num_prompts: N ≥ 1.
      length: L ≥ 1, the number of labelled tokens.
      dim: D ≥ 1.
      noise_std: τ ≥ 0.

    Returns:
      float64 prompts, x (N, L+1, D) and y (N, L+1).

    Raises:
      ValueError: for a size below 1 or a negative noise level.
    """
    noise = check_sizes(num_prompts, length, dim, noise_std)
    return _sample_prompts(key, noise, num_prompts, length, dim)


@in_float64
def sample_prompt(key: jax.Array, length: int, dim: int, *, noise_std: float = 0.0) -> Prompts:
    """One prompt, x (1, L+1, D) and y (1, L+1): prompt k of `sample_prompts` has key `split(key, N)[k]`."""
    noise = check_sizes(1, length, dim, noise_std)
    x, y = _draw(key, length, dim, noise)
    return Prompts(x[None], y[None])


@in_float64
def sample_features(
    key: jax.Array,
    num_prompts: int,
    length: int,
    dim: int,
    *,
    noise_std: float = 0.0,
    response_clip: float | None = None,
    feature_radius: float | None = None,
) -> Features:
    """Computes `featurize(sample_prompts(...))` for a few prompts at a time, without holding all prompts.

    It needs memory for 2ND + N numbers. Args, returns and errors are those of the two functions.
    """
    noise = check_sizes(num_prompts, length, dim, noise_std)
    _check_bounds(response_clip, feature_radius)
    options = (noise, response_clip, feature_radius)
    return _sample_features(key, options, num_prompts, length, dim)


@in_float64
def featurize(
    prompts: Prompts,
    *,
    response_clip: float | None = None,
    feature_radius: float | None = None,
) -> Features:
    """The rank-one features of prompts, optionally with the paper's clipping (Algorithm 1, line 1).

    Args:
      prompts: x (N, L+1, D) and y (N, L+1), NumPy or JAX.
      response_clip: C > 0: every response is clipped to [−C, C]. None leaves them alone.
      feature_radius: G > 0: Z is projected onto the Frobenius ball of radius G, by scaling its context.

    Returns:
      float64 features: query (N, D), context (N, D), target (N,).

    Raises:
      ValueError: for shapes that do not fit, values that are not finite, or a bound that is not positive.
    """
    x, y = prompts
    if jnp.ndim(x) != 3 or jnp.shape(x)[1] < 2 or jnp.shape(y) != jnp.shape(x)[:2]:
        raise ValueError(
            f"prompts have x {jnp.shape(x)} and y {jnp.shape(y)}: "
            "they must be (N, L+1, D) and (N, L+1) with L ≥ 1"
        )
    _check_bounds(response_clip, feature_radius)
    for name, array in (("prompts.x", x), ("prompts.y", y)):
        check_real(array, name)
        check_finite(array, name, "drop or repair those prompts")
    return _reduce(as_float64(x), as_float64(y), response_clip, feature_radius)


@in_float64
def corrupt(
    prompts: Prompts, index: int | jax.Array, *, alpha: float, mu: float, where: str = "context"
) -> Prompts:
    """The prompts with one adversarial prompt (5.1): prompt `index` has x + μ for all tokens, and y + α.

    Args:
      prompts: x (N, L+1, D) and y (N, L+1).
      index: The number of the prompt, 0 ≤ index < N.
      alpha: The shift α of responses.
      mu: The shift μ of every coordinate of every token.
      where: Which responses move: "context" (y_1..y_L, the paper's text), "all" (y_{L+1} too), or "query".

    Raises:
      ValueError: for an unknown `where`, or an index out of range.
    """
    if not isinstance(index, Tracer) and check_integer(index, "index", 0) >= len(prompts.x):
        raise ValueError(f"index={index} must be one of the {len(prompts.x)} prompts, from 0")
    check_real(prompts.x, "prompts.x")
    check_real(prompts.y, "prompts.y")
    x, y = as_float64(prompts.x), as_float64(prompts.y)
    moved = {"context": slice(None, -1), "all": slice(None), "query": slice(-1, None)}
    if where not in moved:
        raise ValueError(f"where={where!r} is not known: use 'context', 'all' or 'query'")
    row = y[index].at[moved[where]].add(alpha)
    return Prompts(x.at[index].add(mu), y.at[index].set(row))


@in_float64
def predict(gamma: jax.Array, features: Features) -> jax.Array:
    """The predictions ŷ_k = ⟨Γ, Z_k⟩ for gamma (..., D, D), of shape (..., N)."""
    for name, array in (("gamma", gamma), ("query", features.query), ("context", features.context)):
        check_real(array, name)
    query, context = as_float64(features.query), as_float64(features.context)
    return jnp.sum((query @ as_float64(gamma)) * context, axis=-1)


def check_features(features: Features) -> Features:
    """The features in float64, after the checks that every estimator needs.

    Raises:
      ValueError: for shapes other than (N, D), (N, D), (N,), and for values that are not real or not finite.
    """
    query, context, target = features
    shape = jnp.shape(query)
    if len(shape) != 2 or jnp.shape(context) != shape or jnp.shape(target) != shape[:1]:
        raise ValueError(
            f"features have shapes {shape}, {jnp.shape(context)}, {jnp.shape(target)}: "
            "they must be (N, D), (N, D), (N,)"
        )
    if 0 in shape:
        raise ValueError(f"features of shape {shape} are empty: N and D must be at least 1")
    for name, array in zip(Features._fields, features, strict=True):
        check_real(array, f"features.{name}")
        check_finite(array, f"features.{name}", "drop or repair those prompts")
    return Features(as_float64(query), as_float64(context), as_float64(target))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _sample_prompts(key, noise_std, num_prompts, length, dim) -> Prompts:
    keys = jax.random.split(key, num_prompts)
    return jax.vmap(lambda key: _draw(key, length, dim, noise_std))(keys)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _sample_features(key, options, num_prompts, length, dim) -> Features:
    noise_std, response_clip, feature_radius = options

    def one(key):
        x, y = _draw(key, length, dim, noise_std)
        return _reduce(x, y, response_clip, feature_radius)

    chunk = max(1, _DRAWS_PER_CHUNK // ((length + 2) * dim))
    keys = jax.random.split(key, num_prompts)
    return jax.lax.map(one, keys, batch_size=min(chunk, num_prompts))


def _draw(key, length, dim, noise_std) -> Prompts:
    w, x = jnp.split(_normals(key, (length + 2) * dim).reshape(length + 2, dim), [1])
    x = x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True))
    y = x @ w[0]
    if noise_std is not None:
        y = y + noise_std * _normals(jax.random.fold_in(key, 1), length + 1)
    return Prompts(x, y)


def _normals(key, count):
    """Standard normals for simulated data, never for privacy: float64 numbers of float32 resolution.

    Each 64-bit word gives two, which takes half as long as `jax.random.normal`.
    """
    words = jax.random.bits(key, (-(-count // 2),), jnp.uint64)
    halves = jnp.concatenate([words.astype(jnp.uint32), (words >> 32).astype(jnp.uint32)])[:count]
    # Odd multiples of 2⁻²⁴ in (−1, 1): all are float32 numbers and equally likely.
    uniform = (halves.astype(jnp.int32) >> 8).astype(jnp.float32) * 2**-23 + 2**-24
    return math.sqrt(2) * as_float64(jax.lax.erf_inv(uniform))


def _reduce(x, y, response_clip, feature_radius) -> Features:
    if response_clip is not None:
        y = jnp.clip(y, -response_clip, response_clip)
    query, target = x[..., -1, :], y[..., -1]
    context = jnp.einsum("...i,...id->...d", y[..., :-1], x[..., :-1, :]) / (x.shape[-2] - 1)
    if feature_radius is not None:
        size = norm(query) * norm(context)
        context = context * jnp.minimum(1, feature_radius / jnp.where(size > 0, size, 1))[..., None]
    return Features(query, context, target)


def check_sizes(num_prompts, length, dim, noise_std):
    """Checks the sizes and returns the noise level, or None if it is zero, so that no noise is drawn."""
    for name, size in (("num_prompts", num_prompts), ("length", length), ("dim", dim)):
        check_integer(size, name)
    if isinstance(noise_std, Tracer):
        return noise_std
    check_positive(noise_std, "noise_std", zero=True)
    return noise_std or None


def _check_bounds(response_clip, feature_radius) -> None:
    for name, bound in (("response_clip", response_clip), ("feature_radius", feature_radius)):
        if (
            bound is not None
            and not isinstance(bound, Tracer)
            and not check_number(bound, name) > 0
        ):
            raise ValueError(f"{name}={bound} must be positive, or None for no bound")
