"""Exact softmax attention: the reference that every private form in dpx is measured against."""

import jax
import jax.numpy as jnp
from jax.core import Tracer

from dpx._validate import check_positive


def dot_product_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Softmax attention, `softmax(scale · q kᵀ) v` (Vaswani et al. 2017, arXiv 1706.03762, eq. 1).

    Logits and weights are computed in float32 at least, whatever the inputs' precision. The leading
    axes of `q`, `k`, `v` and `mask` (batch, heads) broadcast.

    Args:
      q: Queries (..., Lq, D).
      k: Keys (..., Lk, D).
      v: Values (..., Lk, Dv).
      mask: Boolean, broadcastable to (..., Lq, Lk); True where the query may attend to the key. A
        query that may attend to no key gets zeros, and its gradient is zero, not NaN.
      scale: What the logits ⟨q, k⟩ are multiplied by, as in `jax.nn.dot_product_attention`; 1/√D if None.

    Returns:
      The answers (..., Lq, Dv), in the dtype of `v`; floats where `v` holds integers or booleans.

    Raises:
      ValueError: for shapes that do not fit together, a mask that is not boolean or a scale that is
        not positive.
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    if min(q.ndim, k.ndim, v.ndim) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"q {q.shape}, k {k.shape} and v {v.shape} do not fit together: "
            "pass q (..., Lq, D), k (..., Lk, D) and v (..., Lk, Dv)"
        )
    weights = attention_weights(q, k, mask=mask, scale=scale)
    v = v.astype(jnp.result_type(v, 0.0))
    dtype = jnp.result_type(weights, v)
    return jnp.einsum("...qk,...kv->...qv", weights.astype(dtype), v.astype(dtype)).astype(v.dtype)


def attention_weights(
    q: jax.Array,
    k: jax.Array,
    *,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """The weights (..., Lq, Lk) of `dot_product_attention`, float32 at least.

    Args: as `dot_product_attention`, and
      bias: (..., Lq, Lk), added to the logits after their scaling; finite wherever the mask is True.

    Raises:
      ValueError: for a mask that is not boolean or a scale that is not positive.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if not isinstance(factor, Tracer):
        check_positive(factor, "scale")
    dtype = jnp.result_type(q, k, jnp.float32)
    logits = jnp.einsum("...qd,...kd->...qk", q.astype(dtype), k.astype(dtype)) * factor
    if bias is not None:
        logits = logits + bias
    if mask is None:
        return jax.nn.softmax(logits, axis=-1)
    mask = boolean(mask)
    weights = jax.nn.softmax(logits, axis=-1, where=mask)
    return jnp.where(mask.any(axis=-1, keepdims=True), weights, 0)


def boolean(mask: jax.Array) -> jax.Array:
    """The mask as an array; raises ValueError if it is not boolean."""
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise ValueError(f"mask has dtype {mask.dtype}: pass booleans, True where q may attend")
    return mask
