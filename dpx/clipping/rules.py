"""Sums of gradients that are kept as factors.

All uses of a parameter must agree on which of its axes are blocks k, rows r and columns c; then
the gradient of one example is, over all uses and positions p,

    g[k, r, c] = sum_p rows[k, p, r] · columns[k, p, c].
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpx.clipping import meshes
from dpx.clipping.materialize import accumulator
from dpx.clipping.uses import Use
from dpx.clipping.views import to_matrices

# Clip factors must fit the gradients they multiply: no TensorFloat-32, no bfloat16 passes.
HIGHEST = jax.lax.Precision.HIGHEST


class Layout(NamedTuple):
    """The split of a parameter's axes (those longer than one) that all its uses share."""

    shape: tuple[int, ...]
    blocks: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def sizes(self) -> tuple[int, int, int]:
        """(K, R, C)."""
        k, r, c = (math.prod(self.shape[i] for i in part) for part in self[1:])
        return k, r, c

    def restore(self, gradient: jax.Array) -> jax.Array:
        """(K, R, C) -> the shape of the parameter."""
        order = [*self.blocks, *self.rows, *self.columns]
        gradient = gradient.reshape([self.shape[i] for i in order])
        return gradient.transpose([order.index(i) for i in sorted(order)]).reshape(self.shape)


class Pair(NamedTuple):
    """The factors of one use for one example: rows (K, P, R), or indices (K, P); columns
    (K, P, C)."""

    rows: jax.Array
    columns: jax.Array


def _split(use: Use) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
    loops = {atom for loop in use.loops for atom in loop.axes}
    left = loops | {a for axis in use.left_axes for a in axis if a >= 0}
    right = loops | {a for axis in use.right_axes for a in axis if a >= 0}
    if use.indexed is not None:
        left.update(use.indexed)
    return frozenset(left & right), frozenset(left - right), frozenset(right - left)


def layout(uses: Sequence[Use], shape: tuple[int, ...]) -> Layout | None:
    """The layout that all uses of a parameter share, or None. Look-ups index its rows.

    Where an array multiplies the gradient that varies over both factors, it is that of all uses.
    """
    if any(use.is_masked for use in uses) and len({use.scale for use in uses}) > 1:
        return None
    splits = [_split(use) for use in uses]
    first = next((i for i, use in enumerate(uses) if use.indexed is not None), 0)
    blocks, rows, columns = splits[first]
    for use, split in zip(uses, splits, strict=True):
        swapped = split == (blocks, columns, rows) and use.indexed is None
        if split != (blocks, rows, columns) and not swapped:
            return None
    return Layout(shape, *(tuple(sorted(part)) for part in (blocks, rows, columns)))


def is_left_rows(use: Use, shared: Layout) -> bool:
    """Whether the left factor of a use runs over the rows of the layout."""
    return _split(use)[1] == frozenset(shared.rows)


def loop_axes(use: Use) -> tuple[tuple[int, ...], ...]:
    """What the leading axes that scans add to the factors of a use stand for."""
    return tuple(
        loop.axes if loop.axes or loop.length == 1 else (-1000 - depth,)
        for depth, loop in enumerate(use.loops)
    )


def pair(use: Use, shared: Layout, left: jax.Array, right: jax.Array) -> Pair:
    """The factors of a use, loops leading, as matrices."""
    return _pair(use.form, shared, left, right)


@functools.partial(jax.jit, static_argnums=(0, 1))  # Traced once for all uses that are alike.
def _pair(use: Use, shared: Layout, left: jax.Array, right: jax.Array) -> Pair:
    loops = loop_axes(use)
    left_axes, right_axes = loops + use.left_axes, loops + use.right_axes
    if (
        use.indexed is None
        and left.dtype != right.dtype
        and jnp.float64 in (left.dtype, right.dtype)
    ):
        # One type for both: bounds on rounding are those of one.
        left, right = left.astype(jnp.float64), right.astype(jnp.float64)
    straight = is_left_rows(use, shared)
    axes = (left_axes, right_axes) if straight else (right_axes, left_axes)
    factors = (left, right) if straight else (right, left)
    inner = None if use.indexed is not None else shared.rows
    places = [axis[0] for axis in left_axes if axis and axis[0] < 0]
    rows = to_matrices(factors[0], axes[0], shared.shape, shared.blocks, places, inner)
    columns = to_matrices(factors[1], axes[1], shared.shape, shared.blocks, places, shared.columns)
    return Pair(rows.astype(jnp.int32) if inner is None else rows, columns)


def in_both_forms(pair: Pair, later: bool) -> tuple[Pair, Pair]:
    """The factors of one example as norms read them and as sums do, settled if that was left for later."""
    return _settled(pair) if later else (pair, pair)


