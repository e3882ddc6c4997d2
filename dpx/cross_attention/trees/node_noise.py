"""The noise of the nodes of private trees, and the division of a budget among trees.

With Gaussian noise all nodes of all trees are one release. With truncated Laplace noise, which Ke et al.
(arXiv 2407.14717) use, every level of every tree gets a part of the budget, by composition.
"""

import math
from typing import NamedTuple

import dp_accounting
import numpy as np
from scipy import optimize

from dpx._validate import check_delta, check_epsilon
from dpx.noise import Gaussian, TruncatedLaplace
from dpx.privacy import gaussian_noise_multiplier

NOISES = ("gaussian", "truncated_laplace")
_PAPER_CONSTANT = 0.1  # c of Algorithm 3


def split_budget(epsilon: float, delta: float, count: int) -> tuple[float, float]:
    """An (ε₀, δ₀) such that `count` mechanisms with that guarantee are together (ε, δ)-DP.

    It is the better of basic composition, (ε/k, δ/k), and advanced composition (Dwork & Roth 2014, Theorem
    3.20) with half of δ for the slack δ', where ε₀ solves kε₀(e^{ε₀} − 1) + ε₀√(2k log(1/δ')) = ε.
    """
    epsilon, delta = check_epsilon(epsilon), check_delta(delta)
    basic = epsilon / count

    def excess(e):
        return advanced_composition(e, count, delta / 2) - epsilon

    if basic > 50 or excess(basic) >= 0:
        return basic, delta / count
    high = epsilon / math.sqrt(2 * count * math.log(2 / delta))
    advanced = float(optimize.brentq(excess, basic, high, rtol=1e-12))  # type: ignore[arg-type]
    return advanced * (1 - 1e-9), delta / (2 * count)


def advanced_composition(epsilon: float, count: int, slack: float) -> float:
    """The ε of `count` ε-DP mechanisms together, with slack δ' (Dwork & Roth 2014, Theorem 3.20)."""
    return count * epsilon * math.expm1(epsilon) + epsilon * math.sqrt(
        2 * count * math.log(1 / slack)
    )


def paper_budget(
    epsilon: float, delta: float, features: int, structures: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """The paper's budgets (ε, δ) for Σ w and for each of r features (Algorithm 3).

    ε and δ are divided evenly among the structures (Remark 4.2: one for each column, times copies), and half
    of δ becomes the slack δ'. A structure spends ε/3 on Σ w and cε/(3√(r log(2/δ'))) on each feature. For
    large ε, advanced composition may not bound the features by 2ε/3 together; then they share 2ε/3 by basic
    composition.
    """
    epsilon, delta, slack = epsilon / structures, delta / structures / 2, delta / structures / 2
    each = _PAPER_CONSTANT * epsilon / (3 * math.sqrt(features * math.log(2 / slack)))
    if each > 50 or advanced_composition(each, features, slack) > 2 * epsilon / 3:
        each = 2 * epsilon / (3 * features)
    return (epsilon / 3, delta / 3), (each, delta / (3 * features))


class NodeNoise(NamedTuple):
    """The noise of the nodes, for the tree of each coordinate and moment: arrays (coordinates, power + 1).

    Attributes:
      law: The law of the noise.
      sensitivity: The sensitivity of all levels of a tree together, as `dpx.noise.release` is told. With
        Gaussian noise the squares of ‖Δ/sensitivity‖₂ add up to at most 1 over all trees. With truncated
        Laplace noise ‖Δ/sensitivity‖₁ ≤ 1 for each tree and each set of weights.
    """

    law: Gaussian | TruncatedLaplace
    sensitivity: np.ndarray


def check_noise(noise: str, delta: float) -> None:
    """Raises ValueError for an unknown noise, or δ > 1/2 with truncated Laplace noise."""
    if noise not in NOISES:
        raise ValueError(f"noise={noise!r} is not known: use one of {', '.join(NOISES)}")
    if noise == "truncated_laplace" and delta > 0.5:
        raise ValueError(
            f"delta={delta} must be at most 1/2 for truncated Laplace noise: use a smaller one"
        )


def calibrated(
    noise: str,
    ranges: np.ndarray,
    power: int,
    depth: int,
    sensitivity: float,
    epsilon: float,
    delta: float,
    columns: int = 1,
    copies: int = 1,
) -> tuple[NodeNoise, dp_accounting.DpEvent | None]:
    """The noise of (power + 1) trees for each coordinate, (ε, δ)-DP together, and its DpEvent if there is
    one.

    Args:
      noise: "gaussian" or "truncated_laplace".
      ranges: R of each coordinate, (coordinates,).
      power: p, the largest moment.
      depth: L, the number of levels that are released.
      sensitivity: The sensitivity of a level for x in [0, 1]: in l2 over all columns for Gaussian noise, and
        otherwise in l1 of each column.
      epsilon, delta: The budget of all trees.
      columns: The number of sets of weights that are summed.
      copies: The number of independent structures.

    Raises:
      ValueError: for an unknown noise, or δ > 1/2 with truncated Laplace noise.
    """
    check_noise(noise, delta)
    if noise == "gaussian":
        multiplier = gaussian_noise_multiplier(epsilon, delta)
        unit = gaussian_stds(ranges, power, depth, math.sqrt(copies) * sensitivity)
        law = Gaussian(multiplier * unit)  # type: ignore[arg-type]
        return NodeNoise(law, unit), dp_accounting.GaussianDpEvent(multiplier)
    count = depth * (power + 1) * len(ranges) * columns * copies
    shares = [split_budget(epsilon, delta, count)] * len(ranges)
    return laplace_nodes(shares, power, depth, sensitivity), None


def gaussian_stds(ranges: np.ndarray, power: int, depth: int, sensitivity: float) -> np.ndarray:
    """The noise std of each coordinate's and moment's nodes, (coordinates, power + 1), for x in [0, 1].

    It is for a noise multiplier of 1. Every level of every tree changes by at most `sensitivity` in l2, and
    for any division of the noise among trees Σ levels·sensitivity²/std² = 1. Moment t of coordinate a enters
    a distance with a coefficient of at most C(p, t)·R_a^p. The variance of the worst answer is least if std²
    is inversely proportional to that coefficient (by Lagrange multipliers).
    """
    binomials = np.array([math.comb(power, t) for t in range(power + 1)], np.float64)
    worst = np.asarray(ranges, np.float64)[:, None] ** power * binomials
    return sensitivity * np.sqrt(depth * worst.sum() / worst)


def laplace_nodes(
    shares: list[tuple[float, float]], power: int, depth: int, sensitivity: float
) -> NodeNoise:
    """Truncated Laplace noise, if each level of a tree has its coordinate's share (ε, δ) of the budget."""
    laws = [TruncatedLaplace.calibrate(sensitivity, *share) for share in shares]
    scales, bounds = ([[getattr(law, f)] * (power + 1) for law in laws] for f in ("scale", "bound"))
    law = TruncatedLaplace(np.asarray(scales), np.asarray(bounds))  # type: ignore[arg-type]
    return NodeNoise(law, np.full((len(laws), power + 1), depth * sensitivity))
