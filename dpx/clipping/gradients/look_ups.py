"""Gradients of tables that are looked up: the left factor is a one-hot row, of which only the number is kept.

Numbers of several axes count as one, over all of their entries.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from dpx.clipping.gradients.outer import Factor, Outer, labels
from dpx.clipping.gradients.reading import Reader, Terms, rule


@rule("dynamic_update_slice")
def dynamic_update_slice(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """Zeros but for consecutive rows."""
    del which
    whole, operand, *starts = eqn.invars
    shapes = zip(whole.aval.shape, operand.aval.shape, strict=True)
    axes = [i for i, (n, m) in enumerate(shapes) if n != m]
    if not reader.is_zero(whole) or len(axes) != 1 or isinstance(operand, core.Literal):
        return None
    (axis,) = axes
    n, m = whole.aval.shape[axis], operand.aval.shape[axis]
    start = starts[axis]

    def places(*given: Any) -> Any:
        first = given[0] if given else start.val
        return jnp.clip(jnp.asarray(first, jnp.int32), 0, n - m) + jnp.arange(m)

    known = [] if isinstance(start, core.Literal) else [start]
    value = reader.make(places, *known)
    return [rows(reader, "dynamic_slice", value, operand, axis, whole.aval.shape)]


def rows(
    reader: Reader, name: str, value: int, operand: Any, axis: int, shape: Sequence[int]
) -> Outer:
    """A look-up of rows along an axis."""
    (place, row), rest = labels(2), labels(len(shape) - 1)
    others = iter(rest)
    axes = tuple(row if i == axis else next(others) for i in range(len(shape)))
    right = tuple(place if a == row else a for a in axes)
    sizes = dict(zip(right, operand.aval.shape, strict=True)) | {row: shape[axis]}
    return Outer(
        name, Factor(value, (place,)), Factor(reader.value(operand), right),
        tuple((a,) for a in axes), sizes, indexed=(row,),
    )  # fmt: skip


@rule("scatter-add", "scatter_add")
def scatter_add(reader: Reader, eqn: Any, which: int) -> Terms | None:
    """What a look-up of rows becomes: rows added up where indices say, of one axis or of several."""
    del which
    whole, index, update = eqn.invars
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    if not reader.is_zero(whole) or isinstance(update, core.Literal):
        return None
    table = whole.aval.shape
    batching = numbers.scatter_indices_batching_dims, numbers.operand_batching_dims
    tables = dict(zip(*batching, strict=True))  # Axes of the indices that are axes of the result.
    window = [i for i in range(len(table)) if i not in numbers.inserted_window_dims]
    window = [i for i in window if i not in numbers.operand_batching_dims]
    spans = dict(
        zip(window, (update.aval.shape[i] for i in numbers.update_window_dims), strict=True)
    )
    # Axes that are taken whole may have an index too, which can only be zero.
    cut = [i for i in numbers.scatter_dims_to_operand_dims if spans.get(i, 1) != table[i]]
    if not cut and len(numbers.scatter_dims_to_operand_dims) == 1:
        cut = list(numbers.scatter_dims_to_operand_dims)
    whole_axes = [i for i in window if i not in cut]
    if (
        not cut
        or any(spans.get(i, 1) != 1 for i in cut)
        or any(spans[i] != table[i] for i in whole_axes)
    ):
        return None
    if math.prod(table[i] for i in cut) >= 2**31:
        return None
    cut.sort()
    columns = [numbers.scatter_dims_to_operand_dims.index(axis) for axis in cut]
    others = [c for c in range(index.aval.shape[-1]) if c not in columns]
    lengths, clips = [table[i] for i in cut], mode == lax.GatherScatterMode.CLIP

    def numbers_of(indices: Any) -> Any:
        indices = indices.astype(jnp.int32) if indices.dtype.itemsize < 4 else indices
        inside = jnp.all(indices[..., jnp.array(others, int)] == 0, -1) if others else True
        row: Any = 0
        for column, length in zip(columns, lengths, strict=True):
            i = indices[..., column]
            inside &= (i >= 0) & (i < length)
            row = row * length + jnp.clip(i, 0, length - 1)
        row = row if clips else jnp.where(inside, row, math.prod(lengths))
        return row.astype(jnp.int32)

    row, places = labels(len(cut)), labels(index.aval.ndim - 1)
    kept = dict(zip(window, labels(len(window)), strict=True))
    windows = iter(kept[i] for i in window)
    spots = iter(places)
    right = tuple(
        next(windows if i in numbers.update_window_dims else spots) for i in range(update.aval.ndim)
    )
    sizes = dict(zip(right, update.aval.shape, strict=True)) | dict(zip(row, lengths, strict=True))
    of_table = {axis: places[i] for i, axis in tables.items()} | dict(zip(cut, row, strict=True))
    axes = tuple((of_table.get(i, kept.get(i)),) for i in range(len(table)))
    left, columns_ = (
        Factor(reader.make(numbers_of, index), places),
        Factor(reader.value(update), right),
    )
    return [Outer("gather", left, columns_, axes, sizes, indexed=row)]
