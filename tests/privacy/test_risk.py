"""Risk beside ε: μ and the power of attacks, against closed forms and the privacy profile itself."""

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy import stats

from dpx import Ledger, PrivacyGuarantee, privacy
from dpx.privacy import ADD_OR_REMOVE_ONE, REPLACE_ONE

WORDS = {"unit": "record", "mechanism": "by hand"}


def stated(epsilon, delta=0.0, relation=ADD_OR_REMOVE_ONE, event=None):
    return PrivacyGuarantee(epsilon, delta, relation, event=event, **WORDS)


def power(mu):
    """Of the best test of N(0, 1) against N(μ, 1) at a level of 1 %."""
    return stats.norm.sf(stats.norm.isf(0.01) - mu)


def gaussian_delta(mu, epsilon):
    """δ(ε) of N(μ, 1) against N(0, 1)."""
    a = mu / 2 - epsilon / mu
    return stats.norm.cdf(a) - np.exp(epsilon + stats.norm.logcdf(a - mu))


@pytest.mark.parametrize("relation", [ADD_OR_REMOVE_ONE, REPLACE_ONE])
@pytest.mark.parametrize("noise", [0.3, 1.0, 4.0])
def test_gaussian_mechanisms_have_their_own_mu(noise, relation):
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(noise), 4)
    epsilon = privacy.gaussian_epsilon(noise, 1e-5, compositions=4)
    risk = stated(epsilon, 1e-5, relation, event).risk()
    assert risk.mu == pytest.approx(2 / noise, rel=1e-12)
    assert risk.tpr_at_1_percent == pytest.approx(power(2 / noise), rel=1e-9)


@pytest.mark.parametrize("noise", [0.3, 1.0, 4.0])
def test_replacing_a_record_moves_a_gaussian_twice_as_far(noise):
    """Where it is stated for adding or removing one: N(0, 1) against N(2/noise, 1) at worst."""
    event = dp_accounting.GaussianDpEvent(noise)
    replaced = stated(privacy.gaussian_epsilon(noise, 1e-5), 1e-5, event=event).risk("replace_one")
    assert replaced.mu == pytest.approx(2 / noise, rel=1e-12)
    assert replaced.tpr_at_1_percent == pytest.approx(power(2 / noise), rel=1e-9)
    # A general accountant of that relation agrees: at no ε does the curve of that μ lie below its δ.
    accountant = PLDAccountant(REPLACE_ONE, value_discretization_interval=1e-3).compose(event)
    for epsilon in (0.5 / noise, 2 / noise):
        delta = float(accountant.get_delta(epsilon))
        assert gaussian_delta(replaced.mu, epsilon) == pytest.approx(delta, rel=2e-3)


def test_releases_compose():
    ledger = Ledger()
    for noise in (2.0, 3.0):
        ledger.spend(stated(1.0, 1e-6, event=dp_accounting.GaussianDpEvent(noise)), f"at {noise}")
    risk = ledger.guarantee(1e-5).risk()
    assert risk.mu == pytest.approx(math.hypot(1 / 2, 1 / 3))
    # A sample of nearly all records goes by privacy loss distributions, and is nearly the same.
    sampled = dp_accounting.PoissonSampledDpEvent(1 - 1e-9, dp_accounting.GaussianDpEvent(3.0))
    ledger = Ledger().spend(dp_accounting.GaussianDpEvent(2.0), "one").spend(sampled, "other")
    for relation, mu in ((None, risk.mu), ("replace_one", 2 * risk.mu)):
        found = ledger.guarantee(1e-5).risk(relation)
        assert found.mu == pytest.approx(mu, rel=2e-3)
        assert found.tpr_at_1_percent == pytest.approx(power(mu), rel=2e-3)


def test_of_two_releases_at_one_epsilon_each_has_its_own_risk():
    few, many = (privacy.dpsgd_event(1.0, sampling_probability=0.1, steps=n) for n in (1, 50))
    risks = [stated(2.0, 1e-5, event=event).risk() for event in (few, many)]
    assert risks[0].mu < risks[1].mu


@pytest.mark.parametrize("epsilon", [30.0, 37.0, 200.0, 1e6])
def test_large_epsilon_has_a_finite_mu(epsilon):
    """1 − δ(0) is about 2e^(−ε), which beside 1 is lost from 37 on; −Φ⁻¹(e^(−ε)) tends to √(2ε)."""
    mu = stated(epsilon).risk().mu
    assert stats.norm.logsf(mu / 2) == pytest.approx(-epsilon, rel=1e-9)


@pytest.mark.parametrize("epsilon", [0.1, math.log(3), 6.0])
def test_randomized_response(epsilon):
    """It says the truth with probability e^ε/(1 + e^ε): f(α) = max(1 − e^ε·α, e^(−ε)·(1 − α))."""
    risk = stated(epsilon).risk()
    truth = 1 / (1 + math.exp(-epsilon))
    assert risk.mu == pytest.approx(2 * stats.norm.ppf(truth), rel=1e-6)
    expected = min(0.01 * math.exp(epsilon), 1 - math.exp(-epsilon) * 0.99)
    assert risk.tpr_at_1_percent == pytest.approx(expected, rel=1e-6)


