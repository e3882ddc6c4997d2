"""ε of a DpEvent: exact for Gaussian mechanisms, otherwise by privacy loss distributions.

An event that contains a selection among private trials is accounted by Rényi divergences instead.
"""

import math
from typing import Any

import attr
import dp_accounting
import numpy as np
from dp_accounting import DpEvent, NeighboringRelation, dp_event
from dp_accounting.privacy_accountant import UnsupportedEventError
from dp_accounting.rdp import RdpAccountant

from dpx._validate import check_number
from dpx.privacy import composition
from dpx.privacy.allocation import AllocatedGaussianDpEvent
from dpx.privacy.gaussian import gaussian_epsilon

# An epoch of random allocation is rounded as often as so many mechanisms.
_ROUNDINGS = 2
_MANY_STEPS = 2**15  # for which the first grid is fine enough
_LARGEST_INTERVAL = 300.0  # e^interval must stay a float


def check_event(event: DpEvent, name: str) -> DpEvent:
    """Returns the event with plain numbers; raises ValueError for numbers out of range.

    Accountants compute in the types that they are given: with 16-bit numbers, Rényi accounting returns ε = 0.
    With a number out of range they may not terminate.
    """
    if not isinstance(event, DpEvent):
        raise ValueError(f"{name}={event!r} must be a DpEvent: make one with dp_accounting")
    for field in getattr(event, "__attrs_attrs__", ()):
        for value in np.ravel(np.asarray(getattr(event, field.name), object)):
            if not isinstance(value, DpEvent):
                check_number(value, f"{name}: {field.name}")
    limits = {"noise_multiplier": math.inf, "sampling_probability": 1.0}
    limits |= dict.fromkeys(("count", "steps", "released"), math.inf)
    changes: dict[str, Any] = {}
    for field, most in limits.items():
        value = getattr(event, field, None)
        if value is None:
            continue
        number = check_number(value, f"{name}: {field}")
        if not 0 <= number <= most:
            raise ValueError(f"{name} has {field}={value}, which must be in [0, {most:g}]")
        if field in ("noise_multiplier", "sampling_probability"):
            changes[field] = number
        elif number.is_integer():
            changes[field] = int(number)
        elif math.isfinite(number):
            raise ValueError(f"{name} has {field}={value}, which must be a whole number")
    if isinstance(event, AllocatedGaussianDpEvent) and not 1 <= event.released <= event.steps:
        raise ValueError(
            f"{name} has released={event.released}, which must be in [1, {event.steps}], the steps of one"
        )
    if (inner := getattr(event, "event", None)) is not None:
        changes["event"] = check_event(inner, name)
    if (parts := getattr(event, "events", None)) is not None:
        changes["events"] = [check_event(part, name) for part in parts]
    return attr.evolve(event, **changes) if changes else event


def gaussian_mu(event: DpEvent) -> float | None:
    """μ of an event that consists of full-batch Gaussian mechanisms only; None for other events."""
    mus = []
    for mechanism, count in composition.uses(event):
        if not isinstance(mechanism, dp_accounting.GaussianDpEvent):
            return None
        noise = mechanism.noise_multiplier
        mus.append(1 / noise * math.sqrt(count) if noise > 0 else math.inf)
    return math.hypot(*mus)


def event_epsilon(
    event: DpEvent, delta: float, neighboring: NeighboringRelation
) -> tuple[float, str]:
    """The smallest known ε at δ, and the name of the accounting that gave it."""
    mu = gaussian_mu(event)
    if mu is not None:
        epsilon = gaussian_epsilon(1 / mu, delta) if mu > 0 else 0.0
        return epsilon, "Gaussian mechanisms exactly, μ² added up"
    if neighboring != NeighboringRelation.ADD_OR_REMOVE_ONE:
        raise ValueError(
            f"{event} can be composed under add_or_remove_one only, not {neighboring.name.lower()}: "
            "spend its PrivacyGuarantee without the event"
        )
    if _selects(event):
        try:
            return float(RdpAccountant().compose(event).get_epsilon(delta)), "Rényi divergences"
        except UnsupportedEventError as error:
            raise ValueError(
                f"{event} cannot be composed with a selection ({error}): spend the PrivacyGuarantee of "
                "either without its event"
            ) from None
    if not accountable(event):
        raise ValueError(
            f"{event} has a part that privacy loss distributions do not know: spend a PrivacyGuarantee with "
            "its (ε, δ) in its place"
        )
    try:
        return _pld_epsilon(event, delta), "privacy loss distributions"
    except (TypeError, OverflowError) as error:
        raise ValueError(
            f"{event} holds a number that privacy loss distributions do not take ({error}): spend a "
            "PrivacyGuarantee with its (ε, δ) in its place"
        ) from None


