"""The noise that a budget needs, and the budget that noise costs: closed forms, oracles, and the cache."""

import json
import math

import mpmath
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import stats

import dpx
from dpx import _storage, privacy
from dpx.privacy import _cache, calibration
from dpx.privacy.events import pld_bound


def exact_delta(noise_multiplier, epsilon, compositions=1):
    """Balle & Wang's Theorem 8 as printed, in 700 digits."""
    with mpmath.workdps(700):
        mu = mpmath.sqrt(compositions) / mpmath.mpf(noise_multiplier)
        a = mu / 2 - mpmath.mpf(epsilon) / mu
        tails = [mpmath.erfc(-x / mpmath.sqrt(2)) / 2 for x in (a, a - mu)]
        return tails[0] - mpmath.exp(mpmath.mpf(epsilon)) * tails[1]


@pytest.mark.parametrize(
    "epsilon", [1e-300, 1e-20, 1e-16, 1e-13, 1e-10, 1e-6, 1e-3, 0.1, 1.0, 10.0, 1e3, 1e6, 1e8]
)
@pytest.mark.parametrize("delta", [1e-300, 1e-50, 1e-20, 1e-12, 1e-5, 0.1, 0.5])
def test_gaussian_is_exact_in_delta(epsilon, delta):
    """The difference of Mills ratios cancelled: at 1e-16 and 1e-20 δ was 17,000 times what it should be."""
    multiplier = dpx.gaussian_noise_multiplier(epsilon, delta)
    found = dpx.gaussian_epsilon(multiplier, delta)
    if epsilon >= 1e-3 and delta >= 1e-12:
        assert found == pytest.approx(epsilon, rel=1e-7)
    # An ε of next to nothing beside μ is lost in it.
    for stated in (epsilon, found) if epsilon < 1 else (epsilon,):
        assert float(exact_delta(multiplier, stated) / delta) == pytest.approx(1, abs=1e-8)


@pytest.mark.parametrize(
    ("compositions", "epsilon", "expected"), [(38, 1.0, 23.0), (38, 0.2, 100.5), (5, 1.0, 8.34)]
)
def test_gaussian_compositions(compositions, epsilon, expected):
    multiplier = dpx.gaussian_noise_multiplier(epsilon, 1e-5, compositions=compositions)
    assert multiplier == pytest.approx(expected, rel=1e-3)
    delta = float(exact_delta(multiplier, epsilon, compositions))
    assert delta == pytest.approx(1e-5, rel=1e-8)


def test_gaussian_limits():
    assert dpx.gaussian_epsilon(0.0, 1e-5) == dpx.gaussian_epsilon(1e-300, 1e-5) == math.inf
    assert dpx.gaussian_epsilon(1e-100, 1e-5) == pytest.approx(5e199)
    assert dpx.gaussian_epsilon(1e9, 1e-5) == 0.0
    assert dpx.gaussian_noise_multiplier(1e8, 1e-5) < 1e-4


@pytest.mark.parametrize("noise_multiplier", [0.05, 1.0, 300.0])
def test_a_budget_of_a_multiplier_has_no_larger_delta(noise_multiplier):
    epsilon, delta = privacy.gaussian_budget(noise_multiplier, 1e-3)
    assert epsilon > 0
    assert delta <= 1e-3
    found = dpx.gaussian_noise_multiplier(epsilon, delta)
    assert found == pytest.approx(noise_multiplier, rel=1e-6)


FEW = {"sampling_probability": 0.064, "steps": 6}


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: dpx.dpsgd_epsilon(1, 1e-5, **FEW, accountant="moments"), "accountant"),
        (lambda: dpx.calibrate_dpsgd(3, 0.9, **FEW), "delta=0.9"),
        (lambda: dpx.calibrate_dpsgd(3, 1e-300, **FEW), "1e-12"),
        (lambda: dpx.dpsgd_epsilon(1, 1e-13, **FEW), "1e-12"),
        (lambda: dpx.calibrate_dpsgd(1e-3, 0.4, **FEW), r"delta=0\.4 "),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=name):
        call()


