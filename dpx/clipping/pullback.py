"""What the derivative of a function of weights alone looks like, read off its jaxpr.

Reverse differentiation turns a cotangent of the result into cotangents of the weights, linearly. Where entry
[r, c] of what comes out depends on nothing but entry [r, c] (or c) of what went in, the derivative is a
product with a fixed array, which is then found by one evaluation at a cotangent of ones. So for every value
on the way it is noted which axes of the cotangent its axes follow, and over which axes the array varies by
which it was multiplied.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from dpx.clipping import jaxprs, meshes
from dpx.clipping.jaxprs import PLAIN

# Entry by entry, in all operands at once.
ELEMENTWISE = frozenset((
    *PLAIN, "abs", "acos", "add", "add_any", "and", "asin", "atan", "atan2", "ceil", "clamp",
    "convert_element_type", "cos", "cosh", "copy", "div", "eq", "erf", "exp", "exp2", "expm1",
    "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max",
    "min", "mul", "ne", "neg", "not", "or", "pow", "rem", "round", "rsqrt", "select_n", "sign",
    "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh",
))  # fmt: skip


class UnclearError(Exception):
    """The derivative is not linear, or cannot be shown to be."""


@dataclasses.dataclass(frozen=True)
class Value:
    """What is known of an array.

    Attributes:
      varies: the axes over which it varies, or, if it follows the cotangent, over which the array varies that
        the cotangent was multiplied by.
      base: the input that this array is a multiple of, if any; the multiple varies over the axes `ratio`.
      axes: None for an array that does not depend on the cotangent. Else, for every axis, the axis of the
        cotangent that it follows (None if it follows none): entries depend only on those with the same
        index there.
      zero: whether it is zero throughout.
    """

    varies: frozenset[int]
    base: int | None = None
    ratio: frozenset[int] = frozenset()
    axes: tuple[int | None, ...] | None = None
    zero: bool = False

    def follows(self, shape: Sequence[int]) -> bool:
        """Whether every axis, of those longer than one, is the same axis of the cotangent."""
        return self.axes == tuple(i if n > 1 else None for i, n in enumerate(shape))


class Derivative(NamedTuple):
    """A derivative, and what is known of it.

    Attributes:
      closed: its jaxpr, without calls.
      known: what is known of its variables.
    """

    closed: core.ClosedJaxpr
    known: dict[Any, Value]

    @property
    def results(self) -> list[Value]:
        """What is known of the results."""
        return [_look(self.known, atom) for atom in self.closed.jaxpr.outvars]

    def __call__(self, arguments: Sequence[Any], over: Collection[int] = ()) -> list[jax.Array]:
        """The results; those numbered `over` without the input that they are a multiple of.

        What multiplies that input is computed with ones in its place, so that a compiler that is asked for
        one entry of it reads no other, whereas a quotient would take sums over the whole input.
        """
        jaxpr = self.closed.jaxpr
        arrays = dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        arrays |= dict(zip(jaxpr.invars, arguments, strict=True))
        multiples = {
            v: meshes.ones_like(arrays[v]) for v in jaxpr.invars if self.known[v].base is not None
        }
        for eqn in jaxpr.eqns:
            jaxprs.run([eqn], arrays, ())
            if eqn.primitive.name == "optimization_barrier":
                pairs = zip(eqn.outvars, eqn.invars, strict=True)
                multiples |= {out: multiples[v] for out, v in pairs if v in multiples}
            elif (base := self.known[eqn.outvars[0]].base) is not None:
                # A divisor that is a multiple of the same input stays as it is.
                replaced = eqn.invars[:1] if eqn.primitive.name == "div" else eqn.invars
                mine = {v for v in replaced if _look(self.known, v).base == base}
                env = arrays | {v: multiples[v] for v in mine}
                multiples[eqn.outvars[0]] = jaxprs.run([eqn], env, eqn.outvars)[0]
        outs = jaxprs.run((), arrays, jaxpr.outvars)
        return [
            multiples[v] if i in over else x
            for i, (v, x) in enumerate(zip(jaxpr.outvars, outs, strict=True))
        ]


def read(
    closed: core.ClosedJaxpr,
    source: int,
    trusted: bool,
    wide: dict[int, frozenset[int]] | None = None,
) -> Derivative:
    """What is known of a derivative, input number `source` being the cotangent.

    Args:
      closed: the jaxpr of a derivative.
      source: which input is the cotangent.
      trusted: whether it is known to be linear, as all that JAX derives itself is.
      wide: inputs that vary over some of their axes only, and these axes.

    Raises:
      UnclearError: it may not be linear in the cotangent.
    """
    closed = jaxprs.flat(closed)
    known: dict[Any, Value] = {}
    for i, var in enumerate(closed.jaxpr.invars):
        long, ndim = _long(var), len(getattr(var.aval, "shape", ()))
        if i == source:
            known[var] = Value(
                frozenset(), axes=tuple(a if a in long else None for a in range(ndim))
            )
        elif wide and i in wide:
            known[var] = Value(wide[i])
        else:
            known[var] = Value(long, base=i)
    for eqn in closed.jaxpr.eqns:
        operands = [_look(known, atom) for atom in eqn.invars]
        if eqn.primitive.name == "optimization_barrier":
            results = operands
        else:
            results = [_apply(eqn, operands, out, trusted) for out in eqn.outvars]
        known.update(zip(eqn.outvars, results, strict=True))
    return Derivative(closed, known)


def _look(known: dict[Any, Value], atom: Any) -> Value:
    if isinstance(atom, core.Literal):
        return Value(_long(atom), zero=jnp.ndim(atom.val) == 0 and bool(atom.val == 0))
    return known.get(atom) or Value(_long(atom))


def _long(atom: Any) -> frozenset[int]:
    return frozenset(i for i, n in enumerate(getattr(atom.aval, "shape", ())) if n > 1)


def _apply(eqn: Any, operands: list[Value], out: Any, trusted: bool) -> Value:
    moved = [_moved(eqn, x) for x in operands[:1]]
    if moved and moved[0] is not None:
        return moved[0]
    linear = [x for x in operands if x.axes is not None]
    name = eqn.primitive.name
    ndim = len(out.aval.shape)
    # Axes of length one, and scalars, may be broadcast by the equation itself.
    if name in ELEMENTWISE and all(len(v.aval.shape) in (ndim, 0) for v in eqn.invars):
        if not linear:
            return _together(name, operands)
        whole = all(len(x.axes or ()) == ndim for x in linear)
        if whole and (found := _linear(eqn, operands, linear)) is not None:
            return found
    if linear and not trusted:
        raise UnclearError
    lost = (None,) * ndim if linear else None
    return Value(_long(out), axes=lost)


def _together(name: str, operands: list[Value]) -> Value:
    """An elementwise function of arrays that do not depend on the cotangent."""
    varies = frozenset().union(*(x.varies for x in operands))
    bases = [x for x in operands if x.base is not None]
    scaled = name in ("mul", "neg", *PLAIN) or (name == "div" and operands[0].base is not None)
    if len(bases) != 1 or not scaled:
        return Value(varies)
    others = frozenset().union(*(x.varies for x in operands if x is not bases[0]))
    return Value(varies, bases[0].base, bases[0].ratio | others)


def _linear(eqn: Any, operands: list[Value], linear: list[Value]) -> Value | None:
    """An elementwise function of what follows the cotangent; None unless it is linear."""
    name, first = eqn.primitive.name, operands[0]
    if name in ("mul", "div", "neg", *PLAIN):
        if len(linear) != 1 or (name == "div" and first.axes is None):
            return None
        if name == "div":  # What is divided by an array is no multiple of it.
            operands = [first, dataclasses.replace(operands[1], base=None)]
        return dataclasses.replace(_together("mul", operands), axes=linear[0].axes)
    if name == "convert_element_type" and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
        return first
    if name in ("add", "add_any", "sub", "select_n"):
        terms = operands[1:] if name == "select_n" else operands
        chosen = first.varies if name == "select_n" else frozenset()
        if any(x.axes is None and not x.zero for x in terms) or (name == "select_n" and first.axes):
            return None
        axes = tuple(
            a[0] if len(set(a)) == 1 else None for a in zip(*(x.axes for x in linear), strict=True)
        )
        varies = chosen.union(*(x.varies for x in linear))
        if chosen or len({x.base for x in linear}) > 1:
            return Value(varies, axes=axes)
        return Value(varies, linear[0].base, frozenset().union(*(x.ratio for x in linear)), axes)
    return None


def _moved(eqn: Any, x: Value) -> Value | None:
    """After an equation that rearranges axes, repeats along them or adds them up; None for any other."""
    name, params = eqn.primitive.name, eqn.params
    before = eqn.invars[0].aval.shape
    after = eqn.outvars[0].aval.shape
    if name == "transpose":
        origin = list(params["permutation"])
    elif name == "broadcast_in_dim":
        origin: list[int | None] = [None] * len(after)
        for i, axis in enumerate(params["broadcast_dimensions"]):
            origin[axis] = i if before[i] == after[axis] else None
    elif name == "reduce_sum":
        origin = [i for i in range(len(before)) if i not in params["axes"]]
    elif name in ("reshape", "squeeze", "expand_dims"):
        long = [i for i, n in enumerate(before) if n > 1]
        if [before[i] for i in long] != [n for n in after if n > 1] or params.get("dimensions"):
            return None
        rest = iter(long)
        origin = [next(rest) if n > 1 else None for n in after]
    else:
        return None
    varies = frozenset(o for o, i in enumerate(origin) if i in x.varies)
    axes = None if x.axes is None else tuple(None if i is None else x.axes[i] for i in origin)
    # A sum of multiples of an array is no multiple of it; that of nothing but ones is.
    if before == after and name not in ("transpose",):
        return dataclasses.replace(x, varies=varies, axes=axes)
    return Value(varies, axes=axes, zero=x.zero)
