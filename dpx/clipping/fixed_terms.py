"""Products of gradients with fixed arrays: the algebra behind `dpx.clipping.common`.

The gradient of an example is m ⊙ sum_p rows[p] ⊗ columns[p] + sum_j T_j ⊙ y_j, with fixed arrays m and T_j
and small values y_j. So m is moved into the factors, and the other terms of ‖g‖² are ⟨T_j ⊙ y_j, T_l ⊙ y_l⟩,
sums of products of fixed arrays that are made once, and

    ⟨rows[p] ⊗ columns[p], T ⊙ y⟩ = sum_c (rows[p] · T)[c] · columns[p, c] · y[c],

one product of matrices as in the forward pass.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpx.clipping import grams, rules
from dpx.clipping import rounding as _rounding
from dpx.clipping.materialize import accumulator
from dpx.clipping.rules import Layout, Pair

Split = Sequence[tuple[int, ...]]


class Term(NamedTuple):
    """What turns a small value into a gradient, or the other way round.

    Attributes:
      small: index of the small value.
      axes: for each axis of the parameter, the axis of the small value that it follows, if any.
      key: which fixed array.
      ratio: what the array is multiplied by, with axes of length one.
    """

    small: int
    axes: tuple[int | None, ...]
    key: str
    ratio: jax.Array


def spread(value: jax.Array, axes: Sequence[int | None]) -> jax.Array:
    """A small value with an axis for each of the parameter's, of length one where it does not follow one."""
    kept = [a for a in axes if a is not None]
    value = value.reshape([n for i, n in enumerate(value.shape) if i in kept])
    value = value.transpose([sorted(kept).index(a) for a in kept])
    shape = iter(value.shape)
    return value.reshape([1 if a is None else next(shape) for a in axes])


def arrange(shared: Layout, split: Split, x: jax.Array) -> jax.Array:
    """An array with the axes of a parameter, some of length one, as (K or 1, R or 1, C or 1)."""
    fine = [m if n > 1 else 1 for n, parts in zip(x.shape, split, strict=True) for m in parts]
    x = x.reshape(fine)
    for group in shared[1:]:
        if any(fine[a] > 1 for a in group):
            full = [shared.shape[a] if a in group else n for a, n in enumerate(x.shape)]
            x = jnp.broadcast_to(x, full)
    order = [a for group in shared[1:] for a in group]
    rest = [a for a in range(x.ndim) if a not in order]  # Axes of length one.
    x = x.transpose([*order, *rest])
    sizes = iter(x.shape)
    lengths = []
    for group in shared[1:]:
        length = 1
        for _ in group:
            length *= next(sizes)
        lengths.append(length)
    return x.reshape(lengths)


def scaled(pair: Pair, scale: jax.Array) -> Pair:
    """The factors of m ⊙ (their product); m, (K or 1, R or 1, C or 1), varies over rows or over columns."""
    rows, columns = pair
    if scale.shape[1] == 1:
        columns = _rounding.settled(columns * scale)
    elif rows.ndim == 2:
        columns = _rounding.settled(columns * taken(scale, rows))
    else:
        rows = _rounding.settled(rows * jnp.swapaxes(scale, 1, 2))
    return Pair(rows, columns)


def taken(array: jax.Array, index: jax.Array) -> jax.Array:
    """The rows of (K or 1, R, C) at indices (K, P); zero beyond the last row."""
    array = jnp.broadcast_to(array, (index.shape[0], *array.shape[1:]))
    return jnp.take_along_axis(array, index[:, :, None], axis=1, mode="fill", fill_value=0)


def contract(pair: Pair, array: jax.Array, by_rows: bool) -> jax.Array:
    """sum over positions and rows (or columns) of product ⊙ T: (K, 1, C), or (K, R, 1) if `by_rows`."""
    rows, columns = pair
    columns = columns.astype(accumulator(columns.dtype))
    if rows.ndim == 2:
        terms = taken(array, rows) * columns
        if not by_rows:
            return jnp.sum(terms, axis=1, keepdims=True)
        sums = jnp.zeros(array.shape[:2], terms.dtype)
        block = jnp.arange(len(rows))[:, None]
        return sums.at[block, rows].add(jnp.sum(terms, axis=2), mode="drop")[:, :, None]
    if by_rows:
        return jnp.sum(rows * multiplied(columns, array, 2), axis=1)[:, :, None]
    return jnp.sum(columns * multiplied(rows, array, 1), axis=1)[:, None, :]


def multiplied(factor: jax.Array, array: jax.Array, axis: int) -> jax.Array:
    """A factor times a fixed array (K, R, C) along its rows or columns, in a few chunks that are added up."""
    size = chunk(array.shape[axis])
    form = "kpr,krc->kpc" if axis == 1 else "kpc,krc->kpr"
    parts = [
        jnp.einsum(
            form,
            factor[:, :, i : i + size],
            lax.slice_in_dim(array, i, min(i + size, array.shape[axis]), axis=axis),
            precision=rules.HIGHEST,
            preferred_element_type=array.dtype,
        )
        for i in range(0, array.shape[axis], size)
    ]
    return functools.reduce(jnp.add, parts)


