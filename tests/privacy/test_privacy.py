import json
import math
import time

import dp_accounting
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

mpmath.mp.dps = 60


def exact_delta(noise_multiplier, epsilon, compositions=1):
    """Balle & Wang's Theorem 8 as printed, in 60 digits."""
    mu = mpmath.sqrt(compositions) / mpmath.mpf(noise_multiplier)
    epsilon = mpmath.mpf(epsilon)

    def cdf(x):
        return mpmath.erfc(-x / mpmath.sqrt(2)) / 2

    return cdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * cdf(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0, 10.0, 1e3, 1e6, 1e8])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1, 0.5])
def test_gaussian_is_exact_in_delta(epsilon, delta):
    multiplier = dpx.gaussian_noise_multiplier(epsilon, delta)
    assert float(exact_delta(multiplier, epsilon)) == pytest.approx(delta, rel=1e-8)
    assert dpx.gaussian_epsilon(multiplier, delta) == pytest.approx(epsilon, rel=1e-7)


@pytest.mark.parametrize(
    ("compositions", "epsilon", "expected"), [(38, 1.0, 23.0), (38, 0.2, 100.5), (5, 1.0, 8.34)]
)
def test_gaussian_compositions(compositions, epsilon, expected):
    multiplier = dpx.gaussian_noise_multiplier(epsilon, 1e-5, compositions=compositions)
    assert multiplier == pytest.approx(expected, rel=1e-3)
    delta = float(exact_delta(multiplier, epsilon, compositions))
    assert delta == pytest.approx(1e-5, rel=1e-8)


def test_gaussian_limits():
    assert dpx.gaussian_epsilon(0.0, 1e-5) == math.inf
    assert dpx.gaussian_epsilon(1e9, 1e-5) == 0.0
    assert dpx.gaussian_noise_multiplier(1e8, 1e-5) < 1e-4


def test_gaussian_by_hypothesis_testing():
    """The best test of N(0, m²) against N(1, m²) reaches the claimed δ and no more."""
    multiplier = dpx.gaussian_noise_multiplier(1.0, 1e-2)
    thresholds = np.linspace(-10, 20, 4001)
    positives = stats.norm.sf(thresholds, 1, multiplier)
    advantage = positives - math.e * stats.norm.sf(thresholds, 0, multiplier)
    assert advantage.max() == pytest.approx(1e-2, rel=1e-4)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: dpx.gaussian_noise_multiplier(0, 1e-5), "epsilon"),
        (lambda: dpx.gaussian_noise_multiplier(float("nan"), 1e-5), "epsilon"),
        (lambda: dpx.gaussian_noise_multiplier(1, 0), "delta"),
        (lambda: dpx.gaussian_noise_multiplier(1, 1e-5, compositions=0), "compositions"),
        (lambda: dpx.gaussian_epsilon(-1, 1e-5), "noise_multiplier"),
        (lambda: dpx.calibrate_dpsgd(1, 1e-5, sampling_probability=1.5, steps=1), "sampling"),
        (lambda: dpx.calibrate_dpsgd(1, 1e-5, sampling_probability=0.5, steps=0), "steps"),
        (
            lambda: dpx.dpsgd_epsilon(
                1, 1e-5, sampling_probability=0.5, steps=1, accountant="moments"
            ),
            "accountant",
        ),
        (lambda: dpx.calibrate_dpsgd(3, 0.9, sampling_probability=0.064, steps=6), "delta=0.9"),
        (lambda: dpx.calibrate_dpsgd(3, 1e-300, sampling_probability=0.064, steps=6), "1e-12"),
        (lambda: dpx.dpsgd_epsilon(1, 1e-13, sampling_probability=0.064, steps=6), "1e-12"),
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
    settings = {"sampling_probability": 0.064, "steps": 6}
    assert dpx.dpsgd_epsilon(1.0, 0.1, **settings) == 0
    assert dpx.dpsgd_epsilon(0.0, 0.1, **settings) == math.inf
    assert dpx.dpsgd_epsilon(1.0, 1e-12, **settings) == pytest.approx(4.977, rel=1e-3)
    for delta in (1e-12, 0.1):
        multiplier = dpx.calibrate_dpsgd(3.0, delta, **settings)
        assert 0.999 * 3.0 < dpx.dpsgd_epsilon(multiplier, delta, **settings) <= 3.0


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


