"""What clipping a batch gives."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["grads", "norms", "losses", "aux"],
    meta_fields=["clips"],
)
@dataclasses.dataclass(frozen=True)
class ClippedGrads:
    """The clipped gradients of a batch of B examples.

    Attributes:
      grads: the sum over examples of clipped gradients, a tree like the parameters, with None at leaves that
        are not differentiated; for an NNX module the `nnx.State` of the variables that are. It is the
        tree that `ClippedGrad.trained` gives. Parameters in bfloat16 or float16 have float32 sums, so that
        nothing is rounded before noise is added.
      norms: (B,) l2 norms of the gradients before clipping, rounded up: a bound that holds whatever was
        rounded, most often within 0.1 % of the norm (`ClippedGrad.sensitivity`); a tree of them, shaped like
        `l2_clip_norm`, when that is a tree. Zero where the mask is False, infinite where a gradient
        is not finite.
      losses: (B,) losses, zero where the mask is False.
      clips: the thresholds, in the order of the leaves of `l2_clip_norm`; static under `jax.jit`.
      aux: what the loss of each example returned beside the loss (`has_aux`), stacked along a leading axis of
        B, zero where the mask is False; else None.

    The whole of it is what `dpx.privatize` takes, which then makes sure that its own threshold is the same.
    `norms`, `losses` and `aux` are private data that no guarantee covers, however often noise is added to the
    sum: nothing is clipped in them, and none of them may be released, logged, or kept in the state of a
    model (such as running statistics) unless a mechanism of its own protects it.
    """

    grads: Any
    norms: Any
    losses: jax.Array
    clips: tuple[float, ...]
    aux: Any = None

    @property
    def num_not_finite(self) -> jax.Array:
        """How many examples added nothing because their gradient, or its norm, is not finite.

        The number depends on private examples: it is for debugging on public ones, and not for logs.
        """
        infinite = [jnp.isinf(norm) for norm in jax.tree.leaves(self.norms)]
        return functools.reduce(jnp.logical_or, infinite).sum()
