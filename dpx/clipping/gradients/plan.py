"""Chooses, from shapes alone, the form of every gradient."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from dpx.clipping import jaxprs, meshes, mixing
from dpx.clipping.gradients import primitives  # noqa: F401  It registers the rules.
from dpx.clipping.gradients.forms import Form, Held, Within, Zero, factors
from dpx.clipping.gradients.reading import Reader
from dpx.clipping.materialize import is_vectorised
from dpx.clipping.rounding import settled

# A per-example gradient is held unless its factors have fewer elements by this much: held, it
# needs no second product for the clipped sum.
FAVOR_GRADIENT = 1.5

# A table that is looked up has gradients that are nearly all zeros: they are held only if they
# are the smaller ones.
FAVOR_TABLE = 1.0

# Equations that a gradient passes on its way out of a block, and that do not change its norm.
MOVES = ("transpose", "reshape", "squeeze", "expand_dims", "convert_element_type", *jaxprs.PLAIN)

# The factors of all iterations of a loop that uses a parameter are handed out while they are no larger than
# its gradient by this much.
MOST_FACTORS = 128


class Program(NamedTuple):
    """The gradients of one example's loss, traced and read.

    Attributes:
      reader: of the program that computes them: (parameters, example) -> loss, gradients.
      loss: the number of the loss.
      forms: that of each parameter's gradient.
    """

    reader: Reader
    loss: int
    forms: list[Form]


def trace(loss: Callable, leaves: Sequence[jax.Array], batch: Any, within: bool = False) -> Program:
    """Traces and reads the gradients of one example's loss.

    Args:
      loss: of one example.
      leaves: the parameters.
      batch: of which only shapes matter.
      within: whether rematerialised blocks hand out norms where they can, and not what these are made of.

    Raises:
      ValueError: for a loss that mixes examples, and, in a strict call, for what `reports` says.
    """
    example = meshes.one_example(batch)
    closed = jax.make_jaxpr(loss)(list(leaves), example)
    mixing.check(closed, len(leaves), is_vectorised(batch))
    value = core.jaxpr_as_fun(closed)

    def gradients(leaves: list, *example: Any) -> Any:
        return jax.value_and_grad(lambda p: value(*p, *example)[0])(leaves)

    traced = jax.make_jaxpr(gradients)(list(leaves), *jax.tree.leaves(example))
    inputs = len(traced.jaxpr.invars)
    reader = Reader(traced, [i < len(leaves) for i in range(inputs)])
    first, *outs = reader.jaxpr.outvars
    forms = [form(reader, out, leaf.shape, within) for out, leaf in zip(outs, leaves, strict=True)]
    if isinstance(first, core.Literal):
        number = reader.make(lambda value=first.val: jax.numpy.asarray(value, first.aval.dtype))
    else:
        number = reader.value(first)
    return Program(reader, number, forms)


def form(reader: Reader, out: Any, shape: Sequence[int], within: bool = False) -> Form:
    """The form of the gradient that a variable is."""
    if within and not reader.is_zero(out) and (inside := _within(reader, out)) is not None:
        return inside
    if (terms := reader.terms(out)) == []:
        return Zero()
    size = math.prod(shape)
    found = None if terms is None or not size else factors(reader, terms, shape)
    if found is None:
        return Held(reader.value(out))
    is_table = any(term.indexed for term in terms or ())
    if size > (FAVOR_TABLE if is_table else FAVOR_GRADIENT) * found.elements:
        return found
    if _adds_up_in_a_loop(reader, out) and found.elements <= MOST_FACTORS * size:
        numbers = found.numbers
        made = reader.make(
            lambda *values: found.gradient(dict(zip(numbers, values, strict=True)), shape), *numbers
        )
        return Held(made)
    return Held(reader.value(out))


def _within(reader: Reader, var: Any) -> Within | None:
    """The form of a gradient that a rematerialised block makes, perhaps in a loop; None for any other."""
    moves: list[Any] = []
    eqn = reader.made.get(var)
    while eqn is not None and eqn.primitive.name in MOVES:
        moves.append(eqn)
        var = eqn.invars[eqn.outvars.index(var)]
        eqn = None if isinstance(var, core.Literal) else reader.made.get(var)
    if eqn is None or eqn.primitive.name not in ("scan", *jaxprs.REMAT):
        return None
    which, inner = eqn.outvars.index(var), reader.body(eqn).reader
    out = inner.jaxpr.outvars[which]
    if isinstance(out, core.Literal):
        return None
    if eqn.primitive.name == "scan":
        first, last = jaxprs.scan_parts(eqn.params)
        if which < last - first or (deeper := _within(inner, out)) is None:
            return None
        number = deeper.number
        mine = form(inner, out, out.aval.shape)
    else:
        mine = form(inner, out, out.aval.shape)
        numbers = mine.numbers
        number = inner.make(
            lambda *values: mine.squared_norm(settled(dict(zip(numbers, values, strict=True)))),
            *numbers,
        )
    return Within(reader.handed(eqn, number), eqn, which, mine, tuple(moves[::-1]))


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
