"""A clipping norm that follows a quantile of the gradients' norms, and pays for it (arXiv:1905.03871).

At each step the released sum has one more entry: how many records of the batch have a gradient within the
clipping norm C. The noisy share s of these records moves C to C·exp(−η·(s − γ)) for the next step, so that a
share γ of the gradients comes to lie within it (Andrew, Thakkar, McMahan and Ramaswamy, 2021). The next C
follows from what was released, and costs nothing more.

Noise. A record counts as ½ or −½, so that it moves the count by ½ when it comes or goes. Gradients in units
of C with noise z_Δ and the count with noise σ_b are one Gaussian mechanism of noise multiplier z, for

    1/z² = 1/z_Δ² + 1/(2σ_b)²,       z_Δ = (1/z² − 1/(2σ_b)²)^(−½).

With σ_b = B/20, the paper's choice for batches of B records, the noise of the gradients grows by 1 % at
B = 64 and z = 1.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpx._validate import check_number, check_positive
from dpx.clipping.groups import BOUNDS


@dataclasses.dataclass(frozen=True)
class AdaptiveClipNorm:
    """A clipping norm that follows a quantile of the gradients' norms: an `l2_clip_norm` of `fit`.

    Attributes:
      start: The clipping norm of the first step.
      quantile: γ, the share of the gradients that are to be within the norm.
      learning_rate: η, the largest move of the norm's logarithm in a step.
      count_noise: σ_b, the standard deviation of the count's noise; None for a twentieth of the expected
        batch size.

    Raises:
      ValueError: for a value out of range.
    """

    start: float = 1.0
    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self):
        for name in ("start", "learning_rate", "count_noise"):
            value = getattr(self, name)
            if name == "count_noise" and value is None:
                continue  # a share of the batch size
            object.__setattr__(self, name, check_positive(value, name))
        if not 0 <= check_number(self.quantile, "quantile") <= 1:
            raise ValueError(
                f"quantile={self.quantile} must be in [0, 1]: it is a share of the records"
            )
        if not BOUNDS[0] <= self.start <= BOUNDS[1]:
            raise ValueError(
                f"start={self.start} must be between {BOUNDS[0]:g} and {BOUNDS[1]:g}: scale the loss"
            )

    def noise(self, noise_multiplier: float, batch_size: float) -> tuple[float, float]:
        """The noise (z_Δ, σ_b) of a step that costs as much as a Gaussian mechanism with that multiplier.

        Raises:
          ValueError: for a σ_b with which the count alone costs more.
        """
        count = batch_size / 20 if self.count_noise is None else self.count_noise
        share = noise_multiplier / (2 * count)
        if share >= 1:
            raise ValueError(
                f"count_noise={count:g} must be more than {noise_multiplier / 2:.4g}, half the noise "
                "multiplier, or the count costs more than the budget: raise it, or batch_size"
            )
        return noise_multiplier / math.sqrt(1 - share**2), count


class AdaptiveClipState(NamedTuple):
    """The clipping norm of the next step, which follows from what was released."""

    clip: jax.Array


def clips(ratio: float) -> tuple[float, float]:
    """The sensitivities of the gradients, in units of the clipping norm, and of the count times a ratio.

    The ratio is z_Δ / σ_b, with which one isotropic noise serves both. Their joint sensitivity is
    √(1 + ratio²/4), and z times this is z_Δ.
    """
    return 1.0, ratio / 2


def counted(norms: jax.Array, real: jax.Array, ratio: float) -> jax.Array:
    """The multiplied count of a batch, as it enters the sum. Norms are in units of the clipping norm."""
    counts = jnp.where(real, jnp.where(norms <= 1, 0.5, -0.5), 0)
    return ratio * counts.sum(dtype=jnp.float32)  # the type of the norm, also where 64 bits are on


def follow(clip: AdaptiveClipNorm, ratio: float) -> optax.GradientTransformation:
    """A transformation that multiplies gradients by the clipping norm, and moves the norm by the count.

    It takes a pair of noisy means: the gradients in units of the norm, and the multiplied count.
    """
    limits = (max(BOUNDS[0], 1e-6 * clip.start), min(BOUNDS[1], 1e6 * clip.start))

    def init(params: Any) -> AdaptiveClipState:
        del params
        return AdaptiveClipState(jnp.float32(clip.start))

    def update(updates: Any, state: Any, params: Any = None):
        del params
        gradients, count = updates
        share = count / ratio + 0.5
        step = jnp.exp(-clip.learning_rate * (share - clip.quantile))
        moved = AdaptiveClipState(jnp.clip(state.clip * step, *limits).astype(state.clip.dtype))
        return jax.tree.map(lambda x: x * state.clip.astype(x.dtype), gradients), moved

    return optax.GradientTransformation(init, update)


def norms(l2_clip_norm: Any) -> list[float | None]:
    """The numbers of a clipping norm, which a training that goes on has to find unchanged."""
    if isinstance(l2_clip_norm, AdaptiveClipNorm):
        return [None if x is None else float(x) for x in dataclasses.astuple(l2_clip_norm)]
    return [float(clip) for clip in jax.tree.leaves(l2_clip_norm)]
