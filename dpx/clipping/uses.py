"""How a parameter is used by one equation, and why its gradient there is a sum of outer products.

A per-example gradient through a matrix product, a table look-up or a convolution is

    gradient[k, r, c] = sum_p left[k, p, r] · right[k, p, c]

where `left` comes from the other operand, `right` is the cotangent of the result, p runs over
positions (tokens, pixels, time steps), and the axes of the parameter fall into k (axes that both
factors have: heads of a batched product, layers of a scan), r and c. For look-ups, left[k, p, :]
is a one-hot row, of which only the index is kept. A `Use` says where in the program the two
factors are found and which parameter axes their axes stand for.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Indices travel as float32 cotangents, exact up to this many rows.
MAX_ROWS = 2**24

# The parameter axes that one axis of an array merges, major first; () for an axis of size one.
# In factors, (-1,), (-2,), ... are axes of positions.
Axes = tuple[tuple[int, ...], ...]


class Loop(NamedTuple):
    """A scan around a use: its length, and the parameter axes it runs over (none if shared)."""

    length: int
    axes: tuple[int, ...]


class Scale(NamedTuple):
    """A fixed array that a parameter is multiplied by before its use.

    Attributes:
      derived: which input after the parameters the derived weight is.
      atoms: the parameter axes over which the array varies.
    """

    derived: int
    atoms: frozenset[int]


class View(NamedTuple):
    """A value that is a parameter, reshaped, transposed or cast; inside scans, a slice of it.

    Attributes:
      param: index of the parameter.
      axes: what the axes of the value stand for.
      loops: the scans around it, outermost first.
      pads: for some axes of the value, how much longer the parameter is on either side: positive where the
        value is a part of the parameter, negative where the parameter is a part of the value.
      scale: what the gradient is multiplied by, entry by entry, where the value is a derived weight.
    """

    param: int
    axes: Axes
    loops: tuple[Loop, ...] = ()
    pads: tuple[tuple[int, int, int], ...] = ()
    scale: Scale | None = None


class Use(NamedTuple):
    """One equation that turns a view of a parameter into something else.

    Attributes:
      param: index of the parameter.
      primitive: name of the primitive.
      path: where the equation stands: its index in the jaxpr, after those of the equations
        (and branches) around it.
      loops: the scans around it, outermost first.
      left: the equation's operands -> the left factor of one iteration.
      right: the cotangent of the equation's result -> the right factor.
      left_axes, right_axes: what the axes of the factors stand for, loops excluded.
      left_aval, right_aval: shapes and dtypes of the factors of one iteration.
      indexed: the parameter axis that a left factor of row indices stands for, else None.
      scale: what the product of the factors is multiplied by, if anything.
    """

    param: int
    primitive: str
    path: tuple[int, ...]
    loops: tuple[Loop, ...]
    left: Callable[[Sequence[jax.Array]], jax.Array]
    right: Callable[[jax.Array], jax.Array]
    left_axes: Axes
    right_axes: Axes
    left_aval: jax.ShapeDtypeStruct
    right_aval: jax.ShapeDtypeStruct
    indexed: int | None = None
    scale: Scale | None = None

    @property
    def form(self) -> "Use":
        """What the factors look like; equal for uses that are alike, wherever they stand."""
        return self._replace(param=0, path=(), left=_same, right=_same)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(loop.length for loop in self.loops)

    @property
    def is_shared_by_loop(self) -> bool:
        return any(loop.length > 1 and not loop.axes for loop in self.loops)


def find(eqn: Any, which: int, view: View, path: tuple[int, ...], sizes: Any) -> Use | None:
    """The use that equation `eqn` makes of its operand `which`, or None if there is no rule."""
    rule = RULES.get(eqn.primitive.name)
    found = rule(eqn, which, view, sizes) if rule else None
    if found is None:
        return None
    left, left_axes, right_axes, indexed = found
    right = _same
    if view.pads:
        if view.scale is not None:
            return None
        padded = _padded(view, left_axes), _padded(view, right_axes)
        if len(padded[0]) + len(padded[1]) < len(view.pads):
            return (
                None  # An axis that is neither in one factor nor in the other: that of a look-up.
            )
        left = functools.partial(_pad_left, left, padded[0])
        right = functools.partial(_pad, padded[1])
    operands = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    left_aval = _evaluated(left, operands)
    out = eqn.outvars[0].aval
    right_aval = _evaluated(right, jax.ShapeDtypeStruct(out.shape, out.dtype))
    if not all(jnp.issubdtype(a.dtype, jnp.floating) for a in (left_aval, right_aval)):
        return None
    if view.scale is not None and not _can_scale(view, left_axes, right_axes, indexed):
        return None
    return Use(
        view.param, eqn.primitive.name, path, view.loops, left, right, left_axes, right_axes,
        left_aval, right_aval, indexed, view.scale,
    )  # fmt: skip


def _can_scale(view: View, left_axes: Axes, right_axes: Axes, indexed: int | None) -> bool:
    """Whether the array of a scale varies over the axes of one factor only, or is looked up itself."""
    assert view.scale is not None
    loops = {atom for loop in view.loops for atom in loop.axes}
    left = loops | {atom for axis in left_axes for atom in axis}
    right = loops | {atom for axis in right_axes for atom in axis}
    return indexed is not None or view.scale.atoms <= left or view.scale.atoms <= right


class _Operand(NamedTuple):
    """Takes one operand as it is."""

    which: int

    def __call__(self, operands: Sequence[Any]) -> Any:
        return operands[self.which]


def _evaluated(function: Callable, arguments: Any) -> Any:
    """The shape and dtype of a function's result."""
    if function is _same or isinstance(function, _Operand):
        return function(arguments)
    return jax.eval_shape(function, arguments)


