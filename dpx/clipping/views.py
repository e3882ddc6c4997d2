"""What the axes of a value stand for that is a parameter, reshaped, transposed, cast, or a part of one."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

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
      gain: the number that the parameter was multiplied by; complex where the value is.
    """

    param: int
    axes: Axes
    loops: tuple[Loop, ...] = ()
    pads: tuple[tuple[int, int, int], ...] = ()
    scale: Scale | None = None
    gain: complex = 1.0


def padded(view: View, axis: int, low: int, high: int) -> View | None:
    """The view of a part of a value along one axis (or of a whole of which it is a part, if negative)."""
    pads = {a: (i, j) for a, i, j in view.pads}
    before = pads.get(axis, (0, 0))
    if not view.axes[axis] or any(x * y < 0 for x in before for y in (low, high)):
        return None  # Part of a whole, then whole of a part: no single padding.
    pads[axis] = (before[0] + low, before[1] + high)
    return view._replace(pads=tuple((a, i, j) for a, (i, j) in sorted(pads.items())))


def pads_of(view: View, axes: Axes) -> tuple[tuple[int, int, int], ...]:
    """The pads of a view that fall on the axes of a factor."""
    found = ((view.axes[axis], low, high) for axis, low, high in view.pads)
    return tuple((axes.index(a), low, high) for a, low, high in found if a and a in axes)


def pad(pads: tuple[tuple[int, int, int], ...], x: jax.Array) -> jax.Array:
    """Adds zeros to axes, or takes a part of them where the numbers are negative."""
    widths = [(0, 0, 0)] * x.ndim
    for axis, low, high in pads:
        widths[axis] = (low, high, 0)
    return lax.pad(x, jnp.zeros((), x.dtype), widths)


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
