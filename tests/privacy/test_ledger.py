"""Guarantees and their compositions: what they say, and what they refuse."""

import json
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    ZCDpEvent,
    dp_event,
)
from dp_accounting.pld import PLDAccountant

import dpx
from dpx import privacy
from dpx.privacy import composition, risk
from dpx.privacy.allocation import AllocatedGaussianDpEvent

STEPS = {"sampling_probability": 0.1, "steps": 3}


def guarantee(
    epsilon=1.0, delta=1e-6, *, relation=privacy.ADD_OR_REMOVE_ONE, unit="user", assumptions=("a",),
    event=None,
):  # fmt: skip
    return dpx.PrivacyGuarantee(epsilon, delta, relation, unit, "test", assumptions, event)


def total(*spent, delta=1e-5):
    """The composition of releases, each under a label of its own."""
    ledger = dpx.Ledger()
    for number, each in enumerate(spent):
        ledger.spend(each, f"release {number}")
    return ledger.guarantee(delta)


def test_gaussians_add_up_exactly():
    found = total(*(guarantee(event=GaussianDpEvent(m)) for m in (2.0, 3.0, 6.0)))
    together = 1 / math.sqrt(1 / 4 + 1 / 9 + 1 / 36)
    assert found.epsilon == pytest.approx(dpx.gaussian_epsilon(together, 1e-5), rel=1e-9)
    assert "μ²" in found.mechanism
    # Of replacements by their own sensitivity.
    event = GaussianDpEvent(dpx.gaussian_noise_multiplier(1.0, 1e-5))
    replaced = guarantee(event=event, relation=privacy.REPLACE_ONE)
    assert total(replaced).epsilon == pytest.approx(1.0)


@pytest.mark.slow
def test_dpsgd_composes_with_gaussians_and_plain():
    settings = {"sampling_probability": 0.1, "steps": 10}
    run = privacy.dpsgd_guarantee(1.0, 1e-5, unit="user", **settings)
    release = guarantee(event=GaussianDpEvent(5.0))
    oracle = PLDAccountant().compose(run.event).compose(release.event)
    composed = total(run, release)
    assert composed.epsilon == pytest.approx(oracle.get_epsilon(1e-5), rel=1e-3)
    assert "privacy loss distributions" in composed.mechanism
    mixed = total(run, guarantee(0.5, 4e-6))
    alone = dpx.dpsgd_epsilon(1.0, 6e-6, **settings)
    assert mixed.epsilon == pytest.approx(alone + 0.5, rel=1e-6)
    assert "plain" in mixed.mechanism


def test_plain_guarantees_add_up():
    """ε and δ both, beside events, which get what is left of δ."""
    one, two, event = guarantee(0.5, 4e-6), guarantee(0.75, 5e-6), GaussianDpEvent(5.0)
    assert total(one, two, delta=9e-6).epsilon == 1.25
    for spent, delta in (((one, two), 8.9e-6), ((one, two, event), 9e-6)):
        with pytest.raises(ValueError, match=f"delta={delta} is used up by the plain guarantees"):
            total(*spent, delta=delta)
    bare = dpx.gaussian_epsilon(5.0, 1e-6)
    assert bare > 0.1
    assert total(one, two, event).epsilon == pytest.approx(1.25 + bare, rel=1e-6)


def test_without_events_there_may_be_no_delta():
    pure = [guarantee(epsilon, 0.0) for epsilon in (0.5, 0.75)]
    assert (total(*pure, delta=0.0).epsilon, total(*pure, delta=0.0).delta) == (1.25, 0.0)
    for spent, named in ((GaussianDpEvent(5.0), "must be in"), (guarantee(), "used up")):
        with pytest.raises(ValueError, match=rf"delta=0\.0 .*{named}"):
            total(*pure, spent, delta=0.0)


def test_an_event_that_no_accountant_knows_counts_as_plain():
    sampled = PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))
    found = total(guarantee(event=ZCDpEvent(0.1)), sampled)
    alone = total(sampled, delta=9e-6)
    assert found.epsilon == pytest.approx(1 + alone.epsilon, rel=1e-9)
    assert "1 plain" in found.mechanism
    with pytest.raises(ValueError, match=r"ZCDpEvent.* spend a PrivacyGuarantee"):
        total(ZCDpEvent(0.1))


