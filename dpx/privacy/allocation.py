"""Random allocation: in each epoch every record is in one batch, chosen at random, for itself.

An epoch of t steps puts each record into one of t batches, uniformly and independently of all others, and
adds Gaussian noise to the sum of each batch. The sizes of the batches vary. It is not a shuffle: where all
records are shuffled once and cut into batches of one size, a record that joins moves others, and what
stands here does not hold.

The privacy loss, after Feldman and Shenfeld (arXiv:2602.17284). Of a record that takes part, let the sums be
x₁, …, x_t in units of the clipping norm, Q the law of t noises, and P that in which a uniform one of them is
moved by one. The ratio P/Q is the mean of t independent ratios Z = exp((x − ½)/σ²), each with mean 1 under
Q. So all that is needed is the law of a mean of such ratios under Q: its logarithm is the loss, with mass
P = Z·Q where a record leaves, and Q where it joins.

Steps may depend on what was released before. Let g be the record's clipped gradient at a step, given that. If
its norm is 1, the noise along g has the same law whatever came before, and the ratios are as above. If it is
shorter, release one number more, with noise, which the record moves by √(1 − ‖g‖²): then the ratios are as
above, and to leave that number out again tells nobody anything.

The law is kept on a geometric grid. A ratio z between two points a < b of the grid becomes b with probability
(z − a)/(b − a), and otherwise a, so that Q and P keep their mass. An adversary who is not told which has what
was there before: the pair on the grid dominates. The mean of m + n ratios is m/(m+n) times that of m, and
n/(m+n) times that of n. This is a choice between two such pairs, so that a pair that dominates may take the
place of either. All laws here are therefore upper bounds. Masses of cells are sums of what is positive, and
only within a cell a share is a difference, so that masses keep their digits however small they are.
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

# With less noise ratios leave the range of floats: the mechanism without allocation is a bound, by convexity.
LEAST_NOISE = 0.05
_LEVELS = 3  # of halves of means, on grids of one interval; deviations grow by 2.8 meanwhile
_SHORT = 8  # terms of a sum that are added one by one


@attr.s(frozen=True, slots=True, auto_attribs=True)
class AllocatedGaussianDpEvent(DpEvent):
    """Gaussian noise on the sums of an epoch of random allocation.

    Attributes:
      noise_multiplier: Standard deviation of the noise over the clipping norm.
      steps: Of the epoch; a record is in the batch of one.
      released: How many of these steps are released: fewer where a training ends within the epoch.
    """

    noise_multiplier: float
    steps: int
    released: int


def epoch(step: int, sampling_probability: float) -> tuple[int, int, int]:
    """Number, first step and length of the epoch that a step is in.

    Epoch e begins at step e / q, rounded. So the lengths differ by one at most, their mean is 1 / q, and no
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
    """The first `steps` steps of epochs of 1 / `sampling_probability` steps."""
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
    """The privacy loss of an epoch, an upper bound.

    Args:
      event: The epoch, with a noise multiplier of at least `LEAST_NOISE`.
      interval: Of the grid of losses, at most 1.
      tail: About the mass that may count as lost.
    """
    tail = 2.0 ** math.floor(math.log2(tail))  # so that epochs of other lengths share their parts
    each = tail / 2 ** event.steps.bit_length()
    found = _mean(event.noise_multiplier, event.released, interval, each)
    if event.released < event.steps:
        nothing = _Ratios(interval, 0, np.ones(1))
        found = _mixed(found, nothing, event.released / event.steps)
    without = found.mass
    joined = without * found.ratios

    def losses(first: int, mass: np.ndarray) -> pld_pmf.PLDPmf:
        lost = max(0.0, 1 - float(mass.sum())) + 2 * tail
        return pld_pmf.DensePLDPmf(interval, first, mass, lost, True)

    return plds.PrivacyLossDistribution(
        losses(found.first, joined), losses(-found.last, without[::-1].copy())
    )


class _Ratios(NamedTuple):
    """The law of P/Q under Q: `mass` at exp(interval·first), exp(interval·(first + 1)), ...

    What is missing of mass 1 is lost.
    """

    interval: float
    first: int
    mass: np.ndarray

    @property
    def last(self) -> int:
        return self.first + len(self.mass) - 1

    @property
    def ratios(self) -> np.ndarray:
        return np.exp(self.interval * np.arange(self.first, self.last + 1))

    def trimmed(self, tail: float) -> "_Ratios":
        """Without both ends, each of which has at most that mass under Q and P."""
        begin = int(np.searchsorted(np.cumsum(self.mass), tail))
        end = int(np.searchsorted(np.cumsum((self.mass * self.ratios)[::-1]), tail))
        return self._replace(first=self.first + begin, mass=self.mass[begin : len(self.mass) - end])


def _grid(interval: float, level: int) -> float:
    """The interval of the grid for parts of parts of a mean, so many levels down."""
    return interval * min(2 ** (level // _LEVELS), 2 ** math.floor(-math.log2(interval)))


@functools.lru_cache(maxsize=512)  # a part serves means of several lengths
def _mean(noise: float, count: int, interval: float, tail: float, level: int = 0) -> _Ratios:
    """The law of the mean of so many ratios of one Gaussian mechanism.

    It is that of two halves, and so on. The errors of many ratios average out, as the ratios do, so that
    theirs are on coarser grids.
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
    """The law of share·x + (1 − share)·y for x and y of two laws, on a grid that is so much finer."""
    # Rounding may move a mean of equals by a point.
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
    """Adds the pairs in which `high` is at least so many points above `low`.

    Where x and y are d points apart, the mean share·x + (1 − share)·y is x times a number that depends on d
    alone. All pairs whose means lie in one cell above their x are added at once. Of these the part

        up = (share − s + (1 − share)·exp(−interval·d)) / (s' − s)

    goes to the upper end of the cell, from s·x to s'·x.
    """
    apart = np.arange(least, high.last - low.first + 1)
    if not len(apart):
        return
    interval = high.interval / factor
    place = np.logaddexp(math.log(share), math.log1p(-share) - high.interval * apart) / interval
    cells = np.floor(place).astype(int)
    ends = np.append(np.flatnonzero(np.diff(cells)) + 1, len(apart))
    of_low = np.pad([low.mass, low.mass * low.ratios], [(0, 0), (_SHORT, _SHORT)])
    ratios = high.ratios
    for begin, end in zip(np.append(0, ends[:-1]), ends, strict=True):
        nearest, farthest, cell = int(apart[begin]), int(apart[end - 1]), int(cells[begin])
        # The points of `high` that have partners so far away
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
    """`count` sums of `length` neighbours in each row, the first of them from index `begin` on.

    Indices outside of a row count as zero. Nothing is subtracted, so that small sums keep their digits.
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
    # In blocks of that length, a window is the end of one and the beginning of the next.
    blocks = values.reshape(len(rows), -1, length)
    ending = np.cumsum(blocks[:, :, ::-1], axis=2)[:, :, ::-1].reshape(values.shape)
    beginning = np.cumsum(blocks, axis=2).reshape(values.shape)[:, length - 1 : size]
    beginning[:, ::length] = 0  # of windows that are a block
    return ending[:, :count] + beginning