@pytest.mark.quick_cases("0.5-20-0.5", "0.5-20-100.0")
@pytest.mark.parametrize("epsilon", [0.5, 3.0, 100.0])
@pytest.mark.parametrize(("probability", "steps"), [(0.025, 500), (0.5, 20)])
def test_calibration_wastes_little_and_never_exceeds(epsilon, probability, steps):
    settings = {"sampling_probability": probability, "steps": steps}
    multiplier = dpx.calibrate_dpsgd(epsilon, 1e-5, **settings)
    assert 0.999 * epsilon < dpx.dpsgd_epsilon(multiplier, 1e-5, **settings) <= epsilon
    # An accountant with a fixed fine discretisation agrees.
    event = privacy.dpsgd_event(multiplier, **settings)
    fine = PLDAccountant(value_discretization_interval=1e-4 * max(1, epsilon / 3))
    assert fine.compose(event).get_epsilon(1e-5) == pytest.approx(epsilon, rel=1e-3)


def test_calibration_without_sampling_is_the_gaussian_mechanism():
    multiplier = dpx.calibrate_dpsgd(2.0, 1e-5, sampling_probability=1.0, steps=10)
    assert multiplier == dpx.gaussian_noise_multiplier(2.0, 1e-5, compositions=10)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1e4, 1e8])
def test_calibration_at_huge_budgets_tends_to_no_noise(epsilon):
    settings = {"sampling_probability": 0.025, "steps": 500}
    multiplier = dpx.calibrate_dpsgd(epsilon, 1e-5, **settings)
    assert 0 < multiplier < 0.05
    assert 0.999 * epsilon < dpx.dpsgd_epsilon(multiplier, 1e-5, **settings) <= epsilon


def test_large_and_small_deltas_end_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert dpx.dpsgd_epsilon(1.0, 0.1, **FEW) == 0
    assert dpx.dpsgd_epsilon(0.0, 0.1, **FEW) == math.inf
    assert dpx.dpsgd_epsilon(1.0, 1e-12, **FEW) == pytest.approx(4.977, rel=1e-3)
    for delta in (1e-12, 0.1):
        multiplier = dpx.calibrate_dpsgd(3.0, delta, **FEW)
        assert 0.999 * 3.0 < dpx.dpsgd_epsilon(multiplier, delta, **FEW) <= 3.0


def test_a_small_epsilon_at_a_large_delta_is_tight():
    """Rounding of losses as coarse as for a first look would say 5 % more."""
    settings = {"sampling_probability": 0.2, "steps": 3}
    found = dpx.dpsgd_epsilon(4.0, 2e-2, **settings)
    event = privacy.dpsgd_event(4.0, **settings)
    assert 1e-3 < found < 0.1
    fine = PLDAccountant(value_discretization_interval=1e-4).compose(event)
    assert found == pytest.approx(fine.get_epsilon(2e-2), rel=5e-3)


@pytest.mark.slow
def test_rdp_on_request_is_an_upper_bound():
    settings = {"sampling_probability": 0.025, "steps": 500}
    multiplier = dpx.calibrate_dpsgd(3.0, 1e-5, accountant="rdp", **settings)
    found = dpx.dpsgd_epsilon(multiplier, 1e-5, accountant="rdp", **settings)
    event = privacy.dpsgd_event(multiplier, **settings)
    assert found == pytest.approx(RdpAccountant().compose(event).get_epsilon(1e-5), rel=1e-6)
    assert 2.99 < found <= 3.0
    assert dpx.dpsgd_epsilon(multiplier, 1e-5, **settings) < 3.0


@pytest.mark.slow
def test_calibration_beside_another_release_fits_one_budget():
    settings = {"sampling_probability": 0.05, "steps": 100}
    prior = GaussianDpEvent(dpx.gaussian_noise_multiplier(1.0, 1e-5))
    multiplier = dpx.calibrate_dpsgd(3.0, 1e-5, beside=prior, **settings)
    assert multiplier > dpx.calibrate_dpsgd(3.0, 1e-5, **settings)
    run = privacy.dpsgd_event(multiplier, **settings)
    together = dpx.Ledger().spend(prior, "prior").spend(run, "run").guarantee(1e-5)
    assert 0.999 * 3.0 < together.epsilon <= 3.0
    with pytest.raises(ValueError, match="alone costs"):
        dpx.calibrate_dpsgd(1.0, 1e-5, beside=prior, **settings)
    # Without sampling both are Gaussian mechanisms, whose μ² add up.
    whole = dpx.calibrate_dpsgd(3.0, 1e-5, beside=prior, sampling_probability=1.0, steps=100)
    mu = math.hypot(1 / prior.noise_multiplier, 10 / whole)
    assert 0.999 * 3.0 < dpx.gaussian_epsilon(1 / mu, 1e-5) <= 3.0


