"""Additive noise: the one door through which releases go, and the laws with density, variance and sampler.

`release` is the only function in this project that adds noise to what is private. It is told the exact value,
how far a record may move it, and the noise per unit of that; `dpx.audit.replay` watches it, and
compares two runs on neighbouring data with what was declared here.

A mechanism releases f(x) + z, z with independent entries. What counts is how far f moves between
neighbours: its l2 sensitivity for `Gaussian`, its l1 sensitivity for `Laplace` and `TruncatedLaplace`.

Samples are drawn in finite precision and the guarantees are those of the real-valued laws; no floating
point sampler escapes that (Mironov, CCS 2012). What can be kept small is the tail that is cut off: an output
beyond the largest draw of one neighbour, which the other can reach, counts to δ whatever ε is. `normal`
reaches 8.2 standard deviations at least, so a release with noise multiplier m adds at most Φ(1/m − 8.2) to
δ: 6e-9 at m = 0.4 (ε about 12), 3e-13 at m = 1.
"""

import dataclasses
import functools
import math
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting import NeighboringRelation
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from dpx import _watch
from dpx.privacy import (
    PrivacyGuarantee,
    check_delta,
    check_epsilon,
    check_positive,
    gaussian_epsilon,
)
from dpx.wide import wide_sums

_SHARING = 16  # draws that share the word of their tail


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def normal(
    key: jax.Array, shape: tuple[int, ...] = (), dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """N(0, 1) draws with a long tail.

    In float32 `jax.random.normal` has 2²³ values, the largest at 5.4: more than a small δ lies beyond. Here
    the probability of a tail has 64 bits in place of 23, so that draws reach 9.1; in float64
    `jax.random.normal` itself reaches 8.2.

    Args:
      key: A JAX key.
      shape: Of the draws.
      dtype: float32 or float64.
    """
    if jax.dtypes.canonicalize_dtype(dtype) == jnp.float64:
        return jax.random.normal(key, shape, dtype)
    size = math.prod(shape)
    word_key, tail_key = jax.random.split(key)
    rows = -(-size // _SHARING)
    words = jax.random.bits(word_key, (rows, _SHARING), jnp.uint32)
    tails = jax.random.bits(tail_key, (rows, 1), jnp.uint32)
    return _normal_from_bits(words, tails).ravel()[:size].reshape(shape)


def _normal_from_bits(word: jax.Array, tail: jax.Array) -> jax.Array:
    """The inverse CDF at a probability in [2⁻⁶⁴, ½], 31 bits of `word` and 32 of `tail`; a bit is the sign.

    `tail` matters in float32 only where few leading bits of `word` are set, so that draws can share it.
    """
    coarse, fine = (word >> 1).astype(jnp.float32), tail.astype(jnp.float32)
    probability = 2.0**-32 * (coarse + 2.0**-32 * (fine + 1))
    sign = 1 - 2 * (word & 1).astype(jnp.float32)
    return sign * jax.scipy.special.ndtri(probability)


def release(
    key: jax.Array,
    exact: Any,
    *,
    sensitivity: Any,
    label: str,
    noise_multiplier: ArrayLike | None = None,
    law: "_Law | None" = None,
    axis: int | None = None,
    parts: int = 1,
) -> Any:
    """Releases an exact statistic with noise: the only door from private data to outputs.

    Guarantee: what the caller's accounting makes of it. The caller promises that for neighbours the exact
    values differ by a vector Δ with ‖Δ/sensitivity‖₂ ≤ 1 over all entries together, and gets noise
    N(0, (noise_multiplier·sensitivity)²) on each entry: a Gaussian mechanism with that noise multiplier. A
    `law` says how large the noise is itself; for the Laplace laws the promise is ‖Δ/sensitivity‖₁ ≤ 1.

    What is symmetric by nature is released entry by entry and projected afterwards: an orthogonal projection
    that leaves the exact value alone is post-processing, and takes its share of the noise away.

    Args:
      key: Secret, and for this release alone.
      exact: The statistic, an array or a tree of arrays. Sums are float32 at least.
      sensitivity: How far a record moves it: one number, or an array for each leaf (or subtree) that
        broadcasts against it, where entries are in different units.
      label: What is released; the same in every run.
      noise_multiplier: Standard deviation of the noise per unit of sensitivity, of a Gaussian release.
      law: The noise's law, of any other release of one array; its parameters broadcast against the array.
      axis: The promise holds along this axis alone, for each index of the others.
      parts: That many calls in turn with this label are one release: the squares of their ‖Δ/sensitivity‖ add
        up to 1.

    Returns:
      A tree like `exact`, of its floating-point types, float32 at least. Where nothing is traced, it is
      computed in 64 bits if `exact` has them.

    Raises:
      ValueError: outside `jit`, for an exact value that is not finite, which no noise can hide, or noise that
        is not.
    """
    with wide_sums(key, exact):
        leaves, structure = jax.tree.flatten(exact)
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        # Integers are the floats they stand for: an empty histogram of NumPy's holds integers.
        wide = jnp.result_type(
            jnp.float32,
            *(
                leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.result_type(float)
                for leaf in leaves
            ),
        )
        leaves = [leaf.astype(wide) for leaf in leaves]
        for leaf in leaves:
            if not isinstance(leaf, Tracer) and not np.isfinite(np.asarray(leaf)).all():
                raise ValueError(
                    f"{label} is not finite: use smaller bounds, or rows that are finite"
                )
        unit = jax.tree.leaves(jax.tree.broadcast(sensitivity, structure.unflatten(leaves)))
        check_size(label, [noise_multiplier, *unit] if law is None else jax.tree.leaves(law))
        unit = [jnp.asarray(one, wide) for one in unit]
        if law is None:
            # One draw for all leaves: XLA compiles the generator once, not once per leaf.
            flat = normal(key, (sum(leaf.size for leaf in leaves),), wide)
            ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
            draws = [
                noise_multiplier * one * draw.reshape(leaf.shape)
                for one, draw, leaf in zip(unit, jnp.split(flat, ends), leaves, strict=True)
            ]
        else:
            draws = [law.sample(key, leaf.shape).astype(wide) for leaf in leaves]
        noisy = [leaf + draw for leaf, draw in zip(leaves, draws, strict=True)]
        about = {
            "label": label,
            "norm": 2 if law is None else law.norm,
            "axis": axis,
            "parts": parts,
        }
        scale = noise_multiplier if law is None else jax.tree.leaves(law)
        noisy = _watch.at_release(about, key, leaves, unit, noisy, scale)
        return structure.unflatten(noisy)


def check_size(label: str, sizes: list[Any]) -> None:
    """Raises ValueError where bounds or noise of these sizes would not be finite in JAX's default floats."""
    largest = float(jnp.finfo(jnp.result_type(jnp.float32)).max) / 1e8
    for size in sizes:
        if not isinstance(size, Tracer) and not (np.abs(np.asarray(size)) <= largest).all():
            raise ValueError(
                f"{label}: a size of {np.max(np.abs(size)):.3g} is more than floats hold with noise: use "
                "smaller bounds"
            )


def _check_positive(name: str, value: ArrayLike) -> None:
    # Arrays broadcast, and while JAX flattens a law its parameters are anything.
    if value is None or isinstance(value, (int, float, complex, str, bytes, np.generic)):
        check_positive(value, name)


class _Law:
    """What the three laws share; `log_density` is theirs."""

    norm = 1  # in which a sensitivity counts

    def log_density(self, z: ArrayLike) -> jax.Array:
        raise NotImplementedError

    def density(self, z: ArrayLike) -> jax.Array:
        """The probability density at z, elementwise."""
        return jnp.exp(self.log_density(z))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gaussian(_Law):
    """N(0, std²)."""

    std: float
    norm = 2

    def __post_init__(self):
        _check_positive("std", self.std)

    @property
    def variance(self) -> float:
        return self.std**2

    def log_density(self, z: ArrayLike) -> jax.Array:
        """Log of the probability density at z, elementwise."""
        return -0.5 * jnp.square(jnp.asarray(z) / self.std) - jnp.log(
            self.std * math.sqrt(2 * math.pi)
        )

    def sample(self, key: jax.Array, shape: tuple[int, ...] = ()) -> jax.Array:
        return self.std * normal(key, shape, jnp.result_type(float))

    def guarantee(
        self, sensitivity: float, delta: float, *, neighboring: NeighboringRelation, unit: str
    ) -> PrivacyGuarantee:
        """What releasing f + noise guarantees, f with that *l2* sensitivity.

        ε is exact (Balle & Wang 2018, arXiv 1805.06530, Theorem 8).
        """
        _check_positive("sensitivity", sensitivity)
        multiplier = self.std / sensitivity
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
class Laplace(_Law):
    """Density exp(−|z| / scale) / (2 scale)."""

    scale: float

    def __post_init__(self):
        _check_positive("scale", self.scale)

    @property
    def variance(self) -> float:
        return 2 * self.scale**2

    def log_density(self, z: ArrayLike) -> jax.Array:
        """Log of the probability density at z, elementwise."""
        return -jnp.abs(jnp.asarray(z)) / self.scale - jnp.log(2 * self.scale)

    def sample(self, key: jax.Array, shape: tuple[int, ...] = ()) -> jax.Array:
        return _signed_exponential(key, shape, self.scale, 0.0)

    def guarantee(
        self, sensitivity: float, *, neighboring: NeighboringRelation, unit: str
    ) -> PrivacyGuarantee:
        """What releasing f + noise guarantees, f with that *l1* sensitivity: (Δ/scale, 0).

        Source: Dwork et al. 2006, Calibrating noise to sensitivity in private data analysis.
        """
        _check_positive("sensitivity", sensitivity)
        return PrivacyGuarantee(
            epsilon=sensitivity / self.scale,
            delta=0.0,
            neighboring=neighboring,
            unit=unit,
            mechanism=f"Laplace mechanism, scale {self.scale / sensitivity:.6g} per unit of sensitivity",
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TruncatedLaplace(_Law):
    """Density ∝ exp(−|z| / scale) on [−bound, bound] (Geng et al. 2020, arXiv 1810.00877).

    `calibrate` gives TLap(Δ, ε, δ): scale Δ/ε and bound (Δ/ε)·log(1 + (e^ε − 1)/(2δ)). Added to every
    entry of a vector of *l1* sensitivity Δ it is (ε, δ)-DP for every ε > 0 and δ ≤ 1/2, whichever way
    the change is spread over the entries. An entry that moves by a ≤ Δ costs ε_a = εa/Δ, except on the
    part of the support that the neighbour cannot reach, whose probability is
    δ_a = δ(e^{ε_a} − 1)/(e^ε − 1) (a ≤ bound, which δ ≤ 1/2 ensures). The ε_a add up to ε at most, and
    so do the δ_a to δ, since (u − 1) + (v − 1) ≤ uv − 1 for u, v ≥ 1. A record that leaves one node of
    a tree and enters another, half the change in each, is thus covered.
    """

    scale: float
    bound: float

    def __post_init__(self):
        _check_positive("scale", self.scale)
        _check_positive("bound", self.bound)

    @classmethod
    def calibrate(cls, sensitivity: float, epsilon: float, delta: float) -> "TruncatedLaplace":
        """TLap(Δ, ε, δ), the narrowest of these laws that is (ε, δ)-DP at l1 sensitivity Δ.

        Raises:
          ValueError: for Δ ≤ 0, ε out of (0, 1e8] or δ out of (0, 1/2].
        """
        _check_positive("sensitivity", sensitivity)
        check_epsilon(epsilon)
        check_delta(delta)
        if delta > 0.5:
            raise ValueError(
                f"delta is {delta}: the truncated Laplace mechanism is defined for delta ≤ 1/2"
            )
        # log(1 + (e^ε − 1)/2δ), arranged so that neither a large nor a small ε loses digits.
        if epsilon < 30:
            ratio = math.log1p(math.expm1(epsilon) / (2 * delta))
        else:
            ratio = epsilon - math.log(2 * delta)
        return cls(scale=sensitivity / epsilon, bound=sensitivity / epsilon * ratio)

    @property
    def variance(self) -> float:
        """Exact; equal to Fact 3.5 of Ke et al. (Theorem 3 of Geng et al.) for a calibrated law."""
        ratio = self.bound / self.scale
        tail = (ratio**2 + 2 * ratio) * math.exp(-ratio) / -math.expm1(-ratio)
        return self.scale**2 * (2 - tail)

    def log_density(self, z: ArrayLike) -> jax.Array:
        """Log of the probability density at z, elementwise; −∞ outside the support."""
        z = jnp.asarray(z)
        mass = 2 * self.scale * -jnp.expm1(-self.bound / self.scale)
        return jnp.where(jnp.abs(z) <= self.bound, -jnp.abs(z) / self.scale, -jnp.inf) - jnp.log(
            mass
        )

    def sample(self, key: jax.Array, shape: tuple[int, ...] = ()) -> jax.Array:
        """Draws by inverse CDF; `scale` and `bound` may also be arrays that broadcast to `shape`."""
        draw = _signed_exponential(key, shape, self.scale, jnp.exp(-self.bound / self.scale))
        return jnp.clip(draw, -self.bound, self.bound)

    def guarantee(
        self, sensitivity: float, *, neighboring: NeighboringRelation, unit: str
    ) -> PrivacyGuarantee:
        """What releasing f + noise guarantees, f with that *l1* sensitivity.

        Raises:
          ValueError: for a sensitivity ≤ 0 or beyond the support's half width, where δ would pass 1/2.
        """
        _check_positive("sensitivity", sensitivity)
        if sensitivity > self.bound * (1 + 1e-12):
            raise ValueError(
                f"sensitivity is {sensitivity}: the noise reaches {self.bound} only, so that neighbours "
                "would be told apart; calibrate the noise to the sensitivity"
            )
        ratio = self.bound / self.scale
        epsilon = sensitivity / self.scale
        delta = math.exp(epsilon - ratio) * math.expm1(-epsilon) / (2 * math.expm1(-ratio))
        return PrivacyGuarantee(
            epsilon=epsilon,
            delta=delta,
            neighboring=neighboring,
            unit=unit,
            mechanism="truncated Laplace mechanism, "
            f"scale {self.scale / sensitivity:.6g} per unit of sensitivity",
        )


def _signed_exponential(key, shape, scale, smallest_survival) -> jax.Array:
    """±scale·E, E exponential with survival probabilities uniform in (smallest_survival, 1].

    A float32 uniform has 23 bits and would end the tail at 16 scales, where small δ live; 24 bits more take
    it to 32 scales.
    """
    first, second = jax.random.bits(key, (2, *shape), jnp.uint32)
    dtype = jnp.result_type(float)
    coarse, fine = (first >> 9).astype(dtype), (second >> 8).astype(dtype)
    uniform = 2.0**-23 * (coarse + (1 - 2.0**-24 * fine))  # in (0, 1]
    survival = smallest_survival + (1 - smallest_survival) * uniform
    sign = 1 - 2 * (first & 1).astype(dtype)
    return -scale * sign * jnp.log(survival)
