"""Norms of gradients that are kept as factors, from inner products of the factors' rows.

With the layout of `dpx.clipping.gradients.products`, and without ever building a gradient,

    ‖g‖² = sum over pairs of uses (s, t) of
             sum_{k, p, q} ⟨rows_s[k, p], rows_t[k, q]⟩ · ⟨columns_s[k, p], columns_t[k, q]⟩.

Goodfellow's trick (arXiv:1510.01799) is the case of one position, ghost clipping (Li et al.,
arXiv:2110.05679) that of one use, and Phantom Clipping that of an embedding tied to the output
head: the pair of a look-up, whose rows are one-hot, with a matrix product.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpx.clipping import meshes
from dpx.clipping import rounding as _rounding
from dpx.clipping.gradients.products import Layout, Pair, precision
from dpx.clipping.rounding import CHUNK, accumulator

# No norm is taken for less than this part of what its terms would add up to if none cancelled: it bounds
# what an example can add to the rounding of a sum over many.
FLOOR = 2.0**-6

# Products over this many chunks of an axis are written out; beyond it they run in a loop.
UNROLLED = 4

# Chunks that a step of that loop takes, but on a CPU.
TOGETHER = 8

# Above what second-order terms, and rounding while the bounds are computed, can add to them.
SLACK = 1.02


class Products(NamedTuple):
    """Inner products of the rows of all uses of a parameter, for one example.

    Attributes:
      rows, columns: (K, P, Q) for every pair of uses s >= t, in the order (0, 0), (1, 0), (1, 1), ...;
        of one-hot rows, bools.
    """

    rows: list[jax.Array]
    columns: list[jax.Array]


@functools.partial(jax.jit, static_argnums=0)  # Traced once for all parameters that are alike.
def squared_norm(shared: Layout, pairs: Sequence[Pair]) -> jax.Array:
    """An upper bound on ‖g‖² of one example, rounding included."""
    found = products(shared, pairs)
    return bounded(Errors.of(shared, dtype(found)), found)


def squared_norms(shared: Layout, many: Sequence[Sequence[Pair]]) -> jax.Array:
    """The same of several gradients with factors of the same shapes, bounded together."""
    found = jax.tree.map(lambda *x: jnp.stack(x), *(_products(shared, pairs) for pairs in many))
    return jax.vmap(lambda each: bounded(Errors.of(shared, dtype(each)), each))(found)


def products(shared: Layout, pairs: Sequence[Pair]) -> Products:
    """The inner products that a norm is made of."""
    _, rows, columns = shared.sizes()
    found = Products([], [])
    for s, one in enumerate(pairs):
        for t, other in enumerate(pairs[: s + 1]):
            fast = shared.fast[s] and shared.fast[t]
            found.rows.append(_inner(one.rows, other.rows, rows, fast))
            found.columns.append(_inner(one.columns, other.columns, columns, fast))
    return found


_products = jax.jit(products, static_argnums=0)  # Traced once.


class Errors(NamedTuple):
    """How far inner products of rows and of columns are off, at most.

    Attributes:
      rows, columns: the root of γ_n for n roundings on the way to a product. An inner product of rows p and q
        errs by at most γ times their lengths.
      flushed_rows, flushed_columns: how much longer rows may be than their inner products with themselves
        say, for what is flushed to zero.
    """

    rows: Any
    columns: Any
    flushed_rows: Any
    flushed_columns: Any

    @classmethod
    def of(cls, shared: Layout, dtype: Any) -> "Errors":
        """Those of a layout."""
        sizes = shared.sizes()[1:]
        roots = [math.sqrt(_rounding.gamma(_rounding.chunked(n), dtype)) for n in sizes]
        # Of n products and sums that are flushed, each is off by no more than 4·tiny.
        flushed = [math.sqrt(4 * n * _rounding.tiny(dtype)) for n in sizes]
        return cls(*roots, *(x / root for x, root in zip(flushed, roots, strict=True)))


def bounded(errors: Errors, found: Products) -> jax.Array:
    """An upper bound on ‖g‖², rounding of its products, and of what is added up of g, included."""
    total, length, roundings = estimate(errors, found)
    return raised(total, length, _rounding.gamma(roundings, total.dtype))


def dtype(found: Products) -> Any:
    """That of inner products."""
    return found.columns[0].dtype if found.columns else jnp.float32


def estimate(errors: Errors, found: Products) -> tuple[jax.Array, jax.Array, int]:
    """An upper bound on ‖g‖², √Λ, and the number of roundings on the way to the sum that is released.

    Of a computed inner product L of rows α and α' over R entries no more is known than that it lies
    within γ_n·‖α‖·‖α'‖ of the exact one, n = `_rounding.chunked(R)`: about 512 + R/512. So each product
    L·M of inner products of rows and of columns is replaced by

        L·M + γ‖α‖‖α'‖·(|M| + γ'‖β‖‖β'‖) + |L|·γ'‖β‖‖β'‖ + γ''·|L·M| ≥ the exact product,

    with γ'' for the rounding of the sum over positions. One-hot rows and look-ups in the other factor
    have exact inner products, and cost nothing. Squares that are flushed to zero are part of the lengths.
    Λ = sum_k (sum_p ‖rows[k, p]‖·‖columns[k, p]‖)² is what ‖g‖² would be if no terms cancelled.
    """
    total, all_lengths = jnp.float32(0), jnp.float32(0)
    roundings = _rounding.in_products(0)
    each = iter(zip(*found, strict=True))
    uses: list[tuple[jax.Array | None, jax.Array]] = []
    while crossed := list(itertools.islice(each, len(uses) + 1)):
        *others, (left, right) = [(_squeezed(a), _squeezed(b)) for a, b in crossed]
        rows, columns = (
            lengths(left, errors.flushed_rows),
            lengths(right, errors.flushed_columns),
        )
        # Inner products with one-hot rows are exact.
        shares = None if left.dtype == bool else errors.rows * rows, errors.columns * columns
        total += added_up(terms(left, right, shares, shares, len(found.rows)))
        for (left, right), before in zip(others, uses, strict=True):
            total += 2 * added_up(terms(left, right, shares, before, len(found.rows)))
        all_lengths += jnp.sum(rows * columns, axis=-1)
        roundings += columns.shape[-1] + 1
        uses.append(shares)
    return total, SLACK * jnp.sqrt(jnp.sum(jnp.square(all_lengths))), roundings


def raised(total: jax.Array, length: jax.Array, gamma: Any) -> jax.Array:
    """The squared norm: `total` with what the sum that is released rounds, at least `FLOOR`·`length` long.

    With P positions and a clip factor w, what is added to the sum is off from w·g by at most w·γ_{P+4}·√Λ. So
    this is added to the norm, and a contribution that is computed in float32 is never longer than w times the
    root of what is returned.
    """
    # `maximum` passes NaN on.
    norm = jnp.sqrt(jnp.maximum(total, jnp.square(FLOOR * length)))
    return jnp.square(norm + gamma * length)


def _inner(a: jax.Array, b: jax.Array, size: int, fast: bool) -> jax.Array:
    """⟨a[k, p], b[k, q]⟩ for all positions: (K, P, Q). Indices (2-D) are one-hot rows."""
    if a.ndim == b.ndim == 3:
        return _gram(a, b, fast)
    if a.ndim == b.ndim == 2:
        return (a[:, :, None] == b[:, None, :]) & (a < size)[:, :, None]
    if a.ndim == 3:
        return _inner(b, a, size, fast).transpose(0, 2, 1)
    index = jnp.broadcast_to(a[:, None, :], (*b.shape[:2], a.shape[1]))
    taken = jnp.take_along_axis(b, index, axis=2, mode="fill", fill_value=0)
    return taken.transpose(0, 2, 1)


def _gram(a: jax.Array, b: jax.Array, fast: bool) -> jax.Array:
    """⟨a[k, p], b[k, q]⟩, each a sum over chunks of r of products that are sums within a chunk."""
    size = a.shape[2]
    # A GPU is given several chunks at once: one is too little work for it.
    together = 1 if meshes.on_one_cpu() else TOGETHER
    length = together * CHUNK
    whole = 0 if size <= UNROLLED * CHUNK else size // length

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        left, right = (lax.dynamic_slice_in_dim(x, i * length, length, 2) for x in (a, b))
        if together == 1:
            return total + _dot(left, right, fast)
        left, right = (x.reshape(*x.shape[:2], together, CHUNK) for x in (left, right))
        return total + jnp.sum(jax.vmap(_dot, (2, 2, None))(left, right, fast), 0)

    starts = range(whole * length, max(size, 1), CHUNK)
    parts = [_dot(a[..., i : i + CHUNK], b[..., i : i + CHUNK], fast) for i in starts]
    rest = functools.reduce(jnp.add, parts or [_dot(a[..., :0], b[..., :0], fast)])
    return lax.fori_loop(0, whole, add, rest) if whole else rest


def _dot(a: jax.Array, b: jax.Array, fast: bool) -> jax.Array:
    dtype = accumulator(jnp.promote_types(a.dtype, b.dtype))
    product = functools.partial(jnp.einsum, preferred_element_type=dtype, precision=precision(fast))
    if a.shape[0] > 1:
        return product("kpr,kqr->kpq", a, b)
    # XLA's compiler for CPUs copies a factor to move an axis of length one.
    return product("pr,qr->pq", a[0], b[0])[None]


def _squeezed(products: jax.Array) -> jax.Array:
    """The same without K if that is one: XLA's compiler for CPUs copies an array to move such an axis."""
    return products[0] if len(products) == 1 else products


