"""The price of a selection, against the exact law of what is selected and against dp-accounting."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from scipy import stats

import dpx
from dpx.privacy import (
    ADD_OR_REMOVE_ONE,
    REPLACE_ONE,
    PrivacyGuarantee,
    Trials,
    dpsgd_guarantee,
    selected_guarantee,
    selected_rdp,
)
from dpx.privacy.allocation import AllocatedGaussianDpEvent

ORDERS = np.array([1 + x / 10 for x in range(1, 100)] + list(range(11, 64)) + [128, 256, 512])
LAWS = [
    Trials("geometric", 1),
    Trials("geometric", 6.5),
    Trials("poisson", 1),
    Trials("poisson", 9),
]


def generating(trials, x):
    """E[x^K]."""
    if trials.law == "poisson":
        return np.exp(trials.mean * (x - 1))
    return (x / trials.mean) / (1 - (1 - 1 / trials.mean) * x)


def selected(trials, law):
    """The law of the largest of K outputs 0, 1, ..., and behind it that of none."""
    below = generating(trials, np.clip(np.cumsum(law), 0, 1))
    none = generating(trials, 0.0)
    return np.append(np.diff(below, prepend=none), none)


def divergence(order, p, q):
    return float(np.logaddexp.reduce(order * np.log(p) - (order - 1) * np.log(q)) / (order - 1))


def curve(p, q):
    return np.array([max(divergence(o, p, q), divergence(o, q, p)) for o in ORDERS])


def laws_of_outputs(seed):
    """What a trial puts out on two neighbours: a mixture of three candidates, and each candidate."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(7), size=3) + 1e-3
    q = p * np.exp(rng.uniform(-1, 1, size=p.shape) * [[0.1], [0.5], [1.5]])
    p, q = (x / x.sum(axis=1, keepdims=True) for x in (p, q))
    return p, q


@pytest.mark.quick_cases("geometric 1")
@pytest.mark.parametrize("trials", LAWS, ids=lambda t: f"{t.law} {t.mean:g}")
def test_the_exact_law_of_what_is_selected_never_costs_more(trials):
    for seed in range(20):
        p, q = laws_of_outputs(seed)
        curves = np.array([curve(*pair) for pair in zip(p, q, strict=True)])
        worst = curves.max(axis=0)
        stated = selected_rdp(ORDERS, worst, trials)
        # The trial is a mixture over the candidates, drawn by public weights.
        exact = [selected(trials, x.mean(axis=0)) for x in (p, q)]
        exact = [x[x > 0] for x in exact]
        assert np.isclose(exact[0].sum(), 1)
        assert (curve(*exact) <= stated + 1e-9).all()
        for delta in (1e-6, 1e-2):
            epsilon = compute_epsilon(ORDERS, stated, delta)[0]
            for a, b in (exact, exact[::-1]):
                assert np.maximum(a - math.exp(epsilon) * b, 0).sum() <= delta


@pytest.mark.quick_cases("poisson 9", "geometric 1")
@pytest.mark.parametrize("trials", LAWS, ids=lambda t: f"{t.law} {t.mean:g}")
def test_agrees_with_dp_accounting(trials):
    one = dpsgd(1.1, 0.01, 500)
    price = selected_guarantee([one], trials, score_noise_multiplier=3.0)
    base = dp_accounting.ComposedDpEvent([one.event, dp_accounting.GaussianDpEvent(3.0)])
    event = dp_event.RepeatAndSelectDpEvent(base, trials.mean, trials.shape)
    expected = RdpAccountant().compose(event).get_epsilon(1e-6)
    assert price.guarantee.epsilon == pytest.approx(expected, rel=1e-9)
    assert price.guarantee.event == event
    assert price.trial == pytest.approx(RdpAccountant().compose(base).get_epsilon(1e-6))
    count = math.ceil(trials.mean)
    composed = RdpAccountant().compose(dp_accounting.SelfComposedDpEvent(base, count))
    assert price.composed == pytest.approx(composed.get_epsilon(1e-6))


def dpsgd(noise, probability, steps, delta=1e-6, unit="user"):
    settings = {"sampling_probability": probability, "steps": steps, "unit": unit}
    return dpsgd_guarantee(noise, delta, accountant="rdp", **settings)


def test_the_largest_divergence_counts_at_every_order():
    """Of two candidates whose divergences cross, neither alone is the price, nor the larger of the two ε."""
    few, many = dpsgd(0.8, 0.001, 2000), dpsgd(4.0, 0.05, 500)
    trials = Trials("geometric", 4)
    alone = [selected_guarantee([c], trials, score_noise_multiplier=20.0) for c in (few, many)]
    both = selected_guarantee([few, many], trials, score_noise_multiplier=20.0)
    assert both.guarantee.epsilon > 1.15 * max(price.guarantee.epsilon for price in alone)
    assert both.guarantee.event is None
    assert both.trial >= max(price.trial for price in alone)
    other = selected_guarantee([many, few], trials, score_noise_multiplier=20.0)
    assert other.guarantee.epsilon == both.guarantee.epsilon
    # The same candidate several times, and one that is below it everywhere, change nothing.
    below = dpsgd(4.0, 0.05, 200)
    more = selected_guarantee([many, below, many], trials, score_noise_multiplier=20.0)
    assert more.guarantee.epsilon == alone[1].guarantee.epsilon
    assert more.guarantee.event == alone[1].guarantee.event