def _same(cotangent: jax.Array) -> jax.Array:
    return cotangent


def is_whole(use: Use) -> bool:
    """Whether the right factor is the cotangent as it is."""
    return use.right is _same


def _padded(view: View, axes: Axes) -> tuple[tuple[int, int, int], ...]:
    """The pads of a view that fall on the axes of a factor."""
    found = ((view.axes[axis], low, high) for axis, low, high in view.pads)
    return tuple((axes.index(a), low, high) for a, low, high in found if a and a in axes)


def _pad(pads: tuple[tuple[int, int, int], ...], x: jax.Array) -> jax.Array:
    """Adds zeros to axes, or takes a part of them where the numbers are negative."""
    widths = [(0, 0, 0)] * x.ndim
    for axis, low, high in pads:
        widths[axis] = (low, high, 0)
    return lax.pad(x, jnp.zeros((), x.dtype), widths)


def _pad_left(left: Callable, pads: tuple, operands: Sequence[jax.Array]) -> jax.Array:
    return _pad(pads, left(operands))


def padded(view: View, axis: int, low: int, high: int) -> View | None:
    """The view of a part of a value along one axis (or of a whole of which it is a part, if negative)."""
    pads = {a: (i, j) for a, i, j in view.pads}
    before = pads.get(axis, (0, 0))
    if not view.axes[axis] or any(x * y < 0 for x in before for y in (low, high)):
        return None  # Part of a whole, then whole of a part: no single padding.
    pads[axis] = (before[0] + low, before[1] + high)
    return view._replace(pads=tuple((a, i, j) for a, (i, j) in sorted(pads.items())))


def _dot_general(eqn, which, view, sizes):
    (contract, batch) = eqn.params["dimension_numbers"]
    other = 1 - which
    ndim = eqn.invars[other].aval.ndim
    free = [i for i in range(ndim) if i not in (*contract[other], *batch[other])]
    positions = {axis: (-1 - n,) for n, axis in enumerate(free)}
    axes = dict(zip(contract[other], (view.axes[i] for i in contract[which]), strict=True))
    axes |= dict(zip(batch[other], (view.axes[i] for i in batch[which]), strict=True))
    left_axes = tuple((axes | positions)[i] for i in range(ndim))

    used = (*contract[which], *batch[which])
    halves = [[a for i, a in enumerate(view.axes) if i not in used], [positions[i] for i in free]]
    # The result has the batch axes, then the free axes of the first operand, then the second's.
    right_axes = (*(view.axes[i] for i in batch[which]), *halves[which], *halves[other])
    return _Operand(other), left_axes, right_axes, None


