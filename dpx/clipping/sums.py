"""Sums over many pieces whose rounding does not grow with their number.

A plain running sum of float32 terms errs by more than a clipped gradient once thousands of terms have been
added: with records in a crafted order, removing one moves the sum by several thresholds. Here each addition
keeps what it rounds off (TwoSum; Knuth, The Art of Computer Programming 2, §4.2.2), in a second tree that is
added at the end (Ogita, Rump and Oishi, Accurate sum and dot product, 2005, Proposition 4.5): the result
errs by at most u·|exact sum| + γ_n²·(sum of absolute values).

    total = start(tree)
    total = add(total, tree)  # in any loop, under `jax.jit`
    tree = result(total)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Sum(NamedTuple):
    """A running sum: trees of the rounded sum, and of what was rounded off."""

    high: Any
    low: Any


def start(like: Any) -> Sum:
    """An empty sum of trees of arrays (or of their shapes and dtypes) like this one."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return Sum(zeros, zeros)


def add(total: Sum, tree: Any) -> Sum:
    """Adds a tree of arrays; their products must not be fused into the addition, hence the barrier."""
    leaves, structure = jax.tree.flatten(lax.optimization_barrier(tree))
    high, low = (structure.flatten_up_to(part) for part in total)
    sums = [a + x for a, x in zip(high, leaves, strict=True)]
    lost = []
    for a, x, rounded, before in zip(high, leaves, sums, low, strict=True):
        taken = rounded - a
        lost.append(before + ((a - (rounded - taken)) + (x - taken)))
    return Sum(structure.unflatten(sums), structure.unflatten(lost))


def result(total: Sum) -> Any:
    """The sum, rounded once."""
    return jax.tree.map(jnp.add, total.high, total.low)
