"""The privacy loss distribution of one use of the Gaussian mechanism on a Poisson sample.

It is an upper bound: a loss between two points of the grid becomes one of these at random, such that both
distributions keep their mass (`dpx.privacy.composition` says why this is an upper bound).
"""

import math

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as plds
from scipy import stats

_MOST_NOISE = 1e100  # whose square is a float
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)


def sampled_gaussian(
    noise: float, probability: float, interval: float, tail: float
) -> plds.PrivacyLossDistribution:
    """The distribution of the loss between N(0, m²) and the mixture (1 − q)·N(0, m²) + q·N(1, m²).

    dp-accounting computes this distribution from differences of δ, which are inaccurate on a fine grid, and
    one point at a time. Here the mass of each cell of the grid, and the part that goes to the cell's upper
    end, are integrals without cancellation.

    Args:
      noise: The noise multiplier m.
      probability: The sampling probability q.
      interval: The interval of the grid, at most 1, so that the part that goes up is smooth within a cell.
      tail: The mass of a normal distribution at either end that counts as an infinite loss.
    """
    noise = min(noise, _MOST_NOISE)  # with less noise, the loss is larger
    far = noise * float(stats.norm.isf(tail))
    low, high = -far, 1 + far
    # log(1 − q), log q, and the point at which the two parts of the mixture have equal density
    stays, moves = math.log1p(-probability) if probability < 1 else -math.inf, math.log(probability)
    middle = 0.5 + noise**2 * max(stays - moves, -1e3)

    def loss(x: np.ndarray) -> np.ndarray:
        u = (x - 0.5) / noise**2
        near = np.log1p(probability * np.expm1(np.clip(u, -1, 1)))
        return np.where(np.abs(u) < 1, near, np.logaddexp(stays, moves + u))

    ends = loss(np.array([low, high])) / interval
    points = interval * np.arange(math.floor(ends[0]), math.ceil(ends[1]) + 1)
    with np.errstate(all="ignore"):
        shift = np.where(
            np.abs(points) < 1,
            np.log1p(np.expm1(points) / probability),
            points + np.log1p(-np.exp(stays - points)) - moves,
        )
    edges = np.nan_to_num(0.5 + noise**2 * shift, nan=low, neginf=low)
    # Within a panel densities and losses change so little that eight nodes are exact to 64 bits.
    even = np.linspace(low, high, math.ceil(4 * (high - low) / noise))
    bend = middle + noise**2 * np.linspace(-40, 40, 161)
    panels = np.unique(np.clip(np.concatenate([edges, even, bend]), low, high))
    half = np.diff(panels)[:, None] / 2
    x = panels[:-1, None] + half * (1 + _NODES)
    density = half * _WEIGHTS / (noise * math.sqrt(2 * math.pi))
    without, shifted = (density * np.exp(-0.5 * ((x - mean) / noise) ** 2) for mean in (0, 1))
    losses = loss(x)
    both = (1 - probability) * without + probability * shifted
    return plds.PrivacyLossDistribution(
        _on_grid(losses, both, interval, 2 * tail), _on_grid(-losses, without, interval, 2 * tail)
    )


def _on_grid(losses: np.ndarray, mass: np.ndarray, interval: float, lost: float) -> pld_pmf.PLDPmf:
    """The distribution on a grid of losses with given masses; `lost` is the mass of an infinite loss."""
    cells = np.floor(losses / interval).astype(np.int64)
    first = int(cells.min())
    share = np.expm1(interval * cells - losses) / math.expm1(-interval)
    mass = mass / mass.sum()
    held, up = (np.bincount((cells - first).ravel(), part.ravel()) for part in (mass, mass * share))
    probs = np.append(held - up, 0.0)
    probs[1:] += up
    return pld_pmf.DensePLDPmf(interval, first, probs, lost, True)
