"""Random allocation: in each epoch, every record is in one batch, which is drawn for it independently.

An epoch of t steps puts each record into one of t batches, uniformly and independently of all other records,
and adds Gaussian noise to the sum of each batch. The sizes of the batches vary. This is not a shuffle: if all
records are shuffled once and cut into batches of one size, adding a record moves others, and the accounting
of this module does not hold.

**The privacy loss** (after Feldman and Shenfeld, arXiv:2602.17284). Fix a record that takes part, and let
x₁, …, x_t be the noisy sums along its gradients, in units of the clipping norm. Let Q be the law of t
independent noises, and P the law in which one of them, chosen uniformly, is moved by 1. The ratio P/Q is the
mean of t independent ratios Z = exp((x − ½)/σ²), each of mean 1 under Q. The loss is the logarithm of that
mean. Its law is taken under P if a record is removed, and under Q if one is added.

**Adaptive steps.** A step may depend on earlier releases. Given these, let g be the record's clipped gradient
at the step. If ‖g‖ = 1, the noise along g has the same law whatever came before, and the ratios are as above.
If ‖g‖ < 1, imagine that the step releases one more noisy number, which the record moves by √(1 − ‖g‖²). Then
the ratios are as above, and dropping that number again is post-processing.

**Rounding.** The law is kept on a geometric grid. A ratio z between two neighbouring points a < b of the grid
becomes b with probability (z − a)/(b − a) and a otherwise, so that the masses of Q and P are kept. Forgetting
which of the two it became gives the original pair back, so that the pair on the grid dominates it. The mean
of m + n ratios is m/(m+n) times the mean of the first m plus n/(m+n) times that of the others: a mixture of
two pairs, in which each may be replaced by a pair that dominates it. All laws here are therefore upper
bounds. Masses of cells are sums of positive numbers; only shares within a cell are differences, so that even
tiny masses are accurate.
"""

import functools
import math
from typing import NamedTuple

import attr
import dp_accounting
import numpy as np
from dp_accounting import DpEvent
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as plds

from dpx.privacy.sampled import sampled_gaussian

# With less noise, ratios overflow; the mechanism without allocation then is a bound, by convexity.
LEAST_NOISE = 0.05
_LEVELS = 3  # halvings of a mean that share a grid; deviations grow by 2.8 over them
_SHORT = 8  # up to so many terms are added one by one


@attr.s(frozen=True, slots=True, auto_attribs=True)
class AllocatedGaussianDpEvent(DpEvent):
    """The event of one epoch of random allocation with Gaussian noise.

    Attributes:
      noise_multiplier: The standard deviation of the noise over the clipping norm.
      steps: The number of steps of the epoch; a record is in the batch of one of them.
      released: How many of these steps are released: fewer than `steps` if training ends within the epoch.
    """

    noise_multiplier: float
    steps: int
    released: int


def epoch(step: int, sampling_probability: float) -> tuple[int, int, int]:
    """The number, the first step and the length of the epoch that contains a step.

    Epoch e begins at step e / q, rounded. So the lengths differ by at most one, their mean is 1 / q, and no
    epoch depends on how many steps follow.
    """

    def begin(number: int) -> int:
        return math.floor(number / sampling_probability + 0.5)

    number = math.floor(step * sampling_probability)
    while begin(number) > step:
        number -= 1
    while begin(number + 1) <= step:
        number += 1
    return number, begin(number), begin(number + 1) - begin(number)


def allocation_event(
    noise_multiplier: float, *, sampling_probability: float, steps: int
) -> DpEvent:
    """The event of `steps` steps of random allocation, in epochs of 1 / `sampling_probability` steps."""
    last, begin, length = epoch(steps - 1, sampling_probability)
    short = math.floor(1 / sampling_probability)
    long_ones = begin - last * short
    parts = [(short, short, last - long_ones), (short + 1, short + 1, long_ones)]
    parts.append((length, steps - begin, 1))
    events: list[DpEvent] = [
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.GaussianDpEvent(noise_multiplier)
            if steps == 1
            else AllocatedGaussianDpEvent(noise_multiplier, steps, released),
            count,
        )
        for steps, released, count in parts
        if count
    ]
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)


