"""Guarantees and their compositions: what they say, and what they refuse."""

import json
import math

import dp_accounting
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant

import dpx
from dpx import _storage, privacy
from dpx.privacy import _cache, composition, dpsgd, risk


def guarantee(
    epsilon=1.0, delta=1e-6, *, relation=privacy.ADD_OR_REMOVE_ONE, unit="user", assumptions=("a",),
    event=None,
):  # fmt: skip
    return dpx.PrivacyGuarantee(epsilon, delta, relation, unit, "test", assumptions, event)


def test_a_total_with_a_plain_guarantee_has_no_event():
    """Its event would stand for a part of it, and a ledger that it is spent in would forget the rest."""
    ledger = dpx.Ledger().spend(guarantee(event=GaussianDpEvent(2.0)), "noise")
    assert ledger.guarantee(1e-5).event == GaussianDpEvent(2.0)
    total = ledger.spend(guarantee(0.5), "plain").guarantee(1e-5)
    assert total.event is None
    assert dpx.Ledger().spend(total, "both").guarantee(1e-5).epsilon == total.epsilon


def test_a_total_assumes_what_each_of_its_parts_does():
    ledger = dpx.Ledger()
    for words in (("a",), ("b", "a"), ("c",)):
        ledger.spend(guarantee(assumptions=words), "one")
    assert ledger.guarantee(1e-5).assumptions == ("a", "b", "c")


def test_units_are_compared_with_all_that_was_spent_before():
    spent = [guarantee(), GaussianDpEvent(1.0)]
    for order in (spent, spent[::-1]):
        ledger = dpx.Ledger()
        for one in order:
            ledger.spend(one, "before")
        with pytest.raises(ValueError, match="unit='name' differs from the ledger's 'user'"):
            ledger.spend(guarantee(unit="name"), "names")


def test_a_total_speaks_of_the_relation_of_its_parts():
    """Amplification by sampling is accounted for adding or removing a record, and for nothing else."""
    sampled = privacy.dpsgd_event(1.0, sampling_probability=0.01, steps=5)
    one = guarantee(0.5, relation=privacy.REPLACE_ONE, event=sampled)
    total = dpx.Ledger().spend(one, "first").spend(one, "second").guarantee(1e-5)
    assert total.neighboring == privacy.REPLACE_ONE
    assert total.epsilon == 1.0
    assert "2 plain" in total.mechanism
    removed = guarantee(0.5, event=sampled)
    total = dpx.Ledger().spend(removed, "first").spend(removed, "second").guarantee(1e-5)
    assert total.neighboring == privacy.ADD_OR_REMOVE_ONE
    ten_steps = dpx.dpsgd_epsilon(1.0, 1e-5, sampling_probability=0.01, steps=10)
    assert total.epsilon == pytest.approx(ten_steps, rel=1e-3)
    assert "plain" not in total.mechanism


def test_noise_needs_a_part_of_delta():
    ledger = dpx.Ledger().spend(guarantee(), "plain").spend(GaussianDpEvent(1.0), "noise")
    with pytest.raises(ValueError, match="delta=1e-06 is used up by the plain guarantees"):
        ledger.guarantee(1e-6)


def test_assumptions_are_sentences():
    with pytest.raises(ValueError, match="a tuple of sentences, not one string"):
        guarantee(assumptions="one string")


def test_a_guarantee_says_its_relation_and_what_is_infinite():
    replaced = dpx.PrivacyGuarantee(1.0, 1e-6, privacy.REPLACE_ONE, "row", "test")
    assert str(replaced) == "(1, 1e-06)-DP, replace one row: test"
    assert str(guarantee()).startswith("(1, 1e-06)-DP, add or remove one user")
    assert json.loads(json.dumps(guarantee(math.inf).to_json()))["epsilon"] is None


def test_numbers_inside_an_event_are_checked():
    nested = GaussianDpEvent(math.nan)
    for event in (
        dp_accounting.SelfComposedDpEvent(nested, 3),
        dp_accounting.ComposedDpEvent([GaussianDpEvent(1.0), nested]),
    ):
        with pytest.raises(ValueError, match="noise_multiplier=nan"):
            guarantee(event=event)
    sampled = dp_accounting.PoissonSampledDpEvent(-0.1, GaussianDpEvent(1.0))
    with pytest.raises(ValueError, match=r"sampling_probability=-0\.1, which must be in \[0, 1\]"):
        guarantee(event=sampled)


def test_training_says_what_it_rests_on():
    settings = {"sampling_probability": 1.0, "steps": 2, "unit": "user"}
    found = privacy.dpsgd_guarantee(1.0, 1e-5, assumptions=("theirs",), **settings)
    assert found.assumptions == (
        "the number of users is public, and with it the sampling probability",
        "which users are sampled stays as secret as the noise",
        "theirs",
    )


@pytest.mark.parametrize("noise_multiplier", [0.05, 1.0, 300.0])
def test_a_budget_of_a_multiplier_has_no_larger_delta(noise_multiplier):
    epsilon, delta = privacy.gaussian_budget(noise_multiplier, 1e-3)
    assert epsilon > 0
    assert delta <= 1e-3
    found = dpx.gaussian_noise_multiplier(epsilon, delta)
    assert found == pytest.approx(noise_multiplier, rel=1e-6)


def test_a_sample_that_is_cut_off_is_priced_for_one_record_more():
    event = privacy.dpsgd_event(
        1.0, sampling_probability=0.1, steps=3, num_examples=50, max_batch_size=9
    )
    assert event.event.dataset_size == 51  # type: ignore[attr-defined]


def test_a_small_epsilon_at_a_large_delta_is_tight():
    """Rounding of losses as coarse as for a first look would say 5 % more."""
    settings = {"sampling_probability": 0.2, "steps": 3}
    found = dpx.dpsgd_epsilon(4.0, 2e-2, **settings)
    event = privacy.dpsgd_event(4.0, **settings)
    assert 1e-3 < found < 0.1
    fine = PLDAccountant(value_discretization_interval=1e-4).compose(event)
    assert found == pytest.approx(fine.get_epsilon(2e-2), rel=5e-3)


@pytest.mark.slow
def test_a_cached_multiplier_with_a_thousandth_too_little_noise_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    budget = {"sampling_probability": 0.05, "steps": 100, "accountant": "rdp"}
    monkeypatch.setattr(_cache, "_known", {})
    first = dpx.calibrate_dpsgd(2.0, 1e-5, **budget)
    (entry,) = _storage.user_cache().glob("*.json")
    entry.write_text(json.dumps({**json.loads(entry.read_text()), "value": 0.999 * first}))
    monkeypatch.setattr(_cache, "_known", {})
    assert dpx.calibrate_dpsgd(2.0, 1e-5, **budget) == first
    assert dpsgd.dpsgd_epsilon(0.999 * first, 1e-5, **budget) > 2.0


def test_rounding_of_compositions_is_in_the_risk(monkeypatch):
    event = privacy.dpsgd_event(3.0, sampling_probability=0.01, steps=2)
    found = []
    for delta in (0.0, 1e-3):
        monkeypatch.setattr(risk, "_known", {})
        monkeypatch.setattr(composition.Plan, "rounding", delta)
        found.append(guarantee(0.01, 1e-5, event=event).risk())
    assert found[0].tpr_at_1_percent + 9e-4 < found[1].tpr_at_1_percent
    assert found[0].mu < found[1].mu
