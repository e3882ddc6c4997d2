"""Norms of gradients that are kept as factors, from inner products of the factors' rows.

With the layout of `dpx.clipping.rules`, and without ever building a gradient,

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

from dpx.clipping import rounding as _rounding
from dpx.clipping.materialize import accumulator
from dpx.clipping.rounding import CHUNK
from dpx.clipping.rules import HIGHEST, Layout, Pair

# Elements of a factor of one example from which it is worth a loop iteration of its own.
LARGE = 2**16

# No norm is taken for less than this part of what its terms would add up to if none cancelled: it bounds
# what an example can add to the rounding of a sum over many.
FLOOR = 2.0**-6

# Products over this many chunks of an axis are written out; beyond it they run in a loop.
UNROLLED = 4

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


def squared_norm(shared: Layout, pairs: Sequence[Pair]) -> jax.Array:
    """An upper bound on ‖g‖² of one example, rounding included."""
    found = products(shared, pairs)
    return bounded(Errors.of(shared, found), found)


@functools.partial(jax.jit, static_argnums=0)
def products(shared: Layout, pairs: Sequence[Pair]) -> Products:
    """The inner products that a norm is made of."""
    _, rows, columns = shared.sizes()
    found = Products([], [])
    for s, one in enumerate(pairs):
        for other in pairs[: s + 1]:
            found.rows.append(_inner(one.rows, other.rows, rows))
            found.columns.append(_inner(one.columns, other.columns, columns))
    return found


class Errors(NamedTuple):
    """How far inner products of rows and of columns are off, at most.

    Attributes:
      rows, columns: γ_n for n roundings on the way to a product.
      flushed_rows, flushed_columns: the root of what may be flushed to zero.
    """

    rows: Any
    columns: Any
    flushed_rows: Any
    flushed_columns: Any

    @classmethod
    def of(cls, shared: Layout, found: Products) -> "Errors":
        """Those of a layout."""
        sizes = shared.sizes()[1:]
        dtype = found.columns[0].dtype if found.columns else jnp.float32
        # Of n products and sums that are flushed, each is off by no more than 4·tiny.
        return cls(
            *(_rounding.gamma(_rounding.chunked(n), dtype) for n in sizes),
            *(math.sqrt(4 * n * _rounding.tiny(dtype)) for n in sizes),
        )


def bounded(errors: Errors, found: Products) -> jax.Array:
    """An upper bound on ‖g‖², rounding of its products, and of what is added up of g, included."""
    total, length, roundings = estimate(errors, found)
    return raised(total, length, roundings)


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
    total, lengths, roundings = jnp.float32(0), jnp.float32(0), 4
    each = iter(zip(*found, strict=True))
    uses: list[tuple[_Side, _Side]] = []
    while crossed := list(itertools.islice(each, len(uses) + 1)):
        *others, (left, right) = crossed
        sides = (
            _side(left, errors.rows, errors.flushed_rows),
            _side(right, errors.columns, errors.flushed_columns),
        )
        total += _added_up(_terms(left, right, sides, sides))
        for (left, right), before in zip(others, uses, strict=True):
            total += 2 * _added_up(_terms(left, right, sides, before))
        lengths += jnp.sum(sides[0].lengths * sides[1].lengths, axis=1)
        roundings += sides[1].lengths.shape[1] + 1
        uses.append(sides)
    return total, SLACK * jnp.sqrt(jnp.sum(jnp.square(lengths))), roundings


def raised(total: jax.Array, length: jax.Array, roundings: int) -> jax.Array:
    """The squared norm: `total` with what the sum that is released rounds, at least `FLOOR`·`length` long.

    With P positions and a clip factor w, what is added to the sum is off from w·g by at most w·γ_{P+4}·√Λ. So
    this is added to the norm, and a contribution that is computed in float32 is never longer than w times the
    root of what is returned.
    """
    # `maximum` passes NaN on.
    norm = jnp.sqrt(jnp.maximum(total, jnp.square(FLOOR * length)))
    return jnp.square(norm + _rounding.gamma(roundings, total.dtype) * length)


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


class _Side(NamedTuple):
    """One side of a use: bounds for its rows and for the rounding of their inner products.

    Attributes:
      lengths: (K, P) upper bounds of the norms of its rows.
      share: (K, P); an inner product of rows p and q errs by at most share[p]·share[q]. None where
        inner products are exact.
    """

    lengths: jax.Array
    share: jax.Array | None


def _side(gram: jax.Array, gamma: Any, flushed: Any) -> _Side:
    """The bounds of a side from its Gram matrix (K, P, P), that of one-hot rows being of bools."""
    if gram.dtype == bool:
        return _Side(jnp.ones(gram.shape[:2]), None)
    # The diagonal, as every (P + 1)th entry: XLA would look it up entry by entry.
    count = gram.shape[1]
    squares = lax.slice_in_dim(gram.reshape(len(gram), count**2), 0, None, count + 1, axis=1)
    # What may be flushed in a product is spread over share[p]·share[q]; the terms between it and the rows are
    # those of flushed operands.
    share = jnp.sqrt(SLACK * gamma * squares) + flushed
    return _Side(share / jnp.sqrt(gamma), share)


def _terms(
    left: jax.Array, right: jax.Array, s: tuple[_Side, _Side], t: tuple[_Side, _Side]
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


def _added_up(terms: jax.Array) -> jax.Array:
    """The sum over (K, P, Q), one axis after the other: merged into one it would round more."""
    while terms.ndim:
        terms = lax.optimization_barrier(jnp.sum(terms, axis=-1))
    return terms