def allocated_gaussian(
    event: AllocatedGaussianDpEvent, interval: float, tail: float
) -> plds.PrivacyLossDistribution:
    """An upper bound on the privacy loss distribution of an epoch.

    Args:
      event: The epoch, with a noise multiplier of at least `LEAST_NOISE`.
      interval: The interval of the grid of losses, at most 1.
      tail: Roughly the mass that may be moved to an infinite loss.
    """
    tail = 2.0 ** math.floor(math.log2(tail))  # so that epochs of other lengths share their parts
    each = tail / 2 ** event.steps.bit_length()
    ratios = _mean(event.noise_multiplier, event.released, interval, each)
    if event.released < event.steps:
        nothing = _Ratios(interval, 0, np.ones(1))
        ratios = _mixed(ratios, nothing, event.released / event.steps)
    without = ratios.mass
    joined = without * ratios.values

    def losses(first: int, mass: np.ndarray) -> pld_pmf.PLDPmf:
        lost = max(0.0, 1 - float(mass.sum())) + 2 * tail
        return pld_pmf.DensePLDPmf(interval, first, mass, lost, True)

    return plds.PrivacyLossDistribution(
        losses(ratios.first, joined), losses(-ratios.last, without[::-1].copy())
    )


class _Ratios(NamedTuple):
    """The law of P/Q under Q: `mass` at the points exp(interval·first), exp(interval·(first + 1)), ...

    Mass that is missing from a total of 1 counts as an infinite loss.
    """

    interval: float
    first: int
    mass: np.ndarray

    @property
    def last(self) -> int:
        return self.first + len(self.mass) - 1

    @property
    def values(self) -> np.ndarray:
        return np.exp(self.interval * np.arange(self.first, self.last + 1))

    def trimmed(self, tail: float) -> "_Ratios":
        """The law without its two ends: the lower has mass at most `tail` under Q, the upper under P."""
        begin = int(np.searchsorted(np.cumsum(self.mass), tail))
        end = int(np.searchsorted(np.cumsum((self.mass * self.values)[::-1]), tail))
        return self._replace(first=self.first + begin, mass=self.mass[begin : len(self.mass) - end])


