"""Rules by which the results of equations are read as sums of outer products, one function a primitive."""

import itertools
import math
from typing import Any

from jax.extend import core

from dpx.clipping import jaxprs
from dpx.clipping.gradients.convolution import Convolution
from dpx.clipping.gradients.outer import Factor, Outer, labels
from dpx.clipping.gradients.reading import Reader, Terms, rule

# Primitives that lay products out, or add them up.
MOVES = ("add_any", "convert_element_type", "reshape", "transpose", *jaxprs.PLAIN)


@rule("dot_general")
def dot_general(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """A product of two values of one example, or of the gradient of a weight with a value that is shared.

    The latter makes the gradients of adapters that are merged with the weight: of a factor, which is smaller.
    """
    if any(isinstance(v, core.Literal) for v in eqn.invars):
        return None
    for side in (0, 1):
        if (terms := _multiplied(reader, eqn, side)) is not None:
            return terms
    (contract, batch), sizes = eqn.params["dimension_numbers"], {}
    places, blocks = labels(len(contract[0])), labels(len(batch[0]))
    factors = []
    for side, v in enumerate(eqn.invars):
        known = dict(zip((*contract[side], *batch[side]), (*places, *blocks), strict=True))
        rest = iter(labels(v.aval.ndim - len(known)))
        axes = tuple(known[i] if i in known else next(rest) for i in range(v.aval.ndim))
        sizes |= dict(zip(axes, v.aval.shape, strict=True))
        factors.append(Factor(reader.value(v), axes))
    free = [a for f in factors for a in f.axes if a not in (*places, *blocks)]
    axes, (left, right) = tuple((a,) for a in (*blocks, *free)), factors
    return [Outer("dot_general", left, right, axes, sizes, exact=jaxprs.is_exact(eqn.params))]


def _multiplied(reader: Reader, eqn: Any, side: int) -> Terms | None:
    """The terms of one operand, each with a factor multiplied by the other operand, which is shared."""
    contract, batch = eqn.params["dimension_numbers"]
    own, other = eqn.invars[side], eqn.invars[1 - side]
    if not reader.is_shared(other) or not _is_product(reader, own):
        return None
    taken, rest = (*contract[side], *batch[side]), (*contract[1 - side], *batch[1 - side])
    of_own = dict(zip(rest, taken, strict=True))
    new = {i: labels(1)[0] for i in range(other.aval.ndim) if i not in of_own}
    sizes = {label: other.aval.shape[i] for i, label in new.items()}

    def of_term(term: Outer) -> Outer | None:
        axes = [(new[i],) if i in new else term.axes[of_own[i]] for i in range(other.aval.ndim)]
        summed = [a for i in contract[side] for a in term.axes[i]]
        new_term = term.times(other, axes, reader, sizes, summed, eqn.params["precision"])
        free = [axis for i, axis in enumerate(term.axes) if i not in taken], [(a,) for a in sizes]
        made = [term.axes[i] for i in batch[side]], *free[:: 1 - 2 * side]
        axes = tuple(itertools.chain(*made))
        return new_term and new_term._replace(axes=axes, detour=math.inf)

    return reader.each(own, of_term)


def _is_product(reader: Reader, atom: Any) -> bool:
    """Whether a value looks like the gradient of a weight, rather than like that of what a layer returned."""
    if (eqn := reader.maker(atom)) is None:
        return False
    if eqn.primitive.name == "dot_general":
        return not any(map(reader.is_shared, eqn.invars))
    if eqn.primitive.name in MOVES or jaxprs.gain(eqn) is not None:
        return all(_is_product(reader, v) for v in jaxprs.variables(eqn))
    return eqn.primitive.name in ("scan", *jaxprs.REMAT)


@rule("add", "add_any", "sub")
def add(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """The terms of both operands."""
    if any(v.aval.shape != eqn.outvars[0].aval.shape for v in eqn.invars):
        return None
    first, second = map(reader.terms, eqn.invars)
    if first is None or second is None:
        return None
    sign = -1 if eqn.primitive.name == "sub" else 1
    return [*first, *(term._replace(gain=sign * term.gain) for term in second)]


@rule(*jaxprs.PLAIN, "reduce_precision", "convert_element_type")
def same(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """The same value, laid out or rounded otherwise: products are made in float32 all the same."""
    return reader.terms(eqn.invars[which])


@rule("neg", "mul", "div")
def scaled(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """A value times a number, or times an array that varies along axes of one factor alone."""
    shape, divides = eqn.outvars[0].aval.shape, eqn.primitive.name == "div"
    if (gain := jaxprs.gain(eqn)) is not None:
        (own,) = jaxprs.variables(eqn)
        if own.aval.shape != shape:
            return None
        return reader.each(own, lambda term: term._replace(gain=gain * term.gain))
    if any(isinstance(v, core.Literal) for v in eqn.invars):
        return None
    for own, other in (eqn.invars, *([] if divides else [eqn.invars[::-1]])):
        axes = _varying(reader, other)
        if own.aval.shape != shape or math.prod(shape[i] for i in axes) == own.aval.size > 1:
            continue
        at = tuple(slice(None) if i in axes else 0 for i in range(other.aval.ndim))
        source = reader.make(lambda x, at=at: 1 / x[at] if divides else x[at], other)
        terms = reader.each(own, lambda t: t.times(source, [t.axes[i] for i in axes], reader))  # noqa: B023
        if terms is not None:
            return terms
    return None


def _varying(reader: Reader, atom: Any) -> list[int]:
    """The axes along which an array varies: those of what was broadcast to it, or all."""
    eqn, axes = reader.maker(atom), dict(enumerate(range(atom.aval.ndim)))
    if eqn is not None and eqn.primitive.name == "broadcast_in_dim":
        (atom, *_), axes = eqn.invars, eqn.params["broadcast_dimensions"]
    return [axes[i] for i, n in enumerate(atom.aval.shape) if n > 1]


@rule("transpose")
def transpose(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """The same with its axes in another order."""
    (operand,), order = eqn.invars, eqn.params["permutation"]
    return reader.each(operand, lambda term: term._replace(axes=tuple(term.axes[i] for i in order)))


@rule("reshape", "squeeze", "expand_dims", "broadcast_in_dim")
def reshape(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """The same in another shape, with as many entries."""
    operand, shape = eqn.invars[0], eqn.outvars[which].aval.shape
    in_order = eqn.primitive.name != "reshape" or eqn.params["dimensions"] is None
    if isinstance(operand, core.Literal) or math.prod(shape) != operand.aval.size or not in_order:
        return None
    return reader.each(operand, lambda term: term.reshaped(shape, reader))


@rule("reduce_sum")
def reduce_sum(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """Sums along axes: what were blocks are positions."""
    if eqn.invars[0].aval.ndim == len(eqn.params["axes"]):
        return None

    def added_up(term: Outer | None) -> Outer | None:
        for axis in sorted(eqn.params["axes"], reverse=True):
            term = term and term.without(axis, reader)
        return term

    return reader.each(eqn.invars[0], added_up)


@rule("conv_general_dilated")
def conv_general_dilated(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """A convolution of two values: patches of the first, and the second."""
    if any(map(reader.is_shared, eqn.invars)):
        return None
    convolution, (x, kernel) = Convolution(eqn), eqn.invars
    left = Factor(reader.make(convolution.patches, x), convolution.left)
    right = Factor(reader.make(convolution.grouped, kernel), convolution.right)
    result, exact = (convolution.axes, convolution.sizes), jaxprs.is_exact(eqn.params)
    return [Outer("conv_general_dilated", left, right, *result, exact=exact)]


@rule("scan", *jaxprs.REMAT)
def body(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """The terms of the body's own result, of each iteration, or of each addition to what is carried."""
    inner, (first, last) = reader.body(eqn).jaxpr, jaxprs.carried(eqn)
    if which >= last - first:
        return reader.lifted(eqn, which)
    start = reader.terms(eqn.invars[first + which])
    adds = reader.body(eqn).count_from_zero(inner.invars[first + which], inner.outvars[which])
    if start is None or not adds or (added := reader.lifted(eqn, which)) is None:
        return None
    return [*start, *added]
