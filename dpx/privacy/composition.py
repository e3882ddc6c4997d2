"""The mechanisms that an event composes, and the composition of their privacy loss distributions.

Every distribution here is an upper bound (Doroshenko et al., arXiv 2207.04380). A loss x between two
neighbouring points a < b of a grid becomes b with probability p and a otherwise, where

    p = (1 − e^(a−x)) / (1 − e^(a−b)).

This keeps the mass of both distributions whose loss x is: e^−x = (1 − p)·e^−a + p·e^−b. Forgetting which of
the two points x became gives the original pair back, so that rounding can only increase divergence.
dp-accounting composes what lies on one grid.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import dp_accounting
from dp_accounting import DpEvent, NeighboringRelation
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld import privacy_loss_distribution as plds

from dpx.privacy.allocation import LEAST_NOISE, AllocatedGaussianDpEvent, allocated_gaussian
from dpx.privacy.sampled import sampled_gaussian

MOST_STEPS = 10**7  # that are composed: more take minutes and gigabytes
_TAIL = 1e-15  # mass of the composition that may count as an infinite loss
_MOST_LOSSES = 2**15  # intervals in the losses of one mechanism: more take minutes and gigabytes


class Plan(NamedTuple):
    """The way in which an event is composed.

    Attributes:
      parts: Its mechanisms, and how often each is used.
      interval: The interval of the grid on which their distributions are composed.
    """

    parts: list[tuple[DpEvent, int]]
    interval: float

    @property
    def steps(self) -> int:
        """The number of distributions that are composed."""
        return sum(count for _, count in self.parts)

    @property
    def rounding(self) -> float:
        """A bound on the amount by which δ may be too small, since Fourier transforms round it either way.

        Compared with the closed form of the Gaussian mechanism, δ was off by at most 3.2e-17 for each use.
        """
        return 1e-16 * self.steps


def plan(event: DpEvent, interval: float) -> Plan:
    """Plans how an event is composed.

    Args:
      event: The event; its mechanisms are `known`.
      interval: The interval of a grid that is fine enough for one use of each mechanism. If losses are so
        large that this grid would have too many points, for example at tiny sampling probabilities, a
        coarser one is taken.
    """
    parts = _priced(event)
    if any(isinstance(mechanism, AllocatedGaussianDpEvent) for mechanism, _ in parts):
        # On powers of two, a training and its first steps share the cached distributions of their parts.
        interval = 2.0 ** min(0, math.floor(math.log2(interval)))
    return Plan(parts, max([interval, *(_largest_loss(each) / _MOST_LOSSES for each, _ in parts)]))


def composed(
    planned: Plan, relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
) -> plds.PrivacyLossDistribution:
    """An upper bound on the distribution of an event, but for rounding: δ is at most `rounding` too small."""
    pld = plds.identity(planned.interval)
    for mechanism, count in planned.parts:
        one = _one(mechanism, planned.interval, _TAIL / count / 100, relation)
        pld = pld.compose(one.self_compose(count, _TAIL))
    return pld


def uses(event: DpEvent, count: int = 1) -> Iterator[tuple[DpEvent, int]]:
    """Yields the mechanisms that an event composes, and how often each is used."""
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        yield from uses(event.event, count * event.count)
    elif isinstance(event, dp_accounting.ComposedDpEvent):
        for part in event.events:
            yield from uses(part, count)
    elif count and not isinstance(event, dp_accounting.NoOpDpEvent):
        yield event, count


def noise_of(mechanism: DpEvent) -> float | None:
    """The noise multiplier of a mechanism, sampled or not; None if it has none, 0 without any noise."""
    if isinstance(mechanism, dp_accounting.NonPrivateDpEvent):
        return 0.0
    if 0 in (getattr(mechanism, name, None) for name in ("standard_deviation", "noise_parameter")):
        return 0.0
    return getattr(getattr(mechanism, "event", mechanism), "noise_multiplier", None)


def _priced(event: DpEvent) -> list[tuple[DpEvent, int]]:
    """The mechanisms that have a price, in the form in which it is computed."""
    found = []
    for mechanism, count in uses(event):
        noise = noise_of(mechanism)
        if noise == math.inf:  # which reveals nothing, and which accountants refuse
            continue
        gaussian = isinstance(mechanism, dp_accounting.GaussianDpEvent)
        if isinstance(mechanism, AllocatedGaussianDpEvent):
            gaussian = mechanism.noise_multiplier < LEAST_NOISE
        if gaussian and noise is not None:
            mechanism, count = dp_accounting.GaussianDpEvent(noise / math.sqrt(count)), 1
        found.append((mechanism, count))
    return found


def _largest_loss(mechanism: DpEvent) -> float:
    """Roughly the largest privacy loss of a mechanism: the loss at nine standard deviations of its noise."""
    noise = noise_of(mechanism)
    loss = (0.5 / noise + 9) / noise if noise else 0.0
    probability = getattr(mechanism, "sampling_probability", 1 / getattr(mechanism, "steps", 1))
    return math.log1p(probability * math.expm1(loss)) if loss < 700 else loss


def _one(
    mechanism: DpEvent, interval: float, tail: float, relation: NeighboringRelation
) -> plds.PrivacyLossDistribution:
    """The distribution of one use of a mechanism."""
    joins = relation == NeighboringRelation.ADD_OR_REMOVE_ONE
    if isinstance(mechanism, AllocatedGaussianDpEvent):
        if interval <= 1:
            return allocated_gaussian(mechanism, interval, tail)
        mechanism = dp_accounting.GaussianDpEvent(mechanism.noise_multiplier)  # an upper bound
    if joins and interval <= 1 and _is_sampled_gaussian(mechanism):
        event: Any = mechanism
        noise = event.event.noise_multiplier
        return sampled_gaussian(noise, event.sampling_probability, interval, tail)
    accountant = PLDAccountant(relation, value_discretization_interval=interval)
    return accountant.compose(mechanism)._pld


def known(event: DpEvent, relation: NeighboringRelation) -> bool:
    """Whether this module can compute the distributions of all mechanisms of an event under a relation."""
    joins = relation == NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = PLDAccountant(relation)
    return all(
        joins if isinstance(mechanism, AllocatedGaussianDpEvent) else accountant.supports(mechanism)
        for mechanism, _ in _priced(event)
    )


def _is_sampled_gaussian(event: DpEvent) -> bool:
    """Whether an event is the Gaussian mechanism on a Poisson sample of positive probability."""
    return (
        isinstance(event, dp_accounting.PoissonSampledDpEvent)
        and isinstance(event.event, dp_accounting.GaussianDpEvent)
        and event.sampling_probability > 0
    )
