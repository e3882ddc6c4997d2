"""Per-example gradients by vmap: the plain way, and the oracle for every other one."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpx.clipping import meshes, mixing
from dpx.clipping.joint import Sums
from dpx.clipping.rounding import accumulator, settled, sum_of_squares

Loss = Callable[[Sequence[jax.Array], Any], jax.Array]


class Norms(NamedTuple):
    """Squared l2 norms of the gradients of some parameter arrays.

    Attributes:
      groups: n indices of groups of parameter arrays; a group's squared norm is the sum of what stands at its
        index.
      squared: (n, B), rounded up so far that no contribution is longer: float32 (float64 for float64
        parameters). Not finite where a gradient is not.
    """

    groups: tuple[int, ...]
    squared: jax.Array

    @classmethod
    def of(cls, group: int, gradients: jax.Array) -> "Norms":
        """Those of gradients (B, ...) of one parameter array, or of several of one group in one array."""
        return cls((group,), jax.vmap(sum_of_squares)(gradients)[None])


class Pass(NamedTuple):
    """One batch after its backward pass, before its clip factors are known.

    Attributes:
      losses: (B,) per-example losses.
      squared_norms: those of per-example gradients, those of each parameter array once.
      weighted_sum: takes (B,) weights for each group of parameter arrays; returns for each array
        sum_b weights[b]·gradient[b], small ones together (`dpx.clipping.joint.apart`).
    """

    losses: jax.Array
    squared_norms: list[Norms]
    weighted_sum: Callable[[Sequence[jax.Array]], list[jax.Array] | Sums]


def is_vectorised(batch: Any) -> bool:
    """Whether `over_examples` uses `jax.vmap`."""
    return jax.tree.leaves(batch)[0].shape[0] > 1


def over_examples(function: Callable[[Any], Any], batch: Any) -> Any:
    """`function` of every example, stacked.

    One example alone is not vectorised: some primitives have no rule for that.
    """
    if not is_vectorised(batch):
        found = function(jax.tree.map(lambda x: x[0], batch))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], found)
    try:
        return jax.vmap(function)(batch)
    except NotImplementedError as error:
        error.add_note(
            "A primitive of loss_fn cannot be vectorised over examples by jax.vmap: use "
            "clipped_grad(..., microbatch_size=1), which takes one example at a time without it."
        )
        raise


def run(loss: Loss, leaves: Sequence[jax.Array], batch: Any, groups: Sequence[int]) -> Pass:
    """The pass that holds every per-example gradient, B times the size of the parameters.

    `groups` has the group of every parameter array.
    """
    closed = jax.make_jaxpr(loss)(list(leaves), meshes.one_example(batch))
    mixing.check(closed, len(leaves), is_vectorised(batch))
    one = functools.partial(jax.value_and_grad(loss), list(leaves))
    losses, gradients = over_examples(one, batch)
    gradients = [g.astype(accumulator(g.dtype)) for g in settled(gradients)]

    def weighted_sum(weights: Sequence[jax.Array]) -> list[jax.Array]:
        # Factors must fit the gradients that they multiply: no TensorFloat-32.
        highest = jax.lax.Precision.HIGHEST
        return [
            jnp.tensordot(weights[group], g, 1, precision=highest)
            for group, g in zip(groups, gradients, strict=True)
        ]

    return Pass(losses, list(map(Norms.of, groups, gradients)), weighted_sum)


def in_turn(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The same, for one example at a time: for all at once, it would take the memory of their gradients.

    Not on several devices, where examples would have to be gathered.
    """
    return function if jax.device_count() > 1 else jax.custom_batching.sequential_vmap(function)
