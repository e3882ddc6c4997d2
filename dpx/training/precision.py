"""Mixed precision: the loss computes in a narrower type than that in which parameters are kept."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Gradients in float16 vanish below 6e-8 unless the loss is scaled, which bfloat16 does not need.
KNOWN = ("bfloat16", "float32")


def check(compute_dtype: Any, name: str = "compute_dtype") -> Any:
    """Returns what was asked for as a dtype; None stays None.

    Raises:
      ValueError: for anything that is neither bfloat16 nor float32.
    """
    if compute_dtype is None:
        return None
    try:
        dtype = jnp.dtype(compute_dtype)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in KNOWN:
        raise ValueError(
            f"{name}={compute_dtype!r} must be one of {KNOWN}: use 'bfloat16' to compute faster and in less "
            "memory, or 'float32'"
        )
    return dtype


def computed_in(compute_dtype: Any, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The loss, whose floating-point arguments are cast to a dtype, and whose value is cast to float32.

    Casting is a part of the loss, so that gradients have the type of the parameters as they are kept. They
    are clipped, added up and noised in float32. A bfloat16 product of an activation and a cotangent is not
    rounded before it is added to the sum (`dpx.clipping.gradients.factors`).
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
