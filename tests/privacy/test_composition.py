"""Privacy losses of many steps: upper bounds, near closed forms, in bounded memory."""

import math
import tracemalloc

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import stats

import dpx
from dpx import privacy
from dpx.privacy import calibration, composition
from dpx.privacy.events import pld_bound, pld_interval

# All records but one in 1e15 are in every sample, so that the closed form of the Gaussian mechanism holds.
NEARLY_ALL = 1 - 1e-15


@pytest.mark.quick_cases("33000-1.0-1e-05")
@pytest.mark.parametrize(
    ("steps", "mu", "delta"),
    [(33_000, 1.0, 1e-5), (10**5 + 7, 0.3, 1e-8), (10**6, 4.0, 1e-6), (10**6, 1.0, 2e-9)],
)
def test_many_steps_cost_hardly_more_than_in_closed_form(steps, mu, delta):
    multiplier = math.sqrt(steps) / mu
    exact = dpx.gaussian_epsilon(1 / mu, delta)
    settings = {"sampling_probability": NEARLY_ALL, "steps": steps}
    spent = privacy.dpsgd_guarantee(multiplier, delta, unit="record", **settings)
    assert 1 <= spent.epsilon / exact < 1.002
    if steps < 10**5:
        assert 1 <= spent.risk().mu / mu < 1.01
        assert 1 <= spent.risk("replace_one").mu / (2 * mu) < 1.05


def test_more_steps_than_memory_holds_are_refused():
    settings = {"sampling_probability": 1e-4, "steps": 10**8}
    with pytest.raises(ValueError, match=r"steps=100000000 must be at most 10000000.*'rdp'"):
        dpx.dpsgd_epsilon(100.0, 1e-6, **settings)
    spent = privacy.dpsgd_guarantee(100.0, 1e-6, accountant="rdp", unit="record", **settings)
    assert (
        spent.risk()
        == privacy.PrivacyGuarantee(
            spent.epsilon, 1e-6, "add_or_remove_one", "record", "plain"
        ).risk()
    )


@pytest.mark.slow
def test_every_use_of_every_part_counts():
    """Also where parts are repeated in what is repeated, and where they stand beside one that is sampled."""
    normal = dp_accounting.GaussianDpEvent(20.0)
    sampled = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(2.0))
    repeated = dp_accounting.SelfComposedDpEvent
    inner = dp_accounting.ComposedDpEvent([repeated(normal, 3), repeated(sampled, 4), normal])
    event = repeated(repeated(inner, 2), 5)
    alike = dp_accounting.ComposedDpEvent([repeated(normal, 40), repeated(sampled, 40)])
    theirs = PLDAccountant(value_discretization_interval=1e-4).compose(alike).get_epsilon(1e-5)
    losses = composition.composed(composition.plan(event, 1e-4))
    assert losses.get_epsilon_for_delta(1e-5) == pytest.approx(theirs, rel=1e-3)
    whole = dpx.Ledger().spend(repeated(normal, 40), "a").spend(repeated(sampled, 40), "b")
    ledger = dpx.Ledger().spend(event, "all of them")
    for found in (whole, ledger):
        assert found.guarantee(1e-5).epsilon == pytest.approx(theirs, rel=1e-3)


