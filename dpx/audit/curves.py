"""Trade-off curves of the Gaussian mechanism and of DP-SGD, which are the models that audits test against.

A trade-off curve f gives, for two neighbouring inputs, the least type II error f(α) of any test whose type I
error is α (Dong, Roth and Su, arXiv:1905.02383). If a mechanism has too little noise, its errors are below
the claimed curve also at moderate α, where a few thousand runs measure them. In contrast, (ε, δ) at δ = 1e-5
is a statement about tails, which so few runs never see.
"""

import dataclasses
import functools
import math

import numpy as np
from scipy import special

from dpx._validate import check_choice, check_integer, check_sampling_probability
from dpx.privacy import composition
from dpx.privacy.dpsgd import SAMPLINGS, dpsgd_epsilon, dpsgd_event

# A curve is supported by lines of slopes −e^ε. These ε are so dense that the error is at most 1e-3.
_EPSILONS = np.concatenate([[0.0], np.geomspace(1e-2, 60.0, 200)])


@dataclasses.dataclass(frozen=True)
class SampledGaussian:
    """The curves of DP-SGD with known sampling and an unknown noise multiplier.

    The mechanism consists of `steps` Gaussian mechanisms, each on a batch that a record is in with
    probability `sampling_probability`, by "poisson" sampling or random "allocation" (`dpx.dpsgd_epsilon`).
    If that probability is 1, the curves are those of μ-GDP with μ = √steps / noise multiplier. A curve holds
    for adding a record as for removing it.
    """

    sampling_probability: float = 1.0
    steps: int = 1
    sampling: str = "poisson"

    def __post_init__(self):
        check_sampling_probability(self.sampling_probability)
        check_integer(self.steps, "steps")
        check_choice(self.sampling, "sampling", SAMPLINGS)

    def tradeoff(self, noise_multiplier: float, type_one) -> np.ndarray:
        """A lower bound on the least type II error at each type I error, tight to about 1e-3.

        With sampling it follows from a privacy loss distribution, which is an upper bound, by
        f(α) = sup_ε max(1 − δ(ε) − e^ε α, e^−ε (1 − δ(ε) − α)). A test that rejects this curve therefore
        rejects the true one.
        """
        type_one = np.asarray(type_one, np.float64)
        if self.sampling_probability == 1:
            return special.ndtr(
                special.ndtri(1 - type_one) - math.sqrt(self.steps) / noise_multiplier
            )
        lines = _lines(self, noise_multiplier)
        return np.max(lines[0] - lines[1] * type_one[..., None], axis=-1, initial=0.0)

    def epsilon(self, noise_multiplier: float, delta: float) -> float:
        """The ε at δ of the curve of a noise multiplier."""
        return dpsgd_epsilon(
            noise_multiplier,
            delta,
            sampling_probability=self.sampling_probability,
            steps=self.steps,
            sampling=self.sampling,
        )


@functools.lru_cache(maxsize=4096)
def _lines(model: SampledGaussian, noise_multiplier: float):
    """The intercepts and the slopes of the lines whose maximum is the curve."""
    interval = 1e-2 / math.sqrt(model.steps) * max(1.0, noise_multiplier**-2)
    event = dpsgd_event(
        noise_multiplier,
        sampling_probability=model.sampling_probability,
        steps=model.steps,
        sampling=model.sampling,
    )
    loss = composition.composed(composition.plan(event, interval))
    delta = np.asarray(loss.get_delta_for_epsilon(_EPSILONS.tolist()))
    slopes = np.exp(_EPSILONS)
    heights = np.concatenate([1 - delta, (1 - delta) / slopes])
    return heights, np.concatenate([slopes, 1 / slopes])