@pytest.mark.parametrize("interval", [1e-3, 1e-1, 1.0])
def test_an_accountant_never_says_less_than_hypothesis_testing(interval):
    """Of one Poisson-sampled step, whose δ has a closed form, however coarse the losses are."""
    event = privacy.dpsgd_event(0.8, sampling_probability=0.2, steps=1)
    for delta in (1e-2, 1e-4, 1e-6):
        epsilon = pld_bound(event, delta, interval)
        found = 0.0
        for sign in (1, -1):  # the record leaves, or joins
            z = np.linspace(-12, 13, 200_001)
            with_record = 0.2 * stats.norm.pdf(z, 1, 0.8) + 0.8 * stats.norm.pdf(z, 0, 0.8)
            pair = (with_record, stats.norm.pdf(z, 0, 0.8))[::sign]
            excess = np.maximum(pair[0] - math.exp(epsilon) * pair[1], 0)
            found = max(found, excess.sum() * (z[1] - z[0]))
        assert found <= delta * (1 + 1e-3)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own, and a function that makes this process forget what it knows of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def forget():
        monkeypatch.setattr(_cache, "_known", {})

    forget()
    return forget


@pytest.mark.slow
def test_the_cache_is_optional(cache, tmp_path, monkeypatch):
    settings = {"sampling_probability": 0.02, "steps": 50, "accountant": "rdp"}
    first = dpx.calibrate_dpsgd(1.0, 1e-5, **settings)
    (entry,) = _storage.user_cache().glob("*.json")
    for corrupt in ("", "{", '{"key": 1}', '{"key": "x", "value": "y"}', "[]", "\xff"):
        entry.write_text(corrupt, encoding="latin-1")
        cache()
        assert dpx.calibrate_dpsgd(1.0, 1e-5, **settings) == first
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    cache()
    assert dpx.calibrate_dpsgd(1.0, 1e-5, **settings) == first


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("beside", [None, GaussianDpEvent(4.0)])
def test_a_cached_multiplier_is_checked_before_it_is_used(cache, accountant, beside):
    budget = {"sampling_probability": 0.05, "steps": 100, "accountant": accountant}
    first = dpx.calibrate_dpsgd(2.0, 1e-5, beside=beside, **budget)
    (entry,) = _storage.user_cache().glob("*.json")
    written = json.loads(entry.read_text())
    # Too little noise breaks the guarantee, too much the promise of at least 0.999 ε.
    for edited in (0.3, 0.97 * first, 0.999 * first, 1.1 * first, 1e9, 1e308, 10**400):
        entry.write_text(json.dumps({**written, "value": edited}))
        cache()
        assert dpx.calibrate_dpsgd(2.0, 1e-5, beside=beside, **budget) == first
        assert json.loads(entry.read_text())["value"] == first


@pytest.mark.parametrize("sampling", ["poisson", "allocation"])
def test_noise_whose_square_is_no_float_costs_nothing(sampling):
    settings = {"sampling_probability": 0.25, "steps": 5, "sampling": sampling}
    assert [dpx.dpsgd_epsilon(m, 1e-6, **settings) for m in (1e90, 1e200, 1e308)] == [0.0] * 3


def test_a_cached_multiplier_costs_one_evaluation_and_none_again(cache, monkeypatch):
    evaluated, accounted = [], calibration.accounted
    monkeypatch.setattr(
        calibration, "accounted", lambda *args: (evaluated.append(args), accounted(*args))[1]
    )
    counts = []
    for _ in range(2):
        cache()
        for _ in range(2):
            evaluated.clear()
            dpx.calibrate_dpsgd(2.0, 1e-5, sampling_probability=0.05, steps=100)
            counts.append(len(evaluated))
    assert counts[0] > 3
    assert counts[1:] == [0, 1, 0]