@pytest.mark.quick_cases("0.6-0.1-100-1e-05", "0.9-0.999-5-1e-05", "8.0-0.5-1000-1e-05")
@pytest.mark.parametrize(
    ("multiplier", "probability", "steps", "delta"),
    [
        (1.0, 0.01, 1000, 1e-6),
        (0.6, 0.1, 100, 1e-5),
        (3.0, 1e-3, 30_000, 1e-7),
        (0.4, 1e-4, 1000, 1e-6),
        (0.05, 0.1, 10, 1e-5),
        (8.0, 0.5, 1000, 1e-5),
        (0.9, 0.999, 5, 1e-5),
    ],
)
def test_it_is_what_dp_accounting_finds_at_once(multiplier, probability, steps, delta):
    event = privacy.dpsgd_event(multiplier, sampling_probability=probability, steps=steps)
    renyi = RdpAccountant().compose(event).get_epsilon(delta)
    interval = pld_interval(renyi, steps)
    losses = composition.composed(composition.plan(event, interval))
    theirs = PLDAccountant(value_discretization_interval=interval).compose(event)
    found = losses.get_epsilon_for_delta(delta)
    assert found == pytest.approx(theirs.get_epsilon(delta), rel=1e-6)
    assert found <= renyi
    # In either direction, not only in the worse one.
    for ours, other in (
        (losses._pmf_add, theirs._pld._pmf_add),
        (losses._pmf_remove, theirs._pld._pmf_remove),
    ):
        for epsilon in (0.0, 0.3 * found, found):
            want = other.get_delta_for_epsilon(epsilon)
            # Theirs has more mass than 1 where the grid is fine.
            assert ours.get_delta_for_epsilon(epsilon) == pytest.approx(want, rel=1e-3, abs=1e-13)


@pytest.mark.quick_cases(
    "0.05-0.5-0.0001", "20.0-0.01-0.01", "0.171-1e-09-0.9", "1.0-0.2-0.01", "0.3-1e-05-0.9"
)
@pytest.mark.parametrize("interval", [1e-4, 1e-2, 0.9])
@pytest.mark.parametrize(
    ("multiplier", "probability"),
    [(1.0, 0.2), (0.171, 1e-9), (0.3, 1e-5), (0.05, 0.5), (20.0, 0.01)],
)
def test_one_step_is_an_upper_bound_of_what_hypothesis_testing_says(
    multiplier, probability, interval
):
    """δ of each ε, by sums over a fine grid of outcomes, for a record that leaves and for one that joins."""
    if multiplier < 0.1:
        interval *= 100  # of losses up to 600
    losses = composition.sampled_gaussian(multiplier, probability, min(interval, 1.0), 1e-20)
    x = np.linspace(-9 * multiplier, 1 + 9 * multiplier, 1_000_001)
    step = x[1] - x[0]
    without = stats.norm.pdf(x, 0, multiplier)
    both = (1 - probability) * without + probability * stats.norm.pdf(x, 1, multiplier)
    for pmf, (upper, lower) in (
        (losses._pmf_remove, (both, without)),
        (losses._pmf_add, (without, both)),
    ):
        for epsilon in (0.0, 1e-3, 0.05, 0.31, 1.7, 5.0, 20.0):
            exact = np.maximum(upper - math.exp(epsilon) * lower, 0).sum() * step
            found = pmf.get_delta_for_epsilon(epsilon)
            assert found >= exact * (1 - 1e-6) - 1e-17
            if interval == 1e-4:
                assert found <= exact * (1 + 1e-2) + probability * 1e-4


@pytest.mark.slow
def test_a_calibration_where_records_are_hardly_ever_sampled(tmp_path, monkeypatch):
    """6.3 GiB were taken."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = {"sampling_probability": 1e-9, "steps": 10**6}
    tracemalloc.start()
    found = dpx.calibrate_dpsgd(1.0, 1e-8, **settings)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 400 * 2**20
    assert 0.999 <= dpx.dpsgd_epsilon(found, 1e-8, **settings) <= 1.001
    assert dpx.dpsgd_epsilon(found, 1e-8, accountant="rdp", **settings) > 1


def test_a_calibration_that_takes_long_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "_PATIENCE", 0)
    with pytest.warns(UserWarning, match="calibrating 7 steps .* accountant='rdp'") as found:
        dpx.calibrate_dpsgd(1.7, 1e-5, sampling_probability=0.0123, steps=7)
    assert len(found) == 1


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


def test_losses_that_do_not_fit_into_memory_are_refused(monkeypatch):
    def full(*arguments):
        raise MemoryError

    monkeypatch.setattr(composition, "sampled_gaussian", full)
    with pytest.raises(ValueError, match=r"too many privacy losses .* use accountant='rdp'"):
        dpx.dpsgd_epsilon(1.0, 1e-6, sampling_probability=1e-6, steps=10**5)