@pytest.mark.parametrize(
    "event",
    [
        NonPrivateDpEvent(),
        LaplaceDpEvent(0.0),
        dp_event.DiscreteLaplaceDpEvent(0.0, 1),
        dp_event.MixtureOfGaussiansDpEvent(0.0, [1.0], [1.0]),
    ],
    ids=lambda event: type(event).__name__,
)
def test_what_has_no_noise_has_no_guarantee(event):
    """dp-accounting notes it beside the distribution, which alone says that it costs nothing."""
    sampled = PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))
    for spent in (event, ComposedDpEvent([sampled, event]), guarantee(event=event)):
        assert math.isinf(total(spent).epsilon)
    assert guarantee(event=event).risk() == (math.inf, 1.0)
    with pytest.raises(ValueError, match="the other release alone costs inf"):
        dpx.calibrate_dpsgd(1.0, 1e-5, **STEPS, beside=event)


def test_a_total_with_a_plain_guarantee_has_no_event():
    """Its event would stand for a part of it, and a ledger that it is spent in would forget the rest."""
    noise, plain = guarantee(event=GaussianDpEvent(2.0)), guarantee(0.5)
    assert total(noise).event == GaussianDpEvent(2.0)
    both = total(noise, plain)
    assert both.event is None
    assert total(both).epsilon == both.epsilon


def test_a_total_assumes_what_each_of_its_parts_does():
    parts = (guarantee(assumptions=words) for words in (("a",), ("b", "a"), ("c",)))
    assert total(*parts).assumptions == ("a", "b", "c")


def test_units_are_compared_with_all_that_was_spent_before():
    spent = [guarantee(), GaussianDpEvent(1.0)]
    for order in (spent, spent[::-1]):
        with pytest.raises(ValueError, match="unit='name' differs from the ledger's 'user'"):
            total(*order, guarantee(unit="name"))
        with pytest.raises(ValueError, match="neighboring"):
            total(*order, guarantee(relation=privacy.REPLACE_ONE))
    with pytest.raises(ValueError, match="spend a PrivacyGuarantee"):
        total(1.0)


def test_a_total_speaks_of_the_relation_of_its_parts():
    """Amplification by sampling is accounted for adding or removing a record, and for nothing else."""
    sampled = privacy.dpsgd_event(1.0, sampling_probability=0.01, steps=5)
    replaced = total(*[guarantee(0.5, relation=privacy.REPLACE_ONE, event=sampled)] * 2)
    assert (replaced.neighboring, replaced.epsilon) == (privacy.REPLACE_ONE, 1.0)
    assert "2 plain" in replaced.mechanism
    removed = total(*[guarantee(0.5, event=sampled)] * 2)
    assert removed.neighboring == privacy.ADD_OR_REMOVE_ONE
    ten_steps = dpx.dpsgd_epsilon(1.0, 1e-5, sampling_probability=0.01, steps=10)
    assert removed.epsilon == pytest.approx(ten_steps, rel=1e-3)
    assert "plain" not in removed.mechanism


def test_bare_events_and_nothing():
    assert total(GaussianDpEvent(2.0)).unit == "record"
    assert total().epsilon == total(dp_accounting.NoOpDpEvent()).epsilon == 0
    ledger = dpx.Ledger().spend(guarantee(0.5), "query").spend(guarantee(0.25), "query")
    assert [(label, spent.epsilon) for label, spent in ledger.releases] == [
        ("query", 0.5),
        ("query", 0.25),
    ]


def test_infinite_noise_costs_nothing_beside_other_releases():
    finite, silent = (PoissonSampledDpEvent(0.1, GaussianDpEvent(m)) for m in (1.0, math.inf))
    assert total(silent, finite).epsilon == pytest.approx(total(finite).epsilon, rel=1e-4)
    twice = SelfComposedDpEvent(ComposedDpEvent([finite, silent]), 2)
    want = total(SelfComposedDpEvent(finite, 2)).epsilon
    assert total(twice).epsilon == pytest.approx(want, rel=1e-3)


def test_assumptions_are_sentences():
    with pytest.raises(ValueError, match="a tuple of sentences, not one string"):
        guarantee(assumptions="one string")
    with pytest.raises(ValueError, match="assumptions='abc' must be a tuple of sentences"):
        privacy.dpsgd_guarantee(1.0, 1e-5, **STEPS, unit="record", assumptions="abc")


