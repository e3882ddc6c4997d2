"""ε of a DpEvent: exactly where it is Gaussian throughout, otherwise by privacy loss distributions.

What is selected among private trials has neither: it is accounted by Rényi divergences.
"""

import math

import dp_accounting
from dp_accounting import DpEvent, NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import UnsupportedEventError
from dp_accounting.rdp import RdpAccountant

from dpx._validate import check_number
from dpx.privacy.gaussian import (
    gaussian_epsilon,
)

_LARGEST_INTERVAL = 300.0  # e^interval must stay a float


def check_event(event: DpEvent, name: str) -> None:
    """Raises ValueError for an event with a number that no mechanism has: accountants may never end on it."""
    inner = getattr(event, "event", None)
    for part in (*getattr(event, "events", ()), *(() if inner is None else (inner,))):
        check_event(part, name)
    limits = {"noise_multiplier": math.inf, "sampling_probability": 1.0, "count": math.inf}
    for field, most in limits.items():
        value = getattr(event, field, None)
        if value is not None and not 0 <= check_number(value, f"{name}: {field}") <= most:
            raise ValueError(f"{name} has {field}={value}, which must be in [0, {most:g}]")


def gaussian_mu(event: DpEvent) -> float | None:
    """μ of an event that is made of full-batch Gaussian mechanisms only, otherwise None."""
    if isinstance(event, dp_accounting.NoOpDpEvent):
        return 0.0
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return 1 / event.noise_multiplier if event.noise_multiplier > 0 else math.inf
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        mu = gaussian_mu(event.event)
        return None if mu is None else mu * math.sqrt(event.count)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        mus = [gaussian_mu(part) for part in event.events]
        return None if any(mu is None for mu in mus) else math.hypot(*mus)  # type: ignore[arg-type]
    return None


def event_epsilon(
    event: DpEvent, delta: float, neighboring: NeighboringRelation
) -> tuple[float, str]:
    """The smallest known ε at δ, and in words how it was found."""
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
    return _pld_epsilon(event, delta), "privacy loss distributions"


def _selects(event: DpEvent) -> bool:
    """Whether a selection among trials is part of an event."""
    parts = (*getattr(event, "events", ()), getattr(event, "event", None))
    return isinstance(event, dp_event.RepeatAndSelectDpEvent) or any(
        _selects(part) for part in parts if part is not None
    )


def _pld_epsilon(event: DpEvent, delta: float) -> float:
    """ε by privacy loss distributions, discretised as finely as this event needs.

    The estimate is pessimistic at any interval h and its relative error is about (h/s)²/12, s the standard
    deviation of one step's loss, for which ε/(4√steps) stands in: h = ε/(200√steps) wastes under 1e-4. An ε
    below 1e-3 gets the interval of 1e-3, since one that tends to zero would need endless memory.
    """
    steps, noise = count_steps(event)
    if noise == 0 or math.isinf(noise):
        return 0.0 if noise else math.inf
    interval = min(1e-2 * max(1.0, noise**-2), _LARGEST_INTERVAL)
    while True:
        epsilon = pld_bound(event, delta, interval)
        finest = pld_interval(epsilon, steps)
        if interval <= 1.01 * finest or not math.isfinite(epsilon):
            return epsilon
        interval = finest


def pld_interval(epsilon: float, steps: int) -> float:
    """The interval of privacy losses that is fine enough for so many steps of that ε together."""
    return min(max(epsilon, 1e-3) / (200 * math.sqrt(steps)), _LARGEST_INTERVAL)


def pld_bound(event: DpEvent, delta: float, interval: float) -> float:
    """An upper bound on ε, with privacy losses rounded up to multiples of an interval."""
    accountant = PLDAccountant(value_discretization_interval=interval)
    return float(accountant.compose(event).get_epsilon(delta))


def count_steps(event: DpEvent) -> tuple[int, float]:
    """How many mechanisms an event composes, and its smallest noise multiplier."""
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        count, noise = count_steps(event.event)
        return event.count * count, noise
    if isinstance(event, dp_accounting.ComposedDpEvent):
        parts = [count_steps(part) for part in event.events]
        return sum(count for count, _ in parts), min(noise for _, noise in parts)
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        return count_steps(event.event)
    return 1, getattr(event, "noise_multiplier", 1.0)
