"""The same computation written so that it takes less time and memory: what XLA does not see for itself."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from dpx.clipping import meshes
from dpx.clipping.jaxprs import CALLS, REMAT, bind, nested, run

# Equations with bodies that may be replaced by others that compute the same.
BODIES = (*CALLS, *REMAT, "cond", "scan", "while")

# Equations that stretch operands of as many axes, along those of length one.
STRETCHING = ("add", "div", "max", "min", "mul", "sub")


def vjp(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Callable[..., Any]]:
    """`jax.vjp`, rewritten."""
    closed, shapes = jax.make_jaxpr(lambda *a: jax.vjp(function, *a), return_shape=True)(*arguments)
    closed = rewritten(closed)
    env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env |= dict(zip(closed.jaxpr.invars, jax.tree.leaves(arguments), strict=True))
    found = run(closed.jaxpr.eqns, env, closed.jaxpr.outvars)
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def rewritten(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """A jaxpr with the same results, rounding in products aside; the same one if nothing changes."""
    if not _changes(closed.jaxpr):
        return closed

    def body(value: Any) -> Any:
        if isinstance(value, core.ClosedJaxpr):
            return rewritten(value)
        if isinstance(value, core.Jaxpr) and not value.constvars:
            return rewritten(core.ClosedJaxpr(value, ())).jaxpr
        return tuple(map(body, value)) if isinstance(value, tuple) else value

    def evaluate(*arguments: Any) -> list[Any]:
        env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env |= dict(zip(closed.jaxpr.invars, arguments, strict=True))
        for eqn in closed.jaxpr.eqns:
            operands = [x.val if isinstance(x, core.Literal) else env[x] for x in eqn.invars]
            if _rounds_nothing(eqn):
                found = operands
            elif _sums_over_leading_axes(eqn):
                found = _over_one_axis(eqn, operands)
            else:
                if eqn.primitive.name in BODIES:
                    eqn = eqn.replace(params={k: body(v) for k, v in eqn.params.items()})
                found = bind(eqn, operands)
            env.update(zip(eqn.outvars, found, strict=True))
        return run((), env, closed.jaxpr.outvars)

    return jax.make_jaxpr(evaluate)(*closed.in_avals)


def _changes(jaxpr: Any) -> bool:
    """Whether any equation in a jaxpr is written otherwise here."""
    return any(
        _rounds_nothing(each) or _sums_over_leading_axes(each)
        for eqn in jaxpr.eqns
        for each in nested(eqn)
    )


def _rounds_nothing(eqn: Any) -> bool:
    """Whether an equation rounds to the precision that its operand has.

    JAX does so with what a policy of `jax.checkpoint` saves. While both are used, both are held.
    """
    if eqn.primitive.name != "reduce_precision":
        return False
    kind = jnp.finfo(eqn.invars[0].aval.dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (kind.nexp, kind.nmant)


def _sums_over_leading_axes(eqn: Any) -> bool:
    """Whether an equation is a product that sums over several leading axes, on one CPU.

    Differentiation sums over examples and positions. XLA's compiler for CPUs writes one of the factors once
    more for that, transposed, which can take as long as the product. Axes that lie on several devices would
    have to be gathered before they are merged.
    """
    if eqn.primitive.name != "dot_general":
        return False
    (left, right), batch = eqn.params["dimension_numbers"]
    leading = tuple(left) == tuple(right) == tuple(range(len(left)))
    return meshes.on_one_cpu() and leading and len(left) > 1 and not any(batch)


def _over_one_axis(eqn: Any, factors: Sequence[Any]) -> list[Any]:
    """The same product, these axes merged."""
    count = len(eqn.params["dimension_numbers"][0][0])
    numbers = ((0,), (0,)), ((), ())
    eqn = eqn.replace(params=eqn.params | {"dimension_numbers": numbers})
    return bind(eqn, [x.reshape(math.prod(x.shape[:count]), *x.shape[count:]) for x in factors])


def stretched(eqn: Any, values: list) -> list:
    """The operands of an equation, on one CPU with its shape where they are stretched along some axes.

    If these are not all their axes of length one, differentiation would sum over some of them alone: XLA's
    compiler for CPUs takes thirty times as long to sum the products of a batch if an axis of length one is
    left before the one summed over.
    """
    if eqn.primitive.name not in STRETCHING or not meshes.on_one_cpu():
        return values
    return [_stretched(x, eqn.outvars[0].aval.shape) for x in values]


def _stretched(x: Any, shape: Sequence[int]) -> Any:
    ones = [i for i, n in enumerate(jnp.shape(x)) if n == 1]
    if len({shape[i] == 1 for i in ones}) < 2:
        return x
    kept = [i for i in range(len(shape)) if i not in ones]
    return lax.broadcast_in_dim(lax.squeeze(x, ones), shape, kept)
