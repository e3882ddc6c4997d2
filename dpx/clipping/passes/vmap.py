"""Per-example gradients by vmap: the plain way, and the oracle for every other one."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from dpx.clipping.gradients import plan
from dpx.clipping.losses import Loss, is_vectorised
from dpx.clipping.rounding import accumulator, settled, sum_of_squares


class Clipping(NamedTuple):
    """How gradients of one loss are clipped, traced and decided.

    Attributes:
      of_batch: runs it for a batch of any size.
      bytes: that one example takes, about, from its forward pass to its sum; 0 where that is not asked for.
    """

    of_batch: Callable[[Any], "Pass"]
    bytes: int


class Pass(NamedTuple):
    """One batch after its backward pass, before its clip factors are known.

    Attributes:
      losses: (B,) per-example losses.
      squared_norms: pairs of a group of parameter arrays and (B,) squared norms of gradients in it, which
        together are those of the group, rounded up so far that no contribution is longer: float32 (float64
        for float64 parameters). Not finite where a gradient is not.
      weighted_sum: takes (B,) weights for each group of parameter arrays; returns for each array
        sum_b weights[b]·gradient[b].
    """

    losses: jax.Array
    squared_norms: list[tuple[int, jax.Array]]
    weighted_sum: Callable[[Sequence[jax.Array]], list[jax.Array]]


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


def held(
    loss: Loss, leaves: Sequence[jax.Array], batch: Any, groups: Sequence[int], vectorised: bool
) -> Clipping:
    """Holds every per-example gradient, B times the size of the parameters.

    `groups` has the group of every parameter array.
    """
    traced, _ = plan.read(loss, leaves, batch, vectorised)

    def one(example: Any) -> list[jax.Array]:
        return core.jaxpr_as_fun(traced)(*leaves, *jax.tree.leaves(example))

    def run(batch: Any) -> Pass:
        losses, *gradients = over_examples(one, batch)
        gradients = settled(gradients)
        gradients = [g.astype(accumulator(g.dtype)) for g in settled(gradients)]

        def weighted_sum(weights: Sequence[jax.Array]) -> list[jax.Array]:
            # Factors must fit the gradients that they multiply: no TensorFloat-32.
            highest = jax.lax.Precision.HIGHEST
            return [
                jnp.tensordot(weights[group], g, 1, precision=highest)
                for group, g in zip(groups, gradients, strict=True)
            ]

        norms = map(jax.vmap(sum_of_squares), gradients)
        return Pass(losses, list(zip(groups, norms, strict=True)), weighted_sum)

    return Clipping(run, 0)