def chunk(size: int) -> int:
    return max(_rounding.CHUNK, -(-size // grams.UNROLLED))


def squared_norm(
    shared: Layout,
    pairs: Sequence[Pair],
    commons: Sequence[tuple[jax.Array, jax.Array, bool]],
    dots: Sequence[jax.Array | None],
    least_scale: float = 1.0,
) -> jax.Array:
    """An upper bound on ‖g‖² of one example, `grams.squared_norm` with terms T ⊙ y, both arranged.

    Each such term is another position, of length ‖T ⊙ y‖: the sum of n products is off by γ_n times the
    product of lengths (Cauchy-Schwarz, over columns first), n the number of roundings on the way to any.
    Where T is the parameter itself, `dots` has what `contract` would be, for those uses that know it, from
    products with the parameter times a scale of at least `least_scale`.
    """
    found = grams.products(shared, pairs)
    total, length, places = grams.estimate(grams.Errors.of(shared, grams.dtype(found)), found)
    # What roundings are outside sums: of y, of squares, and of adding up these few numbers.
    roundings, shared_length = 16 + len(commons) ** 2, length
    tiny, squares = _rounding.tiny(total.dtype), []
    # Part of squared lengths, so that what is flushed is part of what is rounded, as in `grams`. Of a product
    # with a scaled weight as much is flushed as of others, over the scale.
    flushed = 4 * math.prod(shared.sizes()) * tiny / (_rounding.unit(total.dtype) * least_scale**2)
    for i, (array, y, is_parameter) in enumerate(commons):
        for other, z, _ in commons[: i + 1]:
            summed = [a == b == 1 for a, b in zip(y.shape, z.shape, strict=True)]
            products, n = _along(array * other, summed)
            if other is array and z is y:
                sum_, m = _rounding.added_up((products + flushed) * jnp.square(y))
                squares.append(sum_ + flushed)
                total += sum_
            else:
                sum_, m = _rounding.added_up(products * y * z)
                total += 2 * sum_
            roundings = max(roundings, 16 + len(commons) ** 2 + n + m)
        for each, dot in zip(pairs, dots, strict=True):
            by_rows = y.shape[1] > 1
            known = dot is not None and is_parameter and _fits(dot, y)
            found = dot if dot is not None and known else contract(each, array, by_rows)
            sum_, m = _rounding.added_up(found * y)
            total += 2 * sum_
            inner = array.shape[2 if by_rows else 1]
            n = max(array.shape[1:]) + 8 if known else min(inner, chunk(inner))
            n += grams.UNROLLED + each.columns.shape[1]
            n += array.shape[2] if each.rows.ndim == 2 else 0
            roundings = max(roundings, 17 + len(commons) ** 2 + n + m)
    gamma = _rounding.gamma(roundings, total.dtype)
    for square in squares:
        length += grams.SLACK * jnp.sqrt(square)
    error = grams.SLACK * gamma * (jnp.square(length) - jnp.square(shared_length))
    gamma = _rounding.gamma(places + 2 * len(commons) + 4, total.dtype)
    return grams.raised(total + error, length, gamma)


def _fits(dot: jax.Array, y: jax.Array) -> bool:
    """Whether a coefficient varies over no axis that has been summed over."""
    return all(n == 1 or n == m for n, m in zip(y.shape[1:], dot.shape[1:], strict=True))


def _along(x: jax.Array, summed: Sequence[bool]) -> tuple[jax.Array, int]:
    """Sums over some of the three axes, kept with length one, and the number of roundings."""
    axes = [a for a, is_summed in enumerate(summed) if is_summed]
    kept = [a for a in range(3) if a not in axes]
    moved = x.transpose([*kept, *axes])
    flat = moved.reshape([-1, *(x.shape[a] for a in axes)])
    roundings = 0

    def added(one: jax.Array) -> jax.Array:
        nonlocal roundings
        total, roundings = _rounding.added_up(one)
        return total

    flat = jax.vmap(added)(flat)
    return flat.reshape([1 if a in axes else n for a, n in enumerate(x.shape)]), roundings + 1


def by_array(leads: Sequence[Term], smalls: Sequence[jax.Array | None]) -> dict[str, jax.Array]:
    """The coefficient y of each fixed array in the gradient of a parameter."""
    found: dict[str, jax.Array] = {}
    for term in leads:
        y = smalls[term.small]
        if y is not None:
            y = spread(y.astype(term.ratio.dtype), term.axes) * term.ratio
            found[term.key] = found[term.key] + y if term.key in found else y
    return found


def atoms_of(split: Split, axes: set[int] | frozenset[int]) -> set[int]:
    """The parts of axes of a parameter."""
    found, number = set(), 0
    for axis, parts in enumerate(split):
        if axis in axes:
            found |= set(range(number, number + len(parts)))
        number += len(parts)
    return found


def is_dense(shared: Layout, split: Split, axes: set[int] | frozenset[int]) -> bool:
    atoms = {a for a in atoms_of(split, axes) if shared.shape[a] > 1}
    return bool(atoms.intersection(shared.rows)) and bool(atoms.intersection(shared.columns))
