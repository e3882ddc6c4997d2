"""Composition of privacy loss distributions in time and memory that do not grow with the number of steps.

The distribution of T steps on a grid that is fine enough for one step has about √T·1000 points. Therefore
steps are composed in blocks of 1,024, and the losses of a block are rounded to a grid 32 times coarser, which
is as fine for the block as the first grid is for a step. Blocks of blocks follow, until few are left.

Every distribution here is an upper bound (Doroshenko et al., arXiv 2207.04380). A loss x between two
neighbouring points a < b of a grid becomes b with probability p and a otherwise, where

    p = (1 − e^(a−x)) / (1 − e^(a−b)).

This keeps the mass of both distributions whose loss x is: e^−x = (1 − p)·e^−a + p·e^−b. Forgetting which of
the two points x became gives the original pair back, so that rounding can only increase divergence.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
from dp_accounting import DpEvent, NeighboringRelation
from dp_accounting.pld import PLDAccountant, pld_pmf
from dp_accounting.pld import privacy_loss_distribution as plds

from dpx.privacy.allocation import LEAST_NOISE, AllocatedGaussianDpEvent, allocated_gaussian
from dpx.privacy.sampled import sampled_gaussian, split_pmf

# Steps in a block, and the factor by which its grid is coarser: √BLOCK, as a block's loss deviates more.
BLOCK, COARSER = 1024, 32
# The most steps, or blocks, that are composed at once.
AT_ONCE = 2**15
_TAIL = 1e-15  # mass of the composition that may count as an infinite loss
_MOST_LOSSES = 2**15  # intervals in the losses of one mechanism: more take minutes and gigabytes


class Part(NamedTuple):
    """A mechanism, how often it is used, and how many levels of blocks its uses are composed in."""

    mechanism: DpEvent
    count: int
    depth: int


class Plan(NamedTuple):
    """The way in which an event is composed.

    Attributes:
      parts: Its mechanisms.
      interval: The interval of the grid on which their distributions are composed with each other.
    """

    parts: list[Part]
    interval: float

    @property
    def rounding(self) -> float:
        """A bound on the amount by which δ may be too small, since Fourier transforms round it either way.

        Compared with the closed form of the Gaussian mechanism, δ was off by at most 2.7e-17 for each use
        that is composed at once, and by 1.3e-14 in blocks, at up to 1e15 uses. For mechanisms whose single
        use is computed by dp-accounting, each use adds that error.
        """
        uses = (
            count // BLOCK**depth + BLOCK * depth if _is_ours(mechanism) else count
            for mechanism, count, depth in self.parts
        )
        return 1e-16 * sum(uses)


def plan(event: DpEvent, interval: float) -> Plan:
    """Plans how an event is composed.

    Args:
      event: The event; its mechanisms are `known`.
      interval: The interval of a grid that is fine enough for one use of each mechanism. If losses are so
        large that this grid would have too many points, for example at tiny sampling probabilities, a
        coarser one is taken.
    """
    used, parts, coarsest = list(_uses(event)), [], 0.0
    if any(isinstance(mechanism, AllocatedGaussianDpEvent) for mechanism, _ in used):
        # On powers of two, a training and its first steps share the cached distributions of their parts.
        interval = 2.0 ** math.floor(math.log2(interval))
    most = max((levels(count) for _, count in used), default=0)
    for mechanism, count in used:
        grid = max(interval, _largest_loss(mechanism) / _MOST_LOSSES)
        depth = levels(count)
        # A part of few uses is not put into blocks: it lies on the grid that all parts share in the end.
        while depth and grid * COARSER**depth > interval * COARSER**most:
            depth -= 1
        parts.append(Part(mechanism, count, depth))
        coarsest = max(coarsest, grid * COARSER**depth)
    return Plan(parts, coarsest or interval)


def composed(
    planned: Plan, relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
) -> plds.PrivacyLossDistribution:
    """An upper bound on the distribution of an event, but for rounding: δ is at most `rounding` too small."""
    pld = plds.identity(planned.interval)
    for part in planned.parts:
        pld = pld.compose(_repeated(part, planned.interval, relation))
    return pld


def levels(count: int) -> int:
    """The number of levels of blocks in which `count` uses of a mechanism are composed."""
    level = 0
    while count > AT_ONCE:
        count, level = count // BLOCK, level + 1
    return level


def _uses(event: DpEvent, count: int = 1) -> Iterator[tuple[DpEvent, int]]:
    """Yields the mechanisms that an event composes, and how often each is used."""
    if not count or isinstance(event, dp_accounting.NoOpDpEvent):
        return
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        yield from _uses(event.event, count * event.count)
    elif isinstance(event, dp_accounting.ComposedDpEvent):
        for part in event.events:
            yield from _uses(part, count)
    elif isinstance(event, AllocatedGaussianDpEvent) and event.noise_multiplier < LEAST_NOISE:
        yield from _uses(dp_accounting.GaussianDpEvent(event.noise_multiplier), count)
    elif isinstance(event, dp_accounting.GaussianDpEvent):
        yield dp_accounting.GaussianDpEvent(event.noise_multiplier / math.sqrt(count)), 1
    else:
        yield event, count


def _largest_loss(mechanism: DpEvent) -> float:
    """Roughly the largest privacy loss of a mechanism: the loss at nine standard deviations of its noise."""
    noise = getattr(getattr(mechanism, "event", mechanism), "noise_multiplier", None)
    loss = (0.5 / noise + 9) / noise if noise else 0.0
    probability = getattr(mechanism, "sampling_probability", 1 / getattr(mechanism, "steps", 1))
    return math.log1p(probability * math.expm1(loss)) if loss < 700 else loss


def _repeated(
    part: Part, interval: float, relation: NeighboringRelation
) -> plds.PrivacyLossDistribution:
    """The distribution of all uses of a mechanism, on a grid of that interval."""
    mechanism, count, depth = part
    one = _one(mechanism, interval / COARSER**depth, _TAIL / count / 100, relation)
    rest, left = None, count
    for level in range(depth):
        # Mass that one block loses is lost by every copy of it.
        tail = _TAIL * BLOCK ** (level + 1) / count / (depth + 1)
        left, few = divmod(left, BLOCK)
        if few:
            some = one.self_compose(few, tail)
            rest = some if rest is None else rest.compose(some)
        rest = None if rest is None else _coarser(rest)
        one = _coarser(one.self_compose(BLOCK, tail))
    whole = one.self_compose(left, _TAIL)
    return whole if rest is None else whole.compose(rest)


def _coarser(pld: plds.PrivacyLossDistribution) -> plds.PrivacyLossDistribution:
    """The distribution, rounded to a grid that is `COARSER` times coarser."""
    add = None if pld._symmetric else _coarser_pmf(pld._pmf_add)
    return plds.PrivacyLossDistribution(_coarser_pmf(pld._pmf_remove), add)


def _coarser_pmf(pmf: pld_pmf.PLDPmf) -> pld_pmf.PLDPmf:
    dense = pmf.to_dense_pmf()
    interval = dense._discretization
    first = dense._lower_loss // COARSER
    before = dense._lower_loss - first * COARSER
    after = -(before + dense.size) % COARSER
    cells = np.pad(dense._probs, (before, after)).reshape(-1, COARSER)
    up = cells @ (np.expm1(-interval * np.arange(COARSER)) / math.expm1(-COARSER * interval))
    return split_pmf(interval * COARSER, first, cells.sum(axis=1), up, dense._infinity_mass)


def _one(
    mechanism: DpEvent, interval: float, tail: float, relation: NeighboringRelation
) -> plds.PrivacyLossDistribution:
    """The distribution of one use of a mechanism."""
    joins = relation == NeighboringRelation.ADD_OR_REMOVE_ONE
    if isinstance(mechanism, AllocatedGaussianDpEvent):
        if interval > 1:
            return _coarser(_one(mechanism, interval / COARSER, tail, relation))
        return allocated_gaussian(mechanism, interval, tail)
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
        for mechanism, _ in _uses(event)
    )


def _is_ours(event: DpEvent) -> bool:
    """Whether dpx, and not dp-accounting, computes the distribution of a single use."""
    return _is_sampled_gaussian(event) or isinstance(event, AllocatedGaussianDpEvent)


def _is_sampled_gaussian(event: DpEvent) -> bool:
    """Whether an event is the Gaussian mechanism on a Poisson sample of positive probability."""
    return (
        isinstance(event, dp_accounting.PoissonSampledDpEvent)
        and isinstance(event.event, dp_accounting.GaussianDpEvent)
        and event.sampling_probability > 0
    )
