"""The sensitivity of the Gram matrix, and the number of Gaussian samples that a budget admits.

Notation: X is n×d and its columns are the private records. α (`column_bound`) bounds their norms, β
(`max_column_change`) bounds how far one of them moves between neighbours, and ηI (η is `eta`) is a lower
bound on the covariance that is sampled from.

**Sensitivity.** A neighbour replaces a column u by v, so XXᵀ changes by uuᵀ − vvᵀ. With p = u + v,
q = u − v this is (pqᵀ + qpᵀ)/2, hence with ‖q‖ = b ≤ β and ‖p‖² = 2‖u‖² + 2‖v‖² − b²

    ‖uuᵀ − vvᵀ‖_F² = ½ (b² (2‖u‖² + 2‖v‖² − b²) + (‖u‖² − ‖v‖²)²),

which is convex in ‖u‖² and in ‖v‖². So at the maximum the longer norm is α, and the other is either α too,
which gives b²(2α² − b²/2), or as small as b allows, |α − b|, which gives (b (2α − b))². The first increases
up to b = √2 α, the second up to b = α, and the second is the larger one for b ≤ 2α/3. Hence

    F = β (2α − β)          for β ≤ 2α/3,
        β √(2α² − β²/2)     for 2α/3 ≤ β ≤ √2 α,
        √2 α²               for β ≥ √2 α.

Adding or removing a whole column changes XXᵀ by uuᵀ: F = α². The source (Gao, Song, Yang, Zhou,
"Differentially Private Attention Computation", arXiv:2305.04701) uses 2αβ√n instead; the change has
rank two, so its √n is not needed.

**Sampling.** B = k⁻¹ Σ gᵢgᵢᵀ with gᵢ ~ N(0, Σ), where every admissible Σ ⪰ η I and neighbours have
‖Σ − Σ'‖_F ≤ F. Let 1 + zᵢ be the eigenvalues of Σ'^(−1/2) Σ Σ'^(−1/2); then ‖z‖₂ ≤ ‖Σ'⁻¹‖ F ≤ t := F/η,
in both orders, because both matrices are ⪰ η I. The Rényi divergence of order λ of one sample is

    Σᵢ r(zᵢ),  r(z) = −½ log(1 + z) − log(1 − (λ−1)z) / (2(λ−1)) = Σ_{j≥2} ((λ−1)^(j−1) + (−1)^j) zʲ/(2j)

for (λ−1) t < 1. For λ ≥ 2 no coefficient is negative, so r(z) ≤ r(|z|) and s ↦ r(√s) is convex with
value 0 at 0, hence superadditive: Σ r(zᵢ) ≤ r(‖z‖₂) ≤ r(t). The k samples together have divergence at
most k r(t), and B is a function of them. `ideal_samples(calibration="exact")` is the largest k for which
some 2 ≤ λ < 1 + 1/t turns this into (ε, δ) by the conversion of Canonne, Kamath, Steinke
(arXiv:2004.00010, Proposition 12).
"""

import math

import numpy as np
from dp_accounting import NeighboringRelation
from scipy import optimize

from dpx._validate import (
    check_choice,
    check_delta,
    check_epsilon,
    check_integer,
    check_number,
    check_relation,
)
from dpx.privacy import ADD_OR_REMOVE_ONE, REPLACE_ONE

CALIBRATIONS = ("exact", "paper")
_SMALLEST_CHANGE = 1e-100  # the number of samples is about its −2nd power, which is still a float
_LARGEST_BOUND = 1e150  # its square stays a float


def frobenius_sensitivity(column_bound: float, max_column_change: float) -> float:
    """F, the exact maximum of ‖uuᵀ − vvᵀ‖_F over ‖u‖, ‖v‖ ≤ α and ‖u − v‖ ≤ β.

    Args:
      column_bound: α > 0, bound on the l2 norm of a column.
      max_column_change: β in (0, 2α], bound on how far a column moves.

    Raises:
      ValueError: for a bound out of range.
    """
    alpha, beta = _check_bounds(column_bound, max_column_change)
    if beta <= 2 * alpha / 3:
        return beta * (2 * alpha - beta)
    # Beyond √2 α the worst pair is an orthogonal one, not the one farthest apart.
    beta = min(beta, math.sqrt(2) * alpha)
    return beta * math.sqrt(2 * alpha**2 - beta**2 / 2)