def _rows(view: View, axis: int, sizes: Any) -> int | None:
    """The one parameter axis that a table is looked up along, or None."""
    atoms = view.axes[axis]
    return atoms[0] if len(atoms) == 1 and sizes[view.param][atoms[0]] <= MAX_ROWS else None


def _gather(eqn, which, view, sizes):
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    table, indices = (v.aval for v in eqn.invars)
    modes = lax.GatherScatterMode
    # A derivative drops what lies out of bounds, unless the look-up was clipped.
    drops = mode != modes.CLIP
    if which != 0 or numbers.operand_batching_dims:
        return None
    taken = eqn.params["slice_sizes"]
    # Axes that are taken whole may have an index too, which can only be zero.
    cut = [i for i in numbers.start_index_map if taken[i] != table.shape[i]]
    if not cut and len(numbers.start_index_map) == 1:
        cut = list(numbers.start_index_map)
    if (
        mode not in (modes.CLIP, modes.PROMISE_IN_BOUNDS, modes.FILL_OR_DROP)
        or len(cut) != 1
        or not set(numbers.collapsed_slice_dims) <= set(cut)
        or taken[cut[0]] != 1
        or any(
            s != n for i, (s, n) in enumerate(zip(taken, table.shape, strict=True)) if i not in cut
        )
        or (indexed := _rows(view, cut[0], sizes)) is None
    ):
        return None
    (axis,) = cut
    which_index = numbers.start_index_map.index(axis)
    kept = [i for i in range(table.ndim) if i not in numbers.collapsed_slice_dims]
    rest = iter([() if i == axis else view.axes[i] for i in kept])
    positions = iter([(-1 - i,) for i in range(indices.ndim - 1)])
    ndim = eqn.outvars[0].aval.ndim
    right_axes = tuple(next(rest if i in numbers.offset_dims else positions) for i in range(ndim))
    rows = table.shape[axis]

    def left(operands):
        index = operands[1][..., which_index]
        inside = (index >= 0) & (index < rows)
        if len(numbers.start_index_map) > 1:
            inside &= jnp.all(jnp.delete(operands[1], which_index, -1) == 0, axis=-1)
        # An index beyond the last row stands for a look-up that is dropped.
        index = jnp.where(inside, index, rows) if drops else jnp.clip(index, 0, rows - 1)
        return index.astype(jnp.float32)

    return left, tuple((-1 - i,) for i in range(indices.ndim - 1)), right_axes, indexed


def _slice(eqn, which, view, sizes):
    """A slice along one axis, static or dynamic, is a look-up of consecutive rows."""
    shape, taken = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    cut = [i for i, (n, m) in enumerate(zip(shape, taken, strict=True)) if n != m]
    if which != 0 or len(cut) != 1 or (indexed := _rows(view, cut[0], sizes)) is None:
        return None
    (axis,) = cut
    step = 1
    if eqn.primitive.name == "slice" and eqn.params["strides"] is not None:
        step = eqn.params["strides"][axis]

    def left(operands):
        if eqn.primitive.name == "slice":
            start = eqn.params["start_indices"][axis]
        else:
            start = jnp.clip(operands[1 + axis], 0, shape[axis] - taken[axis])
        return (start + step * jnp.arange(taken[axis])).astype(jnp.float32)

    right_axes = tuple((-1,) if i == axis else a for i, a in enumerate(view.axes))
    return left, ((-1,),), right_axes, indexed


