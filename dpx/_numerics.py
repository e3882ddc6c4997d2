"""Arithmetic that guarantees rest on: scopes of 64 bits, whatever the caller's global setting."""

import contextlib
import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

_Function = TypeVar("_Function", bound=Callable)


@contextlib.contextmanager
def wide_sums(*data):
    """What runs inside runs at once and with 64-bit floats by default, if no array of `data` is traced.

    How a sum over n records rounds depends on all of them. In 32 bits one record of weight 1 may move that of
    1e5 by 136, in 64 bits by 1 + n²·2⁻⁵² at most. Under a JAX transformation nothing changes: there the
    default float type holds, and if that is 32-bit the guarantee is one for exact sums.
    """
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(data)):
        yield
    else:
        with jax.ensure_compile_time_eval(), jax.enable_x64(True):
            yield


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
