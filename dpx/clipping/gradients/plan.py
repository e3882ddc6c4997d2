"""Chooses, from shapes alone, the form of every gradient."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from dpx.clipping import jaxprs, losses, reports, xla_cpu
from dpx.clipping.gradients import (
    gram,
    primitives,  # noqa: F401  It registers the rules.
)
from dpx.clipping.gradients.factors import Factors, factors
from dpx.clipping.gradients.forms import Form, Held, Parts, Within, Zero
from dpx.clipping.gradients.reading import Reader
from dpx.clipping.rounding import accumulator, gamma, in_products, settled

# A per-example gradient is held unless its factors have fewer elements by this much: held, it
# needs no second product for the clipped sum.
FAVOR_GRADIENT = 1.5

# A table that is looked up has gradients that are nearly all zeros: they are held only if they
# are the smaller ones.
FAVOR_TABLE = 1.0

# Equations that a gradient passes on its way out of a block, and that do not change its norm.
MOVES = ("transpose", "reshape", "squeeze", "expand_dims", "convert_element_type", *jaxprs.PLAIN)

# What is evaluated again for sums: rematerialised blocks, and loops of them.
BLOCKS = ("scan", *jaxprs.REMAT)

# The factors of all iterations of a loop that uses a parameter are handed out while they are no larger than
# its gradient by this much.
MOST_FACTORS = 128


class Program(NamedTuple):
    """The gradients of one example's loss, traced and read.

    Attributes:
      reader: of the program that computes them: (parameters, example) -> loss, gradients.
      loss: the number of the loss.
      forms: that of each parameter's gradient.
      uses: for each parameter, what it goes into, as far as its gradient says so.
      unruled: for each, the primitives because of which its gradient is no sum of outer products.
    """

    reader: Reader
    loss: int
    forms: list[Form]
    uses: list[tuple[str, ...]]
    unruled: list[tuple[str, ...]]


def made_again(method: str) -> tuple[str, ...]:
    """The primitives that a method of clipping evaluates again for the sum."""
    if method == "auto" and xla_cpu.keeps_blocks():
        return ("scan",)
    return () if method == "one_pass" else BLOCKS


def read(
    loss: losses.Loss, leaves: Sequence[jax.Array], batch: Any, vectorised: bool = True
) -> tuple[core.ClosedJaxpr, Reader]:
    """The program of one example's loss and its gradients, and its reader, which says what is always zero.

    Raises:
      ValueError: for a loss that mixes examples, and, in a strict call, for what `reports` says.
    """
    traced = losses.trace(loss, leaves, batch, vectorised)
    reader = Reader(traced, [i < len(leaves) for i in range(len(traced.jaxpr.invars))])
    reports.report_zero([reader.terms(out) == [] for out in reader.jaxpr.outvars[1:]])
    return traced, reader


def trace(
    loss: losses.Loss,
    leaves: Sequence[jax.Array],
    batch: Any,
    blocks: Sequence[str] = (),
    vectorised: bool = True,
) -> Program:
    """Traces and reads the gradients of one example's loss.

    Args:
      loss: of one example.
      leaves: the parameters.
      batch: of which only shapes matter.
      blocks: the primitives that hand out norms where they can, and not what these are made of.
      vectorised: whether the program will be, over more than one example.

    Raises:
      ValueError: for a loss that mixes examples, and, in a strict call, for what `reports` says.
    """
    return program(read(loss, leaves, batch, vectorised)[1], leaves, blocks)


def program(reader: Reader, leaves: Sequence[jax.Array], blocks: Sequence[str] = ()) -> Program:
    """What a reader says of the gradients of these parameters, for blocks as in `trace`."""
    first, *outs = reader.jaxpr.outvars
    forms = [form(reader, out, leaf.shape, blocks) for out, leaf in zip(outs, leaves, strict=True)]
    if isinstance(first, core.Literal):
        constant = jnp.asarray(first.val, jnp.result_type(first.val))
        number = reader.make(lambda: constant)
    else:
        number = reader.value(first)
    uses = [_uses(reader, out) for out in outs]
    unruled = [_unruled(reader, out, each) for out, each in zip(outs, forms, strict=True)]
    reports.check_rules(unruled)
    return Program(reader, number, forms, uses, unruled)


def rounding(program: Program, size: int, dtype: Any) -> float:
    """How far the sum over `size` examples is off at most, over the sum of their thresholds.

    The sum of n terms in any order errs by γ_n times the sum of their lengths: of one held gradient for each
    example; or of one product for each of P positions, and those lengths exceed that of their sum by
    1 / `gram.FLOOR` at most. Of what is made again for the sum nothing is known.
    """
    shares = [gamma(size + 4, dtype)]
    for each in program.forms:
        if each.again:
            return math.inf
        for one in each.products:
            terms = in_products(size * one.places) + len(one.terms) + 4
            shares.append(gamma(terms, dtype) / gram.FLOOR)
    return max(shares)


def _uses(reader: Reader, out: Any) -> tuple[str, ...]:
    """What a parameter goes into, as far as its gradient says so."""
    terms = reader.terms(out)
    if terms is not None:
        return tuple(term.name for term in terms)
    return (reader.reason(out) or "nothing",)


def _unruled(reader: Reader, out: Any, form: Form) -> tuple[str, ...]:
    """The primitives because of which a gradient is held, if it is no sum of outer products."""
    if not isinstance(form, Held) or not out.aval.size:
        return ()
    return () if _factors(reader, out, out.aval.shape) is not None else _uses(reader, out)


def form(
    reader: Reader, out: Any, shape: Sequence[int], blocks: Sequence[str] = (), gain: complex = 1.0
) -> Form:
    """The form of a number times the gradient that a variable is."""
    if reader.terms(out) == []:
        return Zero()
    if gain == 1 and (inside := _within(reader, out, blocks)) is not None:
        return inside
    if (parts := _parts(reader, out, blocks, gain)) is not None:
        return parts
    found, size = _factors(reader, out, shape, gain), math.prod(shape)
    if found is not None:
        is_table = any(each.term.indexed for each in found.terms)
        if size > (FAVOR_TABLE if is_table else FAVOR_GRADIENT) * found.elements:
            return found
        if _adds_up_in_a_loop(reader, out) and found.elements <= MOST_FACTORS * size:
            numbers = found.numbers
            made = reader.make(
                lambda *values: found.gradient(dict(zip(numbers, values, strict=True)), shape),
                *numbers,
            )
            return Held(made)
    if gain != 1:
        return Held(reader.make(lambda x: x * gain, out))
    return Held(reader.value(_before_widening(reader, out)))


def _before_widening(reader: Reader, out: Any) -> Any:
    """The narrow values that a gradient is cast from: they are as exact, and take less memory."""
    eqn = reader.maker(out)
    if eqn is None or eqn.primitive.name != "convert_element_type" or not _is_float(eqn.invars[0]):
        return out
    (operand,) = eqn.invars
    narrow, wide = operand.aval.dtype, out.aval.dtype
    widens = jnp.finfo(narrow).bits <= jnp.finfo(wide).bits
    widens &= accumulator(narrow) == accumulator(wide)
    return _before_widening(reader, operand) if widens else out


def _factors(reader: Reader, out: Any, shape: Sequence[int], gain: complex = 1.0) -> Factors | None:
    """A number times a gradient as outer products; None where it is none of one layout."""
    if not (terms := reader.terms(out)) or not math.prod(shape):
        return None
    return factors(reader, [term._replace(gain=gain * term.gain) for term in terms], shape)


def _parts(reader: Reader, var: Any, blocks: Sequence[str], gain: complex) -> Parts | None:
    """The form of a gradient that is put together from parts along one axis; None for any other."""
    # The axis, the beginning, the length, the value and the gain of each.
    found: list[tuple[int, int, int, Any, complex]] = []
    waiting = [(var, gain)]
    while waiting:
        atom, gain = waiting.pop()
        if reader.is_zero(atom):
            continue
        if (eqn := reader.maker(atom)) is None:
            return None
        name = eqn.primitive.name
        if name == "add_any":
            waiting += [(v, gain) for v in eqn.invars]
        elif name == "convert_element_type" and _is_float(eqn.invars[0]):
            waiting.append((eqn.invars[0], gain))
        elif name in ("mul", "div", "neg") and (factor := jaxprs.gain(eqn)) is not None:
            (own,) = jaxprs.variables(eqn)
            if own.aval.shape != eqn.outvars[0].aval.shape:
                return None
            waiting.append((own, gain * factor))
        elif (pieces := _pieces(reader, eqn)) is not None:
            found += [(*each, gain) for each in pieces if not reader.is_zero(each[-1])]
        else:
            return None
    if len({axis for axis, *_ in found}) != 1 or any(
        isinstance(v, core.Literal) for *_, v, _ in found
    ):
        return None
    found.sort(key=lambda each: each[1])
    ends = [low + length for _, low, length, *_ in found]
    if any(end > low for end, (_, low, *_) in zip(ends, found[1:], strict=False)):
        return None
    parts = [
        (low, length, form(reader, v, v.aval.shape, blocks, gain))
        for _, low, length, v, gain in found
    ]
    return Parts(found[0][0], tuple(parts))


def _pieces(reader: Reader, eqn: Any) -> list[tuple[int, int, int, Any]] | None:
    """What an equation puts together along an axis: axis, beginning, length and value of each."""
    name = eqn.primitive.name
    if name == "stack":
        return [(eqn.params["axis"], i, 1, v) for i, v in enumerate(eqn.invars)]
    if name == "concatenate":
        axis = eqn.params["dimension"]
        lengths = [v.aval.shape[axis] for v in eqn.invars]
        starts = itertools.accumulate(lengths, initial=0)
        return [(axis, low, n, v) for low, n, v in zip(starts, lengths, eqn.invars, strict=False)]
    if name != "pad" or not reader.is_zero(eqn.invars[1]):
        return None
    config = [tuple(map(int, widths)) for widths in eqn.params["padding_config"]]
    axes = [i for i, widths in enumerate(config) if widths != (0, 0, 0)]
    if len(axes) != 1 or min(config[axes[0]]) < 0 or config[axes[0]][2]:
        return None
    (axis,), value = axes, eqn.invars[0]
    return [(axis, config[axis][0], value.aval.shape[axis], value)]


def _is_float(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.floating)


def _within(reader: Reader, var: Any, blocks: Sequence[str] = BLOCKS) -> Within | None:
    """The form of a gradient that a rematerialised block makes, perhaps in a loop; None for any other."""
    moves: list[Any] = []
    eqn = reader.maker(var)
    while eqn is not None and eqn.primitive.name in MOVES and _is_float(eqn.invars[0]):
        moves.append(eqn)
        var = eqn.invars[eqn.outvars.index(var)]
        eqn = reader.maker(var)
    if eqn is None or eqn.primitive.name not in blocks:
        return None
    which, inner = eqn.outvars.index(var), reader.body(eqn).reader
    out = inner.jaxpr.outvars[which]
    if isinstance(out, core.Literal):
        return None
    if eqn.primitive.name == "scan":
        first, last = jaxprs.scan_parts(eqn.params)
        if which < last - first or (deeper := _within(inner, out)) is None:
            return None
        number, held = deeper.number, deeper.form
    else:
        held = form(inner, out, out.aval.shape)
        numbers = held.numbers
        number = inner.make(
            lambda *values: held.squared_norm(settled(dict(zip(numbers, values, strict=True)))),
            *numbers,
        )
    # A sum of products over all examples is one product.
    sums = _factors(inner, out, out.aval.shape) or form(inner, out, out.aval.shape)
    return Within(reader.handed(eqn, number), eqn, which, held, sums, tuple(moves[::-1]))


def _adds_up_in_a_loop(reader: Reader, var: Any) -> bool:
    """Whether a value is added up by the iterations of a loop, one outer product in each: that is slow."""
    eqn = reader.made.get(var)
    while eqn is not None and eqn.primitive.name in (
        "transpose",
        "reshape",
        "convert_element_type",
    ):
        var = eqn.invars[0]
        eqn = reader.made.get(var)
    if eqn is None or eqn.primitive.name != "scan":
        return False
    first, last = jaxprs.scan_parts(eqn.params)
    return eqn.outvars.index(var) < last - first
