"""How rows of a table are looked up: the left factor is a one-hot row, of which only the index is kept.

Indices of several axes of a parameter count as one, over all of their entries. A rule returns what
`dpx.clipping.uses.RULES` wants, or None.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from dpx.clipping.views import View

# Indices travel as float32 cotangents, exact up to this many rows.
MAX_ROWS = 2**24


def _rows(view: View, axes: Sequence[int], sizes: Any) -> tuple[int, ...] | None:
    """The parameter axes that a table is looked up along, whose entries are counted as one; or None."""
    atoms = tuple(atom for axis in axes for atom in view.axes[axis])
    count = math.prod(sizes[view.param][atom] for atom in atoms)
    return atoms if atoms and list(atoms) == sorted(atoms) and count <= MAX_ROWS else None


def _wide(index: Any) -> Any:
    """An index in a type that the number of rows fits in: bytes may index a table of 256 rows."""
    return index.astype(jnp.int32) if index.dtype.itemsize < 4 else index


def gather(eqn: Any, which: int, view: View, sizes: Any):
    """Rows at indices: of one axis or of several, in one table or in one for each index."""
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    table, indices = (v.aval for v in eqn.invars)
    modes = lax.GatherScatterMode
    # A derivative drops what lies out of bounds, unless the look-up was clipped.
    drops = mode != modes.CLIP
    if which != 0:
        return None
    # Axes of a table for each index, such as those of `jax.vmap` over tables, by axis of the indices.
    batching = numbers.start_indices_batching_dims, numbers.operand_batching_dims
    tables = dict(zip(*batching, strict=True))
    taken = eqn.params["slice_sizes"]
    # Axes that are taken whole may have an index too, which can only be zero.
    cut = [i for i in numbers.start_index_map if taken[i] != table.shape[i]]
    if not cut and len(numbers.start_index_map) == 1:
        cut = list(numbers.start_index_map)
    cut.sort(key=lambda axis: view.axes[axis])
    if (
        mode not in (modes.CLIP, modes.PROMISE_IN_BOUNDS, modes.FILL_OR_DROP)
        or not set(numbers.collapsed_slice_dims) <= set(cut)
        or any(taken[axis] != 1 for axis in cut)
        or any(
            s != n
            for i, (s, n) in enumerate(zip(taken, table.shape, strict=True))
            if i not in cut and i not in tables.values()
        )
        or (indexed := _rows(view, cut, sizes)) is None
    ):
        return None
    dropped = {*numbers.collapsed_slice_dims, *tables.values()}
    kept = [i for i in range(table.ndim) if i not in dropped]
    rest = iter([() if i in cut else view.axes[i] for i in kept])
    left_axes = tuple(
        view.axes[tables[i]] if i in tables else (-1 - i,) for i in range(indices.ndim - 1)
    )
    positions = iter(left_axes)
    ndim = eqn.outvars[0].aval.ndim
    right_axes = tuple(next(rest if i in numbers.offset_dims else positions) for i in range(ndim))
    lengths = [table.shape[axis] for axis in cut]
    columns = [numbers.start_index_map.index(axis) for axis in cut]

    def left(operands):
        indices = _wide(operands[1])
        row: Any = 0
        inside: Any = True
        if len(columns) < len(numbers.start_index_map):
            inside = jnp.all(jnp.delete(indices, np.array(columns), -1) == 0, axis=-1)
        for column, length in zip(columns, lengths, strict=True):
            index = indices[..., column]
            inside &= (index >= 0) & (index < length)
            row = row * length + jnp.clip(index, 0, length - 1)
        # An index beyond the last row stands for a look-up that is dropped.
        row = jnp.where(inside, row, math.prod(lengths)) if drops else row
        return row.astype(jnp.float32)

    return left, left_axes, right_axes, indexed, None


def consecutive(eqn: Any, which: int, view: View, sizes: Any):
    """A slice along one axis, static or dynamic, is a look-up of consecutive rows."""
    shape, taken = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    cut = [i for i, (n, m) in enumerate(zip(shape, taken, strict=True)) if n != m]
    if which != 0 or len(cut) != 1 or (indexed := _rows(view, cut, sizes)) is None:
        return None
    (axis,) = cut
    step = 1
    if eqn.primitive.name == "slice" and eqn.params["strides"] is not None:
        step = eqn.params["strides"][axis]

    def left(operands):
        if eqn.primitive.name == "slice":
            start = eqn.params["start_indices"][axis]
        else:
            start = jnp.clip(_wide(operands[1 + axis]), 0, shape[axis] - taken[axis])
        return (start + step * jnp.arange(taken[axis])).astype(jnp.float32)

    right_axes = tuple((-1,) if i == axis else a for i, a in enumerate(view.axes))
    return left, ((-1,),), right_axes, indexed, None
