"""Privacy loss distributions of one use of a mechanism, on a grid of losses.

Every distribution is an upper bound: a loss between two points of the grid becomes either, such that both
distributions of which it is the loss keep their mass (`dpx.privacy.composition` says why that is one).
"""

import math

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as plds
from scipy import stats

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)


def sampled_gaussian(
    noise: float, probability: float, interval: float, tail: float
) -> plds.PrivacyLossDistribution:
    """The Gaussian mechanism on a Poisson sample: N(0, m²) against (1 − q)·N(0, m²) + q·N(1, m²).

    dp-accounting makes this distribution of differences of δ, which have few digits on a fine grid, and
    takes each of its points in turn. Here the mass of each cell of the grid, and what of it goes up, are
    integrals without cancellation.

    Args:
      noise: m.
      probability: q.
      interval: Of the grid, at most 1: within a cell the share that goes up has to be smooth.
      tail: Mass of a normal distribution at either end that counts as lost.
    """
    far = noise * float(stats.norm.isf(tail))
    low, high = -far, 1 + far
    # log(1 − q) and log q, and where the two parts of the mixture are alike
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
    # Within a panel densities and loss change little, so that eight nodes leave nothing for 64 bits to see.
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
    """Losses with their mass, which is 1 but for tails that are lost, on a grid."""
    cells = np.floor(losses / interval).astype(np.int64)
    first = int(cells.min())
    share = np.expm1(interval * cells - losses) / math.expm1(-interval)
    mass = mass / mass.sum()
    held, up = (np.bincount((cells - first).ravel(), part.ravel()) for part in (mass, mass * share))
    return split_pmf(interval, first, held, up, lost)


def split_pmf(
    interval: float, first: int, cells: np.ndarray, up: np.ndarray, lost: float
) -> pld_pmf.PLDPmf:
    """Of the mass in the cells of a grid, from its point `first` on, of which a part goes up."""
    probs = np.append(cells - up, 0.0)
    probs[1:] += up
    return pld_pmf.DensePLDPmf(interval, first, probs, lost, True)
