"""Gradients whose entries are moved along an axis, and those of tables that are looked up.

Of a look-up the left factor is a one-hot row, of which only the number is kept. Numbers of several axes count
as one, over all of their entries.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from dpx.clipping.gradients.outer import Factor, Outer, labels
from dpx.clipping.gradients.reading import Reader, Terms, rule


def moved(reader: Reader, operand: Any, axes: Mapping[int, tuple[int, ...]]) -> Terms | None:
    """A value whose entries are moved along some axes, or left out, with zeros between them.

    For each of these axes there is the number of zeros before, after, and between entries, of which negative
    ones leave entries out; and the step from each that is kept to the next, −1 to turn them around.
    """

    def of_term(term: Outer | None) -> Outer | None:
        for axis, (low, high, inner, step) in axes.items():

            def along(x: Any, at: int, widths=(low, high, inner), step=step) -> Any:
                zeros = [widths if i == at else (0, 0, 0) for i in range(x.ndim)]
                x = lax.pad(x, jnp.zeros((), x.dtype), zeros)
                if step == 1:
                    return x
                return lax.rev(x, (at,)) if step < 0 else lax.slice_in_dim(x, 0, None, step, at)

            size = operand.aval.shape[axis]
            padded = low + size + inner * max(size - 1, 0) + high
            entry, rest = np.divmod(np.arange(padded)[::step] - low, inner + 1)
            places = np.where((rest == 0) & (entry >= 0) & (entry < size), entry + 1, 0)
            term = term and term.along(axis, len(places), along, reader, places)
        return term

    return reader.each(operand, of_term)


@rule("slice")
def slice_(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """A part of the value is made of a part of a factor."""
    (operand,), params = eqn.invars, eqn.params
    size, steps = operand.aval.shape, params["strides"] or [1] * operand.aval.ndim
    cuts = zip(params["start_indices"], params["limit_indices"], size, steps, strict=True)
    axes = {
        i: (-a, b - n, 0, step)
        for i, (a, b, n, step) in enumerate(cuts)
        if (a, b, step) != (0, n, 1)
    }
    return moved(reader, operand, axes)


@rule("split")
def split(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """One of several parts."""
    (operand,), axis, sizes = eqn.invars, eqn.params["axis"], eqn.params["sizes"]
    return moved(reader, operand, {axis: (-sum(sizes[:which]), -sum(sizes[which + 1 :]), 0, 1)})


@rule("rev")
def rev(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """The same with entries along axes in the opposite order."""
    shape, turned = eqn.outvars[which].aval.shape, eqn.params["dimensions"]
    return moved(reader, eqn.invars[0], {i: (0, 0, 0, -1) for i in turned if shape[i] > 1})


@rule("concatenate")
def concatenate(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """Values one after the other: each between zeros."""
    axis, found, low = eqn.params["dimension"], [], 0
    high = eqn.outvars[which].aval.shape[axis]
    for operand in eqn.invars:
        high -= operand.aval.shape[axis]
        terms = moved(reader, operand, {axis: (low, high, 0, 1)})
        low += operand.aval.shape[axis]
        if terms is None:
            return None
        found += terms
    return found


@rule("dynamic_update_slice")
def dynamic_update_slice(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """Zeros but for consecutive rows."""
    whole, operand, *starts = eqn.invars
    shapes = zip(whole.aval.shape, operand.aval.shape, strict=True)
    axes = [i for i, (n, m) in enumerate(shapes) if n != m]
    if not reader.is_zero(whole) or len(axes) != 1 or isinstance(operand, core.Literal):
        return None
    (axis,) = axes
    n, m = whole.aval.shape[axis], operand.aval.shape[axis]

    def numbers(start: Any) -> Any:
        return jnp.clip(jnp.asarray(start, jnp.int32), 0, n - m) + jnp.arange(m)

    places = reader.make(numbers, reader.value(starts[axis]))
    return [_rows("dynamic_slice", places, operand, axis, whole.aval.shape)]


@rule("pad")
def pad(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """Zeros around a value are zeros around a factor; of any other value, it is a look-up of its rows."""
    operand, padding = eqn.invars
    config = enumerate(tuple(map(int, widths)) for widths in eqn.params["padding_config"])
    axes = {i: (*widths, 1) for i, widths in config if widths != (0, 0, 0)}
    if not reader.is_zero(padding):
        return None
    if reader.terms(operand) is not None:
        return moved(reader, operand, axes)
    if len(axes) != 1 or min(map(min, axes.values())) < 0:
        return None
    ((axis, (low, _, inner, _)),) = axes.items()
    places = low + (inner + 1) * np.arange(operand.aval.shape[axis])
    number = reader.make(lambda: jnp.asarray(places, jnp.int32))
    return [_rows("slice", number, reader.value(operand), axis, eqn.outvars[which].aval.shape)]


def _rows(name: str, places: Any, operand: Any, axis: int, shape: Sequence[int]) -> Outer:
    """Rows along an axis, at these places."""
    (place,), rows = labels(1), labels(len(shape))
    right = tuple(place if i == axis else a for i, a in enumerate(rows))
    sizes = dict(zip((*rows, place), (*shape, operand.aval.shape[axis]), strict=True))
    factors, axes = (Factor(places, (place,)), Factor(operand, right)), tuple((a,) for a in rows)
    return Outer(name, *factors, axes, sizes, indexed=(rows[axis],))


@rule("scatter-add", "scatter_add")
def scatter_add(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """What a look-up of rows becomes: rows added up where indices say, of one axis or of several.

    The look-up itself, in a table of the numbers of its rows, says which these are.
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
    if not cut or any(spans[i] != 1 for i in cut) or any(spans[i] != table[i] for i in taken):
        return None
    if count >= 2**31:
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
        found = lax.gather(rows, indices, look_up, ones, mode=mode, fill_value=count)
        return found.reshape(indices.shape[:-1])

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
