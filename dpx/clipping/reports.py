"""Reports losses that may void their sensitivity, or that do what their author has hardly meant."""

import contextlib
import contextvars
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dpx._context import within
from dpx.clipping.params import Parameters

# A strict call may hold per-example gradients of fewer elements than this for want of a rule.
LARGE = 2**16
# The collections of Linen beside "params" that hold floating-point state, which no optimizer should move.
_STATE = ("batch_stats", "cache", "intermediates", "losses", "perturbations", "spectral_stats")
_SHOWN = 4


class ClippingWarning(UserWarning):
    """Something in a loss or its arguments that may void the guarantee. An error under `strict=True`."""


class Call(NamedTuple):
    """One call of a `ClippedGrad`.

    Attributes:
      strict: whether a report is an error.
      private: the arrays of its batch, and those that the batch is taken from.
      sizes: the numbers of examples, which are public; users may have any number of rows.
      parameters: the parameters.
    """

    strict: bool
    private: Sequence[Any]
    sizes: frozenset[int]
    parameters: Parameters


_CALL: contextvars.ContextVar[Call | None] = contextvars.ContextVar("clipping_call", default=None)
_RECORDS: contextvars.ContextVar[tuple] = contextvars.ContextVar("records", default=((), 1))
_TOLD: contextvars.ContextVar[bool] = contextvars.ContextVar("told", default=False)


def records(data: Any, count: int) -> contextlib.AbstractContextManager[None]:
    """A context, in which batches are of `count` units of these arrays: no loss may read them otherwise."""
    return within(_RECORDS, (jax.tree.leaves(data), count))


def told() -> contextlib.AbstractContextManager[None]:
    """A context without reports: all has been said before, with better names for the parameters."""
    return within(_TOLD, True)


def of(
    strict: bool, batch: Any, size: int, parameters: Parameters
) -> contextlib.AbstractContextManager[None]:
    """A context in which the loss of this call is traced."""
    everything, count = _RECORDS.get()
    sizes = frozenset({size, count} - {1})
    call = Call(strict, [*jax.tree.leaves(batch), *everything], sizes, parameters)
    return within(_CALL, None if _TOLD.get() else call)


def call() -> Call | None:
    """The call whose loss is being traced; None where there are no reports, as in `explain_clipping`."""
    return _CALL.get()


def report(message: str, strict: bool | None = None) -> None:
    """Warns, or raises ValueError where the call is strict."""
    current = _CALL.get()
    if strict or (strict is None and current is not None and current.strict):
        raise ValueError(message)
    warnings.warn(message, ClippingWarning, stacklevel=2)


def report_zero(zero: Sequence[bool]) -> None:
    """Reports the parameters of a call whose gradients are zero for every example: they would get noise."""
    if (current := call()) is None or not any(zero):
        return
    each = zip(current.parameters.paths, zero, strict=True)
    names = [name.removesuffix("/value") for name, is_zero in each if is_zero]
    shown = [tuple(int(x) if x.isdecimal() else x for x in name.split("/")) for name in names]
    report(
        f"no gradient of loss_fn reaches {_listed(names)}: the loss does not use them, or only behind "
        "stop_gradient, so that all they would get is noise: leave them out by wrt, as in "
        f"wrt=lambda path, leaf: path not in {shown[:_SHOWN]}"
    )


def check_rules(unruled: Sequence[Sequence[str]]) -> None:
    """Raises ValueError where a strict call holds a large parameter's gradients for want of these rules."""
    if (current := call()) is None or not current.strict:
        return
    paths, leaves = current.parameters.paths, current.parameters.leaves
    for path, leaf, names in zip(paths, leaves, unruled, strict=True):
        if names and leaf.size >= LARGE:
            raise ValueError(
                f"strict=True: params[{path}] of {leaf.size} elements has no rule for "
                f"{', '.join(sorted(set(names)))}, so that its gradients would be held for every example: "
                "see dpx.explain_clipping, or use strict=False, which is as exact and takes more memory"
            )


def report_state(params: Any, wrt: Any, strict: bool) -> None:
    """Warns where a tree of parameters holds the state of a model, such as running statistics.

    It has gradients, and would be trained. Linen tells it from parameters by name, NNX by type.
    """
    if wrt is not None:
        return
    if isinstance(params, nnx.State):
        kinds = {type(v) for v in jax.tree.leaves(params, is_leaf=_is_state) if _is_state(v)}
        names, remedy = sorted(kind.__name__ for kind in kinds), "wrt=nnx.Param"
    else:
        keys = params if isinstance(params, Mapping) and "params" in params else ()
        names = [name for name in _STATE if name in keys]
        remedy = 'wrt=lambda path, leaf: path[0] == "params"'
    if names:
        report(
            f"params holds {_listed(names)} beside the parameters, state of the model that would be trained "
            f"and get noise: leave it out by {remedy}",
            strict,
        )


def _is_state(x: Any) -> bool:
    if not isinstance(x, nnx.Variable) or isinstance(x, nnx.Param):
        return False
    return any(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in jax.tree.leaves(x))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