def test_a_guarantee_is_a_value_and_says_what_it_is():
    value = guarantee(event=GaussianDpEvent(1.0))
    assert value == guarantee(event=GaussianDpEvent(1.0))
    assert value.assuming("b", "a").assumptions == ("a", "b")
    assert json.loads(json.dumps(value.to_json()))["neighboring"] == "add_or_remove_one"
    replaced = dpx.PrivacyGuarantee(1.0, 1e-6, privacy.REPLACE_ONE, "row", "test")
    assert str(replaced) == "(1, 1e-06)-DP, replace one row: test"
    assert str(guarantee()).startswith("(1, 1e-06)-DP, add or remove one user")
    assert json.loads(json.dumps(guarantee(math.inf).to_json()))["epsilon"] is None
    with pytest.raises(ValueError, match="neighboring"):
        guarantee(relation="add_or_remove")


def test_what_is_no_event_is_refused_and_numbers_inside_one_are_checked():
    nested = GaussianDpEvent(math.nan)
    for event, named in (
        (3, "event=3 must be a DpEvent"),
        (SelfComposedDpEvent(nested, 3), "noise_multiplier=nan"),
        (GaussianDpEvent(None), "event: noise_multiplier=None must be a number"),
        (SelfComposedDpEvent(GaussianDpEvent(1.0), None), "count=None must be a number"),
        (
            dp_event.MixtureOfGaussiansDpEvent(1.0, [0.0, "1"], [0.5, 0.5]),
            "sensitivities='1' must be a number",
        ),
        (ComposedDpEvent([GaussianDpEvent(1.0), nested]), "noise_multiplier=nan"),
        (
            PoissonSampledDpEvent(-0.1, GaussianDpEvent(1.0)),
            r"sampling_probability=-0\.1, which must be in \[0, 1\]",
        ),
        # Half a release would cost less than one, and an epoch has no more releases than steps.
        (SelfComposedDpEvent(GaussianDpEvent(1.0), 0.5), r"count=0\.5, which must be a whole"),
        (AllocatedGaussianDpEvent(1.0, 3, 5), r"released=5, which must be in \[1, 3\]"),
        (AllocatedGaussianDpEvent(1.0, 3, 0), r"released=0, which must be in \[1, 3\]"),
    ):
        with pytest.raises(ValueError, match=named):
            guarantee(event=event)
    ledger = dpx.Ledger().spend(
        dp_event.MixtureOfGaussiansDpEvent(1e-300, [0.0, 1.0], [0.5, 0.5]), "x"
    )
    with pytest.raises(ValueError, match="a number that privacy loss distributions do not take"):
        ledger.guarantee(1e-5)
    sampled = PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))
    counts = SelfComposedDpEvent(sampled, 2), SelfComposedDpEvent(sampled, np.float16(2.0))
    assert total(counts[0]).epsilon == total(counts[1]).epsilon


def test_training_says_what_it_rests_on():
    settings = {"sampling_probability": 1.0, "steps": 2, "unit": "user"}
    found = privacy.dpsgd_guarantee(1.0, 1e-5, assumptions=("theirs",), **settings)
    assert found.assumptions == (
        "the number of users is public, and with it the sampling probability",
        "which users are sampled stays as secret as the noise",
        "theirs",
    )


@pytest.mark.parametrize(
    "event",
    [
        privacy.dpsgd_event(2.0, **STEPS, num_examples=12, max_batch_size=4),
        privacy.dpsgd_event(1.0, **STEPS, sampling="allocation"),
        dp_accounting.dp_event.RepeatAndSelectDpEvent(
            PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0)), 9, math.inf
        ),
    ],
)
def test_a_saved_guarantee_keeps_its_event(tmp_path, event):
    spent = guarantee(event=event)
    dpx.save(dpx.training.Trained({"w": np.ones(2)}, spent, []), tmp_path / "trained")
    assert dpx.load(tmp_path / "trained").guarantee == spent


def test_rounding_of_compositions_is_in_the_risk(monkeypatch):
    event = privacy.dpsgd_event(3.0, sampling_probability=0.01, steps=2)
    found = []
    for delta in (0.0, 1e-3):
        monkeypatch.setattr(risk, "_known", {})
        monkeypatch.setattr(composition.Plan, "rounding", delta)
        found.append(guarantee(0.01, 1e-5, event=event).risk())
    assert found[0].tpr_at_1_percent + 9e-4 < found[1].tpr_at_1_percent
    assert found[0].mu < found[1].mu