def _selects(event: DpEvent) -> bool:
    """Whether an event contains a selection among trials."""
    return any(
        isinstance(mechanism, dp_event.RepeatAndSelectDpEvent)
        for mechanism, _ in composition.uses(event)
    )


def _pld_epsilon(event: DpEvent, delta: float) -> float:
    """ε by privacy loss distributions, on a grid that is as fine as this event needs.

    The result is an upper bound for any interval h of the grid. Its relative error is about (h/s)²/12, where
    s, the standard deviation of the loss of one step, is estimated by ε/(4√steps): with h = ε/(200√steps) the
    error is below 1e-4. If ε is below 1e-3, it gets the interval of 1e-3, since memory would grow without end
    as ε tends to zero.
    """
    steps, noise = count_steps(event)
    interval = coarse_interval(1e-2, noise) / math.sqrt(max(1, steps / _MANY_STEPS))
    while True:
        epsilon = pld_bound(event, delta, interval)
        finest = pld_interval(epsilon, steps)
        if interval <= 1.01 * finest or not math.isfinite(epsilon):
            break
        interval = finest
    if math.isinf(epsilon) and noise > 0:
        raise ValueError(
            f"noise_multiplier={noise} is too small for privacy loss distributions, which do not hold an "
            "epsilon beyond 1e8: use more noise, or accountant='rdp'"
        )
    return epsilon


def coarse_interval(interval: float, noise: float) -> float:
    """The interval of a grid of losses for a first estimate: this one, or a larger one if noise is small."""
    inverse = 1 / noise if noise else math.inf
    return min(interval * max(1.0, inverse * inverse), _LARGEST_INTERVAL)


def pld_interval(epsilon: float, steps: int) -> float:
    """The interval of a grid of losses that is fine enough for so many steps that cost ε together."""
    return min(max(epsilon, 1e-3) / (200 * math.sqrt(max(steps, 1))), _LARGEST_INTERVAL)


def pld_bound(event: DpEvent, delta: float, interval: float) -> float:
    """An upper bound on ε by privacy loss distributions on a grid of that interval, or of a larger one.

    It is infinite where there is so little noise that ε would exceed 1e8.

    Raises:
      ValueError: for a δ so small that rounding errors could exceed it, or if the losses do not fit into
        memory.
    """
    steps, noise = count_steps(event)
    if noise == 0:
        return math.inf
    planned = composition.plan(event, interval)
    least = max(10 * planned.rounding, 1e-12)
    if delta < least:
        raise ValueError(
            f"delta={delta} must be at least {least:.3g}, or rounding in the composition of {steps} privacy "
            "loss distributions could hide it: use a larger delta, or accountant='rdp'"
        )
    if planned.steps > composition.MOST_STEPS:
        raise ValueError(
            f"steps={steps} must be at most {composition.MOST_STEPS}, since privacy losses of more take "
            "gigabytes: use accountant='rdp'"
        )
    if planned.interval > _LARGEST_INTERVAL:
        return math.inf
    try:
        losses = composition.composed(planned)
        return float(losses.get_epsilon_for_delta(delta - planned.rounding))
    except MemoryError:
        raise ValueError(
            f"{event} is composed of too many privacy losses for the memory of this machine, as where "
            "records are hardly ever sampled: use accountant='rdp'"
        ) from None


def accountable(event: DpEvent) -> bool:
    """Whether `event_epsilon` can account for the event under adding or removing a record."""
    joins = NeighboringRelation.ADD_OR_REMOVE_ONE
    return gaussian_mu(event) is not None or _selects(event) or composition.known(event, joins)


def count_steps(event: DpEvent) -> tuple[int, float]:
    """The number of mechanisms that an event composes, and its smallest noise multiplier."""
    steps, least = 0, math.inf
    for mechanism, count in composition.uses(event):
        steps += count * (_ROUNDINGS if isinstance(mechanism, AllocatedGaussianDpEvent) else 1)
        noise = composition.noise_of(mechanism)
        least = min(least, 1.0 if noise is None else noise)
    return steps, least
