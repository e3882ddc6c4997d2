"""Mixed precision: the loss computes in a narrower type than that in which parameters are kept."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Gradients in float16 vanish below 6e-8 unless the loss is scaled, which bfloat16 does not need.
KNOWN = ("bfloat16", "float32")


def check(compute_dtype: Any, name: str = "compute_dtype") -> Any:
    """The dtype, or None for None.

    Raises:
      ValueError: for anything that is neither bfloat16 nor float32.
    """
    if compute_dtype is None:
        return None
    try:
        found = jnp.dtype(compute_dtype)
    except TypeError:
        found = None
    if found is None or found.name not in KNOWN:
        raise ValueError(
            f"{name}={compute_dtype!r} must be one of {KNOWN}: use 'bfloat16' to compute faster and in less "
            "memory, or 'float32'"
        )
    return found


def computed_in(compute_dtype: Any, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The loss of floating-point arguments that are cast to a dtype, itself in float32.

    Casting happens inside, so that gradients are those of the parameters as they are kept: they are clipped,
    added up and noised in float32, and a bfloat16 product of an activation and a cotangent is not rounded
    before it is added to the sum (`dpx.clipping.gradients.factors`).
    """
    if compute_dtype is None:
        return loss_fn

    def cast(x: Any) -> Any:
        floating = jnp.issubdtype(jnp.result_type(x), jnp.floating)
        return x.astype(compute_dtype) if floating else x

    def narrow(*arguments: Any) -> Any:
        loss = loss_fn(*jax.tree.map(cast, arguments))
        # What is no array is refused where losses are.
        return loss.astype(jnp.float32) if isinstance(loss, jax.Array) else loss

    return narrow
