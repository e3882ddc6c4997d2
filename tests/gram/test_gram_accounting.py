"""Sensitivity and accounting of the Gram release against search, closed forms and other accountants."""

import math

import numpy as np
import pytest
from dp_accounting import rdp
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from dpx.gram import (
    accounting,
    frobenius_sensitivity,
    rounded_sensitivity,
    sampling_epsilon,
)
from dpx.gram.accounting import Sampling

CASES = [0.05, 0.5, 2 / 3, 0.67, 1.0, 1.3, math.sqrt(2), 1.5, 2.0]


def change(u, v):
    return np.linalg.norm(np.outer(u, u) - np.outer(v, v))


@given(st.integers(1, 4), st.floats(0.01, 2.0), st.floats(0.1, 5.0), st.integers(0, 2**32 - 1))
def test_no_random_pair_exceeds_the_frobenius_sensitivity(n, max_column_change, column_bound, seed):
    max_column_change *= column_bound
    rng = np.random.default_rng(seed)
    for _ in range(20):
        u, step = rng.normal(size=(2, n))
        u *= column_bound * rng.random() ** 0.1 / np.linalg.norm(u)
        v = u + step * max_column_change * rng.random() ** 0.1 / np.linalg.norm(step)
        v *= min(1, column_bound / np.linalg.norm(v))
        assert change(u, v) <= frobenius_sensitivity(column_bound, max_column_change) * (1 + 1e-12)


@pytest.mark.quick_cases("0.05", "2.0")
@pytest.mark.parametrize("max_column_change", CASES)
def test_gradient_search_attains_the_frobenius_sensitivity(max_column_change):
    def loss(w):
        u, v = w.reshape(2, 2)
        difference = np.outer(u, u) - np.outer(v, v)
        return -np.sum(difference**2), -4 * np.concatenate([difference @ u, -difference @ v])

    constraints = [
        {"type": "ineq", "fun": lambda w: 1 - w[:2] @ w[:2]},
        {"type": "ineq", "fun": lambda w: 1 - w[2:] @ w[2:]},
        {"type": "ineq", "fun": lambda w: max_column_change**2 - np.sum((w[:2] - w[2:]) ** 2)},
    ]
    rng = np.random.default_rng(0)
    found = 0.0
    for _ in range(30):
        start = np.tile(rng.normal(size=2), 2) + 0.3 * max_column_change * rng.normal(size=4)
        result = optimize.minimize(
            loss, start, jac=True, method="SLSQP", constraints=constraints, options={"ftol": 1e-12}
        )
        if min(c["fun"](result.x) for c in constraints) > -1e-9:
            found = max(found, math.sqrt(-result.fun))
    assert found == pytest.approx(frobenius_sensitivity(1.0, max_column_change), rel=1e-6)


def brute_force_divergence(order, z):
    """Rényi divergence of N(0, 1+z) from N(0, 1) by quadrature."""
    x = np.linspace(-60, 60, 400_001) * math.sqrt(1 + abs(z))
    log_p = -(x**2) / (2 * (1 + z)) - 0.5 * np.log(2 * np.pi * (1 + z))
    log_q = -(x**2) / 2 - 0.5 * np.log(2 * np.pi)
    density = np.exp(order * log_p + (1 - order) * log_q)
    return np.log(np.trapezoid(density, x)) / (order - 1)


@pytest.mark.parametrize(("t", "exponent"), [(0.3, 0.2), (0.1, 0.5), (0.02, 0.7), (0.001, 0.4)])
def test_divergence_agrees_with_quadrature(t, exponent):
    order, divergence = accounting._renyi(exponent, t)
    assert divergence == pytest.approx(brute_force_divergence(order, t), rel=1e-5)


@given(st.floats(0.01, 0.9), st.floats(0, 0.95), st.integers(0, 2**32 - 1))
def test_one_positive_eigenvalue_is_the_worst_case(t, exponent, seed):
    order, worst = accounting._renyi(exponent, t)
    z = np.random.default_rng(seed).normal(size=4)
    z *= t / np.linalg.norm(z)
    z = np.maximum(z, -t / (1 + t))  # what being above ηI in both orders leaves
    each = -0.5 * np.log1p(z) - np.log1p(-(order - 1) * z) / (2 * (order - 1))
    assert each.sum() <= worst * (1 + 1e-9)


def test_tiny_changes_lose_no_digits():
    # r(t) → λ t²/4; the naive difference of logarithms is rounding noise here.
    order, divergence = accounting._renyi(0.1, 1e-12)
    assert divergence == pytest.approx(order * 1e-24 / 4, rel=1e-6)


TABLE = [  # ε, δ, t, n, the paper's k with 2αβ = tη, and the Rényi k with F = tη
    (0.09, 1e-6, 1e-4, 16, 458, 104_084),
    (1.0, 1e-6, 1e-3, 16, 565, 96_127),
    (1.0, 1e-6, 1e-2, 4, 0, 846),
]


