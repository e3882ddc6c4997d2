"""Norms of gradients that are kept as factors, from inner products of the factors' rows.

All terms of a gradient agree on which axes of the parameter are blocks k, rows r and columns c. Over all
terms s, t and positions p, q, the gradient, which is never built, and its norm are

    g[k, r, c] = sum_{s, p} rows_s[k, p, r] · columns_s[k, p, c],

    ‖g‖² = sum_{s, t} sum_{k, p, q} ⟨rows_s[k, p], rows_t[k, q]⟩ · ⟨columns_s[k, p], columns_t[k, q]⟩.

Goodfellow's trick (arXiv:1510.01799) is the case of one position, ghost clipping (Li et al.,
arXiv:2110.05679) that of one term, and Phantom Clipping that of an embedding tied to the output head: the
pair of a look-up, whose rows are one-hot, with a product of matrices.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpx.clipping import meshes, rounding
from dpx.clipping.rounding import CHUNK, accumulator

# No norm is taken for less than this part of the length that its terms would have if none cancelled. That
# bounds what an example can add to the rounding of a sum over many.
FLOOR = 2.0**-6
# The number of chunks of an axis up to which products are written out; more run in a loop.
UNROLLED = 4
# The number of chunks that a step of that loop takes, but on a CPU.
TOGETHER = 8
# A factor above what second-order terms, and rounding while bounds are computed, can add to them.
SLACK = 1.02


class Layout(NamedTuple):
    """The split of a parameter's axes (those longer than one) that all terms of its gradient share.

    Attributes:
      shape: of the parameter.
      blocks, rows, columns: its axes.
      fast: for each term, whether its factors have no more bits than TensorFloat-32.
    """

    shape: tuple[int, ...]
    blocks: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    fast: tuple[bool, ...]

    def sizes(self) -> tuple[int, int, int]:
        """(K, R, C)."""
        parts = self.blocks, self.rows, self.columns
        k, r, c = (math.prod(self.shape[i] for i in part) for part in parts)
        return k, r, c

    def restore(self, gradient: jax.Array) -> jax.Array:
        """(K, R, C) -> the shape of the parameter."""
        order = [*self.blocks, *self.rows, *self.columns]
        gradient = gradient.reshape([self.shape[i] for i in order])
        return gradient.transpose([order.index(i) for i in sorted(order)]).reshape(self.shape)


class Pair(NamedTuple):
    """The factors of one term for one example: rows (K, P, R), or indices (K, P), and columns (K, P, C)."""

    rows: jax.Array
    columns: jax.Array


@functools.partial(jax.jit, static_argnums=0)  # Traced once for all parameters that are alike.
def squared_norm(shared: Layout, *alike: Sequence[Pair]) -> jax.Array:
    """An upper bound on ‖g‖² of one example, with the rounding of its products, and of what is added up of g.

    A computed inner product L of rows α and α' over R entries lies within γ_n·‖α‖·‖α'‖ of the exact one,
    n = `rounding.chunked(R)`: about 512 + R/512. So each product L·M of inner products is replaced by

        L·M + γ‖α‖‖α'‖·(|M| + γ'‖β‖‖β'‖) + |L|·γ'‖β‖‖β'‖ + γ''·|L·M| ≥ the exact product,

    with γ'' for the rounding of the sum over positions. One-hot rows and look-ups in the other factor
    have exact inner products, and cost nothing. Squares that are flushed to zero are part of the lengths.

    Λ = sum_k (sum_p ‖rows[k, p]‖·‖columns[k, p]‖)² is what ‖g‖² would be if no terms cancelled. With P
    positions and a clip factor w, what is added to a sum is off from w·g by at most w·γ_{P+4}·√Λ. So this is
    added to the norm, and no contribution in float32 is longer than w times it. `alike` are blocks of one g.
    """
    _, *sizes = shared.sizes()
    total, all_lengths, roundings = jnp.float32(0), jnp.float32(0), rounding.in_products(0)
    scaled: list[tuple[Any, Any]] = []  # By term: what `lengths` says of rows, and of columns.
    # A term's pair with itself comes first: it tells the lengths of the term's rows.
    numbers = [(s, t) for s in range(len(alike[0])) for t in reversed(range(s + 1))]
    for s, t in numbers:
        fast = shared.fast[s] and shared.fast[t]
        each = [[_inner(x[s][i], x[t][i], sizes[i], fast) for x in alike] for i in (0, 1)]
        both = (x[0] if len(x) == 1 else jnp.concatenate(x) for x in each)
        # XLA's compiler for CPUs copies an array to move an axis of length one.
        left, right = (x[0] if len(x) == 1 else x for x in both)
        if s == t:
            (rows, of_rows), (columns, of_columns) = map(lengths, (left, right), sizes)
            scaled.append((of_rows, of_columns))
            all_lengths += jnp.sum(rows * columns, axis=-1)
            roundings += columns.shape[-1] + 1
        bounds = terms(left, right, scaled[s], scaled[t], len(numbers))
        total += (1 if s == t else 2) * rounding.added_up(bounds)[0]
    length = SLACK * jnp.sqrt(jnp.sum(jnp.square(all_lengths)))
    # `maximum` passes NaN on.
    norm = jnp.sqrt(jnp.maximum(total, jnp.square(FLOOR * length)))
    return jnp.square(norm + rounding.gamma(roundings, total.dtype) * length)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _inner(a: jax.Array, b: jax.Array, size: int, fast: bool) -> jax.Array:
    """⟨a[k, p], b[k, q]⟩ for all positions: (K, P, Q). Indices (2-D) are one-hot rows; of two it is bools."""
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
    if a.shape[0] > 1:
        return product("kpr,kqr->kpq", a, b, fast)
    return product("pr,qr->pq", a[0], b[0], fast)[None]


def product(formula: str, a: jax.Array, b: jax.Array, fast: bool) -> jax.Array:
    """A product of factors: by TensorFloat-32 where they have no more bits, and so lose none.

    Clip factors must fit the gradients they multiply: else no TensorFloat-32, no bfloat16 passes.
    """
    dtype = accumulator(jnp.promote_types(a.dtype, b.dtype))
    precision = lax.Precision.DEFAULT if fast else lax.Precision.HIGHEST
    return jnp.einsum(formula, a, b, preferred_element_type=dtype, precision=precision)


def lengths(gram: jax.Array, size: int) -> tuple[jax.Array, jax.Array | None]:
    """Upper bounds of the lengths of rows (..., P), and these times √γ_n, or None if the rows are one-hot.

    They come from the Gram matrix (..., P, P) of rows of `size` entries, of bools if rows are one-hot. An
    inner product of rows p and q errs by at most γ_n times their lengths, and not at all of one-hot ones.
    """
    # The diagonal, as every (P + 1)th entry: XLA would look it up entry by entry.
    *leading, count, _ = gram.shape
    squares = lax.slice_in_dim(gram.reshape(*leading, count**2), 0, None, count + 1, axis=-1)
    if gram.dtype == bool:  # An index that is no entry is a row of zeros.
        return squares.astype(jnp.float32), None
    root = math.sqrt(rounding.gamma(rounding.chunked(size), gram.dtype))
    # Of n products and sums that are flushed, each is off by no more than 4·tiny. That is spread over the
    # lengths of rows; the terms between it and the rows are those of flushed operands.
    flushed = math.sqrt(4 * size * rounding.tiny(gram.dtype)) / root
    bounds = jnp.sqrt(SLACK * squares) + flushed
    return bounds, root * bounds


def terms(
    left: jax.Array, right: jax.Array, s: Sequence[Any], t: Sequence[Any], pairs: int
) -> jax.Array:
    """Upper bounds of the exact left[..., p, q]·right[..., p, q], from computed inner products.

    Those of rows err by at most s[0][..., p]·t[0][..., q], not at all if either is None, and those of columns
    by s[1][..., p]·t[1][..., q]. The bounds may be added up over so many pairs of terms.
    """
    left = left.astype(right.dtype)
    products = left * right
    # Adding up the terms rounds too: over q, over p, over k, then over the pairs of uses.
    roundings = sum(products.shape) + pairs + 32
    bounds = products + rounding.gamma(roundings, products.dtype) * jnp.abs(products)
    columns = s[1][..., None] * t[1][..., None, :]
    if s[0] is not None and t[0] is not None:
        rows = s[0][..., None] * t[0][..., None, :]
        bounds += rows * (jnp.abs(right) + columns)
    return bounds + jnp.abs(left) * columns + 8 * rounding.tiny(products.dtype)