def sensitivity(
    column_bound: float, max_column_change: float | None, neighboring: NeighboringRelation | str
) -> float:
    """F, the Frobenius sensitivity of XXᵀ, under a neighbouring relation; β = None means 2α.

    Raises:
      ValueError: for a relation other than REPLACE_ONE and ADD_OR_REMOVE_ONE, a bound out of range, or a
        `max_column_change` under ADD_OR_REMOVE_ONE, which does not use it.
    """
    neighboring = check_relation(neighboring, "neighboring")
    if neighboring not in (REPLACE_ONE, ADD_OR_REMOVE_ONE):
        raise ValueError(
            f"neighboring={neighboring} must be replace_one or add_or_remove_one: use one of these"
        )
    column_bound = check_number(column_bound, "column_bound")
    if neighboring is REPLACE_ONE:
        return frobenius_sensitivity(
            column_bound, 2 * column_bound if max_column_change is None else max_column_change
        )
    if max_column_change is not None:
        raise ValueError(
            f"max_column_change={max_column_change} has no meaning for neighboring='add_or_remove_one', "
            "where a whole column comes or goes: leave it out"
        )
    return _check_bounds(column_bound, 2 * column_bound)[0] ** 2


def ideal_samples(
    epsilon: float,
    delta: float,
    *,
    column_bound: float,
    max_column_change: float | None = None,
    eta: float,
    n: int,
    calibration: str = "exact",
    neighboring: NeighboringRelation | str = "replace_one",
) -> int:
    """The largest number k of Gaussian samples for which sampling is (epsilon, delta)-DP in exact arithmetic.

    `dpx.gram.max_samples` is a little smaller, since it accounts for the rounding of a computer.

    Args:
      epsilon, delta: The budget.
      column_bound: α > 0, bound on the l2 norm of a column.
      max_column_change: β in (0, 2α], bound on how far a column moves between neighbours; None is 2α.
      eta: η > 0, lower bound on the eigenvalues of the covariance that is sampled from.
      n: Number of rows of X.
      calibration: "exact", the Rényi bound of this module, or "paper", Definition 4.5 with the paper's
        2αβ√n/η (its Theorems 1.7 and 3.1 print other constants, which its proof does not support). The
        paper's proof needs ε ≤ 8 log(1/δ), so no more than that is spent there.
      neighboring: REPLACE_ONE, or ADD_OR_REMOVE_ONE ("exact" only), or its lower-case name.

    Returns:
      k as a Python integer, 0 if no k is admissible. A full-rank B needs k ≥ n.

    Raises:
      ValueError: for an argument out of range.
    """
    epsilon, delta = check_epsilon(epsilon), check_delta(delta)
    ratio = _relative_change(column_bound, max_column_change, eta, n, calibration, neighboring)
    if ratio >= 1:
        return 0
    if calibration == "paper":
        spread = 8 * math.log(1 / delta)
        epsilon = min(epsilon, spread)
        return math.floor(epsilon**2 / (spread * ratio**2)) if ratio <= epsilon / spread else 0
    return samples_at(epsilon, delta, ratio)


def samples_at(epsilon: float, delta: float, ratio: float) -> int:
    """The largest k by the Rényi bound, if ‖Σ'^(−1/2) Σ Σ'^(−1/2) − I‖_F is at most `ratio`."""
    if ratio >= 1:
        return 0

    def samples(exponent):
        """The k at order λ = 1 + t^(−exponent); exponents in [0, 1) give all admissible orders."""
        order, divergence = _renyi(exponent, ratio)
        return (epsilon - _conversion(order, delta)) / divergence

    return max(0, math.floor(_maximum(samples)))


def sampling_epsilon(
    num_samples: int,
    delta: float,
    *,
    column_bound: float,
    max_column_change: float | None = None,
    eta: float,
    n: int,
    calibration: str = "exact",
    neighboring: NeighboringRelation | str = "replace_one",
) -> float:
    """The smallest ε for which so many samples are (ε, delta)-DP in exact arithmetic, or infinity.

    It is the inverse of `ideal_samples`, with the same arguments and errors. The ε of the release on a
    computer is a little larger; `dpx.gram.wishart` bounds it.
    """
    delta = check_delta(delta)
    num_samples = check_integer(num_samples, "num_samples")
    ratio = _relative_change(column_bound, max_column_change, eta, n, calibration, neighboring)
    if ratio >= 1:
        return math.inf
    if calibration == "paper":
        spread = 8 * math.log(1 / delta)
        epsilon = ratio * max(math.sqrt(num_samples * spread), spread)
        return epsilon if epsilon <= spread else math.inf

    def negative_epsilon(exponent):
        order, divergence = _renyi(exponent, ratio)
        return -(num_samples * divergence + _conversion(order, delta))

    return max(0.0, -_maximum(negative_epsilon))


