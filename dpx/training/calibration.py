"""The noise of a training run, calibrated to its budget, and the guarantee of what ran."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

from dpx import _watch, privacy
from dpx.privacy import Ledger, PrivacyGuarantee
from dpx.training import adaptive, correlated
from dpx.training.sampling import Allocation, Poisson, Sampling

_ROUNDED = (
    "sums of clipped gradients count as exact: in 32-bit floats a record moves them by a share more, which "
    "ClippedGrad.rounding bounds"
)


@dataclasses.dataclass(frozen=True)
class Privacy:
    """How a training is made private, and what that costs. A training without privacy has None.

    Attributes:
      l2_clip_norm: The clipping norm, a tree of them, or an `AdaptiveClipNorm`.
      normalize: Whether all gradients are scaled to the clipping norm, and not only those above it.
      noise_multiplier: The standard deviation of the noise over the clipping norm; with an adaptive norm over
        the joint sensitivity of gradients and count.
      spent: A function of the number of steps taken: the ε spent by then. It includes the release beside the
        training that shares the budget, if there is one.
      alone: The guarantee of all steps, without a release beside them.
      count_ratio: The factor of the count of an adaptive norm (`adaptive.clips`); None without one.
      coefficients: The coefficients of banded noise (`dpx.training.correlated`); independent noise has one.
      sampling: How batches are drawn.
    """

    l2_clip_norm: Any
    normalize: bool
    noise_multiplier: float
    spent: Callable[[int], float]
    alone: PrivacyGuarantee | None = None
    count_ratio: float | None = None
    coefficients: tuple[float, ...] = (1.0,)
    sampling: Sampling = dataclasses.field(default_factory=Poisson)


def calibrate(
    *,
    epsilon: float,
    delta: float,
    num_examples: int,
    batch_size: float,
    steps: int,
    l2_clip_norm: Any,
    normalize: bool,
    accountant: str,
    unit: str,
    assumptions: tuple[str, ...],
    sampling: Sampling | None = Poisson(),  # noqa: B008
    bands: int = 1,
    beside: PrivacyGuarantee | None = None,
    beside_label: str = "prior release",
) -> tuple[Privacy, PrivacyGuarantee]:
    """Calibrates a training run to a budget.

    Args:
      epsilon, delta: The budget.
      num_examples: The number of records.
      batch_size: The expected batch size.
      steps: The number of steps.
      l2_clip_norm, normalize, accountant, unit, assumptions: As in `dpx.training.fit`.
      sampling: How batches are drawn; None for the way that needs less noise (`quieter`).
      bands: b of banded noise; one for independent noise.
      beside: The guarantee of a Gaussian release beside the training, which shares the budget.
      beside_label: What that release is called.

    Returns:
      The argument `privacy` of `dpx.training.loop.train`, and the guarantee of the training and that release
      together.
    """
    # A block of b steps is one mechanism, on a sample of one of b groups.
    records, blocks = public_size(num_examples), math.ceil(steps / bands)
    settings: dict[str, Any] = {"accountant": accountant}
    settings["sampling_probability"] = bands * batch_size / records
    event = None if beside is None else beside.event
    assumptions = (*assumptions, _ROUNDED)

    def needed(sampling: Sampling) -> float:
        about = settings | sampling.accounted(records)
        return privacy.calibrate_dpsgd(epsilon, delta, steps=blocks, beside=event, **about)

    if sampling is None:  # banded noise and Rényi accounting know Poisson sampling alone
        sampling = Poisson() if bands > 1 or accountant != "pld" else quieter(needed)
    multiplier = needed(sampling)
    settings |= sampling.accounted(records)

    counts, ratio = "", None
    if isinstance(l2_clip_norm, adaptive.AdaptiveClipNorm):
        gradients, count = l2_clip_norm.noise(multiplier, batch_size)
        ratio = gradients / count
        counts = (
            ", of which a count of the records within the clipping norm takes a part (noise "
            f"{count:.4g}; the gradients have {gradients:.6g})"
        )

    if bands > 1:
        counts = f", for each {bands} of {steps} steps together, whose noise is banded"

    def alone(steps: int) -> PrivacyGuarantee:
        blocks, about = math.ceil(steps / bands), {"unit": unit, "assumptions": assumptions}
        plain = privacy.dpsgd_guarantee(multiplier, delta, steps=blocks, **about, **settings)
        return dataclasses.replace(plain, mechanism=plain.mechanism + counts)

    def guarantee(steps: int) -> PrivacyGuarantee:
        if beside is None:
            return alone(steps)
        ledger = Ledger().spend(beside, beside_label)
        return ledger.spend(alone(steps), "DP-SGD").guarantee(delta)

    calibrated = Privacy(
        l2_clip_norm=l2_clip_norm,
        normalize=normalize,
        noise_multiplier=multiplier,
        spent=lambda steps: guarantee(steps).epsilon,
        alone=alone(steps),
        count_ratio=ratio,
        coefficients=correlated.coefficients(steps, bands),
        sampling=sampling,
    )
    return calibrated, guarantee(steps)


def quieter(noise_multiplier: Callable[[Sampling], float]) -> Sampling:
    """The sampling that needs less noise: random allocation, unless Poisson sampling needs no more.

    `noise_multiplier` is a function of a sampling: the noise multiplier that it needs.
    """
    return min(Poisson(), Allocation(), key=noise_multiplier)


def check_priced(
    training: Privacy | None, sampling_probability: float, steps: int, num_examples: int
) -> None:
    """Raises ValueError where the records, batches or steps of a training are not those of its guarantee."""
    if training is None or training.alone is None:
        return
    event = privacy.dpsgd_event(
        training.noise_multiplier,
        sampling_probability=sampling_probability,
        steps=math.ceil(steps / len(training.coefficients)),
        **training.sampling.accounted(num_examples),
    )
    if training.alone.event != event:
        raise ValueError(
            f"the guarantee is that of {training.alone.event}, and the training would be {event}: calibrate "
            "for the records, the batch size and the steps that it has"
        )


def public_size(count: int) -> int:
    """Returns the number of records, which every guarantee here assumes to be public."""
    return _watch.public(count, "the number of records")


def warn_about_delta(delta: float, num_records: int, units: str = "records") -> None:
    """Warns of a δ above one over the number of units, with which one of them may be published outright."""
    if delta > 1 / num_records:
        warnings.warn(
            f"delta={delta:g} exceeds 1/{num_records}, one over the number of {units}: "
            f"such a guarantee permits publishing one of the {units}",
            stacklevel=2,
        )
