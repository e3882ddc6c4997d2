"""64-bit arithmetic inside, whatever the caller's global setting."""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

_Function = TypeVar("_Function", bound=Callable)


def in_float64(function: _Function) -> _Function:
    """Runs `function` under a scoped `jax.enable_x64(True)`.

    Excess risks of 1e-7 beside a unit risk leave no room for float32. The scope works eagerly and in `vmap`.
    A surrounding `jit` is lowered after the scope has closed, so there the caller must open it: the
    wrapper raises ValueError rather than let 64 bits be truncated.
    """

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        being_jitted = isinstance(jnp.zeros(()), Tracer)
        if being_jitted and not jax.config.read("jax_enable_x64"):
            raise ValueError(
                f"{function.__name__} computes in 64 bits and is being traced with 64-bit types off: "
                "call the jitted function under `with jax.enable_x64(True):`"
            )
        with jax.enable_x64(True):
            return function(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


def as_float64(array) -> jax.Array:
    """The array in float64; to be called inside the scope only."""
    return jnp.asarray(array, jnp.float64)


def require_finite(name: str, array, remedy: str) -> None:
    """Raises ValueError for a concrete array with a value that is not finite; a traced one passes."""
    if not isinstance(array, Tracer) and not np.all(np.isfinite(np.asarray(array))):
        raise ValueError(f"{name} holds values that are not finite: {remedy}")
