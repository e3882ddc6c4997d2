"""The description of a noisy descent, and the noise that its T steps need for (ε, δ), by four accountings."""

import dataclasses
import math
from typing import Any

import dp_accounting

from dpx._validate import check_choice, check_delta, check_epsilon, check_integer, check_positive
from dpx.noisy_head.sensitivity import DECAY, HyperParameters, check_hyper, gradient_sensitivity
from dpx.privacy import REPLACE_ONE, PrivacyGuarantee, gaussian_noise_multiplier

_METHODS = {
    "basic": "basic composition of classical Gaussian mechanisms",
    "zcdp": "zero-concentrated composition",
    "gdp": "exact Gaussian composition",
    "last_iterate": "exact Gaussian accounting of the last iterate",
}


@dataclasses.dataclass(frozen=True)
class Descent:
    """A description of T noisy, projected, full-batch gradient steps, without their noise level.

    All of it is public. Arguments are checked when the description is made.

    Attributes:
      hyper: The bounds C, G and R, chosen without looking at the prompts.
      regularization: λ > 0.
      step_size: η, positive and below 2/(aλ + G²), a = 1 (ridge) or 2 (paper).
      steps: T ≥ 1, fixed without looking at the prompts.
      accounting: "basic" (the paper's), "zcdp", "gdp" (exact) or "last_iterate" (exact for Γ^T alone).
      sensitivity: "tight" or "paper"; see `gradient_sensitivity`.
      objective: "ridge" descends to (2.7); "paper", as printed, to (2.7) with 2λ.

    Raises:
      ValueError: for a bound, λ, η or T out of range, an unknown option, or a step size η ≥ 2/(aλ + G²), with
        which the step does not contract.
    """

    hyper: HyperParameters
    _: dataclasses.KW_ONLY
    regularization: float
    step_size: float
    steps: int
    accounting: str = "gdp"
    sensitivity: str = "tight"
    objective: str = "ridge"

    def __post_init__(self):
        object.__setattr__(self, "hyper", check_hyper(self.hyper))
        check_choice(self.accounting, "accounting", tuple(_METHODS))
        check_choice(self.objective, "objective", tuple(DECAY))
        for name in ("regularization", "step_size"):
            object.__setattr__(self, name, check_positive(getattr(self, name), name))
        object.__setattr__(self, "steps", check_integer(self.steps, "steps"))
        gradient_sensitivity(self.hyper, self.sensitivity)
        if self.step_size >= self._limit:
            raise ValueError(
                f"step_size={self.step_size} does not contract: use less than {self._limit:.6g}, which is "
                f"2/({'2λ' if self.objective == 'paper' else 'λ'} + G²)"
            )

    @property
    def decay(self) -> float:
        """The factor aλ: a step of size η shrinks Γ to (1 − aλη)Γ."""
        return DECAY[self.objective] * self.regularization

    @property
    def change(self) -> float:
        """The l2 sensitivity of the gradient sum."""
        return gradient_sensitivity(self.hyper, self.sensitivity)

    @property
    def _limit(self) -> float:
        return 2 / (self.decay + self.hyper.feature_radius**2)

    @property
    def contraction_gap(self) -> float:
        """1 − c, where c is the contraction factor of a step; it is accurate even if c rounds to 1."""
        return min(self.decay * self.step_size, 2 * (1 - self.step_size / self._limit))

    def calibrate(self, epsilon: float, delta: float) -> tuple[float, PrivacyGuarantee]:
        """The noise multiplier for (ε, δ)-DP, replacing one prompt, and the guarantee.

        The multiplier m is the noise std on the gradient *sum* in units of its sensitivity.

        "basic": each step is (ε/T, δ/T)-DP by the classical bound, m = (T/ε)√(2 log(1.25T/δ)), as printed in
          the paper. The classical bound needs ε/T < 1.
        "zcdp": each step is 1/(2m²)-zCDP and ρ = T/(2m²) gives ε = ρ + 2√(ρ log(1/δ)) (Bun & Steinke,
          arXiv 1605.02065, Proposition 1.3).
        "gdp": T steps are exactly √T/m-GDP, whatever their order and however they adapt (Dong, Roth & Su,
          arXiv 1905.02383, Corollary 3.3); m is the smallest possible for the sequence of all iterates.
        "last_iterate": for Γ^T alone. With c = max(|1 − aλη|, |1 − aλη − ηG²|), Γ^T is μ-GDP,
          μ = m⁻¹ √[(1 − c^T)(1 + c) / ((1 + c^T)(1 − c))] (Bok, Su & Altschuler, arXiv 2403.00278, the
          theorem on strongly convex losses with full batches). Its hypotheses hold here: every step is
          Γ ↦ Π_R(φ(Γ) + noise), the noise before the projection onto a convex set; φ is c-Lipschitz for
          every data set, being affine with slope 1 − aλη − ηH and 0 ⪯ H ⪯ G²; for neighbours φ differs by at
          most η/N times the sensitivity at every point of the ball; η, the noise, T and Γ⁰ do not depend on
          the data. A linear map without projection attains the bound.

        Args:
          epsilon: ε in (0, 1e8].
          delta: δ in (0, 1).

        Returns:
          (m, guarantee). The guarantee's event composes with others exactly.

        Raises:
          ValueError: for ε or δ out of range, or ε/T ≥ 1 under "basic".
        """
        epsilon, delta = check_epsilon(epsilon), check_delta(delta)
        steps, event = self.steps, None
        if self.accounting == "basic":
            if epsilon >= steps:
                raise ValueError(
                    f"epsilon={epsilon} over steps={steps} is {epsilon / steps:.3g} a step: the classical "
                    "Gaussian bound of accounting='basic' needs less than 1; use accounting='gdp'"
                )
            multiplier = steps / epsilon * math.sqrt(2 * math.log(1.25 * steps / delta))
        elif self.accounting == "zcdp":
            slack = math.log(1 / delta)
            root_rho = epsilon / (math.sqrt(slack + epsilon) + math.sqrt(slack))
            multiplier = math.sqrt(steps / 2) / root_rho
        elif self.accounting == "gdp":
            multiplier = gaussian_noise_multiplier(epsilon, delta, compositions=steps)
        else:
            one_release = gaussian_noise_multiplier(epsilon, delta)
            gap = self.contraction_gap
            log_power = steps * math.log1p(-gap)  # log c^T
            inflation = -math.expm1(log_power) * (2 - gap) / ((1 + math.exp(log_power)) * gap)
            # In exact arithmetic the last iterate never costs more than all iterates.
            multiplier = one_release * math.sqrt(min(inflation, steps))
            event = dp_accounting.GaussianDpEvent(one_release)
        if event is None:
            event = dp_accounting.SelfComposedDpEvent(
                dp_accounting.GaussianDpEvent(multiplier), steps
            )
        return multiplier, PrivacyGuarantee(
            epsilon=float(epsilon),
            delta=float(delta),
            neighboring=REPLACE_ONE,
            unit="prompt",
            mechanism=f"NoisyHead, {steps} full-batch steps, noise multiplier {multiplier:.6g}, "
            f"{self.sensitivity} sensitivity, {_METHODS[self.accounting]}",
            assumptions=("the number of prompts is public",)
            + (_LAST_ITERATE_ONLY if self.accounting == "last_iterate" else ()),
            event=event,
        )


def as_printed() -> dict[str, Any]:
    """The options of `fit` and `Descent` that give Algorithm 1 as the paper prints it.

    Use them as `noisy_head.fit(key, features, hyper, ..., **noisy_head.as_printed())`. The paper's bounds C,
    G and R are `hyperparameters(..., rule="paper")`.
    """
    return {"accounting": "basic", "sensitivity": "paper", "objective": "paper"}


# The condition that a user of accounting="last_iterate" has to keep.
_LAST_ITERATE_ONLY = (
    "only the last iterate is released: no other iterate, no loss, nothing else of any step",
    "the number of steps, the step size and the noise were fixed without looking at the prompts",
)
