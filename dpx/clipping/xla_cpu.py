"""Tricks by which XLA's compiler for CPUs makes programs of this package fast, on one CPU.

They change nothing but the order of additions. `python -m experiments.bench.tuning` measures what each gains.

- rows: what is held is summed as a product of matrices with two equal rows, which a library computes.
  Without it a step of a recommender takes 2.5 times as long.
- kept: what blocks under `jax.checkpoint` make is kept where the compiler drops their barriers. Without it
  six such blocks take 1.8 times as long and 3.8 times the memory.
- ordered: convolutions get their axes in the order for which there is fast code. Without it six of them,
  whose features come before places, take 9 times as long.
- squeezed: sums go over axes of length one too, beside which the compiler adds up number by number. Without
  it a step of a small GPT-2, to which each text is a batch of one, takes 1.2 times as long.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dpx.clipping import meshes

TRICKS = frozenset({"rows", "kept", "ordered", "squeezed"})


def uses(trick: str) -> bool:
    """Whether programs for this machine use a trick."""
    return trick in TRICKS and meshes.on_one_cpu()


def keeps_blocks() -> bool:
    """Whether an ordinary step holds the activations of rematerialised blocks, as it does before JAX 0.12."""
    return uses("kept") and jax.__version_info__ < (0, 12)


def by_rows(weights: jax.Array, held: jax.Array) -> jax.Array:
    """The sum over B of (B,) weights times (B, ...) numbers, by a matrix with two equal rows of weights."""
    rows, flat = lax.broadcast(weights, (2,)), held.reshape(len(held), -1)
    product = lax.dot(rows, flat, precision=lax.Precision.HIGHEST)
    return lax.index_in_dim(product, 0, keepdims=False).reshape(held.shape[1:])


def ordered(eqn: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A convolution whose axes are in the order that XLA itself chooses, but not in loops."""
    of_x, of_kernel, of_result = eqn.params["dimension_numbers"]
    last = x.ndim - 1
    axes, of_features = (0, last, *range(1, last)), (last, last - 1, *range(last - 1))
    x, kernel = jnp.moveaxis(x, of_x, axes), jnp.moveaxis(kernel, of_kernel, of_features)
    params = eqn.params | {"dimension_numbers": lax.ConvDimensionNumbers(axes, of_features, axes)}
    return jnp.moveaxis(lax.conv_general_dilated_p.bind(x, kernel, **params), axes, of_result)


def squeezed(eqn: Any, x: jax.Array) -> jax.Array:
    """A sum over axes and over those of length one."""
    axes = {*eqn.params["axes"], *(i for i, length in enumerate(x.shape) if length == 1)}
    summed = eqn.primitive.bind(x, **eqn.params | {"axes": tuple(sorted(axes))})
    return summed.reshape(eqn.outvars[0].aval.shape)
