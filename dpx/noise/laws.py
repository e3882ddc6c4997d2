"""The laws of noise: sampler and guarantee.

A mechanism releases f(x) + z, where z has independent entries. Its guarantee rests on how far f moves between
neighbours: the l2 sensitivity for `Gaussian`, the l1 sensitivity for `Laplace` and `TruncatedLaplace`. The
grid of a release follows from a law's `width`: its standard deviation, or down to half of it.
"""

import dataclasses
import math
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting import NeighboringRelation
from jax.core import Tracer
from jax.typing import ArrayLike

from dpx._validate import check_delta, check_epsilon, check_positive
from dpx.noise.coupled import signed_exponential
from dpx.privacy import PrivacyGuarantee, gaussian_epsilon


def _check_positive(name: str, value: Any) -> None:
    # Arrays broadcast, and while JAX flattens a law its parameters are anything.
    if isinstance(value, list | tuple):
        for each in value:
            _check_positive(name, each)
    if isinstance(value, (np.ndarray, jax.Array)) and not isinstance(value, Tracer):
        numbers = np.asarray(value)
        if not np.all((numbers > 0) & np.isfinite(numbers)):
            raise ValueError(f"{name}={value} must be finite and positive")
    if value is None or isinstance(value, (int, float, complex, str, bytes, np.generic)):
        check_positive(value, name)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gaussian:
    """N(0, std²). It has no sampler, because its noise is never a float (`dpx.noise.lattice`)."""

    std: float
    norm = 2

    def __post_init__(self):
        _check_positive("std", self.std)

    @property
    def width(self) -> ArrayLike:
        return self.std

    def guarantee(
        self, sensitivity: float, delta: float, *, neighboring: NeighboringRelation, unit: str
    ) -> PrivacyGuarantee:
        """The guarantee of releasing f + noise, where f has that *l2* sensitivity.

        ε is exact (Balle & Wang 2018, arXiv 1805.06530, Theorem 8).
        """
        # Numbers of 64 bits, since 16 bits would round the guarantee.
        std = check_positive(self.std, "std")
        multiplier = std / check_positive(sensitivity, "sensitivity")
        return PrivacyGuarantee(
            epsilon=gaussian_epsilon(multiplier, delta),
            delta=delta,
            neighboring=neighboring,
            unit=unit,
            mechanism=f"Gaussian mechanism, noise multiplier {multiplier:.6g}",
            event=dp_accounting.GaussianDpEvent(multiplier),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Laplace:
    """Density exp(−|z| / scale) / (2 scale)."""

    scale: float
    norm = 1

    def __post_init__(self):
        _check_positive("scale", self.scale)

    def sample(self, key: jax.Array, shape: tuple[int, ...] = ()) -> jax.Array:
        """Draws from the law, float64. Its parameters may be arrays that broadcast to `shape`."""
        with jax.enable_x64(True):
            return self.scale * signed_exponential(key, shape, -jnp.inf)

    @property
    def width(self) -> ArrayLike:
        return self.scale

    def guarantee(
        self, sensitivity: float, *, neighboring: NeighboringRelation, unit: str
    ) -> PrivacyGuarantee:
        """The guarantee of releasing f + noise, where f has that *l1* sensitivity: (Δ/scale, 0)-DP.

        Source: Dwork et al. 2006, Calibrating noise to sensitivity in private data analysis.
        """
        scale = check_positive(self.scale, "scale")
        sensitivity = check_positive(sensitivity, "sensitivity")
        return PrivacyGuarantee(
            epsilon=sensitivity / scale,
            delta=0.0,
            neighboring=neighboring,
            unit=unit,
            mechanism=f"Laplace mechanism, scale {scale / sensitivity:.6g} per unit of sensitivity",
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TruncatedLaplace:
    """Density ∝ exp(−|z| / scale) on [−bound, bound] (Geng et al. 2020, arXiv 1810.00877).

    `calibrate` gives TLap(Δ, ε, δ): scale Δ/ε and bound (Δ/ε)·log(1 + (e^ε − 1)/(2δ)). Added to every
    entry of a vector of *l1* sensitivity Δ it is (ε, δ)-DP for every ε > 0 and δ ≤ 1/2, whichever way
    the change is spread over the entries. An entry that moves by a ≤ Δ costs ε_a = εa/Δ, except on the
    part of the support that the neighbour cannot reach, whose probability is
    δ_a = δ(e^{ε_a} − 1)/(e^ε − 1) (a ≤ bound, which δ ≤ 1/2 ensures). The ε_a add up to at most ε, and
    the δ_a to at most δ, since (u − 1) + (v − 1) ≤ uv − 1 for u, v ≥ 1. This covers a record that leaves
    one node of a tree and enters another, with half of the change in each.
    """

    scale: float
    bound: float
    norm = 1

    def __post_init__(self):
        _check_positive("scale", self.scale)
        _check_positive("bound", self.bound)

    @classmethod
    def calibrate(cls, sensitivity: float, epsilon: float, delta: float) -> "TruncatedLaplace":
        """TLap(Δ, ε, δ), the narrowest of these laws that is (ε, δ)-DP at l1 sensitivity Δ.

        Raises:
          ValueError: for Δ ≤ 0, ε out of (0, 1e8] or δ out of (0, 1/2].
        """
        sensitivity = check_positive(sensitivity, "sensitivity")
        epsilon, delta = check_epsilon(epsilon), check_delta(delta)
        if delta > 0.5:
            raise ValueError(
                f"delta={delta} must be at most 1/2 for the truncated Laplace mechanism: use a smaller one"
            )
        # log(1 + (e^ε − 1)/2δ), arranged so that neither a large nor a small ε loses digits.
        if epsilon < 30:
            ratio = math.log1p(math.expm1(epsilon) / (2 * delta))
        else:
            ratio = epsilon - math.log(2 * delta)
        return cls(scale=sensitivity / epsilon, bound=sensitivity / epsilon * ratio)

    def sample(self, key: jax.Array, shape: tuple[int, ...] = ()) -> jax.Array:
        """As of `Laplace`."""
        with jax.enable_x64(True):
            # In 16 bits the quotient would cut off tails that the guarantee counts on.
            scale, bound = jnp.asarray(self.scale, float), jnp.asarray(self.bound, float)
            return jnp.clip(scale * signed_exponential(key, shape, -bound / scale), -bound, bound)

    @property
    def width(self) -> ArrayLike:
        return jnp.minimum(self.scale, self.bound)

    def guarantee(
        self, sensitivity: float, *, neighboring: NeighboringRelation, unit: str
    ) -> PrivacyGuarantee:
        """The guarantee of releasing f + noise, where f has that *l1* sensitivity.

        Raises:
          ValueError: for a sensitivity ≤ 0 or beyond the support's half width, where δ would pass 1/2.
        """
        scale, bound = check_positive(self.scale, "scale"), check_positive(self.bound, "bound")
        sensitivity = check_positive(sensitivity, "sensitivity")
        if sensitivity > bound * (1 + 1e-12):
            raise ValueError(
                f"sensitivity={sensitivity} must be at most {bound}, as far as the noise reaches, or it "
                "would tell neighbours apart: calibrate the noise to the sensitivity"
            )
        ratio = bound / scale
        epsilon = sensitivity / scale
        delta = math.exp(epsilon - ratio) * math.expm1(-epsilon) / (2 * math.expm1(-ratio))
        return PrivacyGuarantee(
            epsilon=epsilon,
            delta=delta,
            neighboring=neighboring,
            unit=unit,
            mechanism="truncated Laplace mechanism, "
            f"scale {scale / sensitivity:.6g} per unit of sensitivity",
        )


Law = Gaussian | Laplace | TruncatedLaplace
