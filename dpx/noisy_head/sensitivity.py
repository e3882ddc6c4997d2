"""The sensitivity of NoisyHead's gradient sum, and the three bounds C, G and R that make it finite."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from scipy import special

from dpx._numerics import norm
from dpx._validate import check_choice, check_decay, check_positive
from dpx.noisy_head.prompts import Features, check_sizes

# A step shrinks Γ by 1 − aλη: as printed a = 2, which converges to ridge with 2λ; for (2.7) a = 1.
DECAY = {"paper": 2.0, "ridge": 1.0}


# Within this range, squares of products of four bounds stay floats, also in sums and with noise.
_SMALLEST_BOUND, _LARGEST_BOUND = 1e-30, 1e30


class HyperParameters(NamedTuple):
    """The bounds |y| ≤ response_clip (C), ‖Z‖_F ≤ feature_radius (G) and ‖Γ‖_F ≤ parameter_radius (R)."""

    response_clip: float
    feature_radius: float
    parameter_radius: float


def hyperparameters(
    num_prompts: int,
    length: int,
    dim: int,
    *,
    regularization: float,
    noise_std: float = 0.0,
    kappa: float = 1.0,
    rule: str = "valid",
    objective: str = "ridge",
) -> HyperParameters:
    """The bounds C, G and R for the paper's model of prompts. They follow from public sizes alone.

    Under both rules C = √(2(1+τ²) log(NL/κ)). Since 2Q(t) ≤ e^{-t²/2} min(1, 0.8/t), with probability 1 − κ
    no response exceeds it.

    `rule="paper"` is (4.1). Its G rests on ‖Σ y_i x_i‖ ≤ C‖Σ x_i‖ (A.4), which is false, since y and x are
    correlated: ‖Z‖ is about ‖w‖/D and not L^{-1/2}, so that at L = 500, D = 5 this G clips most prompts. Its
    R does not bound ‖Γ*‖ either, and grows like √(N/L).

    `rule="valid"`: E[s | w] = w/D, from which s deviates by about √(D/L) of its size. So with q the upper κ/N
    quantile of ‖w‖ (a χ distribution with D degrees of freedom), G = (q/D)(1 + √(D/L)), to whose square τ²/L
    is added for the noise. R holds for every data set within C and G: with A the N×D² design matrix,
    Γ* = (λ + AᵀA/N)⁻¹Aᵀt/N. Over singular values σ ≤ G, σ/(λ+σ²) is at most G/(λ+G²) if G² ≤ λ, and 1/(2√λ)
    otherwise. R is C times that.

    A bound that is too small biases the fit; it never weakens privacy, because `fit` enforces all three.

    Args:
      num_prompts: N.
      length: L.
      dim: D.
      regularization: λ > 0.
      noise_std: τ ≥ 0.
      kappa: κ in (0, 1], the failure probability; the paper's experiments use 1.
      rule: "valid" or "paper".
      objective: "ridge", or "paper", which converges to ridge with 2λ. Only the valid R depends on it.

    Raises:
      ValueError: for an argument out of range.
    """
    check_sizes(num_prompts, length, dim, noise_std)
    check_positive(regularization, "regularization")
    check_decay(kappa, "kappa", ": it is a failure probability")
    check_choice(objective, "objective", tuple(DECAY))
    check_choice(rule, "rule", ("valid", "paper"))
    # log(NL/κ) is zero for a single token with κ = 1, and a bound must be positive.
    response = math.sqrt(2 * (1 + noise_std**2) * max(math.log(num_prompts * length / kappa), 0.5))
    spread = math.log(num_prompts / kappa)
    if rule == "paper":
        feature = response / math.sqrt(length) * (1 + math.sqrt(spread) / dim)
        parameter = response**2 / regularization * math.sqrt(num_prompts / length)
        parameter *= 1 + math.sqrt(math.log(1 / kappa)) / dim
        return HyperParameters(response, feature, parameter)
    weight = math.sqrt(special.chdtri(dim, min(kappa / num_prompts, 0.5)))
    feature = math.hypot(
        weight / dim * (1 + math.sqrt(dim / length)), noise_std / math.sqrt(length)
    )
    shrink = DECAY[objective] * regularization
    if feature**2 <= shrink:
        parameter = response * feature / (shrink + feature**2)
    else:
        parameter = response / (2 * math.sqrt(shrink))
    return HyperParameters(response, feature, parameter)


def gradient_sensitivity(hyper: HyperParameters, sensitivity: str = "tight") -> float:
    """The l2 sensitivity of the gradient sum Σ_k (⟨Γ, Z_k⟩ − t_k) Z_k when one prompt is replaced.

    Here ‖Z‖ ≤ G, |t| ≤ C and ‖Γ‖ ≤ R, and the sum moves by (Z⊗Z − Z'⊗Z')Γ − (tZ − t'Z').

    "tight": Z⊗Z − Z'⊗Z' is a difference of positive semi-definite matrices of operator norm ≤ G², so that its
    own operator norm is at most G², not 2G². The second bracket has norm at most 2CG. The sum is G(2C + RG);
    for any ratio RG/C there are neighbours that reach 86 % of it.
    "paper": the triangle inequality on all four terms gives 2G(C + RG) (Theorem 3.2).
    """
    check_choice(sensitivity, "sensitivity", ("tight", "paper"))
    C, G, R = map(float, hyper)
    return G * (2 * C + R * G) if sensitivity == "tight" else 2 * G * (C + R * G)


def enforce(features: Features, hyper: HyperParameters) -> Features:
    """Any features, mapped into the bounds; the proofs of privacy rest on this map.

    Each prompt is mapped independently of the others. Its target is clipped, and Z is projected: the query
    gets norm 1 and the context a norm of at most G. A row with a value that is not finite, or whose norm
    overflows, becomes zero, since no error can be raised under `jit` and one such row must not spoil the sum.
    """
    hyper = HyperParameters(*hyper)
    query, context, target = features
    size = norm(query) * norm(context)
    usable = jnp.isfinite(size) & jnp.isfinite(target)
    # Compilers multiply by the reciprocal instead of dividing; that of the largest floats is flushed to zero.
    for part in (query, context):
        usable &= jnp.abs(part).max(axis=1) < jnp.finfo(part.dtype).max / 1e3
    query = jnp.where(usable[:, None], query, 0)
    context = jnp.where(usable[:, None], context, 0)
    length = norm(query)
    size = length * norm(context)
    shrink = jnp.minimum(1, hyper.feature_radius / jnp.where(size > 0, size, 1))
    return Features(
        query / jnp.where(length > 0, length, 1)[:, None],
        (context * length[:, None]) * shrink[:, None],
        jnp.clip(jnp.where(usable, target, 0), -hyper.response_clip, hyper.response_clip),
    )


def check_hyper(hyper: HyperParameters) -> HyperParameters:
    """Returns the bounds as `HyperParameters`; raises ValueError unless all lie between 1e-30 and 1e30."""
    if not isinstance(hyper, tuple | list) or len(hyper) != 3:
        raise ValueError(f"hyper={hyper} must be HyperParameters(C, G, R)")
    names = HyperParameters._fields
    named = zip(hyper, names, strict=True)
    hyper = HyperParameters(*(check_positive(bound, f"hyper.{name}") for bound, name in named))
    for name, bound in hyper._asdict().items():
        if not _SMALLEST_BOUND <= bound <= _LARGEST_BOUND:
            raise ValueError(
                f"hyper.{name}={bound} must be from {_SMALLEST_BOUND} to {_LARGEST_BOUND}: measure in other "
                "units"
            )
    return hyper