def lengths(gram: jax.Array, flushed: Any) -> jax.Array:
    """Upper bounds of lengths of rows (..., P), from their Gram matrix (..., P, P); of bools if one-hot."""
    if gram.dtype == bool:
        return jnp.ones(gram.shape[:-1])
    # The diagonal, as every (P + 1)th entry: XLA would look it up entry by entry.
    *leading, count, _ = gram.shape
    squares = lax.slice_in_dim(gram.reshape(*leading, count**2), 0, None, count + 1, axis=-1)
    # What may be flushed in a product is spread over the lengths of its rows; the terms between it and the
    # rows are those of flushed operands.
    return jnp.sqrt(SLACK * squares) + flushed


def terms(
    left: jax.Array, right: jax.Array, s: Sequence[Any], t: Sequence[Any], pairs: int
) -> jax.Array:
    """Upper bounds of the exact left[..., p, q]·right[..., p, q], from computed inner products.

    Those of rows err by at most s[0][..., p]·t[0][..., q], not at all if either is None, and those of columns
    by s[1][..., p]·t[1][..., q]. The terms of a parameter may be added up over all `pairs` of its uses.
    """
    left = left.astype(right.dtype)
    products = left * right
    # Adding up the terms rounds too: over q, over p, over k, then over the pairs of uses.
    roundings = sum(products.shape) + pairs + 32
    bounds = products + _rounding.gamma(roundings, products.dtype) * jnp.abs(products)
    columns = s[1][..., None] * t[1][..., None, :]
    if s[0] is not None and t[0] is not None:
        rows = s[0][..., None] * t[0][..., None, :]
        bounds += rows * (jnp.abs(right) + columns)
    return bounds + jnp.abs(left) * columns + 8 * _rounding.tiny(products.dtype)


def added_up(terms: jax.Array) -> jax.Array:
    """The sum of all, one axis after the other: merged into one it would round more."""
    while terms.ndim:
        terms = lax.optimization_barrier(jnp.sum(terms, axis=-1))
    return terms