def test_the_ledger_composes_a_selection_with_other_releases():
    one = dpsgd(1.1, 0.01, 500)
    spent = selected_guarantee([one], LAWS[1], score_noise_multiplier=3.0).guarantee
    alone = dpx.Ledger().spend(spent, "selected").guarantee(1e-6)
    assert alone.epsilon == spent.epsilon
    assert "Rényi" in alone.mechanism
    both = dpx.Ledger().spend(spent, "selected").spend(one, "one more").guarantee(1e-6)
    expected = RdpAccountant().compose(spent.event).compose(one.event).get_epsilon(1e-6)
    assert both.epsilon == pytest.approx(expected)
    assert spent.epsilon < both.epsilon < spent.epsilon + one.epsilon
    ledger = dpx.Ledger().spend(spent, "selected").spend(dp_accounting.UnsupportedDpEvent(), "more")
    with pytest.raises(ValueError, match="without its event"):
        ledger.guarantee(1e-6)


@pytest.mark.parametrize("trials", LAWS, ids=lambda t: f"{t.law} {t.mean:g}")
def test_numbers_of_trials_follow_their_law(trials):
    rng = np.random.default_rng(0)
    drawn = np.array([trials.draw(rng) for _ in range(4000)])
    values = np.arange(0, 40)
    if trials.law == "poisson":
        expected = stats.poisson(trials.mean).pmf(values)
    else:
        expected = stats.geom(1 / trials.mean).pmf(values)
        assert (drawn >= 1).all()
    counts = np.bincount(drawn, minlength=len(values))[: len(values)]
    errors = np.sqrt(len(drawn) * expected * (1 - expected)) + 1
    assert (np.abs(counts - len(drawn) * expected) < 5 * errors).all()


class Fixed:
    """A generator of which the next bytes are known."""

    def __init__(self, number):
        self.number = number

    def bytes(self, count):
        return self.number.to_bytes(32, "big")[:count]


def test_numbers_of_trials_do_not_end_where_those_of_numpy_do():
    """At 2⁻²⁵⁶ of the law: NumPy's geometric ends at e^(−44), or 2⁻⁵³ where the mean is below 3."""
    last = Fixed(2**256 - 1)
    assert Trials("geometric", 2).draw(last) in (256, 257)  # beyond k there is 2^(−k)
    assert Trials("geometric", 100).draw(last) == pytest.approx(256 * math.log(2) * 100, rel=0.01)
    many = Trials("poisson", 9).draw(last)
    assert stats.poisson(9).logsf(many - 2) > -256 * math.log(2) > stats.poisson(9).logsf(many)
    assert Trials("poisson", 9).draw(Fixed(0)) == 0
    assert Trials("geometric", 9).draw(Fixed(0)) == 1
    assert Trials("geometric", 1).draw(last) == 1


def stated(event=None, relation=ADD_OR_REMOVE_ONE):
    return PrivacyGuarantee(1, 1e-6, relation, "user", "by hand", (), event)


ONE = dpsgd(1, 0.1, 9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"candidates": []}, "candidates="),
        ({"candidates": [ONE, dpsgd(1, 0.1, 9, delta=1e-5)]}, "delta=1e-05"),
        ({"candidates": [ONE, dpsgd(1, 0.1, 9, unit="row")]}, "unit='row'"),
        ({"candidates": [stated()]}, "event=None"),
        ({"candidates": [stated(ONE.event, REPLACE_ONE)]}, "neighboring=replace_one"),
        ({"candidates": [stated(dp_accounting.UnsupportedDpEvent())]}, "Rényi"),
        ({"candidates": [stated(AllocatedGaussianDpEvent(1.0, 10, 3))]}, "Rényi"),
        ({"score_noise_multiplier": 0}, "score_noise_multiplier=0"),
    ],
)
def test_wrong_calls_are_named(change, words):
    right = {"candidates": [ONE], "score_noise_multiplier": 1.0}
    with pytest.raises(ValueError, match=words):
        selected_guarantee(trials=LAWS[0], **right | change)


@pytest.mark.parametrize(
    ("law", "mean", "words"),
    [
        ("fixed", 3, "law='fixed'"),
        ("poisson", 0.5, "mean=0.5"),
        ("geometric", math.inf, "mean=inf"),
    ],
)
def test_laws_that_are_not_covered_are_named(law, mean, words):
    with pytest.raises(ValueError, match=words):
        Trials(law, mean)


def test_a_selection_assumes_what_its_candidates_do_and_that_the_rest_stays_secret():
    event = dp_accounting.GaussianDpEvent(4.0)
    candidates = [stated(event).assuming(*words) for words in (("a",), ("b", "a"))]
    found = selected_guarantee(candidates, LAWS[1], score_noise_multiplier=3.0).guarantee
    *theirs, fixed, secret = found.assumptions
    assert theirs == ["a", "b"]
    assert fixed.endswith("were fixed without a look at the data")
    assert secret == (
        "all but the selected trial stays secret: the other trials, how many there were, scores without "
        "noise, and how long it took"
    )
