"""Privacy loss distributions of very many steps, in time and memory that do not grow with their number.

A distribution of T steps on a grid that is fine enough for one of them has some √T·1000 points. So steps are
composed in blocks of 1,024, and the losses of a block are put on a grid that is 32 times coarser, which is as
fine for the block as the first grid is for a step. Blocks of blocks follow, until few are left.

Every distribution here is an upper bound (Doroshenko et al., arXiv 2207.04380). A loss x between two points
a < b of a grid becomes b with probability p, and otherwise a, where

    p = (1 − e^(a−x)) / (1 − e^(a−b)).

Then both distributions of which x is the loss keep their mass: e^−x = (1 − p)·e^−a + p·e^−b. An adversary who
is not told which of the two it became has what was there before, so that telling can only add divergence.
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

# Steps in a block, and how much coarser the grid is after it: √BLOCK, as the deviation of a block's loss.
BLOCK, COARSER = 1024, 32
# Steps, or blocks, that are composed at once.
AT_ONCE = 2**15
_TAIL = 1e-15  # mass of the composition that may count as lost
_MOST_LOSSES = 2**15  # of one mechanism, in intervals: more of them take minutes and gigabytes


class Part(NamedTuple):
    """A mechanism, how often it is used, and how often these uses are put into blocks."""

    mechanism: DpEvent
    count: int
    depth: int


class Plan(NamedTuple):
    """How an event is composed.

    Attributes:
      parts: Its mechanisms.
      interval: Of the grid on which they come together.
    """

    parts: list[Part]
    interval: float

    @property
    def rounding(self) -> float:
        """By how much δ may be too small: Fourier transforms round it either way.

        Against the closed form of the Gaussian mechanism it was off by at most 2.7e-17 for each use that is
        composed at once, and by 1.3e-14 in blocks, at up to 1e15 uses. What dp-accounting makes of a single
        use of another mechanism errs in each.
        """
        uses = (
            count // BLOCK**depth + BLOCK * depth if _is_ours(mechanism) else count
            for mechanism, count, depth in self.parts
        )
        return 1e-16 * sum(uses)


def plan(event: DpEvent, interval: float) -> Plan:
    """How to compose an event.

    Args:
      event: Of mechanisms that are `known`.
      interval: Of a grid that is fine enough for one use of each. Where losses are so large that it would
        have too many points, as where records are hardly ever sampled, a coarser one is taken.
    """
    used, parts, coarsest = list(_uses(event)), [], 0.0
    if any(isinstance(mechanism, AllocatedGaussianDpEvent) for mechanism, _ in used):
        # Of a training and its first steps the distributions share what was found on one grid.
        interval = 2.0 ** math.floor(math.log2(interval))
    most = max((levels(count) for _, count in used), default=0)
    for mechanism, count in used:
        grid = max(interval, _largest_loss(mechanism) / _MOST_LOSSES)
        depth = levels(count)
        # A part of few uses has no blocks, and is on the grid where all come together.
        while depth and grid * COARSER**depth > interval * COARSER**most:
            depth -= 1
        parts.append(Part(mechanism, count, depth))
        coarsest = max(coarsest, grid * COARSER**depth)
    return Plan(parts, coarsest or interval)


def composed(
    planned: Plan, relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
) -> plds.PrivacyLossDistribution:
    """The distribution of an event, an upper bound: its δ is too small by `planned.rounding` at most."""
    found = plds.identity(planned.interval)
    for part in planned.parts:
        found = found.compose(_repeated(part, planned.interval, relation))
    return found


def levels(count: int) -> int:
    """How often so many uses are put into blocks."""
    found = 0
    while count > AT_ONCE:
        count, found = count // BLOCK, found + 1
    return found


def _uses(event: DpEvent, count: int = 1) -> Iterator[tuple[DpEvent, int]]:
    """The mechanisms that an event composes, and how often each is used."""
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
    """About the largest privacy loss of a mechanism: at nine standard deviations."""
    noise = getattr(getattr(mechanism, "event", mechanism), "noise_multiplier", None)
    loss = (0.5 / noise + 9) / noise if noise else 0.0
    probability = getattr(mechanism, "sampling_probability", 1 / getattr(mechanism, "steps", 1))
    return math.log1p(probability * math.expm1(loss)) if loss < 700 else loss


def _repeated(
    part: Part, interval: float, relation: NeighboringRelation
) -> plds.PrivacyLossDistribution:
    """All uses of a mechanism, on a grid of that interval."""
    mechanism, count, depth = part
    one = _one(mechanism, interval / COARSER**depth, _TAIL / count / 100, relation)
    rest, left = None, count
    for level in range(depth):
        # What is lost of a block is lost of each.
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
    """The distribution on a grid of an interval that is `COARSER` times longer."""
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
    """One use of a mechanism."""
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
    """Whether all mechanisms of an event have privacy loss distributions here under a relation."""
    joins = relation == NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = PLDAccountant(relation)
    return all(
        joins if isinstance(mechanism, AllocatedGaussianDpEvent) else accountant.supports(mechanism)
        for mechanism, _ in _uses(event)
    )


def _is_ours(event: DpEvent) -> bool:
    """Whether the distribution of a single use is made here, without differences."""
    return _is_sampled_gaussian(event) or isinstance(event, AllocatedGaussianDpEvent)


def _is_sampled_gaussian(event: DpEvent) -> bool:
    """Whether an event is the Gaussian mechanism on a Poisson sample, with a chance to be in it."""
    return (
        isinstance(event, dp_accounting.PoissonSampledDpEvent)
        and isinstance(event.event, dp_accounting.GaussianDpEvent)
        and event.sampling_probability > 0
    )
