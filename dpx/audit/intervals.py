"""The parts that all lower bounds on ε share: splits of samples, thresholds, exact binomial intervals."""

import math
from collections.abc import Callable

import numpy as np
from scipy import special

from dpx._validate import check_real

_CANDIDATES = 512
_RATIO = 1.005  # the ratio of neighbouring noise multipliers on the grid
SMALLEST, LARGEST = math.log(0.05), math.log(1e3)  # the range of the grid, in logarithms


def smallest_refuted(refutes: Callable[[float], bool]) -> float:
    """The smallest noise multiplier on a grid of ratio 1.005 that a test refutes, or infinity.

    A test that refutes m refutes every larger one. All audits use the same grid, so that curves are computed
    once.
    """
    step = math.log(_RATIO)
    low, high = math.floor(SMALLEST / step), math.ceil(LARGEST / step)
    if not refutes(math.exp(high * step)):
        return math.inf
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if refutes(math.exp(middle * step)) else (middle, high)
    return math.exp(high * step)


def check_shares(**shares: float) -> None:
    """Raises ValueError for a number that is not strictly between 0 and 1."""
    for name, value in shares.items():
        if not 0.0 < value < 1.0:
            raise ValueError(f"{name}={value} must be strictly between 0 and 1")


def as_floats(values, name: str) -> np.ndarray:
    """The samples as float64; raises ValueError unless they are an array of real numbers."""
    check_real(values, name)
    return np.asarray(values, np.float64)


def split(name: str, values, fraction: float, *, axes: int) -> tuple[np.ndarray, np.ndarray]:
    """The samples on which a test is chosen and those on which it is measured, as float64.

    Raises:
      ValueError: for samples of another number of axes, too few, or NaN.
    """
    values = as_floats(values, name)
    cut = int(fraction * len(values)) if values.ndim else 0
    if values.ndim != axes or min(cut, len(values) - cut) < 2:
        wanted = "a one-dimensional array" if axes == 1 else f"an array of {axes} dimensions"
        raise ValueError(
            f"{name} has shape {values.shape}: give {wanted} of independent samples, "
            f"enough that both parts of the split at {fraction} hold two"
        )
    if np.isnan(values).any():
        raise ValueError(f"{name} holds NaN: every trial must yield a number or ±inf")
    return values[:cut], values[cut:]


def candidates(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Thresholds to choose from: quantiles of the pooled samples, denser in the tails."""
    pooled = np.concatenate([p, q])
    # Evenly spaced quantiles would miss the far tails, where the best region lies for a small δ.
    tails = np.geomspace(1.0 / pooled.size, 0.5, _CANDIDATES // 2)
    return np.unique(np.quantile(pooled, np.concatenate([tails, 1.0 - tails]), method="nearest"))


def rates(p: np.ndarray, q: np.ndarray, cuts, tail: str, failure: float):
    """Bounds on the probability of the region of each threshold, from sorted samples under two inputs.

    Returns:
      A lower bound under the input that makes the region likelier, which is that of `p` for the tail "upper",
      and an upper bound under the other; each is wrong with probability at most `failure`.
    """
    likelier, other = (p, q) if tail == "upper" else (q, p)
    bounds = []
    for ordered in (likelier, other):
        if tail == "upper":
            hits = ordered.size - np.searchsorted(ordered, cuts, side="left")
        else:
            hits = np.searchsorted(ordered, cuts, side="right")
        bounds.append(clopper_pearson(hits, ordered.size, failure))
    return bounds[0][0], bounds[1][1]


def clopper_pearson(hits, trials: int, failure: float):
    """A lower and an upper bound on a binomial rate, each wrong with probability at most `failure`."""
    hits = np.asarray(hits, np.float64)
    # betaincinv needs positive parameters; at the ends of the range the bounds are 0 and 1.
    low = special.betaincinv(np.maximum(hits, 1), trials - hits + 1, failure)
    high = special.betaincinv(hits + 1, np.maximum(trials - hits, 1), 1 - failure)
    return np.where(hits == 0, 0.0, low), np.where(hits == trials, 1.0, high)
