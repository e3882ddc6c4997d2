"""Chooses, from shapes alone, the form of every gradient."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from dpx.clipping import jaxprs, losses, meshes, mixing, reports, xla_cpu
from dpx.clipping.gradients import entries, primitives  # noqa: F401  They register the rules.
from dpx.clipping.gradients.factors import Factors, factors
from dpx.clipping.gradients.forms import Form, Held, Parts, Within
from dpx.clipping.gradients.reading import Reader
from dpx.clipping.jaxprs import Values
from dpx.clipping.rounding import accumulator, settled

# A per-example gradient is held unless it has more elements than its factors by this much: held, it needs no
# second product for the clipped sum.
FAVOR_GRADIENT = 1.5
# Primitives that a gradient may pass on its way out of a block: they change no norm while the size stays.
MOVES = (
    "transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "convert_element_type",
    *jaxprs.PLAIN,
)  # fmt: skip
# Primitives that are evaluated again for sums: rematerialised blocks, and loops of them.
BLOCKS = ("scan", *jaxprs.REMAT)

METHODS = ("auto", "one_pass", "two_pass", "vmap")


def read(loss: Callable, leaves: Sequence[Any], batch: Any, vectorised: bool = True) -> Reader:
    """Traces and reads a program of (leaves, one example) that returns the loss and its gradients.

    Of `batch` only shapes matter. `vectorised` is whether several examples at once will be run.

    Raises:
      ValueError: for a loss that mixes examples, and, in a strict call, for what `reports` says.
    """
    example = meshes.one_example(batch)
    with losses.without_named_axes():
        traced = jax.make_jaxpr(jax.value_and_grad(loss))(list(leaves), example)
    mixing.check(traced, len(leaves), vectorised and losses.is_vectorised(batch))
    reader = Reader(traced, [i < len(leaves) for i in range(len(traced.jaxpr.invars))])
    reports.report_zero([v.aval.size and reader.terms(v) == [] for v in reader.jaxpr.outvars[1:]])
    return reader


def forms(reader: Reader, method: str = "one_pass") -> list[Form]:
    """The form of each parameter's gradient, for one of the `METHODS` of `dpx.clipped_grad`.

    Raises:
      ValueError: in a strict call, for what `reports` says.
    """
    outs = reader.jaxpr.outvars[1:]
    blocks = {"auto": ("scan",) if xla_cpu.keeps_blocks() else BLOCKS, "two_pass": BLOCKS}
    if method == "vmap":
        chosen: list[Form] = [Held(reader.value(out)) for out in outs]
    else:
        chosen = [form(reader, out, blocks.get(method, ())) for out in outs]
    reports.check_rules([each.unruled for each in chosen])
    return chosen


def uses(reader: Reader, out: Any) -> tuple[str, ...]:
    """The primitives that a parameter goes into, as far as its gradient says so."""
    if (terms := reader.terms(out)) is None:
        return ("nothing" if isinstance(out, core.Literal) else reader.stopped.get(out, "nothing"),)
    return tuple(term.name for term in terms)


def form(reader: Reader, out: Any, blocks: Sequence[str] = (), gain: float = 1.0) -> Form:
    """The form of a gradient times a number."""
    if reader.terms(out) == []:
        return Form()
    if gain == 1 and (inside := _within(reader, out, blocks)) is not None:
        return inside
    if (parts := _parts(reader, out, blocks, gain)) is not None:
        return parts
    if (kept := _factors(reader, out, gain)) is not None:
        if out.aval.size > kept.elements * FAVOR_GRADIENT:
            return kept
        if kept.elements <= max(term.detour for term in kept.terms):
            return Held(reader.make(kept.gradient, *kept.needs))
    unruled = uses(reader, out) if kept is None and out.aval.size else ()
    if gain != 1:
        return Held(reader.make(lambda x: x * gain, out), unruled)
    return Held(reader.value(_before_widening(reader, out)), unruled)


def _before_widening(reader: Reader, out: Any) -> Any:
    """The narrower values that a gradient is cast from: they are as exact, and take less memory."""
    while (eqn := reader.maker(out)) and eqn.primitive.name == "convert_element_type":
        (operand,), wide = eqn.invars, out.aval.dtype
        if not _is_float(operand) or jnp.finfo(operand.aval.dtype).bits > jnp.finfo(wide).bits:
            break
        if accumulator(operand.aval.dtype) != accumulator(wide):
            break
        out = operand
    return out


def _factors(reader: Reader, out: Any, gain: float = 1.0) -> Factors | None:
    """A gradient times a number as outer products; None if it is no sum of such, or of several layouts."""
    if not (terms := reader.terms(out)) or not out.aval.size:
        return None
    scaled = [term._replace(gain=gain * term.gain) for term in terms]
    return factors(reader, scaled, out.aval.shape)


def _parts(reader: Reader, var: Any, blocks: Sequence[str], gain: float) -> Parts | None:
    """The form of a gradient that is put together from parts along one axis; None for any other."""
    pieces = sorted(_pieces(reader, var, gain) or (), key=lambda piece: piece[:2])
    if len({axis for axis, *_ in pieces}) != 1:
        return None
    if any(low + n > after for (_, low, n, *_), (_, after, *_) in itertools.pairwise(pieces)):
        return None
    parts = ((low, n, form(reader, v, blocks, gain)) for _, low, n, v, gain in pieces)
    return Parts(pieces[0][0], tuple(parts))


def _pieces(reader: Reader, atom: Any, gain: float) -> list[tuple] | None:
    """The pieces that a value is put together from: of each the axis, beginning, length, value and gain."""
    if (eqn := reader.maker(atom)) is None or reader.is_zero(atom):
        return [] if reader.is_zero(atom) else None
    name = eqn.primitive.name
    adds = name == "add_any" or (name == "convert_element_type" and _is_float(eqn.invars[0]))
    if (factor := 1.0 if adds else jaxprs.gain(eqn)) is not None:
        operands = eqn.invars if adds else jaxprs.variables(eqn)
        if any(v.aval.shape != atom.aval.shape for v in operands):
            return None
        each = [_pieces(reader, v, gain * factor) for v in operands]
        return None if None in each else [piece for own in each for piece in own or ()]
    if name in ("stack", "concatenate"):
        axis = eqn.params["axis" if name == "stack" else "dimension"]
        lengths = [1 if name == "stack" else v.aval.shape[axis] for v in eqn.invars]
        parts = zip(itertools.accumulate(lengths, initial=0), lengths, eqn.invars, strict=False)
    elif name == "pad" and reader.is_zero(eqn.invars[1]):
        config = [tuple(map(int, widths)) for widths in eqn.params["padding_config"]]
        axes = [i for i, widths in enumerate(config) if widths != (0, 0, 0)]
        if len(axes) != 1 or min(config[axes[0]]) < 0 or config[axes[0]][2]:
            return None
        (axis,) = axes
        parts = [(config[axis][0], eqn.invars[0].aval.shape[axis], eqn.invars[0])]
    else:
        return None
    pieces = [(axis, *part, gain) for part in parts if not reader.is_zero(part[-1])]
    return None if any(isinstance(v, core.Literal) for *_, v, _ in pieces) else pieces


def _is_float(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.floating)


def _within(reader: Reader, var: Any, blocks: Sequence[str] = BLOCKS) -> Within | None:
    """The form of a gradient that a rematerialised block makes, perhaps in a loop; None for any other."""
    moves: list[Any] = []
    while (eqn := reader.maker(var)) and eqn.primitive.name in MOVES:
        operand = eqn.invars[eqn.outvars.index(var)]
        if not _is_float(operand) or operand.aval.size != var.aval.size:
            return None
        moves.append(eqn)
        var = operand
    if eqn is None or eqn.primitive.name not in blocks:
        return None
    which, inner = eqn.outvars.index(var), reader.body(eqn)
    out = inner.jaxpr.outvars[which]
    if isinstance(out, core.Literal):
        return None
    if eqn.primitive.name == "scan":
        first, last = jaxprs.carried(eqn)
        if which < last - first or (deeper := _within(inner, out)) is None:
            return None
        norm = deeper.norm
    else:
        normed = form(inner, out)

        def squared(*values: jax.Array) -> jax.Array:
            return normed.squared_norm(Values(zip(normed.needs, settled(values), strict=True)))

        norm = inner.make(squared, *normed.needs)
    # A sum of products over all examples is one product.
    sums = _factors(inner, out) or form(inner, out)
    return Within(reader.handed(eqn, norm), eqn, which, sums, tuple(moves[::-1]))
