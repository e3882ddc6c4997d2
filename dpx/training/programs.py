"""Digests of what a loss and an optimizer compute: a training goes on with those that it began with.

The digest is of the program that JAX traces, and of the arrays that it closes over. So it follows learning
rates, schedules and architectures, and neither names nor where things lie in memory. It is the same in all
processes that have one version of JAX and of the packages that the functions call. Another version may trace
another program, which then counts as a change.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core

from dpx.training import resuming

_ADDRESS = re.compile(r"0x[0-9a-f]+")  # of a function, in the parameters of an operation


def of_loss(loss_fn: Callable[..., Any], params: Any, *rest: Any) -> str:
    """The digest of a loss (params, *rest), and of its gradient for `params`, which may have its own rule.

    Args:
      loss_fn: The loss of one example.
      params, rest: Trees of arrays or of `jax.ShapeDtypeStruct`.
    """

    def both(params: Any, *rest: Any) -> Any:
        value, pull_back = jax.vjp(lambda params: loss_fn(params, *rest), params)
        return value, pull_back(jax.tree.map(jnp.ones_like, value))

    return _digest(both, params, *rest)


def of_optimizer(optimizer: optax.GradientTransformation, params: Any) -> str:
    """The digest of an optimizer's first state and its update, for parameters of these shapes and types."""

    def step(gradients: Any, params: Any) -> Any:
        return optimizer.update(gradients, optimizer.init(params), params)

    return _digest(step, params, params)


def _digest(function: Callable[..., Any], *arguments: Any) -> str:
    closed = jax.make_jaxpr(function)(*arguments)
    # `str` has colours where stdout is a terminal.
    text = _ADDRESS.sub("", closed.pretty_print(use_color=False))
    arrays = (_numbers(constant) for constant in _constants(closed))
    return resuming.digest([np.frombuffer(text.encode(), np.uint8), *arrays])


def _constants(part: Any) -> Iterator[Any]:
    """The arrays in a program and in programs within it, of which the program's text has only the shapes."""
    if isinstance(part, core.ClosedJaxpr):
        yield from part.consts
        part = part.jaxpr
    if isinstance(part, core.Jaxpr):
        for eqn in part.eqns:
            literals = (atom.val for atom in eqn.invars if isinstance(atom, core.Literal))
            yield from (value for value in literals if np.ndim(value))
            yield from _constants(tuple(eqn.params.values()))
    elif isinstance(part, tuple | list):
        for each in part:
            yield from _constants(each)


def _numbers(constant: Any) -> np.ndarray:
    if jnp.issubdtype(jnp.result_type(constant), jax.dtypes.prng_key):
        constant = jax.random.key_data(constant)
    return np.asarray(constant)
