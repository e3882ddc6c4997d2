"""Rules for gradients whose entries are moved along an axis, and for those of tables that are looked up.

The left factor of a look-up is a one-hot row, of which only the number is kept. A look-up along several axes
has one number, which counts all of their entries.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from dpx.clipping.gradients.outer import Factor, Outer, labels
from dpx.clipping.gradients.reading import Reader, Terms, rule


def moved(
    reader: Reader,
    operand: Any,
    shape: Sequence[int],
    changes: Mapping[int, Callable[[Any, int], Any]],
) -> Terms | None:
    """A value of a new shape, after functions of (array, axis) that move entries along some of its axes.

    They may leave entries out, and put zeros between them.
    """

    def of_term(term: Outer | None) -> Outer | None:
        for axis, change in changes.items():
            term = term and term.along(axis, shape[axis], change, reader, True)
        return term

    return reader.each(operand, of_term)


def between_zeros(low: int, high: int, inner: int = 0) -> Callable[[Any, int], Any]:
    """Puts so many zeros before, after and between entries; negative numbers leave entries out."""

    def along(x: Any, at: int) -> Any:
        widths = [(low, high, inner) if i == at else (0, 0, 0) for i in range(x.ndim)]
        return lax.pad(x, jnp.zeros((), x.dtype), widths)

    return along


def part(*cut: int) -> Callable[[Any, int], Any]:
    """Keeps entries from a first one to a last one, in steps."""
    return lambda x, at: lax.slice_in_dim(x, *cut, axis=at)


@rule("slice")
def slice_(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """A part of the value is made of a part of a factor."""
    (operand,), params, shape = eqn.invars, eqn.params, eqn.outvars[0].aval.shape
    steps = params["strides"] or [1] * len(shape)
    cuts = enumerate(zip(params["start_indices"], params["limit_indices"], steps, strict=True))
    whole = [(0, n, 1) for n in operand.aval.shape]
    return moved(reader, operand, shape, {i: part(*cut) for i, cut in cuts if cut != whole[i]})


@rule("split")
def split(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """One of several parts."""
    sizes, shape = eqn.params["sizes"], eqn.outvars[which].aval.shape
    cut = part(sum(sizes[:which]), sum(sizes[: which + 1]))
    return moved(reader, eqn.invars[0], shape, {eqn.params["axis"]: cut})


@rule("concatenate")
def concatenate(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """Values one after the other: each between zeros."""
    axis, terms, low, shape = eqn.params["dimension"], [], 0, eqn.outvars[0].aval.shape
    for operand in eqn.invars:
        after = low + operand.aval.shape[axis]
        own = moved(reader, operand, shape, {axis: between_zeros(low, shape[axis] - after)})
        if own is None:
            return None
        terms, low = [*terms, *own], after
    return terms


def rows(name: str, places: Any, operand: Any, axis: int, shape: Sequence[int]) -> Terms:
    """Zeros but for rows along an axis, at these places: a look-up of them."""
    (place,), axes = labels(1), labels(len(shape))
    sizes = dict(zip((*axes, place), (*shape, operand.aval.shape[axis]), strict=True))
    own = (*axes[:axis], place, *axes[axis + 1 :])
    factors = Factor(places, (place,)), Factor(operand, own)
    return [Outer(name, *factors, tuple((a,) for a in axes), sizes, indexed=(axes[axis],))]


@rule("dynamic_update_slice")
def dynamic_update_slice(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """Zeros but for consecutive rows."""
    (whole, operand, *starts), shape = eqn.invars, eqn.invars[0].aval.shape
    cut = [i for i, n in enumerate(operand.aval.shape) if n != shape[i]]
    if not reader.is_zero(whole) or len(cut) != 1 or isinstance(operand, core.Literal):
        return None
    (axis,), count = cut, operand.aval.shape[cut[0]]

    def numbers(start: Any) -> Any:
        """The numbers of the rows: a start beyond the last possible one is moved back."""
        every = jnp.arange(shape[axis], dtype=jnp.int32)
        return lax.dynamic_slice(every, (start,), (count,), allow_negative_indices=False)

    places = reader.make(numbers, reader.value(starts[axis]))
    return rows("dynamic_slice", places, operand, axis, shape)


@rule("pad")
def pad(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """Zeros around a value are zeros around a factor; of any other value, it is a look-up of its rows."""
    (operand, padding), shape = eqn.invars, eqn.outvars[0].aval.shape
    config = enumerate(tuple(map(int, widths)) for widths in eqn.params["padding_config"])
    cuts = {i: widths for i, widths in config if widths != (0, 0, 0)}
    if not reader.is_zero(padding):
        return None
    if reader.terms(operand) is not None:
        changes = {i: between_zeros(*widths) for i, widths in cuts.items()}
        return moved(reader, operand, shape, changes)
    if len(cuts) != 1 or min(map(min, cuts.values())) < 0:
        return None
    ((axis, (low, _, inner)),) = cuts.items()
    places = reader.make(lambda: low + (inner + 1) * jnp.arange(operand.aval.shape[axis]))
    return rows("slice", places, reader.value(operand), axis, shape)


@rule("scatter-add", "scatter_add")
def scatter_add(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """Rows added up at indices along one axis or several: the derivative of a look-up.

    The numbers of the rows are what the same look-up finds in a table of all numbers.
    """
    whole, index, update = eqn.invars
    numbers, table = eqn.params["dimension_numbers"], whole.aval.shape
    if not reader.is_zero(whole) or isinstance(update, core.Literal):
        return None
    batching, named = numbers.operand_batching_dims, numbers.scatter_dims_to_operand_dims
    window = [i for i in range(len(table)) if i not in (*numbers.inserted_window_dims, *batching)]
    spans = [1] * len(table)
    for i, axis in zip(window, numbers.update_window_dims, strict=True):
        spans[i] = update.aval.shape[axis]
    # Axes that are taken whole may have an index too, which can only be zero.
    cut = sorted(i for i in named if len(named) == 1 or spans[i] != table[i])
    taken = [i for i in range(len(table)) if i not in (*cut, *batching)]
    count = math.prod(table[i] for i in cut)
    is_cut = all(spans[i] == 1 for i in cut) and all(spans[i] == table[i] for i in taken)
    if not cut or not is_cut or count >= 2**31:
        return None
    clips = eqn.params["mode"] == lax.GatherScatterMode.CLIP
    mode = lax.GatherScatterMode.CLIP if clips else lax.GatherScatterMode.FILL_OR_DROP
    look_up = lax.GatherDimensionNumbers(
        offset_dims=numbers.update_window_dims,
        collapsed_slice_dims=numbers.inserted_window_dims,
        start_index_map=named,
        operand_batching_dims=batching,
        start_indices_batching_dims=numbers.scatter_indices_batching_dims,
    )

    def numbers_of(indices: Any) -> Any:
        rows = jnp.arange(count, dtype=jnp.int32)
        rows = rows.reshape([n if i in cut else 1 for i, n in enumerate(table)])
        rows = jnp.broadcast_to(rows, [1 if i in taken else n for i, n in enumerate(table)])
        ones = [1] * len(table)
        looked_up = lax.gather(rows, indices, look_up, ones, mode=mode, fill_value=count)
        return looked_up.reshape(indices.shape[:-1])

    places, axes = labels(index.aval.ndim - 1), [*labels(len(table))]
    for axis, i in zip(batching, numbers.scatter_indices_batching_dims, strict=True):
        axes[axis] = places[i]
    windows = iter(axes[i] if i in taken else labels(1)[0] for i in window)
    spots, inner = iter(places), numbers.update_window_dims
    right = tuple(next(windows if i in inner else spots) for i in range(update.aval.ndim))
    sizes = dict(zip((*axes, *right), (*table, *update.aval.shape), strict=True))
    factors = Factor(reader.make(numbers_of, index), places), Factor(update, right)
    of_result, rows = tuple((a,) for a in axes), tuple(axes[i] for i in cut)
    return [Outer("gather", *factors, of_result, sizes, indexed=rows)]
