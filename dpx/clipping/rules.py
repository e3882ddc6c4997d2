"""Norms and sums of gradients that are kept as factors.

All uses of a parameter must agree on which of its axes are blocks k, rows r and columns c; then
the gradient of one example is, over all uses and positions p,

    g[k, r, c] = sum_p rows[k, p, r] · columns[k, p, c],

and, without ever building it,

    ‖g‖² = sum over pairs of uses (s, t) of
             sum_{k, p, q} ⟨rows_s[k, p], rows_t[k, q]⟩ · ⟨columns_s[k, p], columns_t[k, q]⟩.

Goodfellow's trick (arXiv:1510.01799) is the case of one position, ghost clipping (Li et al.,
arXiv:2110.05679) that of one use, and Phantom Clipping that of an embedding tied to the output
head: the pair of a look-up, whose rows are one-hot, with a matrix product.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpx.clipping import rounding as _rounding
from dpx.clipping.materialize import accumulator
from dpx.clipping.rounding import CHUNK
from dpx.clipping.uses import Use, to_matrices

# Clip factors must fit the gradients they multiply: no TensorFloat-32, no bfloat16 passes.
HIGHEST = jax.lax.Precision.HIGHEST

# Elements of a factor of one example from which it is worth a loop iteration of its own.
LARGE = 2**16


# No norm is taken for less than this part of what its terms would add up to if none cancelled: it bounds
# what an example can add to the rounding of a sum over many.
FLOOR = 2.0**-6

# Products over this many chunks of an axis are written out; beyond it they run in a loop.
UNROLLED = 4

# Above what second-order terms, and rounding while the bounds are computed, can add to them.
SLACK = 1.02


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
        left.add(use.indexed)
    return frozenset(left & right), frozenset(left - right), frozenset(right - left)


def layout(uses: Sequence[Use], shape: tuple[int, ...]) -> Layout | None:
    """The layout that all uses of a parameter share, or None. Look-ups index its rows."""
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
    loops = loop_axes(use)
    left_axes, right_axes = loops + use.left_axes, loops + use.right_axes
    straight = is_left_rows(use, shared)
    axes = (left_axes, right_axes) if straight else (right_axes, left_axes)
    factors = (left, right) if straight else (right, left)
    inner = None if use.indexed is not None else shared.rows
    places = [axis[0] for axis in left_axes if axis and axis[0] < 0]
    rows = to_matrices(factors[0], axes[0], shared.shape, shared.blocks, places, inner)
    columns = to_matrices(factors[1], axes[1], shared.shape, shared.blocks, places, shared.columns)
    return Pair(rows.astype(jnp.int32) if inner is None else rows, columns)


def _inner(a: jax.Array, b: jax.Array, size: int) -> jax.Array:
    """⟨a[k, p], b[k, q]⟩ for all positions: (K, P, Q). Indices (2-D) are one-hot rows."""
    if a.ndim == b.ndim == 3:
        # In turn, examples on several devices would have to be gathered first.
        one_cpu = jax.default_backend() == "cpu" and jax.device_count() == 1
        return _gram_in_turn(a) if a is b and a.size >= LARGE and one_cpu else _gram(a, b)
    if a.ndim == b.ndim == 2:
        return (a[:, :, None] == b[:, None, :]) & (a < size)[:, :, None]
    if a.ndim == 3:
        return _inner(b, a, size).transpose(0, 2, 1)
    index = jnp.broadcast_to(a[:, None, :], (*b.shape[:2], a.shape[1]))
    taken = jnp.take_along_axis(b, index, axis=2, mode="fill", fill_value=0)
    return taken.transpose(0, 2, 1)


def _gram(a: jax.Array, b: jax.Array) -> jax.Array:
    """⟨a[k, p], b[k, q]⟩, each a sum over chunks of r of products that are sums within a chunk."""
    count, rest = divmod(a.shape[2], CHUNK)
    if count + (rest > 0) <= UNROLLED:
        starts = range(0, max(a.shape[2], 1), CHUNK)
        parts = [_dot(a[..., i : i + CHUNK], b[..., i : i + CHUNK]) for i in starts]
        return functools.reduce(jnp.add, parts)

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        return total + _dot(*(lax.dynamic_slice_in_dim(x, i * CHUNK, CHUNK, 2) for x in (a, b)))

    total = _dot(a[..., count * CHUNK :], b[..., count * CHUNK :])
    return lax.fori_loop(0, count, add, total)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    dtype = accumulator(jnp.promote_types(a.dtype, b.dtype))
    return jnp.einsum("kpr,kqr->kpq", a, b, preferred_element_type=dtype, precision=HIGHEST)


@jax.custom_batching.sequential_vmap
def _gram_in_turn(a: jax.Array) -> jax.Array:
    """One example at a time: on CPUs a loop of products takes half the time of a batched one."""
    return _gram(a, a)


class _Factor(NamedTuple):
    """One side of a use: its matrix, and bounds for the rounding of its inner products.

    Attributes:
      matrix: (K, P, R), or indices (K, P) of one-hot rows.
      lengths: (K, P) upper bounds of the norms of its rows.
      share: (K, P); an inner product of rows p and q errs by at most share[p]·share[q]. None where
        inner products are exact.
    """

    matrix: jax.Array
    lengths: jax.Array
    share: jax.Array | None


def _factor(matrix: jax.Array, size: int) -> tuple[_Factor, jax.Array]:
    """A side of a use with its bounds, and its Gram matrix (K, P, P)."""
    gram = _inner(matrix, matrix, size)
    if matrix.ndim == 2:
        return _Factor(matrix, jnp.ones(matrix.shape), None), gram
    squares = jnp.diagonal(gram, axis1=1, axis2=2)
    gamma = _rounding.gamma(_rounding.chunked(size), squares.dtype)
    # Of n products and sums that are flushed, each is off by no more than 4·tiny, so 4·n·tiny is spread
    # over share[p]·share[q]; the terms between it and the rows are those of flushed operands.
    share = jnp.sqrt(SLACK * gamma * squares) + math.sqrt(4 * size * _rounding.tiny(gram.dtype))
    return _Factor(matrix, share / math.sqrt(gamma), share), gram


def _terms(
    left: jax.Array, right: jax.Array, s: tuple[_Factor, _Factor], t: tuple[_Factor, _Factor]
) -> jax.Array:
    """Upper bounds of the exact left[k, p, q]·right[k, p, q], from computed inner products."""
    left = left.astype(right.dtype)
    terms = left * right
    # Adding up the terms rounds too: over q, over p, over k, then over the pairs of uses.
    roundings = sum(terms.shape) + 32
    bounds = terms + _rounding.gamma(roundings, terms.dtype) * jnp.abs(terms)
    assert s[1].share is not None
    assert t[1].share is not None
    columns = s[1].share[:, :, None] * t[1].share[:, None, :]
    if s[0].share is not None and t[0].share is not None:
        rows = s[0].share[:, :, None] * t[0].share[:, None, :]
        bounds += rows * (jnp.abs(right) + columns)
    return bounds + jnp.abs(left) * columns + 8 * _rounding.tiny(terms.dtype)


def squared_norm(shared: Layout, pairs: Sequence[Pair]) -> jax.Array:
    """An upper bound on ‖g‖² of one example by Gram matrices, rounding included.

    Of a computed inner product L of rows α and α' over R entries no more is known than that it lies
    within γ_n·‖α‖·‖α'‖ of the exact one, n = `_rounding.chunked(R)`: about 256 + R/256. So each product
    L·M of inner products of rows and of columns is replaced by

        L·M + γ‖α‖‖α'‖·(|M| + γ'‖β‖‖β'‖) + |L|·γ'‖β‖‖β'‖ + γ''·|L·M| ≥ the exact product,

    with γ'' for the rounding of the sum over positions. One-hot rows and look-ups in the other factor
    have exact inner products, and cost nothing. Squares that are flushed to zero are part of the lengths.

    The sum that is released rounds the contribution as well: with P positions and a clip factor w it
    is off from w·g by at most w·γ_{P+4}·√Λ, Λ = sum_k (sum_p ‖rows[k, p]‖·‖columns[k, p]‖)². So this is
    added to the norm, and a contribution that is computed in float32 is never longer than w times
    the root of what is returned, which is at least `FLOOR`·√Λ.
    """
    total, length, positions = gram_norm(shared, pairs)
    return bounded(total, length, positions + len(pairs) + 4)


def bounded(total: jax.Array, length: jax.Array, roundings: int) -> jax.Array:
    """The squared norm: `total` with what the sum that is released rounds, at least `FLOOR`·`length` long."""
    # `maximum` passes NaN on.
    norm = jnp.sqrt(jnp.maximum(total, jnp.square(FLOOR * length)))
    return jnp.square(norm + _rounding.gamma(roundings, total.dtype) * length)


def gram_norm(shared: Layout, pairs: Sequence[Pair]) -> tuple[jax.Array, jax.Array, int]:
    """An upper bound on ‖g‖², √Λ, and the number of positions."""
    _, rows, columns = shared.sizes()
    total, lengths, positions, done = jnp.float32(0), jnp.float32(0), 0, []
    for pair in pairs:
        (a, left), (b, right) = _factor(pair.rows, rows), _factor(pair.columns, columns)
        total += _added_up(_terms(left, right, (a, b), (a, b)))
        for c, d in done:
            left, right = _inner(a.matrix, c.matrix, rows), _inner(b.matrix, d.matrix, columns)
            total += 2 * _added_up(_terms(left, right, (a, b), (c, d)))
        lengths += jnp.sum(a.lengths * b.lengths, axis=1)
        positions += b.lengths.shape[1]
        done.append((a, b))
    return total, SLACK * jnp.sqrt(jnp.sum(jnp.square(lengths))), positions


def _added_up(terms: jax.Array) -> jax.Array:
    """The sum over (K, P, Q), one axis after the other: merged into one it would round more."""
    while terms.ndim:
        terms = lax.optimization_barrier(jnp.sum(terms, axis=-1))
    return terms


def product(shared: Layout, pairs: Sequence[Pair]) -> jax.Array:
    """g of one example, built: (K, R, C)."""
    batched = [jax.tree.map(lambda x: x[None], pair) for pair in pairs]
    return weighted_sum(shared, batched, jnp.ones(1))


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Sums outer products over examples and positions: (B, K, P, R), (B, K, P, C) -> (K, R, C)."""
    if a.shape[1] > 1:
        return jnp.einsum("bkpr,bkpc->krc", a, b, precision=HIGHEST)
    # Without a batch axis, even of length one, XLA's product is twice as fast on CPUs.
    a, b = (x.reshape(-1, x.shape[-1]) for x in (a, b))
    return jnp.einsum("nr,nc->rc", a, b, precision=HIGHEST)[None]


def weighted_sum(shared: Layout, pairs: Sequence[Pair], weights: jax.Array) -> jax.Array:
    """sum_b weights[b]·g_b from factors with a leading batch axis: (K, R, C)."""
    k, r, c = shared.sizes()
    total: Any = None
    for rows, columns in sorted(pairs, key=lambda pair: pair.rows.ndim == 3):
        dtype = accumulator(columns.dtype)
        scale = weights.astype(dtype)[:, None, None, None]
        if rows.ndim == 3:
            total = jnp.zeros((k, r, c), dtype) if total is None else total
            block = jnp.arange(k)[None, :, None]
            total = total.at[block, rows].add(columns * scale, mode="drop")
        else:
            # Scale the smaller factor, and let it come first: the larger is then read as it lies,
            # without a transposed copy.
            flip = columns.size < rows.size
            small, large = (columns, rows) if flip else (rows, columns)
            term = _product(small * scale, large)
            term = jnp.swapaxes(term, 1, 2) if flip else term
            total = term if total is None else total + term
    return jnp.zeros((k, r, c), accumulator(weights.dtype)) if total is None else total
