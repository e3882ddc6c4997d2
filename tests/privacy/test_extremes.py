"""Where floats end: tiny ε and δ, many steps, and noise that is next to nothing or without end."""

import math

import mpmath
import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    ZCDpEvent,
)

import dpx
from dpx import privacy
from dpx.privacy import composition
from dpx.privacy.events import pld_bound, pld_interval

# All records but one in 1e12 are in every sample, so that the closed form of the Gaussian mechanism holds.
NEARLY_ALL = 1 - 1e-12


def exact_delta(mu, epsilon):
    """Balle & Wang's Theorem 8 as printed, in 700 digits."""
    with mpmath.workdps(700):
        a = mpmath.mpf(mu) / 2 - mpmath.mpf(epsilon) / mu
        tails = [mpmath.erfc(-x / mpmath.sqrt(2)) / 2 for x in (a, a - mu)]
        return tails[0] - mpmath.exp(mpmath.mpf(epsilon)) * tails[1]


@pytest.mark.parametrize("epsilon", [1e-300, 1e-20, 1e-16, 1e-13, 1e-10, 1e-6, 1e-4])
@pytest.mark.parametrize("delta", [1e-300, 1e-50, 1e-20, 1e-12, 1e-6, 0.3])
def test_tiny_budgets_get_the_noise_that_they_need(epsilon, delta):
    """The difference of Mills ratios cancelled: at 1e-16 and 1e-20 δ was 17,000 times what it should be."""
    multiplier = privacy.gaussian_noise_multiplier(epsilon, delta)
    assert float(exact_delta(1 / multiplier, epsilon) / delta) == pytest.approx(1, abs=1e-8)
    found = privacy.gaussian_epsilon(multiplier, delta)
    # An ε of next to nothing beside μ is lost in it.
    mu = 1 / multiplier
    assert float(exact_delta(mu, found) / delta) == pytest.approx(1, abs=1e-8)


@pytest.mark.parametrize(
    ("steps", "multiplier", "delta"), [(10_000, 200.0, 1.05e-11), (100_000, 300.0, 1.1e-10)]
)
def test_rounding_of_many_compositions_is_in_epsilon(steps, multiplier, delta):
    """At these δ it is 1 % of them, and ε was up to 5e-4 too small where losses are discretised finely."""
    settings = {"sampling_probability": NEARLY_ALL, "steps": steps}
    exact = dpx.gaussian_epsilon(multiplier, delta, compositions=steps)
    event = privacy.dpsgd_event(multiplier, **settings)
    found = dpx.dpsgd_epsilon(multiplier, delta, **settings)
    for bound in (found, pld_bound(event, delta, pld_interval(exact, steps) / 4)):
        assert 1 <= bound / exact < 1.01
    assert dpx.Ledger().spend(event, "run").guarantee(delta).epsilon == found


def test_a_delta_that_rounding_could_hide_is_refused():
    """ε at 2e-12 was 1 % too small, and held at 3.2e-12, where 100,000 steps were composed at once."""
    settings = {"sampling_probability": NEARLY_ALL, "steps": 30_000}
    refused = r"delta=2e-12 must be at least 3e-11, or rounding .* accountant='rdp'"
    with pytest.raises(ValueError, match=refused):
        dpx.dpsgd_epsilon(165.0, 2e-12, **settings)
    with pytest.raises(ValueError, match=refused):
        dpx.calibrate_dpsgd(7.5, 2e-12, **settings)
    ledger = dpx.Ledger().spend(privacy.dpsgd_event(165.0, **settings), "run")
    with pytest.raises(ValueError, match=refused):
        ledger.guarantee(2e-12)
    assert dpx.dpsgd_epsilon(165.0, 2e-12, accountant="rdp", **settings) > 7.5


def test_little_noise_is_refused_at_once():
    for multiplier in (1e-160, 1e-5):
        for delta in (1e-5, 1e-2):
            with pytest.raises(ValueError, match=f"noise_multiplier={multiplier} is too small"):
                dpx.dpsgd_epsilon(multiplier, delta, sampling_probability=0.1, steps=3)


def test_a_delta_far_above_epsilon_is_refused_at_once():
    with pytest.raises(ValueError, match=r"delta=0\.4 must be less than 20 times"):
        dpx.calibrate_dpsgd(1e-3, 0.4, sampling_probability=0.05, steps=10)


def sampled(noise_multiplier):
    return PoissonSampledDpEvent(0.1, GaussianDpEvent(noise_multiplier))


def test_infinite_noise_costs_nothing_beside_other_releases():
    finite, silent = sampled(1.0), sampled(math.inf)
    alone = dpx.Ledger().spend(finite, "run").guarantee(1e-5).epsilon
    both = dpx.Ledger().spend(silent, "nothing").spend(finite, "run").guarantee(1e-5).epsilon
    assert both == pytest.approx(alone, rel=1e-4)
    twice = SelfComposedDpEvent(ComposedDpEvent([finite, silent]), 2)
    want = dpx.Ledger().spend(SelfComposedDpEvent(finite, 2), "runs").guarantee(1e-5).epsilon
    found = dpx.Ledger().spend(twice, "runs").guarantee(1e-5).epsilon
    assert found == pytest.approx(want, rel=1e-3)


def test_an_event_that_no_accountant_knows_counts_as_plain():
    stated = dpx.PrivacyGuarantee(
        1.0, 1e-6, privacy.ADD_OR_REMOVE_ONE, "record", "by hand", event=ZCDpEvent(0.1)
    )
    found = dpx.Ledger().spend(stated, "elsewhere").spend(sampled(1.0), "run").guarantee(1e-5)
    alone = dpx.Ledger().spend(sampled(1.0), "run").guarantee(9e-6)
    assert found.epsilon == pytest.approx(1 + alone.epsilon, rel=1e-9)
    assert "1 plain" in found.mechanism
    with pytest.raises(ValueError, match=r"ZCDpEvent.* spend a PrivacyGuarantee"):
        dpx.Ledger().spend(ZCDpEvent(0.1), "elsewhere").guarantee(1e-5)


def test_numbers_of_numpy_count_like_others(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = {"sampling_probability": np.float32(0.0625), "steps": np.int32(2)}
    cut = {"num_examples": np.int64(100), "max_batch_size": np.int64(12)}
    found = dpx.calibrate_dpsgd(4.0, 1e-4, **settings, **cut)
    assert found == dpx.calibrate_dpsgd(
        4.0, 1e-4, sampling_probability=0.0625, steps=2, num_examples=100, max_batch_size=12
    )


def test_assumptions_are_sentences():
    with pytest.raises(ValueError, match="assumptions='abc' must be a tuple of sentences"):
        privacy.dpsgd_guarantee(
            1.0, 1e-5, sampling_probability=0.1, steps=1, unit="record", assumptions="abc"
        )


def test_losses_that_do_not_fit_into_memory_are_refused(monkeypatch):
    def full(*arguments):
        raise MemoryError

    monkeypatch.setattr(composition, "sampled_gaussian", full)
    with pytest.raises(ValueError, match=r"too many privacy losses .* use accountant='rdp'"):
        dpx.dpsgd_epsilon(1.0, 1e-6, sampling_probability=1e-6, steps=10**5)
