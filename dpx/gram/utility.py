"""Bounds on the error of private attention, which is the largest entry of its difference to the exact one.

A = XXᵀ has entries of size at most r, B is its release, f ∈ {exp, cosh}, and the error is
max_ij |D(A)⁻¹f(A) − D(B)⁻¹f(B)|_ij.

*Paper*: 4(1 + ε' + 2r) r (Theorem 4.3 of arXiv:2305.04701), where (1 − ε')B ⪯ A ⪯ (1 + ε')B. It does not
vanish as B → A.

*Corrected*: (e^{2ρr} − 1) e^{2r}/n if |A − B|_ij ≤ ρr for all i, j. Both log f are 1-Lipschitz, so each
numerator and each row sum changes by a factor within e^{±ρr}, and a weight P by at most (e^{2ρr} − 1) P,
where P ≤ e^r/(n e^{−r}). No weight is above 1, and the smaller of the two weights is at least e^{−2ρr} times
the larger, so that the error is at most 1 − e^{−2ρr} too.

*Uniform*: (e^{2r} − 1)/n, the error of the matrix whose entries are all 1/n, which uses no data, since
weights lie between e^{−2r}/n and e^{2r}/n. It is at most 1 − 1/n. A release is useless unless its bound is
below this one. For n ≥ 2 and r < ½ the paper's bound never is: (e^{2r} − 1)/n < 4r.
"""

import math
from typing import NamedTuple

from dpx._validate import check_integer, check_number, check_positive


class UtilityBounds(NamedTuple):
    """Bounds on the largest entry error of the attention matrix; see the module's docstring."""

    paper: float
    corrected: float
    uniform: float


def utility_bounds(n: int, *, logit_bound: float, relative_error: float) -> UtilityBounds:
    """The three bounds, side by side, so that vacuous ones are seen.

    Args:
      n: Number of rows of X.
      logit_bound: r, bound on |XXᵀ|_ij; the paper states its own for r < 0.1.
      relative_error: ρ with |A − B|_ij ≤ ρr (and ε' of the paper's bound). `gaussian_entry_error` and
        `sampling_entry_error` give ρr with high probability.

    Raises:
      ValueError: for an argument out of range.
    """
    check_integer(n, "n")
    logit_bound = check_positive(logit_bound, "logit_bound")
    relative_error = check_positive(relative_error, "relative_error", zero=True)
    r = logit_bound
    largest = math.exp(min(2 * r, 700.0)) / n
    moved = min(2 * relative_error * r, 700.0)  # beyond 700 exp would overflow
    return UtilityBounds(
        paper=4 * (1 + relative_error + 2 * r) * r,
        corrected=min(-math.expm1(-moved), math.expm1(moved) * largest),
        uniform=min(1 - 1 / n, math.expm1(min(2 * r, 700.0)) / n),
    )


def gaussian_entry_error(noise_std: float, n: int, *, failure_probability: float) -> float:
    """A bound on max_ij |A − B|_ij for additive noise of this standard deviation on the diagonal.

    It is a union bound of normal tails, P(|N| > x) ≤ 2·½e^{−x²/2}, over n entries of standard deviation σ and
    n(n−1)/2 entries of σ/√2. It fails with probability at most `failure_probability`.
    """
    check_positive(noise_std, "noise_std", zero=True)
    check_integer(n, "n")
    _check_probability(failure_probability)
    return noise_std * math.sqrt(2 * math.log(n * (n + 1) / 2 / failure_probability))


def sampling_entry_error(
    num_samples: int, n: int, *, diagonal_bound: float, failure_probability: float
) -> float:
    """A bound on max_ij |Σ − B|_ij for the mean B of k outer products of N(0, Σ) samples, Σ_ii ≤ bound.

    4 g_i g_j = (g_i + g_j)² − (g_i − g_j)², and the mean of k squares of N(0, s) is s·χ²_k/k, which is within
    s (2√(x/k) + 2x/k) of s except with probability 2e^{−x} (Laurent and Massart, 2000, Lemma 1). The two
    variances add up to 2(Σ_ii + Σ_jj), so that an entry is within diagonal_bound·(2√(x/k) + 2x/k). There are
    n² such squares. With the shift, Σ = A + ηI and the bound is r + η.
    """
    check_integer(num_samples, "num_samples")
    check_integer(n, "n")
    check_positive(diagonal_bound, "diagonal_bound")
    _check_probability(failure_probability)
    x = math.log(2 * n**2 / failure_probability) / num_samples
    return diagonal_bound * 2 * (math.sqrt(x) + x)


def _check_probability(failure_probability: float) -> None:
    if not 0 < check_number(failure_probability, "failure_probability") < 1:
        raise ValueError(f"failure_probability={failure_probability} must be in (0, 1)")
