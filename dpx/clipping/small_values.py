"""Gradients of small values inside derived weights: scales, norms of columns, step sizes.

A derived weight has the gradient G = sum_p rows[p] ⊗ columns[p] for an example. A small value t that is
broadcast inside it has the gradient sum G ⊙ T over the axes that t does not follow, with a fixed array T.
That is made of the factors, so that G is not held.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dpx.clipping import fixed_terms, rules
from dpx.clipping.fixed_terms import Split, Term
from dpx.clipping.materialize import in_turn
from dpx.clipping.rules import Layout, Pair


def small_gradient(
    term: Term,
    array: jax.Array,
    shared: Layout,
    split: Split,
    uses: Sequence[tuple[Pair, jax.Array | None]],
    shape: Sequence[int],
) -> jax.Array:
    """The gradient of a small value inside a derived weight, from the factors of that weight's gradient.

    With each pair of factors may come what `fixed_terms.contract` has of it and of the array.
    """
    follows = {a for a, axis in enumerate(term.axes) if axis is not None}
    if fixed_terms.is_dense(shared, split, follows):
        table = fixed_terms.arrange(shared, split, array * term.ratio)
        atoms = sorted(fixed_terms.atoms_of(split, follows))
        parts = [_contract_both(shared, pair, table, atoms) for pair, _ in uses]
        total = functools.reduce(jnp.add, parts)
    else:
        total = _contract_one(term, array, shared, split, uses, follows)
    kept = sorted(follows)
    total = total.reshape([math.prod(split[a]) for a in kept])
    order = sorted(range(len(kept)), key=lambda i: term.axes[kept[i]] or 0)
    return total.transpose(order).reshape(shape)


def _contract_one(
    term: Term,
    array: jax.Array,
    shared: Layout,
    split: Split,
    uses: Sequence[tuple[Pair, jax.Array | None]],
    follows: set[int],
) -> jax.Array:
    """The same for one that follows rows or columns, not both: axes of the parameter, or of length one."""
    ratio, varies = term.ratio, follows | {a for a, n in enumerate(term.ratio.shape) if n > 1}
    if fixed_terms.is_dense(shared, split, varies):
        array, ratio, varies = array * ratio, jnp.ones((1,) * array.ndim, array.dtype), follows
        uses = [(pair, None) for pair, _ in uses]  # Of another array.
    by_rows = bool(fixed_terms.atoms_of(split, varies).intersection(shared.rows))
    array = fixed_terms.arrange(shared, split, array)
    k, r, c = shared.sizes()
    shape = (k, r, 1) if by_rows else (k, 1, c)
    total = sum(
        found
        if found is not None and found.shape == shape
        else fixed_terms.contract(pair, array, by_rows)
        for pair, found in uses
    )
    total *= fixed_terms.arrange(shared, split, ratio)
    # Back to the axes of the parameter, those summed over of length one.
    gone = shared.columns if by_rows else shared.rows
    order = [a for group in shared[1:] for a in group]
    total = total.reshape([1 if a in gone else shared.shape[a] for a in order])
    total = total.transpose([order.index(a) for a in sorted(order)])
    full = [1 if a in gone or a not in order else n for a, n in enumerate(shared.shape)]
    total = total.reshape(full)
    rest = [a for a in range(total.ndim) if a not in fixed_terms.atoms_of(split, follows)]
    return jnp.sum(total, rest, keepdims=True)


def _contract_both(shared: Layout, pair: Pair, table: jax.Array, atoms: Sequence[int]) -> jax.Array:
    """sum over positions of product ⊙ T, and over all axes but `atoms`, which are rows' and columns'.

    Of the two products, that which takes fewer operations comes first: a factor and T for one position, both
    factors for many.
    """
    blocks, rows, columns = (list(group) for group in shared[1:])
    position, count = len(shared.shape), pair.columns.shape[1]

    def of_one(*arrays: jax.Array) -> jax.Array:
        labels = [*blocks, position, *rows], [*blocks, position, *columns], blocks + rows + columns
        sizes = {a: shared.shape[a] for a in labels[2]} | {position: count}
        operands = [
            x.reshape([sizes[a] for a in axes]) for x, axes in zip(arrays, labels, strict=True)
        ]
        given = [each for both in zip(operands, labels, strict=True) for each in both]
        kept = [a for a in atoms if a in sizes]
        return jnp.einsum(*given, kept, precision=rules.HIGHEST, preferred_element_type=table.dtype)

    table = jnp.broadcast_to(table, shared.sizes())
    return (in_turn(of_one) if count > 1 else of_one)(*pair, table)