@pytest.mark.slow
def test_cache_is_fast_and_optional(tmp_path, monkeypatch):
    settings = {"sampling_probability": 0.02, "steps": 50, "accountant": "rdp"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = dpx.calibrate_dpsgd(1.0, 1e-5, **settings)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        assert dpx.calibrate_dpsgd(1.0, 1e-5, **settings) == first
        took.append(time.perf_counter() - began)
    assert min(took) < 0.05
    (entry,) = _storage.user_cache().glob("*.json")
    for corrupt in ("", "{", '{"key": 1}', '{"key": "x", "value": "y"}', "[]", "\xff"):
        entry.write_text(corrupt, encoding="latin-1")
        forget(monkeypatch)
        assert dpx.calibrate_dpsgd(1.0, 1e-5, **settings) == first
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    forget(monkeypatch)
    assert dpx.calibrate_dpsgd(1.0, 1e-5, **settings) == first


def forget(monkeypatch):
    """As another process would find the cache."""
    monkeypatch.setattr(_cache, "_known", {})


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("beside", [None, GaussianDpEvent(4.0)])
def test_a_cached_multiplier_is_checked_before_it_is_used(
    tmp_path, monkeypatch, accountant, beside
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    budget = {"sampling_probability": 0.05, "steps": 100, "accountant": accountant}
    forget(monkeypatch)
    first = dpx.calibrate_dpsgd(2.0, 1e-5, beside=beside, **budget)
    (entry,) = _storage.user_cache().glob("*.json")
    written = json.loads(entry.read_text())
    # Too little noise breaks the guarantee, too much the promise of at least 0.999 ε.
    for edited in (0.3, 0.97 * first, 1.1 * first, 1e9):
        entry.write_text(json.dumps({**written, "value": edited}))
        forget(monkeypatch)
        assert dpx.calibrate_dpsgd(2.0, 1e-5, beside=beside, **budget) == first
        assert json.loads(entry.read_text())["value"] == first


def test_a_cached_multiplier_costs_one_evaluation_and_none_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    evaluated, accounted = [], calibration.accounted
    monkeypatch.setattr(
        calibration, "accounted", lambda *args: (evaluated.append(args), accounted(*args))[1]
    )
    counts = []
    for _ in range(2):
        forget(monkeypatch)
        for _ in range(2):
            evaluated.clear()
            dpx.calibrate_dpsgd(2.0, 1e-5, sampling_probability=0.05, steps=100)
            counts.append(len(evaluated))
    assert counts[0] > 3
    assert counts[1:] == [0, 1, 0]


def test_a_ledger_keeps_releases_of_one_label_apart():
    ledger = dpx.Ledger().spend(guarantee(0.5), "query").spend(guarantee(0.25), "query")
    assert [(label, spent.epsilon) for label, spent in ledger.releases] == [
        ("query", 0.5),
        ("query", 0.25),
    ]


def guarantee(epsilon=1.0, delta=1e-6, event=None, unit="user", relation=None):
    relation = relation or privacy.ADD_OR_REMOVE_ONE
    return dpx.PrivacyGuarantee(epsilon, delta, relation, unit, "test", ("a",), event)


def test_ledger_adds_gaussians_exactly():
    ledger = dpx.Ledger()
    for index, multiplier in enumerate((2.0, 3.0, 6.0)):
        ledger.spend(guarantee(event=GaussianDpEvent(multiplier)), f"release {index}")
    together = 1 / math.sqrt(1 / 4 + 1 / 9 + 1 / 36)
    composed = ledger.guarantee(1e-5)
    assert composed.epsilon == pytest.approx(dpx.gaussian_epsilon(together, 1e-5), rel=1e-9)
    assert "μ²" in composed.mechanism
    assert composed.assumptions == ("a",)


def test_ledger_composes_replace_one_gaussians_by_their_own_sensitivity():
    event = GaussianDpEvent(dpx.gaussian_noise_multiplier(1.0, 1e-5))
    spent = guarantee(event=event, relation=privacy.REPLACE_ONE)
    assert dpx.Ledger().spend(spent, "gram").guarantee(1e-5).epsilon == pytest.approx(1.0)


@pytest.mark.slow
def test_ledger_composes_dpsgd_with_gaussians_and_plain():
    run = privacy.dpsgd_guarantee(1.0, 1e-5, sampling_probability=0.1, steps=10, unit="user")
    release = guarantee(event=GaussianDpEvent(5.0))
    composed = dpx.Ledger().spend(run, "run").spend(release, "release").guarantee(1e-5)
    oracle = PLDAccountant().compose(run.event).compose(release.event)
    assert composed.epsilon == pytest.approx(oracle.get_epsilon(1e-5), rel=1e-3)
    assert "privacy loss distributions" in composed.mechanism
    plain = guarantee(0.5, 4e-6)
    mixed = dpx.Ledger().spend(run, "run").spend(plain, "plain").guarantee(1e-5)
    alone = dpx.dpsgd_epsilon(1.0, 6e-6, sampling_probability=0.1, steps=10)
    assert mixed.epsilon == pytest.approx(alone + 0.5, rel=1e-6)
    assert "plain" in mixed.mechanism
    with pytest.raises(ValueError, match="used up"):
        dpx.Ledger().spend(plain, "plain").guarantee(1e-6)


def test_plain_guarantees_add_up():
    """ε and δ both, beside events, which get what is left of δ."""
    one, two, event = guarantee(0.5, 4e-6), guarantee(0.75, 5e-6), GaussianDpEvent(5.0)
    both = dpx.Ledger().spend(one, "one").spend(two, "two")
    assert both.guarantee(9e-6).epsilon == 1.25
    with pytest.raises(ValueError, match="used up"):
        both.guarantee(8.9e-6)
    bare = dpx.gaussian_epsilon(5.0, 1e-6)
    assert bare > 0.1
    assert both.spend(event, "bare").guarantee(1e-5).epsilon == pytest.approx(1.25 + bare, rel=1e-6)


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


def test_ledger_takes_events_and_refuses_mixtures():
    composed = dpx.Ledger().spend(GaussianDpEvent(2.0), "bare").guarantee(1e-5)
    assert composed.unit == "record"
    ledger = dpx.Ledger().spend(guarantee(), "a")
    with pytest.raises(ValueError, match="unit"):
        ledger.spend(guarantee(unit="name"), "b")
    with pytest.raises(ValueError, match="neighboring"):
        ledger.spend(guarantee(relation=privacy.REPLACE_ONE), "b")
    with pytest.raises(ValueError, match="spend a PrivacyGuarantee"):
        ledger.spend(1.0, "b")  # type: ignore[arg-type]


def test_guarantee_is_a_value():
    value = guarantee(event=GaussianDpEvent(1.0))
    assert value == guarantee(event=GaussianDpEvent(1.0))
    assert value.assuming("b", "a").assumptions == ("a", "b")
    assert json.loads(json.dumps(value.to_json()))["neighboring"] == "add_or_remove_one"
    for field, bad in (("epsilon", -1), ("delta", 1.0)):
        with pytest.raises(ValueError, match=field):
            guarantee(**{field: bad})
    with pytest.raises(ValueError, match="neighboring"):
        dpx.PrivacyGuarantee(1.0, 0.0, "add_or_remove", "user", "m")  # type: ignore[arg-type]


def test_nothing_spent_is_free():
    assert dpx.Ledger().guarantee(1e-5).epsilon == 0
    no_op = dp_accounting.NoOpDpEvent()
    assert dpx.Ledger().spend(no_op, "nothing").guarantee(1e-5).epsilon == 0


def truncated_delta(epsilon, noise, others, probability, most, *, joins):
    """δ of one step with and without a record of gradient 1 beside others of −1, by integration."""
    grid = np.linspace(-most - 12 * noise, most + 12 * noise, 40_001)
    without, with_it = np.zeros_like(grid), np.zeros_like(grid)
    for count, weight in enumerate(stats.binom.pmf(np.arange(others + 1), others, probability)):
        alone = stats.norm.pdf(grid, -min(count, most), noise)
        without += weight * alone
        inside = min(1, most / (count + 1))
        kept = stats.norm.pdf(grid, 1 - min(count, most - 1), noise)
        taken = probability * inside
        with_it += weight * (taken * kept + (1 - taken) * alone)
    first, second = (with_it, without) if joins else (without, with_it)
    excess = np.maximum(first - np.exp(epsilon) * second, 0)
    return float(excess.sum() * (grid[1] - grid[0]))


@pytest.mark.quick_cases("0.9")
@pytest.mark.parametrize("probability", [0.3, 0.9])
def test_samples_that_are_cut_off_cost_what_is_stated(probability):
    settings = {"sampling_probability": probability, "steps": 1}
    cut = {"num_examples": 5, "max_batch_size": 3}
    for delta in (1e-3, 1e-2, 0.1):
        epsilon = dpx.dpsgd_epsilon(1.0, delta, **settings, **cut)
        deltas = [
            truncated_delta(epsilon, 1.0, others, probability, 3, joins=joins)
            for others in (3, 4, 5)
            for joins in (True, False)
        ]
        assert max(deltas) <= delta * (1 + 1e-6)
    plain = dpx.dpsgd_epsilon(1.0, 0.1, **settings)
    worst = truncated_delta(plain, 1.0, 5, 0.9, 3, joins=True)
    assert (
        probability < 0.9 or worst > 0.1
    )  # Accounted as if nothing were cut off, it would cost more.


@pytest.mark.slow
def test_a_cut_that_hardly_happens_costs_hardly_anything():
    settings = {"sampling_probability": 0.01, "steps": 200}
    plain = dpx.dpsgd_epsilon(1.0, 1e-5, **settings)
    costs = [
        dpx.dpsgd_epsilon(1.0, 1e-5, num_examples=10_000, max_batch_size=most, **settings)
        for most in (160, 130, 110)
    ]
    assert costs[0] == pytest.approx(plain, rel=1e-3)
    assert plain < costs[1] < costs[2]
    chance = privacy.truncation_probability(10_000, sampling_probability=0.01, max_batch_size=130)
    assert chance == pytest.approx(stats.binom.sf(130, 10_000, 0.01))
    guarantee = privacy.dpsgd_guarantee(
        1.0, 1e-5, num_examples=10_000, max_batch_size=130, unit="record", **settings
    )
    assert "cut off at 130 records (with probability 0.0016 a step)" in guarantee.mechanism
    assert guarantee.epsilon == costs[1]


def test_cuts_need_the_number_of_records_and_privacy_loss_distributions():
    settings = {"sampling_probability": 0.01, "steps": 10}
    with pytest.raises(ValueError, match="max_batch_size=20 must come with num_examples"):
        dpx.dpsgd_epsilon(1.0, 1e-5, max_batch_size=20, **settings)
    cut = {"num_examples": 1000, "max_batch_size": 20, "accountant": "rdp"}
    for call in (dpx.dpsgd_epsilon, dpx.calibrate_dpsgd):
        with pytest.raises(ValueError, match="accountant='rdp' must be 'pld'"):
            call(1.0, 1e-5, **cut, **settings)
