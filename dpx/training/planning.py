"""Plans of a training before anything is spent: batches, steps, sampling, and an optimizer.

A plan follows from public numbers. Let N be the number of records, E the epochs and μ the privacy of one
release with the whole budget (`dpx.gaussian_noise_multiplier` is 1/μ). T steps of batches of B = E·N/T need
the noise multiplier σ; for gradients of norm 1 there is in each coordinate of the mean gradient

    of a step           σ / B
    of the training     σ / (B·√T), the mean of all steps: what moves the parameters in the end.

In the limit of many steps σ = 1/√log(1 + μ²T/E²) (Bu et al., arXiv:1911.11607). Two things follow for a given
computation, which is E:

- The noise of the training is 1/(μN), that of whole batches, times σ·√(exp(1/σ²) − 1), which is more than 1.
  So many small batches cost next to nothing while σ is large, 1.06 at 2 and 1.31 at 1, and below that ever
  more. Sander et al. (arXiv:2210.03403) found that how good a training is depends on this noise, and hardly
  on B and σ for themselves. McKenna et al. (arXiv:2501.18914) found that it depends on σ/B, on T and on the
  size of the model.
- The noise of a step grows as √T at least. A mean gradient has a norm of 1 at most, and what optimizers do
  with the gradient of a step is not linear: an Adam that sees noise alone walks at random.

The rule is: **as many steps as the noise of the mean gradient allows**, which is that σ/B is at most 0.01.
Noise in 10,000 coordinates is then as long as a gradient. There are not fewer than 200 steps, or an optimizer
goes nowhere, and not more than 1,000, of which each costs time beside its records. What this loses against
the best of a grid was measured (experiments/bench/README.md).
"""

import dataclasses
import math
from typing import Any

import numpy as np
import optax

from dpx import _validate, privacy
from dpx.training import calibration
from dpx.training.loop import wide
from dpx.training.sampling import Sampling

STEP_NOISE = 0.01
LEAST_STEPS, MOST_STEPS = 200, 1000
# Of the learning rate of Adam. From Mechanic's own 1e-6 it takes many of 200 steps to get anywhere.
FIRST_BET = 1e-2


@dataclasses.dataclass(frozen=True)
class Plan:
    """The settings of a training that spends a budget, and the noise that it needs.

    Attributes:
      num_records: N, the number of records.
      epsilon, delta: The budget.
      batch_size: B, the expected size of a batch.
      steps: T, the number of steps.
      sampling: How batches are drawn, which is the way that needs less noise.
      noise_multiplier: σ, calibrated by `dpx.calibrate_dpsgd`.
    """

    num_records: int
    epsilon: float
    delta: float
    batch_size: float
    steps: int
    sampling: Sampling
    noise_multiplier: float

    @property
    def epochs(self) -> float:
        """How often each record is used, in the mean."""
        return self.steps * self.batch_size / self.num_records

    @property
    def step_noise(self) -> float:
        """The standard deviation of a coordinate of a step's mean gradient, for gradients of norm 1."""
        return self.noise_multiplier / self.batch_size

    @property
    def training_noise(self) -> float:
        """The standard deviation of a coordinate of the mean gradient of all steps together."""
        return self.step_noise / math.sqrt(self.steps)

    @property
    def least_noise(self) -> float:
        """The `training_noise` of a training with whole batches, the least in the limit of many steps."""
        return privacy.gaussian_noise_multiplier(self.epsilon, self.delta) / self.num_records

    def __str__(self) -> str:
        return (
            f"{self.steps:,} steps of {self.batch_size:g} records by {self.sampling.name} sampling, noise "
            f"multiplier {self.noise_multiplier:.4g}"
        )


def inflation(planned: Plan, epochs: float, steps: float) -> float:
    """The noise of a training with a plan's budget over the least, in the limit of many steps."""
    odds = steps / (epochs * planned.least_noise * planned.num_records) ** 2  # exp(1/σ²) − 1
    return math.sqrt(odds / math.log1p(odds))