def test_plain_guarantees_are_those_of_the_least_private_mechanism():
    epsilon, delta = 1.0, 0.005
    risk = stated(epsilon, delta).risk()
    # It fails with δ, and is randomised response otherwise.
    assert risk.tpr_at_1_percent == pytest.approx(delta + 0.01 * math.e, rel=1e-6)
    profile = lambda e: delta + (1 - delta) * (math.e - math.exp(e)) / (1 + math.e)  # noqa: E731
    points = np.linspace(1e-3, epsilon, 1000)
    margins = gaussian_delta(risk.mu, points) - np.array([profile(e) for e in points])
    assert margins.min() == pytest.approx(0, abs=1e-4)
    # Replacing is removing and adding: (2ε, δ·(1 + e^ε)).
    other = stated(epsilon, delta).risk("replace_one")
    assert other == stated(2 * epsilon, delta * (1 + math.e)).risk()


@pytest.mark.slow
@pytest.mark.parametrize("relation", [ADD_OR_REMOVE_ONE, REPLACE_ONE])
@pytest.mark.parametrize(("noise", "probability", "steps"), [(1.0, 0.01, 500), (0.8, 0.2, 20)])
def test_sampled_mechanisms_have_the_smallest_mu_that_covers_their_profile(
    noise, probability, steps, relation
):
    settings = {"sampling_probability": probability, "steps": steps}
    guarantee = privacy.dpsgd_guarantee(noise, 1e-5, unit="record", **settings)
    risk = guarantee.risk(relation)
    accountant = PLDAccountant(relation, value_discretization_interval=1e-3).compose(
        guarantee.event
    )
    points = np.linspace(0.01, accountant.get_epsilon(1e-5), 40)
    deltas = np.array([accountant.get_delta(e) for e in points])
    assert (gaussian_delta(risk.mu * 1.001, points) >= deltas * (1 - 1e-6)).all()
    assert not (gaussian_delta(risk.mu * 0.99, points) >= deltas).all()
    # No ε bounds the power better.
    bounds = np.minimum(deltas + 0.01 * np.exp(points), 1 - np.exp(-points) * (0.99 - deltas))
    assert risk.tpr_at_1_percent <= bounds.min() * (1 + 1e-3)
    assert risk.tpr_at_1_percent == pytest.approx(bounds.min(), rel=0.02)
    # It is far less than (ε, δ) alone would allow.
    assert (
        risk.tpr_at_1_percent
        < dataclasses.replace(guarantee, event=None).risk(relation).tpr_at_1_percent
    )


def test_an_attack_reaches_what_is_stated():
    """The likelihood-ratio test on one sampled Gaussian release, by numerical integration."""
    noise, q = 0.7, 0.3
    guarantee = privacy.dpsgd_guarantee(noise, 1e-5, sampling_probability=q, steps=1, unit="record")
    # The ratio of likelihoods grows with what is seen. Absent against present, and the other way round.
    seen = stats.norm(scale=noise)
    cut = seen.isf(0.01)
    present = q * stats.norm.sf(cut, 1, noise) + (1 - q) * 0.01
    lows = np.linspace(-6, 6, 200_001)
    levels = q * stats.norm.cdf(lows, 1, noise) + (1 - q) * seen.cdf(lows)
    absent = seen.cdf(np.interp(0.01, levels, lows))
    found = guarantee.risk().tpr_at_1_percent
    assert found == pytest.approx(max(present, absent), rel=1e-3)


def test_what_is_not_private_has_no_bound():
    for guarantee in (stated(math.inf), stated(math.inf, event=dp_accounting.GaussianDpEvent(0))):
        assert guarantee.risk() == (math.inf, 1.0)
    assert stated(0.0).risk() == (0.0, pytest.approx(0.01))
    nothing = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(0.0))
    assert stated(math.inf, 1e-5, event=nothing).risk() == (math.inf, 1.0)


def test_of_which_relation_a_guarantee_speaks():
    assert set(stated(1.0).risks()) == {"add_or_remove_one", "replace_one"}
    assert set(stated(1.0, relation=REPLACE_ONE).risks()) == {"replace_one"}
    with pytest.raises(ValueError, match="neighboring='add_or_remove_one' must be 'replace_one'"):
        stated(1.0, relation=REPLACE_ONE).risk("add_or_remove_one")
    with pytest.raises(ValueError, match="use one of"):
        stated(1.0).risk("neighbours")


def test_selections_go_by_epsilon_and_delta():
    base = dp_accounting.GaussianDpEvent(3.0)
    event = dp_accounting.dp_event.RepeatAndSelectDpEvent(base, mean=3.0, shape=1.0)
    assert stated(1.5, 1e-5, event=event).risk() == stated(1.5, 1e-5).risk()


def test_it_says_so_in_words():
    event = dp_accounting.GaussianDpEvent(1.0)
    text = str(stated(4.4, 1e-5, event=event).risk())
    assert text == "μ = 1, true positives at 1 % false positives ≤ 9.2%"
