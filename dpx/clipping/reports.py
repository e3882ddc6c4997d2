"""Says what a loss does that its sensitivity does not survive, or that its author has hardly meant."""

import contextlib
import contextvars
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from dpx.clipping.params import Parameters

# Fallbacks to per-example gradients of fewer elements than this are no matter.
LARGE = 2**16


class ClippingWarning(UserWarning):
    """Something in a loss or its arguments that may void the guarantee. An error under `strict=True`."""


class Call(NamedTuple):
    """One call of a `ClippedGrad`.

    Attributes:
      strict: whether a report is an error.
      leaves: everything in its batch.
      size: the number of examples.
      parameters: the parameters.
    """

    strict: bool
    leaves: Sequence[Any]
    size: int
    parameters: Parameters


_CALL: contextvars.ContextVar[Call | None] = contextvars.ContextVar("clipping_call", default=None)


@contextlib.contextmanager
def of(strict: bool, batch: Any, size: int, parameters: Parameters) -> Iterator[None]:
    """Everything that is traced within is the loss of this call."""
    token = _CALL.set(Call(strict, jax.tree.leaves(batch), size, parameters))
    try:
        yield
    finally:
        _CALL.reset(token)


def call() -> Call | None:
    """The call whose loss is being traced; None where nothing is to be clipped (`explain_clipping`)."""
    return _CALL.get()


def report(message: str, strict: bool | None = None) -> None:
    """Warns, or raises ValueError where the call is strict."""
    found = _CALL.get()
    if strict or (strict is None and found is not None and found.strict):
        raise ValueError(message)
    warnings.warn(message, ClippingWarning, stacklevel=2)


def check_fallbacks(opaque: Sequence[Sequence[str]]) -> None:
    """Raises ValueError where a strict call holds the per-example gradients of a large parameter.

    Args:
      opaque: for each parameter, the primitives that use it without a rule.
    """
    found = _CALL.get()
    if found is None or not found.strict:
        return
    for path, leaf, names in zip(
        found.parameters.paths, found.parameters.leaves, opaque, strict=True
    ):
        if names and leaf.size >= LARGE:
            raise ValueError(
                f"strict=True: params[{path}] of {leaf.size} elements has no rule for "
                f"{', '.join(sorted(set(names)))}, so that its gradients would be held for every example: "
                "see dpx.explain_clipping, or use strict=False, which is as exact and takes more memory"
            )
