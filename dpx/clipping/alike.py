"""The norms of parameters that are alike, such as those of blocks that nobody scanned, taken together.

The norm of one gradient is many small steps, all of them the same for a gradient of the same form. So small
gradients of one shape are stacked, and so are small matrices of inner products of factors of one form: a deep
model has no more to trace and to compile for its norms than one of its blocks.

A compiler writes equal kernels only once, and so what differs from parameter to parameter takes it long: what
is stacked is not taken apart again, and sums over examples are computed for each parameter by itself.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpx.clipping import grams, plan
from dpx.clipping.materialize import Norms
from dpx.clipping.plan import Choice
from dpx.clipping.rounding import sum_of_squares

# Elements for one example of what is stacked, at most: a copy of larger arrays would take time and memory.
SMALL = 2**12


def squared_norms(choices: Sequence[Choice], seen: Sequence[Any]) -> list[Norms]:
    """The squared norms of the gradients of all parameters.

    Args:
      choices: how each parameter is treated.
      seen: for each parameter and all examples, its gradients; or the inner products of its factors; or its
        squared norms.
    """
    classes: dict[Any, list[int]] = {}
    for k, (choice, each) in enumerate(zip(choices, seen, strict=True)):
        shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(each)]
        by_gram = plan.gram(choice) is not None
        limit = SMALL if by_gram else SMALL // 4
        small = all(x[0].size < limit for x in jax.tree.leaves(each))
        classes.setdefault((by_gram, *shapes) if small else k, []).append(k)
    return [
        Norms(tuple(members), _together([choices[k] for k in members], [seen[k] for k in members]))
        for members in classes.values()
    ]


def _together(choices: Sequence[Choice], seen: Sequence[Any]) -> jax.Array:
    """Squared norms (n, B) for n parameters that are alike."""
    stacked = jax.tree.map(_stack, *seen)
    if plan.gram(choices[0]) is None:
        return jax.vmap(jax.vmap(sum_of_squares))(stacked)
    if not isinstance(stacked, grams.Products):
        return stacked
    # Parameters of different shapes differ in a few numbers only.
    each = [
        grams.Errors.of(rule.layout, stacked) for choice in choices if (rule := plan.gram(choice))
    ]
    errors = jax.tree.map(lambda *found: jnp.array(found, stacked.columns[0].dtype), *each)
    return jax.vmap(jax.vmap(grams.bounded, (None, 0)))(errors, stacked)


def _stack(*arrays: jax.Array) -> jax.Array:
    # Axes of length one may lie in any order in memory, and would be put in order before they are stacked.
    shape = [n for n in arrays[0].shape[1:] if n > 1]
    stacked = jnp.concatenate([x.reshape(1, len(x), *shape) for x in arrays])
    return stacked.reshape(-1, *arrays[0].shape)
