"""Products with a derivative of their own: quantised ones, and kernels with a backward pass written by hand.

`jax.custom_vjp` hides what becomes of an operand in the backward pass. That is traced here. Where the
cotangent of a weight is one product, of what follows from the operands with what follows from the cotangent
of the result, these two are its factors, as for any product. And where the cotangent of an operand is zero,
such as that of the largest entry by which a weight is scaled, what leads to this operand has no gradient.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from dpx.clipping import jaxprs
from dpx.clipping.rounding import settled
from dpx.clipping.views import View

NAMES = ("custom_vjp_call", "custom_vjp_call_jaxpr")

# What is transposed by a function that somebody wrote.
TRANSPOSED = ("linear_call", "custom_transpose_call")

# `jax.custom_jvp`, and what is a primitive of its own to newer JAX, such as `jax.lax.custom_root`.
FORWARDS = ("custom_jvp_call", "call_hi_primitive")
_BY_HAND = (*NAMES, *TRANSPOSED, *FORWARDS)

# Which operands are differentiated, of the equations of the jaxpr that is read.
_TAKEN: contextvars.ContextVar[dict[Any, list[int]]] = contextvars.ContextVar("taken")


class Backward(NamedTuple):
    """The backward pass of an equation.

    Attributes:
      closed: (operands, cotangents of results) -> cotangents of operands, of floats alone, without calls.
      which: the indices of the operands that have one.
    """

    closed: core.ClosedJaxpr
    which: tuple[int, ...]

    def zeros(self) -> frozenset[int]:
        """Operands whose cotangent is zero whatever their values are."""
        jaxpr = self.closed.jaxpr
        made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

        def is_zero(atom: Any) -> bool:
            if isinstance(atom, core.Literal):
                return bool(np.all(np.asarray(atom.val) == 0))
            if (eqn := made.get(atom)) is None:
                return False
            name = eqn.primitive.name
            return name == "broadcast_in_dim" and is_zero(eqn.invars[0])

        outs = zip(self.which, jaxpr.outvars, strict=True)
        return frozenset(i for i, out in outs if is_zero(out))


def taken(jaxpr: Any, count: int) -> dict[Any, list[int]]:
    """Equations with a derivative by hand, and those of their operands by which it is taken.

    These are those that depend on the first `count` inputs: authors may refuse derivatives by others.
    """
    found: dict[Any, set[int]] = {}

    def visit(eqn: Any, given: Sequence[bool]) -> bool:
        if eqn.primitive.name not in _BY_HAND:
            return False
        found.setdefault(eqn, set()).update(i for i in _floats(eqn.invars) if given[i])
        return True  # What is within is not differentiated.

    jaxprs.follow(jaxpr, jaxprs.first_inputs(jaxpr, count), visit)
    return {eqn: sorted(which) for eqn, which in found.items() if which}


def backward(eqn: Any, which: Sequence[int]) -> Backward | None:
    """Traces the backward pass of an equation for some operands; None if its author refuses that."""
    traced = derivative(eqn, which)
    return None if traced is None else Backward(jaxprs.flat(traced), tuple(which))


def derivative(eqn: Any, which: Sequence[int]) -> core.ClosedJaxpr | None:
    """The same as it is traced: (operands, cotangents of results) -> cotangents of those operands."""
    avals, outs = ([v.aval for v in atoms] for atoms in (eqn.invars, eqn.outvars))
    of = _floats(eqn.outvars)

    def pull(operands: Sequence[Any], cotangents: Any) -> Any:
        def forward(*given: Any) -> Any:
            values = list(operands)
            for i, x in zip(which, given, strict=True):
                values[i] = x
            results = jaxprs.bind(eqn, values)
            return [results[i] for i in of]

        return jax.vjp(forward, *(operands[i] for i in which))[1](cotangents)

    try:
        return jax.make_jaxpr(pull)(avals, [outs[i] for i in of])
    except Exception:  # Others' code, which may refuse derivatives that nobody takes of it.
        return None


def _floats(atoms: Sequence[Any]) -> list[int]:
    """The indices of those that may have a derivative."""
    return [i for i, v in enumerate(atoms) if jnp.issubdtype(v.aval.dtype, jnp.inexact)]


@contextlib.contextmanager
def reading(jaxpr: Any, count: int) -> Iterator[None]:
    """Backward passes of a jaxpr are traced once within, by what depends on its first `count` inputs."""
    token = _TAKEN.set(taken(jaxpr, count))
    try:
        yield
    finally:
        _TAKEN.reset(token)
        _kept.cache_clear()  # What they close over would be kept alive.


@functools.cache
def _kept(eqn: Any) -> Backward | None:
    which = _TAKEN.get().get(eqn)
    return None if which is None else backward(eqn, which)


def title(eqn: Any) -> str:
    """What its author calls the function, and where it is defined."""
    inner = eqn.params.get("call_jaxpr", eqn.params.get("fun_jaxpr"))
    if inner is None:
        return type(eqn.params.get("_prim")).__name__
    kind = "jax.custom_vjp" if eqn.primitive.name in NAMES else "jax.custom_jvp"
    return f"{kind} {getattr(inner.jaxpr.debug_info, 'func_src_info', '')}".strip()


def carrying(jaxpr: core.Jaxpr) -> set[Any] | None:
    """The variables on which results depend by a derivative that is not zero; None for all."""
    if not any(eqn.primitive.name in NAMES for eqn in jaxpr.eqns):
        return None
    found = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    for eqn in reversed(jaxpr.eqns):
        if not found.intersection(eqn.outvars) or eqn.primitive.name == "stop_gradient":
            continue
        traced = _kept(eqn) if eqn.primitive.name in NAMES else None
        zeros = frozenset() if traced is None else traced.zeros()
        operands = enumerate(eqn.invars)
        found |= {v for i, v in operands if i not in zeros and not isinstance(v, core.Literal)}
    return found


def use(eqn: Any, which: int, view: View, sizes: Any) -> tuple | None:
    """The rule for `dpx.clipping.uses`: factors of the cotangent of one operand, if it is a product."""
    del sizes
    traced = _kept(eqn)
    if traced is None or len(eqn.outvars) != 1 or which not in traced.which:
        return None
    live, _ = dce_jaxpr(traced.closed.jaxpr, [i == which for i in traced.which], instantiate=True)
    made: dict[Any, Any] = {v: e for e in live.eqns for v in e.outvars}
    var, axes = live.outvars[0], list(view.axes)
    while (found := made.get(var)) is not None and found.primitive.name != "dot_general":
        name = found.primitive.name
        if name == "transpose":
            order = found.params["permutation"]
            axes = [axes[order.index(i)] for i in range(len(order))]
        elif name != "convert_element_type" and name not in jaxprs.PLAIN:
            return None
        var = found.invars[found.outvars.index(var)]  # The barrier may be one for several values.
        if isinstance(var, core.Literal) or not jnp.issubdtype(var.aval.dtype, jnp.floating):
            return None
    if found is None:
        return None
    operands, cotangent = live.invars[:-1], live.invars[-1:]
    behind = [_behind(live, factor) for factor in found.invars]
    right = next((s for s in (0, 1) if behind[s].inputs.isdisjoint(operands)), None)
    if right is None or not behind[1 - right].inputs.isdisjoint(cotangent):
        return None  # A factor is made of both.
    consts = dict(zip(live.constvars, traced.closed.consts, strict=True))
    left_axes, right_axes = (_factor_axes(axes, found, side) for side in (1 - right, right))
    return (
        functools.partial(_evaluate, behind[1 - right], consts, operands),
        left_axes,
        right_axes,
        None,
        None,
        functools.partial(_from_cotangent, behind[right], consts, cotangent),
    )


def _factor_axes(axes: Sequence[tuple[int, ...]], product: Any, side: int) -> tuple:
    """What the axes of one factor of a product stand for, from those of the result."""
    contract, batch = product.params["dimension_numbers"]
    free = [
        [i for i in range(v.aval.ndim) if i not in (*contract[s], *batch[s])]
        for s, v in enumerate(product.invars)
    ]
    first = len(batch[0]) + (len(free[0]) if side else 0)
    found = {axis: (-1 - n,) for n, axis in enumerate(contract[side])}
    found |= {axis: axes[n] for n, axis in enumerate(batch[side])}
    found |= {axis: axes[first + n] for n, axis in enumerate(free[side])}
    return tuple(found[i] for i in range(len(found)))


class _Behind(NamedTuple):
    """A value of a jaxpr: the equations that it takes, in order, and the inputs that it depends on."""

    atom: Any
    eqns: list[Any]
    inputs: set[Any]


def _behind(jaxpr: core.Jaxpr, atom: Any) -> _Behind:
    wanted, eqns = {atom}, []
    for eqn in reversed(jaxpr.eqns):
        if wanted.intersection(eqn.outvars):
            wanted.update(jaxprs.variables(eqn))
            eqns.append(eqn)
    return _Behind(atom, eqns[::-1], wanted.intersection(jaxpr.invars))


def _evaluate(
    behind: _Behind, consts: dict[Any, Any], inputs: Sequence[Any], values: Sequence[jax.Array]
) -> jax.Array:
    env = consts | dict(zip(inputs, values, strict=True))
    (found,) = jaxprs.run(behind.eqns, env, [behind.atom])
    return settled(found) if behind.eqns else found


def _from_cotangent(
    behind: _Behind, consts: dict[Any, Any], inputs: Sequence[Any], cotangent: jax.Array
) -> jax.Array:
    return _evaluate(behind, consts, inputs, [cotangent])