def _conv(eqn, which, view, sizes):
    """A convolution is a matrix product with the patches of its input."""
    p = eqn.params
    if which != 1 or p["feature_group_count"] != 1 or p["batch_group_count"] != 1:
        return None
    numbers = p["dimension_numbers"]
    kernel = [eqn.invars[1].aval.shape[i] for i in numbers.rhs_spec[2:]]
    out = [eqn.outvars[0].aval.shape[i] for i in numbers.out_spec[2:]]
    out_feature, in_feature, *spatial = (view.axes[i] for i in numbers.rhs_spec)

    def left(operands):
        x = jnp.transpose(operands[0], numbers.lhs_spec)
        dilated = [(0, 0, 0)] * 2 + [
            (low, high, d - 1)
            for (low, high), d in zip(p["padding"], p["lhs_dilation"], strict=True)
        ]
        x = lax.pad(x, jnp.zeros((), x.dtype), dilated)
        patches = []
        for offset in itertools.product(*map(range, kernel)):
            starts = [o * d for o, d in zip(offset, p["rhs_dilation"], strict=True)]
            stops = [
                s + (n - 1) * w + 1
                for s, n, w in zip(starts, out, p["window_strides"], strict=True)
            ]
            patches.append(
                lax.slice(x, (0, 0, *starts), (*x.shape[:2], *stops), (1, 1, *p["window_strides"]))
            )
        return jnp.stack(patches).reshape(*kernel, *patches[0].shape)

    places = [(-2 - i,) for i in range(len(out))]
    left_axes = (*spatial, (-1,), in_feature, *places)
    right_axes: list[tuple[int, ...]] = [()] * (2 + len(out))
    for axis, meaning in zip(numbers.out_spec, [(-1,), out_feature, *places], strict=True):
        right_axes[axis] = meaning
    return left, left_axes, tuple(right_axes), None


RULES = {
    "dot_general": _dot_general,
    "gather": _gather,
    "dynamic_slice": _slice,
    "slice": _slice,
    "conv_general_dilated": _conv,
}


def to_split(axes: Axes, new_shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, int] | None:
    """The first parameter axis that a reshape splits, and the length of its major part; None if none."""
    atoms = [atom for axis in axes for atom in axis]
    for size in new_shape:
        product = 1
        while product < size and atoms:
            atom = atoms.pop(0)
            product *= sizes[atom]
        if product > size:
            major, rest = divmod(size * sizes[atom], product)
            return None if rest or sizes[atom] % major or major == 1 else (atom, major)
    return None


def reshape_axes(axes: Axes, new_shape: Sequence[int], sizes: Sequence[int]) -> Axes | None:
    """What the axes of a reshaped view stand for; None if the reshape splits a parameter axis."""
    atoms = [atom for axis in axes for atom in axis]
    new_axes = []
    for size in new_shape:
        merged, product = [], 1
        while product < size and atoms:
            merged.append(atoms.pop(0))
            product *= sizes[merged[-1]]
        if product != size:
            return None
        new_axes.append(tuple(merged))
    return tuple(new_axes)


def whole(param: int, split: Sequence[tuple[int, ...]]) -> View:
    """The view of a parameter that is all of it; `split` has the parts of each of its axes, major first."""
    number = itertools.count()
    parts = (tuple(i for n, i in zip(sizes, number, strict=False) if n != 1) for sizes in split)
    return View(param, tuple(parts))


def to_matrices(
    array: jax.Array,
    axes: Axes,
    shape: Sequence[int],
    blocks: tuple[int, ...],
    positions: Sequence[int],
    inner: tuple[int, ...] | None,
) -> jax.Array:
    """Brings a factor of one example to (K, P, R): blocks, positions, the axes `inner`.

    With `inner` None the factor holds row indices, (K, P).
    """
    sizes = {label: n for n, axis in zip(array.shape, axes, strict=True) for label in axis}
    sizes |= {label: shape[label] for label in sizes if label >= 0}
    labels = list(sizes)
    order = [*blocks, *positions, *(inner or ())]
    array = array.reshape([sizes[label] for label in labels])
    array = array.transpose([labels.index(label) for label in order])
    parts = (blocks, positions) if inner is None else (blocks, positions, inner)
    return array.reshape([math.prod(sizes[label] for label in part) for part in parts])