def _grid(interval: float, level: int) -> float:
    """The interval of the grid for a part of a mean that was halved `level` times."""
    return interval * min(2 ** (level // _LEVELS), 2 ** math.floor(-math.log2(interval)))


@functools.lru_cache(maxsize=512)  # a part serves means of several lengths
def _mean(noise: float, count: int, interval: float, tail: float, level: int = 0) -> _Ratios:
    """The law of the mean of `count` independent ratios of one Gaussian mechanism.

    It is computed from the laws of the two half means, recursively. Rounding errors average out as the ratios
    do, so that parts may lie on coarser grids.
    """
    grid, below = _grid(interval, level), _grid(interval, level + 1)
    if count == 1:
        joins = sampled_gaussian(noise, 1.0, grid, tail)._pmf_add.to_dense_pmf()
        first = -(joins._lower_loss + joins.size - 1)
        return _Ratios(grid, first, joins._probs[::-1].copy())
    half = count // 2
    one, other = (_mean(noise, part, interval, tail, level + 1) for part in (half, count - half))
    return _mixed(one, other, half / count, round(below / grid)).trimmed(tail)


def _mixed(one: _Ratios, other: _Ratios, share: float, factor: int = 1) -> _Ratios:
    """The law of share·x + (1 − share)·y for independent x and y, on a grid `factor` times finer."""
    # Rounding may move the mean of two equal ratios by one point of the grid.
    first = factor * min(one.first, other.first) - 1
    mass = np.zeros(factor * max(one.last, other.last) + 3 - first)
    _add_pairs(mass, first, one, other, share, 1, factor)
    if one is other:
        mass *= 2
        equal = slice(factor * one.first - first, factor * one.last - first + 1, factor)
        mass[equal] += one.mass**2
    else:
        _add_pairs(mass, first, other, one, 1 - share, 0, factor)
    return _Ratios(one.interval / factor, first, mass)


def _add_pairs(
    mass: np.ndarray,
    first: int,
    high: _Ratios,
    low: _Ratios,
    share: float,
    least: int,
    factor: int,
) -> None:
    """Adds to `mass` all pairs (x of `high`, y of `low`) in which x is at least `least` points above y.

    If x is d points above y, the mean share·x + (1 − share)·y is x times a number that depends on d alone.
    Pairs whose means lie in the same cell relative to x, between s·x and s'·x, are added together. Of their
    mass the part

        up = (share − s + (1 − share)·exp(−interval·d)) / (s' − s)

    goes to the upper end s'·x of the cell, and the rest to the lower end.
    """
    apart = np.arange(least, high.last - low.first + 1)
    if not len(apart):
        return
    interval = high.interval / factor
    place = np.logaddexp(math.log(share), math.log1p(-share) - high.interval * apart) / interval
    cells = np.floor(place).astype(int)
    ends = np.append(np.flatnonzero(np.diff(cells)) + 1, len(apart))
    of_low = np.pad([low.mass, low.mass * low.values], [(0, 0), (_SHORT, _SHORT)])
    ratios = high.values
    for begin, end in zip(np.append(0, ends[:-1]), ends, strict=True):
        nearest, farthest, cell = int(apart[begin]), int(apart[end - 1]), int(cells[begin])
        # Only points of `high` between these have partners at these distances.
        lowest = max(high.first, low.first + nearest)
        highest = min(high.last, low.last + farthest)
        if highest < lowest:
            continue
        among = slice(lowest - high.first, highest - high.first + 1)
        at = lowest - farthest - low.first + _SHORT
        partners, joint = _windows(of_low, at, end - begin, highest + 1 - lowest)
        constant = math.expm1(math.log(share) - interval * cell) / math.expm1(interval)
        falling = (1 - share) * math.exp(-interval * cell) / math.expm1(interval)
        up = joint / ratios[among]
        up *= falling
        up += constant * partners
        np.clip(up, 0, partners, out=up)
        partners -= up
        at = factor * lowest + cell - first
        for step, part in enumerate((partners, up)):
            part *= high.mass[among]
            mass[at + step : at + step + factor * len(part) : factor] += part


def _windows(rows: np.ndarray, begin: int, length: int, count: int) -> np.ndarray:
    """The sums of each row over windows of `length` entries that begin at `begin`, `begin` + 1, … (`count`).

    Entries outside of a row count as zero. Nothing is subtracted, so that small sums are accurate.
    """
    if length <= _SHORT:
        total = rows[:, begin : begin + count].copy()
        for at in range(begin + 1, begin + length):
            total += rows[:, at : at + count]
        return total
    size = count + length - 1
    values = np.zeros((len(rows), -(-size // length) * length))
    inside = slice(max(0, begin), min(rows.shape[1], begin + size))
    values[:, inside.start - begin : inside.stop - begin] = rows[:, inside]
    # If rows are cut into blocks of that length, a window is the end of one block and the start of the next.
    blocks = values.reshape(len(rows), -1, length)
    ending = np.cumsum(blocks[:, :, ::-1], axis=2)[:, :, ::-1].reshape(values.shape)
    beginning = np.cumsum(blocks, axis=2).reshape(values.shape)[:, length - 1 : size]
    beginning[:, ::length] = 0  # for windows that are exactly one block
    return ending[:, :count] + beginning
