"""Sampling of a Gram matrix, as a computer does it: its law, its grid, and what rounding is paid for."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dpx import gram
from dpx.gram import accounting, wishart
from dpx.gram.accounting import Sampling
from dpx.gram.columns import clipped_gram, traced_exact_gram
from dpx.noise import coupled

KEY = jax.random.key(6)
TERMS = {"column_bound": 1.0, "max_column_change": None, "eta": 200.0}
TERMS |= {"calibration": "exact", "neighboring": "replace_one"}
# One column of norm 1 more, at n = 1: what the low bits of a release told of.
HERE, THERE = np.array([[0.3, 0.7, 0.2]]), np.array([[0.3, 0.7, 0.2, 1.0]])
ABOUT = {"epsilon": 1.0, "delta": 1e-6, "column_bound": 1.0, "mechanism": "sampling", "eta": 20.0}
ABOUT |= {"neighboring": "add_or_remove_one"}


def factors(covariance, k, count):
    with jax.enable_x64(True):
        draw = jax.jit(jax.vmap(wishart._factor, (0, None, None)))
        keys = jax.random.split(KEY, count)
        return np.asarray(draw(keys, jnp.asarray(covariance), float(k)))


@pytest.mark.quick_cases("6")
@pytest.mark.parametrize("k", [3, 6, pytest.param(40, marks=pytest.mark.slow)])
def test_each_row_of_bartletts_factor_has_its_own_degrees_of_freedom(k):
    drawn = math.sqrt(k) * factors(np.eye(3), k, 20_000)
    for i in range(3):
        assert stats.kstest(drawn[:, i, i] ** 2, stats.chi2(k - i).cdf).pvalue > 1e-3
        for j in range(i):
            assert stats.kstest(drawn[:, i, j], "norm").pvalue > 1e-3
            assert (drawn[:, j, i] == 0).all()
    entries = drawn[:, *np.tril_indices(3)]
    for power in (1, 2):
        assert abs(np.corrcoef((entries**power).T) - np.eye(6)).max() < 0.03


def released(X, count, **options):
    with jax.enable_x64(True):
        draw = jax.jit(jax.vmap(lambda key: gram.release(key, X, **(ABOUT | options)).matrix))
        return np.asarray(draw(jax.random.split(KEY, count)))


@pytest.mark.slow
def test_releases_lie_on_a_grid_that_neighbours_share():
    """√(b + η) is a whole number of steps of a public size, whichever neighbour b came from."""
    k = gram.release(KEY, HERE, **ABOUT).num_samples
    step = 2.0**-6 * math.sqrt(20.0 / k)
    low = []
    for X in (HERE, THERE):
        steps = np.sqrt(released(X, 3000)[:, 0, 0] + 20.0) / step
        np.testing.assert_allclose(steps, np.round(steps), atol=1e-6)
        low.append(np.bincount(np.round(steps).astype(int) % 16, minlength=16))
    assert min(map(np.min, low)) > 0  # and no coarser
    assert stats.chi2_contingency(low).pvalue > 1e-3


@pytest.mark.slow
def test_a_release_of_one_row_is_a_chi_square_about_its_shifted_sum():
    k = gram.release(KEY, THERE, **ABOUT).num_samples
    covariance = float((THERE @ THERE.T)[0, 0]) + 20.0
    found = (released(THERE, 20_000)[:, 0, 0] + 20.0) * k / covariance
    assert stats.kstest(found, stats.chi2(k).cdf).pvalue > 1e-3
    # The grid is coarser than what low bits hold and far finer than the noise.
    assert found.std() == pytest.approx(math.sqrt(2 * k), rel=0.02)


@pytest.mark.parametrize("n", [1, 3, 8])
def test_rounding_of_a_factor_is_less_than_what_is_paid_for(n):
    """With entries as far apart as 2¹³, against 64 bits of mantissa."""
    wide = np.longdouble
    rng = np.random.default_rng(n)
    with jax.enable_x64(True):
        for trial in range(5):
            columns = rng.normal(size=(n, 4)) * 2.0 ** rng.integers(0, 13, (n, 1))
            covariance = columns @ columns.T + 200 * np.eye(n)
            triangle = np.tril(rng.normal(size=(n, n)), -1)
            triangle += np.diag(np.sqrt(1000 - np.arange(n)) + rng.normal(size=n))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(coupled, "chi", lambda *_, t=triangle: jnp.asarray(np.diag(t)))
                beside = np.pad(triangle, ((0, 0), (0, coupled.SUMMED)))
                patch.setattr(coupled, "normal", lambda *_, t=beside: jnp.asarray(t))
                found = np.asarray(wishart._factor(KEY, jnp.asarray(covariance), 1000.0), wide)
            lower = np.linalg.cholesky(covariance)
            lower = np.asarray(jnp.linalg.cholesky(jnp.asarray(covariance)), wide)
            unit = wide(2) ** -53
            moved = np.linalg.norm((lower @ lower.T - covariance.astype(wide)).astype(float))
            assert moved <= 2 * unit * (n + 8) * np.trace(covariance), trial
            exact = lower @ triangle.astype(wide) / np.sqrt(wide(1000))
            spread = abs(found - exact).sum()
            rows = math.sqrt(1000) + 2 * n
            assert spread <= n * math.sqrt(np.trace(covariance) / 1000) * (n + 64) * unit * rows


def test_what_a_program_may_differ_by_is_paid_for():
    terms = Sampling(n=16, **TERMS)
    k = gram.max_samples(1.0, 1e-6, n=16, **TERMS)
    real = accounting.ideal_samples(1.0, 1e-6, terms)
    assert real * (1 - 1e-3) < k <= real
    x = 1.0 + math.log(1e6) + 30
    cost = wishart.price(k, x, terms)
    assert 1e-8 < cost < 1e-5
    # By hand: trace 2²⁶ + nη, grid of 2⁻⁶, and n² + 32n draws.
    x += math.log(16**2 + 32 * 16)
    w, depth = math.sqrt(2 * x), (k - 15 - 2 / 3) / 2
    spread = 16 * math.sqrt(2**26 / 200 + 16) * 64 * 80 * 2**-53
    spread *= math.sqrt(k) + 32 + 8 * w + w**2 / 16
    kept = 2**-40 * x + 2**-47 * 4 * x**2 * math.exp(x / (3 * depth) + 2) / (27 * depth)
    assert cost == pytest.approx(spread + 256 * 2**-52 + 32 * kept, rel=1e-5)
    change = wishart._change(terms)
    rounded = gram.rounded_sensitivity(16, 1.0, None, "replace_one")
    off = 2 * 2**-53 * 24 * (2**26 + 3200)
    assert change == pytest.approx((rounded + 2 * off) / (200 - off), rel=1e-9)


@pytest.mark.parametrize("epsilon", [0.1, 8.0, 1e4])
@pytest.mark.parametrize(("n", "eta"), [(1, 20.0), (30, 2e3), (1000, 2e5)])
@pytest.mark.parametrize("calibration", ["exact", "paper"])
def test_what_is_left_of_the_budget_covers_the_samples(epsilon, n, eta, calibration):
    """ε₀ + 2c ≤ ε and e^c·δ₀ + (1 + e^(ε₀ + c))·e^(−x) ≤ δ, for the ε₀ that k samples cost at δ₀."""
    terms = TERMS | {"n": n, "eta": eta, "calibration": calibration}
    delta = 1e-6
    k, known = gram.max_samples(epsilon, delta, **terms), Sampling(**terms)
    assert k <= accounting.ideal_samples(epsilon, delta, known)
    if k < n:
        return
    x = epsilon + math.log(1 / delta) + 30
    cost = wishart.price(k, x, known)
    change = wishart._change(known)
    own = delta * math.exp(-cost) * (1 - 1e-12)
    one = {"column_bound": 1.0, "eta": 1 / change, "n": n, "neighboring": "add_or_remove_one"}
    spent = gram.sampling_epsilon(k, own, **one)
    assert spent + 2 * cost <= epsilon * (1 + 1e-9)
    lost = math.exp(-x) + math.exp(spent + cost - x)
    assert math.exp(cost) * own + lost <= delta


def test_of_more_samples_than_floats_resolve_fewer_are_drawn():
    terms = TERMS | {"n": 5, "eta": 1e13}
    k = gram.max_samples(1.0, 1e-6, **terms)
    assert 5 < k < accounting.ideal_samples(1.0, 1e-6, Sampling(**terms))
    assert k <= 2**53
    with pytest.raises(ValueError, match=r"num_samples=\d+ must be .* at most 2\^53"):
        gram.wishart_mean(KEY, jnp.eye(2), 2**54)


@pytest.mark.slow
def test_compiled_it_is_the_same_in_64_bits_and_refused_in_32():
    X = np.random.default_rng(0).normal(size=(3, 50)) / 3
    options = ABOUT | {"eta": 200.0}
    plain = gram.release(KEY, X, **options)
    assert plain.matrix.dtype == np.float32
    draw = jax.jit(lambda key, X: gram.release(key, X, **options))
    with pytest.raises(ValueError, match=r"computes in 64 bits and .*jax.enable_x64"):
        draw(KEY, X)
    with jax.enable_x64(True):
        traced = draw(KEY, X)
    assert traced.guarantee == plain.guarantee
    np.testing.assert_allclose(traced.matrix, plain.matrix, atol=1e-4)
    mapped = jax.vmap(lambda key, X: gram.release(key, X, **options).matrix)(KEY[None], X[None])
    np.testing.assert_allclose(mapped[0], plain.matrix, atol=1e-4)


def test_columns_that_are_traced_are_rounded_to_the_same_integers():
    X = np.random.default_rng(0).normal(size=(4, 2**16 + 5)) / 2
    X[:, 7], X[0, 9] = np.nan, np.inf
    expected, _ = clipped_gram(X, 1.5)
    with jax.enable_x64(True):
        found = jax.jit(traced_exact_gram)(X, 1.5)
    assert found.dtype == np.int64
    # A division may round differently, once in a million entries.
    np.testing.assert_allclose(found, expected, rtol=1e-9)
