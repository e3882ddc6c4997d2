"""How much noise T steps of NoisyHead need for (ε, δ), by four accountings of rising sharpness."""

import math

import dp_accounting

from dpx._validate import check_choice, check_delta, check_epsilon, check_integer, check_positive
from dpx.noisy_head.bounds import (
    DECAY,
    HyperParameters,
    check_hyper,
    gradient_sensitivity,
)
from dpx.privacy import (
    REPLACE_ONE,
    PrivacyGuarantee,
    gaussian_noise_multiplier,
)

_METHODS = {
    "basic": "basic composition of classical Gaussian mechanisms",
    "zcdp": "zero-concentrated composition",
    "gdp": "exact Gaussian composition",
    "last_iterate": "exact Gaussian accounting of the last iterate",
}


def calibrate(
    hyper: HyperParameters,
    *,
    regularization: float,
    step_size: float,
    steps: int,
    epsilon: float,
    delta: float,
    accounting: str = "gdp",
    sensitivity: str = "tight",
    objective: str = "ridge",
) -> tuple[float, PrivacyGuarantee]:
    """The noise multiplier of `noisy_descent` for (ε, δ)-DP, replacing one prompt, and the guarantee.

    The multiplier m is the noise std on the gradient *sum* in units of its sensitivity.

    "basic": each step is (ε/T, δ/T)-DP by the classical bound, m = (T/ε)√(2 log(1.25T/δ)), as the paper
      prints it. The classical bound needs ε/T < 1.
    "zcdp": each step is 1/(2m²)-zCDP and ρ = T/(2m²) gives ε = ρ + 2√(ρ log(1/δ)) (Bun & Steinke,
      arXiv 1605.02065, Proposition 1.3).
    "gdp": T steps are exactly √T/m-GDP, whatever their order and however they adapt (Dong, Roth & Su,
      arXiv 1905.02383, Corollary 3.3); m is the smallest possible for the sequence of all iterates.
    "last_iterate": for Γ^T alone. With c = max(|1 − aλη|, |1 − aλη − ηG²|), a = 1 (ridge) or 2 (paper), Γ^T
      is μ-GDP, μ = m⁻¹ √[(1 − c^T)(1 + c) / ((1 + c^T)(1 − c))] (Bok, Su & Altschuler, arXiv 2403.00278, the
      theorem on strongly convex losses with full batches). Its hypotheses hold here: every step is
      Γ ↦ Π_R(φ(Γ) + noise), the noise before the projection onto a convex set; φ is c-Lipschitz for every
      data set, being affine with slope 1 − aλη − ηH and 0 ⪯ H ⪯ G²; for neighbours φ differs by at most
      η/N times the sensitivity at every point of the ball; η, the noise, T and Γ⁰ do not depend on the
      data. A linear map without projection attains the bound.

    Args: as `fit`.

    Returns:
      (m, guarantee). The guarantee's event composes with others exactly.

    Raises:
      ValueError: for ε, δ, λ, η or T out of range, an unknown word, ε/T ≥ 1 under "basic", or a step size
        η ≥ 2/(aλ + G²), for which the step does not contract.
    """
    hyper = check_hyper(hyper)
    check_epsilon(epsilon)
    check_delta(delta)
    check_choice(accounting, "accounting", tuple(_METHODS))
    gap = check_descent(
        hyper,
        regularization=regularization,
        step_size=step_size,
        steps=steps,
        sensitivity=sensitivity,
        objective=objective,
    )
    event = None
    if accounting == "basic":
        if epsilon >= steps:
            raise ValueError(
                f"epsilon={epsilon} over steps={steps} is {epsilon / steps:.3g} a step: the classical "
                "Gaussian bound of accounting='basic' needs less than 1; use accounting='gdp'"
            )
        multiplier = steps / epsilon * math.sqrt(2 * math.log(1.25 * steps / delta))
    elif accounting == "zcdp":
        slack = math.log(1 / delta)
        root_rho = epsilon / (math.sqrt(slack + epsilon) + math.sqrt(slack))
        multiplier = math.sqrt(steps / 2) / root_rho
    elif accounting == "gdp":
        multiplier = gaussian_noise_multiplier(epsilon, delta, compositions=steps)
    else:
        one_release = gaussian_noise_multiplier(epsilon, delta)
        log_power = steps * math.log1p(-gap)  # log c^T
        inflation = -math.expm1(log_power) * (2 - gap) / ((1 + math.exp(log_power)) * gap)
        # Round-off aside, the last iterate never costs more than all of them.
        multiplier = one_release * math.sqrt(min(inflation, steps))
        event = dp_accounting.GaussianDpEvent(one_release)
    if event is None:
        event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(multiplier), steps)
    return multiplier, PrivacyGuarantee(
        epsilon=float(epsilon),
        delta=float(delta),
        neighboring=REPLACE_ONE,
        unit="prompt",
        mechanism=f"NoisyHead, {steps} full-batch steps, noise multiplier {multiplier:.6g}, "
        f"{sensitivity} sensitivity, {_METHODS[accounting]}",
        assumptions=("the number of prompts is public",)
        + (last_iterate_only() if accounting == "last_iterate" else ()),
        event=event,
    )


def check_descent(
    hyper: HyperParameters,
    *,
    regularization: float,
    step_size: float,
    steps: int,
    sensitivity: str,
    objective: str,
) -> float:
    """The checks of all arguments that `calibrate` and `noisy_descent` share; returns the contraction gap."""
    check_integer(steps, "steps")
    gradient_sensitivity(hyper, sensitivity)
    return contraction_gap(hyper, regularization, step_size, objective)


def contraction_gap(
    hyper: HyperParameters, regularization: float, step_size: float, objective: str = "ridge"
) -> float:
    """1 − c, by how much a step contracts: min(aλη, 2 − η(aλ + G²)), exactly even where c rounds to 1.

    Raises:
      ValueError: if λ or η is not positive, or if η ≥ 2/(aλ + G²).
    """
    hyper = check_hyper(hyper)
    check_positive(regularization, "regularization")
    check_positive(step_size, "step_size")
    check_choice(objective, "objective", tuple(DECAY))
    shrink = DECAY[objective] * regularization
    limit = 2 / (shrink + hyper.feature_radius**2)
    if step_size >= limit:
        raise ValueError(
            f"step_size={step_size} does not contract: use less than {limit:.6g}, which is "
            f"2/({'2λ' if objective == 'paper' else 'λ'} + G²)"
        )
    return min(shrink * step_size, 2 * (1 - step_size / limit))


def last_iterate_only() -> tuple[str, ...]:
    """What the user of `accounting="last_iterate"` must see to."""
    return (
        "only the last iterate is released: no other iterate, no loss, nothing else of any step",
        "the number of steps, the step size and the noise were fixed without looking at the prompts",
    )