def _check_bounds(column_bound: float, max_column_change: float) -> tuple[float, float]:
    """Both bounds as floats, since results computed from 16-bit numbers would be rounded to 16 bits."""
    column_bound = check_number(column_bound, "column_bound")
    max_column_change = check_number(max_column_change, "max_column_change")
    if not 0 < column_bound <= _LARGEST_BOUND:
        raise ValueError(
            f"column_bound={column_bound} must be positive and finite, at most {_LARGEST_BOUND}"
        )
    if not 0 < max_column_change <= 2 * column_bound:
        raise ValueError(
            f"max_column_change={max_column_change} must be in (0, {2 * column_bound}]: two columns of norm "
            f"at most column_bound={column_bound} are never farther apart than twice that"
        )
    return column_bound, max_column_change


def _relative_change(column_bound, max_column_change, eta, n, calibration, neighboring) -> float:
    """The bound on ‖Σ'^(−1/2) Σ Σ'^(−1/2) − I‖_F that a calibration uses."""
    change = sensitivity(column_bound, max_column_change, neighboring)
    check_choice(calibration, "calibration", CALIBRATIONS)
    eta = check_number(eta, "eta")
    if not 0 < eta < math.inf:
        raise ValueError(f"eta={eta} must be positive: sampling needs a covariance of full rank")
    check_integer(n, "n")
    if change / eta < _SMALLEST_CHANGE:
        raise ValueError(
            f"column_bound={column_bound} and max_column_change={max_column_change} let a column change a "
            f"covariance above eta={eta} by less than {_SMALLEST_CHANGE} of it, which is too little to count "
            "samples by: use a smaller eta"
        )
    if calibration == "exact":
        return change / eta
    if check_relation(neighboring, "neighboring") is not REPLACE_ONE:
        raise ValueError(
            f"calibration='paper' is for neighboring='replace_one', not {neighboring}: use 'exact'"
        )
    column_bound = float(column_bound)
    beta = 2 * column_bound if max_column_change is None else float(max_column_change)
    return 2 * column_bound * beta * math.sqrt(n) / eta


def _renyi(exponent, ratio: float):
    """λ = 1 + ratio^(−exponent) and r(ratio), the divergence of order λ of one sample."""
    less_one = ratio ** -np.asarray(exponent)
    # In ½ (t − log(1+t)) + (−log(1−x) − x)/(2(λ−1)), x = (λ−1)t, both terms are positive: nothing cancels.
    return 1 + less_one, (_gap(ratio) + _gap(-less_one * ratio) / less_one) / 2


def _gap(x):
    """x − log(1 + x), computed without the cancellation near 0, which would make k too large."""
    x = np.asarray(x, np.float64)
    small = np.where(np.abs(x) < 1e-2, x, 0.0)
    series = sum((-1) ** j * small**j / j for j in range(2, 11))
    with np.errstate(divide="ignore"):
        return np.where(np.abs(x) < 1e-2, series, x - np.log1p(np.maximum(x, -1.0)))


def _conversion(order, delta: float):
    """The term that the conversion to (ε, δ) adds to the Rényi divergence of this order."""
    return np.log1p(-1 / order) - (math.log(delta) + np.log(order)) / (order - 1)


def _maximum(function) -> float:
    """The maximum of a function on [0, 1), by a grid and a search around its best point."""
    grid = np.linspace(0, 1, 1024, endpoint=False)
    values = function(grid)
    best = int(np.argmax(values))
    bracket = (grid[max(best - 1, 0)], grid[min(best + 1, grid.size - 1)])
    refined = optimize.minimize_scalar(
        lambda x: -function(x), bounds=bracket, method="bounded", options={"xatol": 1e-12}
    )
    return float(max(values[best], -refined.fun))