@functools.partial(jax.jit, inline=True)  # Traced once for all uses that are alike.
def _settled(pair: Pair) -> tuple[Pair, Pair]:
    if len(pair.rows) > 1 or not meshes.on_one_cpu():
        return (lax.optimization_barrier(pair),) * 2
    if _flips(*pair):
        columns, rows, all_rows = _larger_twice(pair.columns, pair.rows)
        return Pair(rows, columns), Pair(all_rows, columns)
    rows, columns, all_columns = _larger_twice(*pair)
    return Pair(rows, columns), Pair(rows, all_columns)


@jax.custom_batching.custom_vmap
def _larger_twice(small: jax.Array, large: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Two factors (1, P, R) and (1, P, C), and the larger once more, settled.

    Norms take a matrix of each example. Sums take one matrix of all, and the larger factor as it lies. XLA's
    compiler for CPUs copies an array whose form changes on both sides of a barrier.
    """
    return lax.optimization_barrier((small, large, large))


@_larger_twice.def_vmap
def _larger_twice_of_all(size: int, batched: Any, small: jax.Array, large: jax.Array):
    if not all(batched):
        return lax.optimization_barrier((small, large, large)), (*batched, batched[1])
    each = [x.reshape(size, *x.shape[2:]) for x in (small, large)]
    forms = lax.optimization_barrier((*each, large.reshape(-1, large.shape[-1])))
    shaped = zip(forms, (small, large, large), strict=True)
    return tuple(x.reshape(like.shape) for x, like in shaped), (True,) * 3


def _flips(rows: jax.Array, columns: jax.Array) -> bool:
    """Whether columns are the smaller factor, which clip factors multiply."""
    return columns.size < rows.size


def _products(a: jax.Array, b: jax.Array) -> jax.Array:
    """Sums outer products over examples and positions: (B, K, P, R), (B, K, P, C) -> (K, R, C).

    Matrix units multiply bfloat16 numbers exactly, several times as fast as float32 ones. So where `b` is
    bfloat16, `a` in float32 is replaced by the sum of two such numbers (`rounding.in_products`).
    """
    if jax.default_backend() == "cpu" or (a.dtype, b.dtype) != (jnp.float32, jnp.bfloat16):
        return _product(a, b)
    most = lax.reduce_precision(a, 8, 7)
    rest = lax.reduce_precision(a - most, 8, 7)
    return _product(rest.astype(b.dtype), b) + _product(most.astype(b.dtype), b)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    dtype = accumulator(jnp.promote_types(a.dtype, b.dtype))
    product = functools.partial(jnp.einsum, preferred_element_type=dtype, precision=HIGHEST)
    if a.shape[1] > 1:
        return product("bkpr,bkpc->krc", a, b)
    # Without a batch axis, even of length one, XLA's product is twice as fast on CPUs.
    a, b = (x.reshape(-1, x.shape[-1]) for x in (a, b))
    return product("nr,nc->rc", a, b)[None]


def product(shared: Layout, pairs: Sequence[Pair]) -> jax.Array:
    """g of one example, built: (K, R, C)."""
    batched = [jax.tree.map(lambda x: x[None], pair) for pair in pairs]
    return _summed(shared, batched, jnp.ones(1))


@functools.partial(jax.jit, static_argnums=0)
def weighted_sum(shared: Layout, pairs: Sequence[Pair], weights: jax.Array) -> jax.Array:
    """sum_b weights[b]·g_b from factors with a leading batch axis, in the shape of the parameter."""
    return shared.restore(_summed(shared, pairs, weights))


def _summed(shared: Layout, pairs: Sequence[Pair], weights: jax.Array) -> jax.Array:
    k, r, c = shared.sizes()
    total: Any = None
    for rows, columns in sorted(pairs, key=lambda pair: pair.rows.ndim == 3):
        dtype = accumulator(columns.dtype)
        scale = weights.astype(dtype)[:, None, None, None]
        if rows.ndim == 3:
            total = jnp.zeros((k, r, c), dtype) if total is None else total
            block = jnp.arange(k)[None, :, None]
            total = total.at[block, rows].add(columns.astype(dtype) * scale, mode="drop")
        else:
            # Scale the smaller factor, and let it come first: the larger is then read as it lies, without a
            # transposed copy. Its scale comes first too, or XLA compiles two orders of operands.
            flip = _flips(rows, columns)
            small, large = (columns, rows) if flip else (rows, columns)
            term = _products(scale * small.astype(dtype), large)
            term = jnp.swapaxes(term, 1, 2) if flip else term
            total = term if total is None else total + term
    return jnp.zeros((k, r, c), accumulator(weights.dtype)) if total is None else total
