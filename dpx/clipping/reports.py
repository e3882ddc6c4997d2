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
      private: the arrays of its batch, and those that the batch is a part of.
      sizes: how many examples there are in each of the two.
      parameters: the parameters.
    """

    strict: bool
    private: Sequence[Any]
    sizes: frozenset[int]
    parameters: Parameters


_CALL: contextvars.ContextVar[Call | None] = contextvars.ContextVar("clipping_call", default=None)
_RECORDS: contextvars.ContextVar[Sequence[Any]] = contextvars.ContextVar("records", default=())


@contextlib.contextmanager
def records(data: Any) -> Iterator[None]:
    """All batches within are taken from these arrays, which a loss must not read in any other way."""
    token = _RECORDS.set(jax.tree.leaves(data))
    try:
        yield
    finally:
        _RECORDS.reset(token)


@contextlib.contextmanager
def of(strict: bool, batch: Any, size: int, parameters: Parameters) -> Iterator[None]:
    """Everything that is traced within is the loss of this call."""
    everything = _RECORDS.get()
    sizes = frozenset({size, *(len(leaf) for leaf in everything)} - {1})
    found = Call(strict, [*jax.tree.leaves(batch), *everything], sizes, parameters)
    token = _CALL.set(found)
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


def check_forms(unruled: Sequence[Sequence[str]]) -> None:
    """Reports what a call's parameters have for gradients.

    Args:
      unruled: for each parameter, the primitives because of which its gradient is no sum of products.

    Raises:
      ValueError: a strict call holds the per-example gradients of a large parameter.
    """
    if (found := _CALL.get()) is None:
        return
    paths, leaves = found.parameters.paths, found.parameters.leaves
    for path, leaf, names in zip(paths, leaves, unruled, strict=True):
        if found.strict and names and leaf.size >= LARGE:
            raise ValueError(
                f"strict=True: params[{path}] of {leaf.size} elements has no rule for "
                f"{', '.join(sorted(set(names)))}, so that its gradients would be held for every example: "
                "see dpx.explain_clipping, or use strict=False, which is as exact and takes more memory"
            )
