"""Exact accounting of the Gaussian mechanism.

The mechanism releases f(x) + N(0, (mΔ)² I), where Δ is the l2 sensitivity of f and m the *noise multiplier*.
Used k times it is μ-GDP with μ = √k/m, exactly, and its privacy profile is

    δ(ε) = Φ(a) − e^ε Φ(a − μ),   a = μ/2 − ε/μ        (Balle & Wang, arXiv 1805.06530, Theorem 8)

Since e^ε φ(a − μ) = φ(a), the second term is φ(a) M(μ − a) with the Mills ratio M = (1 − Φ)/φ. This module
uses that form, because it does not overflow for any ε and loses no digits by cancellation.
"""

import math

import numpy as np
from scipy import optimize, special

from dpx._validate import (
    check_delta,
    check_epsilon,
    check_integer,
    check_not_negative,
    check_positive,
)

# Below this μ, M(x − μ/2) − M(x + μ/2) cancels, and is −μ·M'(x) to a relative error of μ²/12.
_SMALL_MU = 1e-5


def _mills(x: float) -> float:
    return math.sqrt(math.pi / 2) * float(special.erfcx(x / math.sqrt(2)))


def _log_delta(a: float, mu: float) -> float:
    """log δ in terms of a = μ/2 − ε/μ and μ."""
    if mu < _SMALL_MU:
        # The difference of two Mills ratios would cancel, so use −M' = 1 − x·M.
        x = mu / 2 - a
        gap = mu * (1 - x * _mills(x))
    elif a > 0:
        density = math.exp(-a * a / 2) / math.sqrt(2 * math.pi)
        delta = float(special.ndtr(a)) - density * _mills(mu - a)
        return math.log(delta) if delta > 0 else -math.inf
    else:
        gap = _mills(-a) - _mills(mu - a)
    return -a * a / 2 - math.log(2 * math.pi) / 2 + math.log(gap) if gap > 0 else -math.inf


def _solve(function, low: float, high: float) -> float:
    return float(optimize.brentq(function, low, high, xtol=1e-14, rtol=4 * np.finfo(float).eps))  # type: ignore[arg-type]


def gaussian_noise_multiplier(epsilon: float, delta: float, *, compositions: int = 1) -> float:
    """The smallest noise std, per unit of l2 sensitivity, for which k releases are (ε, δ)-DP together: exact.

    The equation is solved for a = μ/2 − ε/μ, where μ = a + √(a² + 2ε), or for log μ if μ is small. The
    relative accuracy in δ is 1e-8 or better for all ε, down to δ = 1e-300, and 1e-9 for ε in [1e-3, 1e8] and
    δ in [1e-12, 1/2].

    Args:
      epsilon: ε in (0, 1e8].
      delta: δ in (0, 1).
      compositions: The number k of releases with that noise (adaptively chosen, on the same data).

    Returns:
      m such that k releases with std m·Δ are together (ε, δ)-DP (Balle & Wang, arXiv 1805.06530).

    Raises:
      ValueError: for ε, δ or k out of range.
    """
    # With a NumPy scalar of 16 bits, all that follows would be computed in 16 bits.
    epsilon, delta = check_epsilon(epsilon), check_delta(delta)
    compositions = check_integer(compositions, "compositions")
    target = math.log(delta)

    def mu_at(a):
        root = math.sqrt(a * a + 2 * epsilon)
        return a + root if a >= 0 else 2 * epsilon / (root - a)

    def excess(a):
        return max(_log_delta(a, mu_at(a)), -1e4) - target

    def excess_in_small(log_mu):
        mu = math.exp(log_mu)
        return max(_log_delta(mu / 2 - math.exp(math.log(epsilon) - log_mu), mu), -1e4) - target

    largest = math.log(_SMALL_MU) - 1e-9
    if excess_in_small(largest) >= 0:
        mu = math.exp(_solve(excess_in_small, math.log(epsilon) - math.log(40), largest))
    else:
        mu = mu_at(_solve(excess, -40.0, 40.0))
    return math.sqrt(compositions) / mu if mu > 0 else math.inf


def gaussian_epsilon(noise_multiplier: float, delta: float, *, compositions: int = 1) -> float:
    """The smallest ε for which k Gaussian releases of that noise multiplier are (ε, δ)-DP: exact.

    It is the inverse of `gaussian_noise_multiplier`. It is infinite for a noise multiplier of zero, and 0 if
    δ is at least the total variation distance.

    Raises:
      ValueError: for a negative noise multiplier, or δ or k out of range.
    """
    noise_multiplier = check_not_negative(noise_multiplier, "noise_multiplier")
    delta = check_delta(delta)
    compositions = check_integer(compositions, "compositions")
    if noise_multiplier == 0:
        return math.inf
    mu = math.sqrt(compositions) / noise_multiplier
    target = math.log(delta)
    if mu == 0 or _log_delta(mu / 2, mu) <= target:
        return 0.0
    # Beyond 40 every δ is 1, and bisection of an interval as long as μ would take too many steps.
    high = min(40.0, mu / 2)
    a = _solve(lambda a: max(_log_delta(a, mu), -1e4) - target, -40.0, high)
    return max(0.0, mu * (mu / 2 - a))


def gaussian_budget(noise_multiplier: float, delta: float) -> tuple[float, float]:
    """An (ε, δ) for which `gaussian_noise_multiplier` is this one; its δ is at most the δ given."""
    noise_multiplier = check_positive(noise_multiplier, "noise_multiplier")
    delta = check_delta(delta)
    # With much noise, ε is 0 at a moderate δ; at a small enough δ every noise multiplier has an ε > 0.
    small = min(delta, 0.1 / noise_multiplier)
    return gaussian_epsilon(noise_multiplier, small), small
