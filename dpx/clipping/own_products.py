"""Products with a parameter itself, read off the products that the loss takes anyway.

Norms and gradients of scales need sums over positions of (rows[p] · W) ⊙ columns[p] (`fixed_terms`).
The loss has multiplied by W, or by a derived weight W ⊙ m. If m varies over columns alone, such as the scale
of weight norm, then the result of that product is (rows[p] · W) ⊙ m, and no second product is needed.

That a derived weight is W ⊙ m is checked when the program runs, and so is that neither it nor m is very
small. Otherwise the product is taken.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpx.clipping import fixed_terms, rounding, rules
from dpx.clipping.rules import Layout
from dpx.clipping.uses import Use
from dpx.clipping.views import to_matrices

# Scales are no smaller, nor their inverses, where the result of a product with a derived weight serves.
SMALLEST_SCALE = 2.0**-10

# Nor are entries of that weight, but for those that are zero.
SMALLEST_ENTRY = 2.0**-100


class Own(NamedTuple):
    """sum over positions of (rows · W) ⊙ columns, as (K, 1, C), or turned, (K, R, 1).

    Attributes:
      bare: of the factors that a use hands out.
      scaled: of those times m.
    """

    bare: jax.Array
    scaled: jax.Array


def dots(use: Use, cotangent: jax.Array, result: jax.Array) -> jax.Array:
    """The result of a product with a weight times its cotangent, summed over positions."""
    places = [i for i, axis in enumerate(use.right_axes) if axis and axis[0] < 0]
    return jnp.sum(cotangent * result, places)


def arranged(use: Use, shared: Layout, found: jax.Array) -> jax.Array:
    """The same as (K, 1, C) or (K, R, 1)."""
    rest = tuple(axis for axis in use.right_axes if not (axis and axis[0] < 0))
    bare = use._replace(
        right_axes=rest, left_axes=tuple(a for a in use.left_axes if not (a and a[0] < 0))
    )
    straight = rules.is_left_rows(use, shared)
    loops = rules.loop_axes(bare)
    places = [axis[0] for axis in loops if axis and axis[0] < 0]
    inner = shared.columns if straight else shared.rows
    found = to_matrices(found, loops + rest, shared.shape, shared.blocks, places, inner)
    found = jnp.sum(found, 1)
    return found[:, None, :] if straight else found[:, :, None]


def varies_with_result(use: Use, shared: Layout) -> bool:
    """Whether what scales the weight varies over no axis that the product sums over."""
    if use.scale is None:
        return True
    inner = shared.rows if rules.is_left_rows(use, shared) else shared.columns
    return not any(shared.shape[a] > 1 for a in use.scale.atoms.intersection(inner))


def is_multiple(derived: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """Whether a derived weight is W ⊙ m, and neither is so small that much of a product would be flushed."""
    error = 8 * rounding.unit(derived.dtype) * jnp.abs(derived)
    size = jnp.abs(scale)
    is_good = (jnp.abs(derived - weight * scale) <= error) & (
        (weight == 0) | (jnp.abs(derived) >= SMALLEST_ENTRY)
    )
    # XLA's compiler for CPUs adds up floats faster than it looks for a False.
    return (jnp.sum(~is_good, dtype=jnp.float32) == 0) & jnp.all(
        (size >= SMALLEST_SCALE) & (size <= 1 / SMALLEST_SCALE)
    )


def of_derived(
    use: Use,
    shared: Layout,
    factors: Sequence[Any],
    found: jax.Array,
    array: jax.Array,
    scale: jax.Array,
    is_good: jax.Array,
) -> Own:
    """From what was found with a derived weight, or from a product with the parameter; all arranged."""

    def taken() -> Own:
        pair = rules.pair(use, shared, *factors)
        bare = fixed_terms.contract(pair, array, not rules.is_left_rows(use, shared))
        return Own(bare, bare * scale)

    return lax.cond(is_good, lambda: Own(found / scale, found), taken)
