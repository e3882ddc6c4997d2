"""How the results of equations are read as sums of outer products: one function a primitive."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from dpx.clipping import jaxprs
from dpx.clipping.gradients import convolution, look_ups
from dpx.clipping.gradients.outer import Factor, Outer, labels
from dpx.clipping.gradients.reading import Reader, Terms, rule


@rule("dot_general")
def dot_general(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """A product of two values, or of a sum of outer products with what parameters alone decide."""
    del which
    for side in (0, 1):
        own, other = eqn.invars[side], eqn.invars[1 - side]
        if reader.is_shared(other) and not reader.is_shared(own):
            found = _times_fixed(reader, eqn, side)
            if found is not None:
                return found
    if any(isinstance(v, core.Literal) for v in eqn.invars):
        return None
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


def _times_fixed(reader: Reader, eqn: Any, side: int) -> Terms | None:
    """A sum of outer products, with factors smaller than itself, times a fixed matrix along one axis."""
    own = eqn.invars[side]
    if isinstance(eqn.invars[1 - side], core.Literal):
        return None
    found = reader.terms(own)
    if not found or own.aval.size <= sum(term.elements for term in found):
        return None
    (contract, batch), other = eqn.params["dimension_numbers"], eqn.invars[1 - side]
    if batch[0] or len(contract[0]) != 1:
        return None
    (axis,), (fixed,) = contract[side], contract[1 - side]
    changed = []
    for term in found:
        mine = [a for a in term.axes[axis] if term.sizes[a] > 1]
        if len(mine) != 1 or mine[0] in term.indexed or all(term.owners(mine[0])):
            return None
        (label,) = mine
        right = term.owners(label)[1]
        factor = term.factors[right]
        at, new = factor.axes.index(label), labels(other.aval.ndim - 1)
        value = reader.make(
            lambda x, y, at=at: jnp.tensordot(x, y, ((at,), (fixed,))), factor.value, other
        )
        kept = tuple(a for a in factor.axes if a != label)
        lengths = [n for i, n in enumerate(other.aval.shape) if i != fixed]
        rest = [a for i, a in enumerate(term.axes) if i != axis]
        added = [(a,) for a in new]
        axes = (*rest, *added) if side == 0 else (*added, *rest)
        sizes = term.sizes | dict(zip(new, lengths, strict=True))
        term = term.with_factor(right, Factor(value, (*kept, *new)), axes=axes, sizes=sizes)
        changed.append(term)
    return changed


@rule("add", "add_any", "sub")
def add(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """The terms of both."""
    del which
    if any(v.aval.shape != eqn.outvars[0].aval.shape for v in eqn.invars):
        return None
    first, second = map(reader.terms, eqn.invars)
    if first is None or second is None:
        return None
    sign = -1 if eqn.primitive.name == "sub" else 1
    return [*first, *(term._replace(gain=sign * term.gain) for term in second)]


@rule(*jaxprs.PLAIN, "reduce_precision")
def same(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """What a value is however it is laid out."""
    return reader.terms(eqn.invars[which])


@rule("convert_element_type")
def convert_element_type(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """What is rounded to another type of float: products are made in float32 all the same."""
    del which
    (operand,) = eqn.invars
    floating = jnp.issubdtype(operand.aval.dtype, jnp.floating)
    return reader.terms(operand) if floating else None


@rule("neg", "mul", "div")
def scaled(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """A value times a number, or times an array that varies along axes of one factor alone."""
    del which
    if (gain := jaxprs.gain(eqn)) is not None:
        (own,) = jaxprs.variables(eqn)
        if own.aval.shape != eqn.outvars[0].aval.shape:
            return None
        return reader.each(own, lambda term: term._replace(gain=gain * term.gain))
    if eqn.primitive.name == "neg" or any(isinstance(v, core.Literal) for v in eqn.invars):
        return None
    candidates = [(0, 1)] if eqn.primitive.name == "div" else [(0, 1), (1, 0)]
    for own, other in ((eqn.invars[i], eqn.invars[j]) for i, j in candidates):
        source, axes = _stretched(reader, other)
        if own.aval.shape != eqn.outvars[0].aval.shape or source.aval.size == own.aval.size > 1:
            continue
        if eqn.primitive.name == "div":
            source = reader.make(lambda x: 1 / x, source)
        found = reader.each(own, lambda term: term.scaled(source, axes, reader))  # noqa: B023
        if found is not None:
            return found
    return None


def _stretched(reader: Reader, atom: Any) -> tuple[Any, list[int]]:
    """What an array is made of by `broadcast_in_dim`, without axes of length one, and where its axes went."""
    axes = [i for i, n in enumerate(atom.aval.shape) if n > 1]
    while (eqn := reader.maker(atom)) is not None:
        name = eqn.primitive.name
        if name == "broadcast_in_dim" and not isinstance(eqn.invars[0], core.Literal):
            (operand,) = eqn.invars
            to = eqn.params["broadcast_dimensions"]
            # Which axes of the operand are longer than one, and where they end up.
            position = {
                axis: axes[rank]
                for rank, axis in enumerate(i for i, n in enumerate(atom.aval.shape) if n > 1)
            }
            axes = [position[to[i]] for i, n in enumerate(operand.aval.shape) if n > 1]
            atom = operand
        elif name in ("reshape", "squeeze", "expand_dims") and _without_ones(
            eqn.invars[0]
        ) == _without_ones(atom):
            atom = eqn.invars[0]
        else:
            break
    return atom, axes


def _without_ones(v: Any) -> list[int]:
    return [n for n in v.aval.shape if n > 1]


@rule("transpose")
def transpose(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """The same with its axes in another order."""
    del which
    order = eqn.params["permutation"]
    return reader.each(
        eqn.invars[0], lambda term: term._replace(axes=tuple(term.axes[i] for i in order))
    )


@rule("reshape", "squeeze", "expand_dims")
def reshape(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """The same in another shape."""
    shape = eqn.outvars[which].aval.shape
    return reader.each(eqn.invars[0], lambda term: term.reshaped(shape, reader))


@rule("broadcast_in_dim")
def broadcast_in_dim(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """New axes of length one."""
    (operand, *_), shape = eqn.invars, eqn.outvars[which].aval.shape
    if isinstance(operand, core.Literal) or math.prod(shape) != operand.aval.size:
        return None
    return reader.each(operand, lambda term: term.reshaped(shape, reader))


@rule("reduce_sum")
def reduce_sum(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """Sums along axes: what were blocks are positions."""
    del which
    if eqn.invars[0].aval.ndim == len(eqn.params["axes"]):
        return None

    def added_up(term: Outer | None) -> Outer | None:
        for axis in sorted(eqn.params["axes"], reverse=True):
            term = None if term is None else term.without(axis, reader)
        return term

    return reader.each(eqn.invars[0], added_up)


@rule("rev")
def rev(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """The same with entries along axes in the opposite order."""
    del which
    shape = eqn.invars[0].aval.shape

    def turned(term: Outer | None) -> Outer | None:
        for axis in eqn.params["dimensions"]:
            size = shape[axis]
            rows = functools.partial(
                lambda i, size: jnp.where(i < size, size - 1 - i, size), size=size
            )
            if term is not None and size > 1:
                term = term.along(axis, size, lambda x, at: jnp.flip(x, at), reader, rows)
        return term

    return reader.each(eqn.invars[0], turned)


@rule("slice")
def slice_(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """A part of the value is made of a part of a factor."""
    starts, strides = eqn.params["start_indices"], eqn.params["strides"]
    shape = eqn.outvars[which].aval.shape
    return _parts(reader, eqn.invars[0], starts, shape, strides or [1] * len(starts))


@rule("split")
def split(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """One of several parts."""
    axis, (operand,) = eqn.params["axis"], eqn.invars
    starts = [0] * operand.aval.ndim
    starts[axis] = sum(eqn.params["sizes"][:which])
    return _parts(reader, operand, starts, eqn.outvars[which].aval.shape, [1] * len(starts))


def _parts(
    reader: Reader, operand: Any, starts: Sequence[int], shape: Sequence[int], steps: Sequence[int]
) -> Terms | None:
    whole = operand.aval.shape

    def part(term: Outer | None) -> Outer | None:
        for axis, (n, m) in enumerate(zip(whole, shape, strict=True)):
            first, step = starts[axis], steps[axis]
            if n == m or term is None:
                continue
            last = first + (m - 1) * step + 1

            def cut(x: Any, at: int, first=first, last=last, step=step) -> Any:
                return lax.slice_in_dim(x, first, last, step, at)

            def rows(i: Any, first=first, m=m, step=step) -> Any:
                moved = (i - first) // step
                return jnp.where((moved >= 0) & (moved < m) & ((i - first) % step == 0), moved, m)

            term = term.along(axis, m, cut, reader, rows)
        return term

    return reader.each(operand, part)


@rule("pad")
def pad(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """Zeros around a value are zeros around a factor; of any other value, it is a look-up of its rows."""
    del which
    operand, padding = eqn.invars
    config = [tuple(map(int, widths)) for widths in eqn.params["padding_config"]]
    whole = eqn.outvars[0].aval.shape
    if not reader.is_zero(padding):
        return None

    if reader.terms(operand) is not None:
        return reader.each(operand, lambda term: _padded(reader, term, config))
    axes = [i for i, widths in enumerate(config) if widths != (0, 0, 0)]
    if len(axes) != 1 or min(*config[axes[0]]) < 0:
        return None
    (axis,) = axes
    low, _, inner = config[axis]
    count = operand.aval.shape[axis]

    def places() -> Any:
        return low + (inner + 1) * jnp.arange(count)

    return [look_ups.rows(reader, "slice", reader.make(places), operand, axis, whole)]


def _padded(reader: Reader, term: Outer | None, config: Sequence[Any]) -> Outer | None:
    """A term between zeros."""
    for axis, (low, high, inner) in enumerate(config):
        if (low, high, inner) == (0, 0, 0) or term is None:
            continue
        if min(low, high) < 0:
            return None
        size = term.shape[axis]
        whole = low + high + size + inner * max(size - 1, 0)

        def fill(x: Any, at: int, widths=(low, high, inner)) -> Any:
            around = [(0, 0, 0)] * x.ndim
            around[at] = widths
            return lax.pad(x, jnp.zeros((), x.dtype), around)

        def rows(i: Any, low=low, inner=inner, size=size, whole=whole) -> Any:
            return jnp.where(i < size, low + i * (inner + 1), whole)

        term = term.along(axis, whole, fill, reader, rows)
    return term


@rule("concatenate")
def concatenate(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """Values one after the other: each between zeros."""
    del which
    axis, (whole,), found, low = eqn.params["dimension"], eqn.outvars, [], 0
    for operand in eqn.invars:
        length = operand.aval.shape[axis]
        config = [(0, 0, 0)] * whole.aval.ndim
        config[axis] = (low, whole.aval.shape[axis] - low - length, 0)
        low += length
        terms = reader.each(operand, lambda term, config=config: _padded(reader, term, config))
        if terms is None:
            return None
        found += terms
    return found


@rule("conv_general_dilated")
def conv_general_dilated(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """A convolution of two values: patches of the first, and the second."""
    del which
    if any(map(reader.is_shared, eqn.invars)):
        return None
    patches, grouped, left, right, axes, sizes = convolution.read(eqn)
    x, kernel = eqn.invars
    factors = Factor(reader.make(patches, x), left), Factor(reader.make(grouped, kernel), right)
    exact = jaxprs.is_exact(eqn.params)
    return [Outer("conv_general_dilated", *factors, axes, sizes, exact=exact)]


@rule(*jaxprs.REMAT)
def remat(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """What the block's own result is made of."""
    inner = reader.body(eqn).reader
    found = inner.terms(inner.jaxpr.outvars[which])
    return None if found is None else [reader.lifted(eqn, term, False) for term in found]


@rule("scan")
def scan(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """What each iteration's result is made of, or what each adds to what is carried."""
    inner = reader.body(eqn).reader
    result = inner.jaxpr.outvars[which]
    first, last = jaxprs.scan_parts(eqn.params)
    start: Terms | None = []
    if which < last - first:
        start = reader.terms(eqn.invars[first + which])
        carry = inner.jaxpr.invars[first + which]
        if start is None or not inner.count_from_zero(carry, result):
            return None
    found = inner.terms(result)
    if found is None or start is None:
        return None
    stacked = which >= last - first
    return [*start, *(reader.lifted(eqn, term, stacked) for term in found)]
