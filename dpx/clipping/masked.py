"""Norms of gradients that an array multiplies entry by entry: those of masked weights, tanh(W), exp(W).

Where a loss uses f(W), entry by entry, the gradient of an example is

    g = m ⊙ sum_p rows[p] ⊗ columns[p],    m = f'(W).

If m varies over rows and columns at once it can be moved into neither factor. The sum over examples is still
one product of their factors, times m. Norms take the product of each example, which is not kept. For one
position it is not even made: ‖g‖² = sum_rc rows[r]²·m[r, c]²·columns[c]² is one more product like the forward
pass.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dpx.clipping import fixed_terms, grams, rules
from dpx.clipping import rounding as _rounding
from dpx.clipping.materialize import accumulator, in_turn
from dpx.clipping.rules import Layout, Pair

# Columns of m that are taken together where its largest entry will do for all of them.
WIDTH = 8


def squared_norm(shared: Layout, pairs: Sequence[Pair], array: jax.Array) -> jax.Array:
    """An upper bound on ‖g‖² of one example, rounding included; m is (K or 1, R, C).

    What is added to a sum is off from w·g by at most w·γ_{P+4}·Λ, with Λ the sum over positions of
    ‖m ⊙ rows[p] ⊗ columns[p]‖, and so is the product that is made here.
    """
    k, r, c = shared.sizes()
    types = (accumulator(pair.columns.dtype) for pair in pairs)
    wide = functools.reduce(jnp.promote_types, types, array.dtype)
    array = jnp.broadcast_to(array, (k, r, c)).astype(wide)
    count = sum(pair.columns.shape[1] for pair in pairs)
    # Of one position this is the norm itself; of several no more than what rounding is measured by.
    width = WIDTH if count > 1 and c % WIDTH == 0 else 1
    lengths = [squared_lengths(pair, array, width) for pair in pairs]
    dtype = lengths[0].dtype
    tiny = _rounding.tiny(dtype)
    gamma = _rounding.gamma(2 * _rounding.in_products(count) + 8, dtype)
    total, length = _rounding.added_up(lengths[0])[0], sum(jnp.sum(jnp.sqrt(x), 1) for x in lengths)
    length = grams.SLACK * jnp.sqrt(jnp.sum(jnp.square(length)))
    # Products that are flushed to zero are off by `tiny`, times an entry of m.
    size = jnp.sqrt(_rounding.sum_of_squares(array))
    length += grams.SLACK * (count * size + math.sqrt(array.size)) * tiny / gamma
    if count > 1:
        total = _of_product(shared, pairs, array)
    return grams.raised(total, length, gamma)


def squared_lengths(pair: Pair, array: jax.Array, width: int = 1) -> jax.Array:
    """‖m ⊙ rows[p] ⊗ columns[p]‖² for all positions, rounded up: (K, P).

    The largest m of every `width` columns stands for all of them, which divides the work by as much.
    """
    dtype = accumulator(pair.columns.dtype)
    k, r, c = array.shape
    tiny = _rounding.tiny(dtype)
    # Whatever is flushed, of squares, of their products and of sums, is below `tiny`.
    squares, columns = jnp.square(array) + tiny, jnp.square(pair.columns.astype(dtype)) + tiny
    squares = jnp.max(squares.reshape(k, r, c // width, width), axis=3)
    columns = jnp.sum(columns.reshape(k, -1, c // width, width), axis=3)
    if pair.rows.ndim == 2:
        found = fixed_terms.taken(squares, pair.rows)
    else:
        rows = jnp.square(pair.rows.astype(dtype)) + tiny
        found = fixed_terms.multiplied(rows, squares, 1) + 2 * r * tiny
    products = jnp.sum(found * columns, axis=2) + 2 * c * tiny
    terms = fixed_terms.chunk(r) + grams.UNROLLED + c + k + 16
    return products * (1 + 1.01 * _rounding.gamma(terms, dtype))


def _of_product(shared: Layout, pairs: Sequence[Pair], array: jax.Array) -> jax.Array:
    def of_one(pairs: Sequence[Pair], array: jax.Array) -> jax.Array:
        return _rounding.sum_of_squares(rules.product(shared, pairs) * array)

    return in_turn(of_one)(pairs, array)
