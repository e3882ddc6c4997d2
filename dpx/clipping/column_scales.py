"""Scales of a weight's columns, moved behind the products of the weight.

Weight norm multiplies each column of a weight by a number s that is made of parameters alone. Then

    x @ (w · s) = (x @ w) · s,

and what stands on the right is a plain product, whose result x @ w is also what the gradient by s is made
of. On the left that takes one more product, of x with w.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from dpx.clipping import jaxprs


class Scale(NamedTuple):
    """What a weight is multiplied by, or divided.

    Attributes:
      name: "mul" or "div".
      var: a value that is repeated along other axes.
      axes: for each axis of it that is longer than one, that of the weight.
    """

    name: str
    var: Any
    axes: tuple[int, ...]


def behind_products(closed: core.ClosedJaxpr, count: int) -> core.ClosedJaxpr:
    """The same flat jaxpr, its first `count` inputs being parameters."""
    jaxpr = closed.jaxpr
    known = {*jaxpr.constvars, *jaxpr.invars[:count]}
    maker: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        if not eqn.effects and all(v in known for v in jaxprs.variables(eqn)):
            known.update(eqn.outvars)
            maker |= dict.fromkeys(eqn.outvars, eqn)
    consumers = jaxprs.consumers(jaxpr)
    moved: dict[Any, tuple[Any, list[Scale]]] = {}
    for var in maker:
        users = [e for e in consumers.get(var, ()) if e is None or e.outvars[0] not in known]
        weight, scales = _unscaled(maker, var)
        if users and scales and all(e and _behind(e, var, scales) is not None for e in users):
            moved[var] = weight, scales
    if not moved:
        return closed

    def evaluate(*arguments: Any) -> list[Any]:
        env = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arguments], strict=True)
        )

        def one(eqn: Any, values: list) -> list[Any]:
            wanted = [] if eqn.outvars[0] in known else [v for v in eqn.invars if is_moved(v)]
            if not wanted:
                return jaxprs.bind(eqn, values)
            (var,) = wanted
            weight, scales = moved[var]
            values = [
                env[weight] if v is var else x for v, x in zip(eqn.invars, values, strict=True)
            ]
            (out,) = jaxprs.bind(eqn, values)
            places = _behind(eqn, var, scales) or {}
            for scale in reversed(scales):
                out = _applied(scale, env[scale.var], out, [places[a] for a in scale.axes])
            return [out]

        return jaxprs.run(jaxpr.eqns, env, jaxpr.outvars, one)

    def is_moved(atom: Any) -> bool:
        return not isinstance(atom, core.Literal) and atom in moved

    return jax.make_jaxpr(evaluate)(*closed.in_avals)


def _unscaled(maker: dict[Any, Any], var: Any) -> tuple[Any, list[Scale]]:
    """What a variable is a multiple of, and by what it was multiplied, the last one first."""
    scales: list[Scale] = []
    while (eqn := maker.get(var)) is not None and eqn.primitive.name in ("mul", "div"):
        for kept, by in ((0, 1), (1, 0)) if eqn.primitive.name == "mul" else ((0, 1),):
            scale, of = _scale(maker, eqn, by), eqn.invars[kept]
            if scale and not isinstance(of, core.Literal) and not _scale(maker, eqn, kept):
                scales.append(scale)
                var = of
                break
        else:
            break
    return var, scales


def _scale(maker: dict[Any, Any], eqn: Any, which: int) -> Scale | None:
    """An operand that is repeated along other axes of the result."""
    var, shape = eqn.invars[which], eqn.outvars[0].aval.shape
    if isinstance(var, core.Literal):
        return None
    axes: Sequence[int] = range(var.aval.ndim)
    if var.aval.shape == shape:
        if (made := maker.get(var)) is None or made.primitive.name != "broadcast_in_dim":
            return None
        (var, *_), axes = made.invars, made.params["broadcast_dimensions"]
        if isinstance(var, core.Literal) or var.aval.size == eqn.outvars[0].aval.size:
            return None
    long = zip(axes, var.aval.shape, strict=True)
    return Scale(eqn.primitive.name, var, tuple(axis for axis, n in long if n > 1))


def _behind(eqn: Any, var: Any, scales: Sequence[Scale]) -> dict[int, int] | None:
    """Where axes of a weight are in its product; None where a scale cannot be moved behind it."""
    sides = [i for i, v in enumerate(eqn.invars) if v is var]
    types = {v.aval.dtype for v in (*eqn.invars, *eqn.outvars, *(s.var for s in scales))}
    if len(sides) != 1 or types != {jnp.dtype("float32")}:
        return None
    places = dict(_places(eqn, sides[0]))
    return places if all(a in places for scale in scales for a in scale.axes) else None


def _places(eqn: Any, side: int) -> Iterator[tuple[int, int]]:
    """(axis of an operand, axis of the product) for those that are not summed over."""
    name = eqn.primitive.name
    if name == "conv_general_dilated" and side == 1:
        numbers = eqn.params["dimension_numbers"]
        yield numbers.rhs_spec[0], numbers.out_spec[1]
    if name == "dot_general":
        contract, batch = eqn.params["dimension_numbers"]
        yield from zip(batch[side], range(len(batch[side])), strict=True)
        free = [
            [i for i in range(v.aval.ndim) if i not in (*contract[s], *batch[s])]
            for s, v in enumerate(eqn.invars)
        ]
        first = len(batch[side]) + (len(free[0]) if side else 0)
        yield from zip(free[side], range(first, first + len(free[side])), strict=True)


def _applied(scale: Scale, value: jax.Array, out: jax.Array, places: Sequence[int]) -> jax.Array:
    """The product times a scale, whose axes are at these places in it."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    value = value.reshape([n for n in value.shape if n > 1]).transpose(order)
    # Not broadcast: of the product's size, it would count as a weight that is a function of another.
    value = value.reshape([n if i in places else 1 for i, n in enumerate(out.shape)])
    return out * value if scale.name == "mul" else out / value
