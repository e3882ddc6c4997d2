"""The law of what `dpx.noise` releases, summed over all draws, and that of the mechanism it stands for."""

import numpy as np
from scipy import special, stats

from dpx.noise.lattice import RESOLUTION as R


def rounding(rest: float, second: int = 2**15, third: int = 2**5) -> np.ndarray:
    """P(J = −1), ..., P(J = 3) for a remainder in [0, 1): U₁ takes all values, U₂ and U₃ so many."""
    offset = (0.5 / second + 0.5 / third) + np.arange(third)[:, None] / third
    total = rest + np.arange(second) / second + offset - 1
    whole = np.floor(total)
    up = total - whole  # the probability that U₁ carries
    found = np.zeros(5)
    for place in range(-1, 3):
        found[place + 1] += ((1 - up) * (whole == place)).mean()
        found[place + 2] += (up * (whole == place)).mean()
    return found


def law(index: np.ndarray, value: float, **points: int) -> np.ndarray:
    """The probability of each point of the grid, for an exact value of so many steps: that of `dpx.noise`."""
    whole = np.floor(value)

    def cell(n):
        tails = [special.erfc((np.abs(n) + side) / R / 2**0.5) for side in (-0.5, 0.5)]
        return (tails[0] - tails[1]) / 2

    places = zip(range(-1, 4), rounding(value - whole, **points), strict=True)
    return np.sum([p * cell(index - whole - j) for j, p in places], axis=0)


def ideal(index: np.ndarray, value: float) -> np.ndarray:
    """The same for the real Gaussian mechanism, whose output is rounded at random by four uniform numbers."""
    nodes, weights = np.polynomial.legendre.leggauss(4)
    # n is R·Z and a uniform number in ±½; rounding down takes one away, and U₁ + U₂ + U₃ − 1 is ½ on average.
    shift = np.stack(np.meshgrid(*[nodes / 2] * 4)).reshape(4, -1).sum(axis=0)
    weight = np.prod(np.stack(np.meshgrid(*[weights / 2] * 4)).reshape(4, -1), axis=0)
    third = (np.arange(32) + 0.5) / 32 - 0.5
    shift, weight = (shift[:, None] + third).ravel(), np.repeat(weight, 32) / 32
    return stats.norm.pdf((index[:, None] - value - shift) / R) @ weight / R
