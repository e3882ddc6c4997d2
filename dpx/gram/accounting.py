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

import dataclasses
import math
from typing import Any

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
from dpx.noise import secure
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


@dataclasses.dataclass(frozen=True)
class Columns:
    """The declared bounds of private columns. They are floats of 64 bits, whatever they are given as.

    Attributes:
      column_bound: α > 0, a bound on the l2 norm of a column.
      max_column_change: β in (0, 2α], a bound on how far a column moves between neighbours; None is 2α.
      neighboring: REPLACE_ONE or ADD_OR_REMOVE_ONE, or its lower-case name.

    Raises:
      ValueError: for another relation, a bound out of range, or a `max_column_change` under
        ADD_OR_REMOVE_ONE, which does not use it.
    """

    column_bound: float
    max_column_change: float | None = None
    neighboring: NeighboringRelation | str = REPLACE_ONE

    def __post_init__(self):
        relation, beta = check_relation(self.neighboring, "neighboring"), self.max_column_change
        if relation not in (REPLACE_ONE, ADD_OR_REMOVE_ONE):
            raise ValueError(
                f"neighboring={relation} must be replace_one or add_or_remove_one: use one of these"
            )
        if relation is ADD_OR_REMOVE_ONE and beta is not None:
            raise ValueError(
                f"max_column_change={beta} has no meaning for neighboring='add_or_remove_one', where a whole "
                "column comes or goes: leave it out"
            )
        alpha = check_number(self.column_bound, "column_bound")
        alpha, change = _check_bounds(alpha, 2 * alpha if beta is None else beta)
        object.__setattr__(self, "column_bound", alpha)
        object.__setattr__(self, "max_column_change", None if beta is None else change)
        object.__setattr__(self, "neighboring", relation)

    @property
    def largest_change(self) -> float:
        """β."""
        return 2 * self.column_bound if self.max_column_change is None else self.max_column_change

    @property
    def sensitivity(self) -> float:
        """F, the Frobenius sensitivity of XXᵀ."""
        if self.neighboring is REPLACE_ONE:
            return frobenius_sensitivity(self.column_bound, self.largest_change)
        return self.column_bound**2

    @property
    def worth(self) -> float:
        """The value of the integer 1 in the sum of rounded columns, (α/2¹⁸)²."""
        return (self.column_bound / secure.FACTOR_STEPS) ** 2

    def rounded(self, n: int) -> "Columns":
        """The bounds, in units of α/2¹⁸, of columns of n entries that were rounded to integers.

        Rounding may lengthen columns and move two of them apart.
        """
        longest, apart = secure.norm_bound(secure.FACTOR_STEPS, n), self.max_column_change
        if apart is not None:
            apart = apart / self.column_bound * secure.FACTOR_STEPS + 2 * secure.rounding(n)
            apart = min(apart, 2 * longest)
        return Columns(longest, apart, self.neighboring)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(Columns):
    """What the number of Gaussian samples depends on, beside the budget.

    Attributes:
      eta: η > 0, lower bound on the eigenvalues of the covariance that is sampled from.
      n: Number of rows of X.
      calibration: "exact", the Rényi bound of this module, or "paper", Definition 4.5 with the paper's
        2αβ√n/η (its Theorems 1.7 and 3.1 print other constants, which its proof does not support), for
        REPLACE_ONE only.

    Raises:
      ValueError: for an argument out of range.
    """

    eta: float
    n: int
    calibration: str = "exact"

    def __post_init__(self):
        super().__post_init__()
        check_choice(self.calibration, "calibration", CALIBRATIONS)
        object.__setattr__(self, "eta", check_number(self.eta, "eta"))
        if not 0 < self.eta < math.inf:
            raise ValueError(
                f"eta={self.eta} must be positive: sampling needs a covariance of full rank"
            )
        object.__setattr__(self, "n", check_integer(self.n, "n"))
        if self.sensitivity / self.eta < _SMALLEST_CHANGE:
            raise ValueError(
                f"column_bound={self.column_bound} and max_column_change={self.max_column_change} let a "
                f"column change a covariance above eta={self.eta} by less than {_SMALLEST_CHANGE} of it, "
                "which is too little to count samples by: use a smaller eta"
            )
        if self.calibration == "paper" and self.neighboring is not REPLACE_ONE:
            raise ValueError(
                "calibration='paper' is for neighboring='replace_one', not add_or_remove_one: use 'exact'"
            )

    @property
    def ratio(self) -> float:
        """The bound on ‖Σ'^(−1/2) Σ Σ'^(−1/2) − I‖_F that the calibration uses."""
        if self.calibration == "exact":
            return self.sensitivity / self.eta
        return 2 * self.column_bound * self.largest_change * math.sqrt(self.n) / self.eta


def ideal_samples(epsilon: float, delta: float, terms: Sampling) -> int:
    """The largest number k of Gaussian samples for which sampling is (epsilon, delta)-DP in exact arithmetic.

    `dpx.gram.max_samples` is a little smaller, since it accounts for the rounding of a computer. The paper's
    proof needs ε ≤ 8 log(1/δ), so that its calibration spends no more than that.

    Returns:
      k as a Python integer, 0 if no k is admissible. A full-rank B needs k ≥ n.

    Raises:
      ValueError: for ε or δ out of range.
    """
    epsilon, delta = check_epsilon(epsilon), check_delta(delta)
    ratio = terms.ratio
    if ratio >= 1:
        return 0
    if terms.calibration == "paper":
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


def sampling_epsilon(num_samples: int, delta: float, **terms: Any) -> float:
    """The smallest ε for which so many samples are (ε, delta)-DP in exact arithmetic, or infinity.

    It is the inverse of `ideal_samples`; `terms` are the fields of `Sampling`: column_bound,
    max_column_change, neighboring, eta, n and calibration. The ε of the release on a computer is a little
    larger; `dpx.gram.wishart` bounds it.

    Raises:
      ValueError: for an argument out of range.
    """
    delta = check_delta(delta)
    num_samples = check_integer(num_samples, "num_samples")
    sampling = Sampling(**terms)
    ratio = sampling.ratio
    if ratio >= 1:
        return math.inf
    if sampling.calibration == "paper":
        spread = 8 * math.log(1 / delta)
        epsilon = ratio * max(math.sqrt(num_samples * spread), spread)
        return epsilon if epsilon <= spread else math.inf

    def negative_epsilon(exponent):
        order, divergence = _renyi(exponent, ratio)
        return -(num_samples * divergence + _conversion(order, delta))

    return max(0.0, -_maximum(negative_epsilon))


def _check_bounds(column_bound: float, max_column_change: float) -> tuple[float, float]:
    """Both bounds as floats; raises ValueError for bounds out of range."""
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