@pytest.mark.parametrize(("epsilon", "delta", "t", "n", "paper", "exact"), TABLE)
def test_number_of_samples(epsilon, delta, t, n, paper, exact):
    for calibration, change, k in (
        ("paper", 2 * 2.0, paper),
        ("exact", frobenius_sensitivity(1.0, 2.0), exact),
    ):
        terms = {"column_bound": 1.0, "n": n, "eta": change / t, "calibration": calibration}
        assert accounting.ideal_samples(epsilon, delta, Sampling(**terms)) == k


@pytest.mark.parametrize(("epsilon", "delta", "t", "n", "paper", "exact"), TABLE)
def test_samples_satisfy_an_independent_renyi_accountant(epsilon, delta, t, n, paper, exact):
    order = 1 + np.exp(np.linspace(0, -np.log(t), 4000, endpoint=False))
    each = -0.5 * np.log1p(t) - np.log1p(-(order - 1) * t) / (2 * (order - 1))
    assert rdp.compute_epsilon(order, exact * each, delta)[0] <= epsilon * (1 + 1e-4)
    assert rdp.compute_epsilon(order, (exact + 2) * 1.002 * each, delta)[0] > epsilon


@pytest.mark.parametrize(("epsilon", "delta", "t", "n", "paper", "exact"), TABLE)
def test_samples_are_below_the_exact_count_of_a_single_eigenvalue(
    epsilon, delta, t, n, paper, exact
):
    # A lower bound on ε: with one eigenvalue the privacy loss is a shifted χ² in closed form, so any k
    # beyond what it allows would be a false claim.
    def hockey_stick(k, sign):
        a, b = (1 + t, 1.0) if sign > 0 else (1.0, 1 + t)
        # log p/q at the sum of squares s: s/2 (1/b − 1/a) − k/2 log(a/b) ≥ ε.
        cut = (2 * epsilon + k * math.log(a / b)) / (1 / b - 1 / a)
        p, q = ((stats.chi2.sf, stats.chi2.cdf)[sign < 0](cut / s, k) for s in (a, b))
        return p - math.exp(epsilon) * q

    assert max(hockey_stick(exact, s) for s in (1, -1)) <= delta
    assert max(hockey_stick(1.25 * exact, s) for s in (1, -1)) > delta


TERMS = {"column_bound": 1.0, "max_column_change": 0.5, "eta": 3000.0, "n": 4}


@pytest.mark.parametrize("calibration", ["exact", "paper"])
def test_epsilon_inverts_the_number_of_samples(calibration):
    terms = TERMS | {"calibration": calibration}
    k = accounting.ideal_samples(0.7, 1e-5, Sampling(**terms))
    assert k > 0
    assert (
        sampling_epsilon(k, 1e-5, **terms) <= 0.7 < sampling_epsilon(k + 1, 1e-5, **terms) * 1.001
    )


def test_numbers_of_samples_without_bound_with_one_and_with_none():
    assert accounting.ideal_samples(1e8, 1e-6, Sampling(**TERMS)) > 2**31
    paper, limit = TERMS | {"calibration": "paper"}, 8 * math.log(1e6)
    # What the paper's proof covers.
    assert accounting.ideal_samples(1e8, 1e-6, Sampling(**paper)) == accounting.ideal_samples(
        limit, 1e-6, Sampling(**paper)
    )
    few = TERMS | {"max_column_change": 2.0, "eta": 1.4}  # below the change
    assert accounting.ideal_samples(1e8, 1e-6, Sampling(**few)) == 0
    assert math.isinf(sampling_epsilon(2, 1e-6, **few))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"calibration": "chi2"}, "calibration='chi2'"),
        ({"neighboring": "swap"}, "neighboring='swap'"),
        ({"neighboring": "add_or_remove_one"}, "max_column_change=0.5"),
        (
            {"neighboring": "add_or_remove_one", "max_column_change": None, "calibration": "paper"},
            "calibration='paper'",
        ),
    ],
)
def test_misuse_raises(changed, named):
    with pytest.raises(ValueError, match=named):
        accounting.ideal_samples(1.0, 1e-6, Sampling(**(TERMS | changed)))


@pytest.mark.parametrize("n", [1, 4, 100])
@pytest.mark.parametrize("column_bound", [0.5, 3.0])
def test_columns_that_are_rounded_are_longer_and_farther_apart(n, column_bound):
    """By up to 0.51 of a unit for each entry, in units of α/2¹⁸."""
    moved = 0.51 * math.sqrt(n)
    longest, unit = 2**18 + math.ceil(moved), column_bound / 2**18
    found = rounded_sensitivity(n, column_bound, 0.1 * column_bound, "replace_one")
    expected = frobenius_sensitivity(longest, 0.1 * 2**18 + 2 * moved) * unit**2
    assert found == pytest.approx(expected, rel=1e-12)
    whole = rounded_sensitivity(n, column_bound, None, "replace_one")
    assert whole == pytest.approx(math.sqrt(2) * (longest * unit) ** 2, rel=1e-12)
    gone = rounded_sensitivity(n, column_bound, None, "add_or_remove_one")
    assert gone == pytest.approx((longest * unit) ** 2, rel=1e-12)