def plan(
    num_records: int,
    *,
    epsilon: float,
    delta: float,
    epochs: float | None = None,
    batch_size: float | None = None,
    steps: int | None = None,
) -> Plan:
    """A plan of a training on that many records, for a budget.

    It follows from these numbers and from no record, so that it costs nothing. Two of `epochs`, `batch_size`
    and `steps` give the third. From `epochs` alone the rule of `dpx.training.planning` gives both others.

    Args:
      num_records, epsilon, delta, batch_size, steps: As in `Plan`. The number of records is public.
      epochs: How often each record is used, in the mean. It says how much is computed, and costs no privacy:
        more is better until time runs out.

    Raises:
      ValueError: for a number out of range; for fewer than two of `epochs`, `batch_size` and `steps`, unless
        it is `epochs`; and for all three.
    """
    num_records = _validate.check_integer(num_records, "num_records")
    epsilon, delta = _validate.check_epsilon(epsilon), _validate.check_delta(delta)
    calibration.warn_about_delta(delta, num_records)
    budget: dict[str, Any] = {"epsilon": epsilon, "delta": delta}
    batch_size, steps = complete(
        num_records, **budget, epochs=epochs, batch_size=batch_size, steps=steps
    )

    def noise_multiplier(sampling: Sampling) -> float:
        about = {"sampling_probability": batch_size / num_records, "steps": steps}
        return privacy.calibrate_dpsgd(**budget, **about, **sampling.accounted(num_records))

    sampling = calibration.quieter(noise_multiplier)
    multiplier = noise_multiplier(sampling)
    return Plan(num_records, epsilon, delta, batch_size, steps, sampling, multiplier)


def complete(
    num_records: int,
    *,
    epsilon: float,
    delta: float,
    epochs: float | None,
    batch_size: float | None,
    steps: int | None,
    units: str = "records",
) -> tuple[float, int]:
    """The batch size and the number of steps of `plan`, without its noise. Errors call records `units`.

    Raises:
      ValueError: as `plan`.
    """
    if steps is not None:
        steps = _validate.check_integer(steps, "steps")
    if batch_size is not None:
        batch_size = _validate.check_number(batch_size, "batch_size")
        if not 0 < batch_size <= num_records:
            raise ValueError(
                f"batch_size={batch_size:g} must be positive and at most {num_records}, the number of "
                f"{units}: it is the expected size of a batch"
            )
    if epochs is None:
        if batch_size is None or steps is None:
            raise ValueError(
                f"epochs=None must be a number with batch_size={batch_size} and steps={steps}: say how often "
                "each record is used, such as 20, and what is missing is planned"
            )
        return batch_size, steps
    epochs = _validate.check_positive(epochs, "epochs")
    if batch_size is not None and steps is not None:
        raise ValueError(
            f"epochs={epochs:g} must be None with batch_size={batch_size:g} and steps={steps}, from which it "
            "follows: leave one of the three out"
        )
    used = epochs * num_records
    if batch_size is not None:
        return batch_size, max(1, round(used / batch_size))
    if steps is None:
        tried = np.arange(LEAST_STEPS, MOST_STEPS + 1)
        scale = epochs * privacy.gaussian_noise_multiplier(epsilon, delta)  # E / μ
        noise = tried / used / np.sqrt(np.log1p(tried / scale**2))
        wanted = tried[noise <= STEP_NOISE].max(initial=LEAST_STEPS)
        batch_size = min(num_records, max(1, round(used / wanted)))
        return batch_size, max(1, round(used / batch_size))
    if used / steps > num_records:
        raise ValueError(
            f"epochs={epochs:g} must be at most steps={steps}: a step uses all records at most; use "
            "fewer epochs, or more steps"
        )
    return used / steps, steps


def untuned(steps: int) -> optax.GradientTransformation:
    """Adam with a learning rate that is found during the training, since trying several costs privacy.

    Mechanic (Cutkosky, Defazio and Mehta, arXiv:2306.00144) multiplies all updates by one number, with which
    it bets on whether the next gradient points where those before it did. The rate also falls to zero over
    all steps. Mechanic sees noisy gradients alone, and so costs nothing. Its state is three times the
    parameters, where Adam's is two.
    """
    falling = optax.linear_schedule(1.0, 0.0, steps)
    inner = optax.contrib.mechanize(optax.adam(falling), s_init=FIRST_BET)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return inner.update(updates, state, wide(params))  # its state is as wide as the gradients

    return optax.GradientTransformation(inner.init, update)


def taken(
    batch_size: float, steps: int, epochs: Any, optimizer: Any, l2_clip_norm: Any, units: str
) -> str:
    """The settings that `fit` chose because they were not given, in words; empty if there are none."""
    parts = [
        (f"{steps:,} steps of {batch_size:g} {units}", epochs is not None),
        ("Adam whose learning rate is found meanwhile", optimizer is None),
        ("gradients of norm 1", l2_clip_norm is None),
    ]
    words = ", ".join(words for words, planned in parts if planned)
    return words and f"takes {words}"
