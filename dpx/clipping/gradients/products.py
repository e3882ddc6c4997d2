"""Sums of outer products as products of matrices.

All terms of a gradient agree on which axes of the parameter are blocks k, rows r and columns c; then
the gradient of one example is, over all terms and positions p,

    g[k, r, c] = sum_p rows[k, p, r] · columns[k, p, c].
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpx.clipping import rounding
from dpx.clipping.rounding import accumulator

# Clip factors must fit the gradients they multiply: no TensorFloat-32, no bfloat16 passes.
HIGHEST = jax.lax.Precision.HIGHEST


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
        k, r, c = (
            math.prod(self.shape[i] for i in part)
            for part in (self.blocks, self.rows, self.columns)
        )
        return k, r, c

    def restore(self, gradient: jax.Array) -> jax.Array:
        """(K, R, C) -> the shape of the parameter."""
        order = [*self.blocks, *self.rows, *self.columns]
        gradient = gradient.reshape([self.shape[i] for i in order])
        return gradient.transpose([order.index(i) for i in sorted(order)]).reshape(self.shape)


class Pair(NamedTuple):
    """The factors of one term for one example: rows (K, P, R), or indices (K, P); columns
    (K, P, C)."""

    rows: jax.Array
    columns: jax.Array


def _flips(rows: jax.Array, columns: jax.Array) -> bool:
    """Whether columns are the smaller factor, which clip factors multiply."""
    return columns.size < rows.size


def precision(fast: bool) -> lax.Precision:
    """That of a product of factors: by TensorFloat-32 where they have no more bits, and so lose none."""
    return lax.Precision.DEFAULT if fast else HIGHEST


def _products(a: jax.Array, b: jax.Array, fast: bool) -> jax.Array:
    """Sums outer products over examples and positions: (B, K, P, R), (B, K, P, C) -> (K, R, C).

    Matrix units multiply numbers of 8 or 11 bits exactly, several times as fast as float32 ones. So where
    `b` has no more, `a` in float32 is replaced by the sum of two such numbers (`rounding.in_products`).
    """
    is_bfloat16 = (a.dtype, b.dtype) == (jnp.float32, jnp.bfloat16)
    if jax.default_backend() == "cpu" or not (is_bfloat16 or fast):
        return _product(a, b, fast)
    most = lax.reduce_precision(a, 8, 7) if is_bfloat16 else rounding.to_tf32(a)
    rest = a - most
    rest = lax.reduce_precision(rest, 8, 7) if is_bfloat16 else rounding.to_tf32(rest)
    dtype = b.dtype if is_bfloat16 else a.dtype
    return _product(rest.astype(dtype), b, fast) + _product(most.astype(dtype), b, fast)


def _product(a: jax.Array, b: jax.Array, fast: bool) -> jax.Array:
    dtype = accumulator(jnp.promote_types(a.dtype, b.dtype))
    product = functools.partial(jnp.einsum, preferred_element_type=dtype, precision=precision(fast))
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
    in_turn = sorted(zip(pairs, shared.fast, strict=True), key=lambda each: each[0].rows.ndim == 3)
    for (rows, columns), fast in in_turn:
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
            term = _products(scale * small.astype(dtype), large, fast)
            term = jnp.swapaxes(term, 1, 2) if flip else term
            total = term if total is None else total + term
    return jnp.zeros((k, r, c), accumulator(weights.dtype)) if total is None else total
