"""Attention with the correction for noisy keys."""

import jax
import jax.numpy as jnp

from dpx import attention as dpx_attention
from dpx.reattention.moments import LARGEST, Moments, attention, check_sign


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | Moments,
    key_variance: jax.Array,
    *,
    mask: jax.Array | None = None,
    renormalize: bool = True,
) -> jax.Array | Moments:
    """Softmax attention with S_i ← S_i / exp(Var[logit_i]/2) (Section 4.3.3, Algorithm 2 line 8).

    The logit ⟨q, k⟩/√D of a head has variance Σ_j q_j² Var[k_j]/D. As in the paper, gradients flow through
    the
    means alone, and the correction counts as a constant: a gradient through the variance would train the
    model to look certain instead of being certain.

    Any variance may be given, even infinity. A variance that all keys share has no effect if weights are
    renormalised.

    Args:
      q: Queries (..., Lq, D).
      k: Keys (..., Lk, D).
      v: Values (..., Lk, Dv), or their Moments.
      key_variance: (..., Lk, D), or (..., Lk, 1) if all coordinates of a key have the same variance.
      mask: As in `dpx.attention.dot_product_attention`.
      renormalize: Whether the corrected weights are made to sum to one, which shifts logits by half their
        variance. With False they are the quotients of the paper, which vanish as the noise grows.

    Returns:
      (..., Lq, Dv), floats like `v` if that is an array, or its Moments if `v` are Moments.

    Raises:
      ValueError: for shapes that do not fit together, a mask that is not boolean or a negative variance.
    """
    weights = attention_weights(q, k, key_variance, mask=mask, renormalize=renormalize)
    values = v.mean if isinstance(v, Moments) else jnp.asarray(v)
    if values.ndim < 2 or values.shape[-2] != weights.shape[-1]:
        raise ValueError(f"v {values.shape} does not fit k {jnp.shape(k)}: pass v (..., Lk, Dv)")
    if isinstance(v, Moments):
        return attention(weights, v)
    dtype = jnp.result_type(values, 0.0)  # an integer type would drop the fraction of the answer
    return (weights @ values.astype(weights.dtype)).astype(dtype)


def attention_weights(
    q: jax.Array,
    k: jax.Array,
    key_variance: jax.Array,
    *,
    mask: jax.Array | None = None,
    renormalize: bool = True,
) -> jax.Array:
    """The corrected weights (..., Lq, Lk) of `attend`, which has the same arguments."""
    q, k, key_variance = jnp.asarray(q), jnp.asarray(k), jnp.asarray(key_variance)
    if min(q.ndim, k.ndim, key_variance.ndim) < 2 or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q {q.shape} and k {k.shape} must be (..., Lq, D) and (..., Lk, D)")
    if key_variance.shape[-2] != k.shape[-2] or key_variance.shape[-1] not in (1, k.shape[-1]):
        raise ValueError(
            f"key_variance {key_variance.shape} does not fit k {k.shape}: pass (..., Lk, D) or (..., Lk, 1)"
        )
    check_sign(key_variance, "key_variance")
    mask = None if mask is None else dpx_attention.boolean(mask)
    key_variance = jnp.clip(key_variance.astype(jnp.result_type(q, k, jnp.float32)), 0, LARGEST)
    if not renormalize:
        variance = _logit_variance(q, key_variance)
        weights = dpx_attention.attention_weights(q, k, mask=mask)
        return weights * jax.lax.stop_gradient(jnp.exp(-variance / 2))
    # A variance that all keys share cancels; in floating point it has to be subtracted beforehand.
    variance = _logit_variance(q, _excess(key_variance, key_variance.min(-2, keepdims=True), 64))
    allowed = jnp.ones((), bool) if mask is None else mask
    least = variance.min(-1, keepdims=True, where=allowed, initial=LARGEST)
    variance = jnp.where(allowed, _excess(variance, least, 64 + q.shape[-1]), 0)
    bias = jax.lax.stop_gradient(-variance / 2)
    return dpx_attention.attention_weights(q, k, mask=mask, bias=bias)


def _logit_variance(q: jax.Array, key_variance: jax.Array) -> jax.Array:
    """The variances (..., Lq, Lk) of the logits, which are finite."""
    squares = jnp.square(q.astype(key_variance.dtype)) / q.shape[-1]
    if key_variance.shape[-1] == 1:
        squares = squares.sum(-1, keepdims=True)
    variance = jnp.einsum("...qd,...kd->...qk", squares, key_variance)
    return jnp.minimum(variance, LARGEST)


def _excess(variance: jax.Array, least: jax.Array, roundings: int) -> jax.Array:
    """The excess of each variance over the least one, or 0 if so many rounding errors could explain it.

    A compiler may compute a variance twice with different rounding. If variances are large, that difference
    alone could raise a logit so far above the largest one that its exponential is infinite.
    """
    doubt = roundings * float(jnp.finfo(variance.dtype).eps) * least
    return jnp.maximum(variance - least - jnp.where(doubt > 1e-3, doubt, 0), 0)
