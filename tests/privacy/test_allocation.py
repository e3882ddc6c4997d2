"""The price of random allocation: against its authors' package, samples of its losses, and closed forms."""

import math
import time
import warnings
from collections import Counter
from typing import Any

import dp_accounting
import numpy as np
import pytest

import dpx
from dpx import privacy
from dpx.privacy import allocation, composition
from dpx.privacy.allocation import AllocatedGaussianDpEvent

with warnings.catch_warnings():
    warnings.simplefilter("ignore", ImportWarning)  # of code that would be faster with numba
    authors = pytest.importorskip("PLD_accounting")


def priced(noise, delta, **settings):
    return dpx.dpsgd_epsilon(noise, delta, sampling="allocation", **settings)


@pytest.mark.quick_cases("1.0-2-1-1e-05", "1.0-3-2-1e-05")
@pytest.mark.parametrize(
    ("noise", "steps", "epochs", "delta"),
    [
        (1.0, 2, 1, 1e-5),
        (1.0, 3, 2, 1e-5),
        (2.0, 4, 3, 1e-5),
        (0.8, 7, 1, 1e-5),
        pytest.param(0.7, 2, 5, 1e-6, marks=pytest.mark.slow),
        pytest.param(1.5, 5, 10, 1e-5, marks=pytest.mark.slow),
        pytest.param(3.0, 3, 20, 1e-7, marks=pytest.mark.slow),
        pytest.param(1.0, 8, 1, 1e-3, marks=pytest.mark.slow),
        pytest.param(0.6, 4, 1, 1e-5, marks=pytest.mark.slow),
        pytest.param(1.2, 12, 2, 1e-5, marks=pytest.mark.slow),
    ],
)
def test_it_lies_between_the_bounds_of_the_authors(noise, steps, epochs, delta):
    """Feldman and Shenfeld's package, on a grid on which it takes seconds."""
    bounds = [
        authors.gaussian_allocation_epsilon_configurable(
            params=authors.PrivacyParams(
                sigma=noise, num_steps=steps, num_epochs=epochs, delta=delta
            ),
            config=authors.AllocationSchemeConfig(loss_discretization=0.1, tail_truncation=1e-10),
            bound_type=bound,
        )
        for bound in (authors.BoundType.IS_DOMINATED, authors.BoundType.DOMINATES)
    ]
    found = priced(noise, delta, sampling_probability=1 / steps, steps=steps * epochs)
    assert bounds[0] < found < bounds[1]
    assert bounds[1] < 1.1 * bounds[0]


@pytest.mark.quick_cases("0.843-11-1-1e-05-3.01-3.91")
@pytest.mark.parametrize(
    ("noise", "steps", "epochs", "delta", "published", "poisson"),
    [
        (0.843, 11, 1, 1e-5, 3.01, 3.91),
        (0.9, 80, 5, 1e-5, 1.82, 1.97),
        (1.3, 15, 7, 3e-5, 2.44, 2.72),
        (1.0, 80, 50, 1e-5, 4.67, 4.80),
    ],
)
def test_trainings_cost_no_more_than_their_package_says(
    noise, steps, epochs, delta, published, poisson
):
    """On grids of minutes to hours, which a test cannot wait for; these are its upper bounds."""
    settings: dict[str, Any] = {"sampling_probability": 1 / steps, "steps": steps * epochs}
    found = priced(noise, delta, **settings)
    assert 0.97 * published < found < published
    assert dpx.dpsgd_epsilon(noise, delta, **settings) == pytest.approx(poisson, abs=6e-3)


def losses(event, generator, moved, count=400_000):
    """Samples of log P/Q of an epoch, with the record (of P) or without it (of Q)."""
    noise, steps, released = event.noise_multiplier, event.steps, event.released
    x = noise * generator.normal(size=(count, released))
    if moved:
        batch = generator.integers(steps, size=count)
        x[batch < released, batch[batch < released]] += 1
    ratios = np.exp((x - 0.5) / noise**2).sum(axis=1) + steps - released
    return np.log(ratios / steps)


@pytest.mark.quick_cases("1.0-5-5-0.5", "0.7-2-2-0.02")
@pytest.mark.parametrize("interval", [0.5, 0.02, 1e-3])
@pytest.mark.parametrize(("noise", "steps", "released"), [(0.7, 2, 2), (1.0, 5, 5), (0.8, 3, 2)])
def test_small_epochs_cost_what_samples_of_their_losses_say(noise, steps, released, interval):
    """Where a record leaves and where it joins: never less, and on a fine grid no more."""
    event = AllocatedGaussianDpEvent(noise, steps, released)
    found = allocation.allocated_gaussian(event, interval, 1e-15)
    generator = np.random.default_rng(0)
    leaves, joins = losses(event, generator, True), -losses(event, generator, False)
    for pmf, sampled in ((found._pmf_remove, leaves), (found._pmf_add, joins)):
        for epsilon in (0.0, 0.3, 1.0):
            each = np.maximum(0, -np.expm1(epsilon - sampled))
            error = each.std() / math.sqrt(len(each))
            delta = pmf.get_delta_for_epsilon(epsilon)
            assert delta > each.mean() - 4 * error
            if interval < 0.5:
                assert delta < each.mean() + 4 * error + 0.3 * interval**2


def test_a_coarser_grid_never_says_less():
    event = AllocatedGaussianDpEvent(0.9, 11, 11)
    found = [allocation.allocated_gaussian(event, h, 1e-15) for h in (1.0, 0.3, 0.1, 0.01)]
    for epsilon in (0.0, 0.5, 2.0, 6.0):
        deltas = [losses.get_delta_for_epsilon(epsilon) for losses in found]
        assert deltas == sorted(deltas, reverse=True)


def test_mass_is_lost_as_said_and_no_more():
    found = allocation.allocated_gaussian(AllocatedGaussianDpEvent(0.5, 100, 70), 0.05, 1e-12)
    for pmf in (found._pmf_remove.to_dense_pmf(), found._pmf_add.to_dense_pmf()):
        assert 1e-12 < pmf._infinity_mass < 1e-10
        assert pmf._probs.sum() + pmf._infinity_mass >= 1
        assert (pmf._probs >= 0).all()


@pytest.mark.parametrize("probability", [1.0, 0.7, 0.5, 0.4, 1 / 3, 0.1, 0.0253, 1e-3])
def test_an_event_has_the_epochs_that_are_drawn(probability):
    """The same as of counting step by step, whatever the number of steps."""
    begins = [round_half_up(number / probability) for number in range(2000)]
    for steps in (1, 2, 3, 7, 40, 399, 1001):
        counted = Counter(allocation.epoch(step, probability) for step in range(steps))
        for number, begin, length in counted:
            assert (begin, begin + length) == (begins[number], begins[number + 1])
        event = allocation.allocation_event(1.0, sampling_probability=probability, steps=steps)
        found = Counter()
        for part in getattr(event, "events", [event]):
            inner = part.event
            found[getattr(inner, "steps", 1), getattr(inner, "released", 1)] += part.count
        assert found == Counter((key[2], taken) for key, taken in counted.items())


def round_half_up(number):
    return math.floor(number + 0.5)


@pytest.mark.quick_cases(
    "0.1-10-1.0-1e-05", "0.3-2-3.0-1e-07", "0.09-40-0.5-1e-07", "0.5-4-1.0-1e-05"
)
@pytest.mark.parametrize("delta", [1e-5, 1e-7])
@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(("probability", "steps"), [(0.5, 4), (0.1, 10), (0.09, 40), (0.3, 2)])
def test_it_costs_no_more_than_poisson_samples_where_delta_is_small(
    probability, steps, noise, delta
):
    settings: dict[str, Any] = {"sampling_probability": probability, "steps": steps}
    assert priced(noise, delta, **settings) < 1.001 * dpx.dpsgd_epsilon(noise, delta, **settings)
    # A Poisson sample of an epoch has no place for a third of the records, which counts where δ is large.
    settings = {"sampling_probability": 0.1, "steps": 10}
    assert priced(0.3, 0.3, **settings) > dpx.dpsgd_epsilon(0.3, 0.3, **settings)


def test_epochs_of_one_step_are_the_gaussian_mechanism():
    settings: dict[str, Any] = {"sampling_probability": 1.0, "steps": 4}
    assert priced(2.0, 1e-5, **settings) == dpx.gaussian_epsilon(2.0, 1e-5, compositions=4)
    found = dpx.calibrate_dpsgd(2.0, 1e-5, sampling="allocation", **settings)
    assert found == dpx.gaussian_noise_multiplier(2.0, 1e-5, compositions=4)


@pytest.mark.parametrize(
    ("rate", "words"), [(0.1, "of 10 steps,"), (60 / 596, "of 9.93333 steps in the mean,")]
)
def test_a_guarantee_says_how_long_epochs_are(rate, words):
    settings: dict[str, Any] = {"sampling_probability": rate, "steps": 20}
    spent = privacy.dpsgd_guarantee(2.0, 1e-5, sampling="allocation", unit="record", **settings)
    assert f"one batch in each epoch {words}" in spent.mechanism


def test_hardly_any_noise_is_priced_without_allocation():
    settings: dict[str, Any] = {"sampling_probability": 0.2, "steps": 10}
    for noise in (0.049, 0.01):
        found = priced(noise, 1e-5, **settings)
        assert found == pytest.approx(dpx.gaussian_epsilon(noise, 1e-5, compositions=2), rel=1e-2)
    assert priced(0.051, 1e-5, **settings) < found
    assert priced(0.0, 1e-5, **settings) == math.inf


@pytest.mark.quick_cases("0.3-0.5-4")
@pytest.mark.parametrize(
    ("epsilon", "probability", "steps"), [(3.0, 0.2, 13), (0.3, 0.5, 4), (30.0, 0.1, 20)]
)
def test_a_calibrated_training_spends_its_budget(epsilon, probability, steps):
    settings: dict[str, Any] = {"sampling_probability": probability, "steps": steps}
    noise = dpx.calibrate_dpsgd(epsilon, 1e-5, sampling="allocation", **settings)
    assert 0.998 * epsilon < priced(noise, 1e-5, **settings) <= epsilon
    assert noise < dpx.calibrate_dpsgd(epsilon, 1e-5, **settings)


@pytest.mark.slow
def test_a_ledger_composes_it_with_other_releases():
    settings: dict[str, Any] = {"sampling_probability": 0.21, "steps": 12}
    run = privacy.dpsgd_guarantee(1.0, 1e-5, sampling="allocation", unit="user", **settings)
    assert "random allocation" in run.mechanism
    assert run.event is not None
    beside = privacy.gaussian_guarantee(
        1.0, 1e-6, neighboring="add_or_remove_one", unit="user", mechanism="counts"
    )
    total = dpx.Ledger().spend(beside, "counts").spend(run, "training").guarantee(1e-5)
    assert "privacy loss distributions" in total.mechanism
    assert max(run.epsilon, 1.0) < total.epsilon < run.epsilon + 1.0
    assert total.event is not None
    fine = composition.composed(composition.plan(total.event, 1e-3))
    assert total.epsilon == pytest.approx(fine.get_epsilon_for_delta(1e-5), rel=1e-3)
    with_it = dpx.calibrate_dpsgd(
        total.epsilon, 1e-5, sampling="allocation", beside=beside.event, **settings
    )
    assert with_it == pytest.approx(1.0, rel=1e-3)
    twice = dpx.Ledger().spend(run, "a").spend(run, "b").guarantee(1e-5)
    event = dp_accounting.SelfComposedDpEvent(run.event, 2)
    assert twice.epsilon == pytest.approx(
        dpx.Ledger().spend(event, "both").guarantee(1e-5).epsilon, rel=1e-6
    )


def test_it_has_a_risk():
    run = privacy.dpsgd_guarantee(
        1.0, 1e-5, sampling="allocation", unit="record", sampling_probability=0.25, steps=6
    )
    risks = run.risks()
    assert 0.01 < risks["add_or_remove_one"].tpr_at_1_percent < 0.5
    assert risks["replace_one"].mu > risks["add_or_remove_one"].mu


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sampling": "shuffle"}, "sampling='shuffle'"),
        ({"accountant": "rdp"}, "accountant='rdp' must be 'pld' with sampling='allocation'"),
        ({"num_examples": 50, "max_batch_size": 9}, "max_batch_size=9 must be None with"),
    ],
)
def test_what_has_no_price_is_refused(changes, named):
    settings: dict[str, Any] = {
        "sampling_probability": 0.1,
        "steps": 3,
        "sampling": "allocation",
    } | changes
    with pytest.raises(ValueError, match=named):
        dpx.dpsgd_epsilon(1.0, 1e-5, **settings)
    with pytest.raises(ValueError, match=named):
        dpx.calibrate_dpsgd(1.0, 1e-5, **settings)


@pytest.mark.slow
def test_a_hundred_epochs_are_calibrated_in_seconds():
    began = time.process_time()
    settings: dict[str, Any] = {"sampling_probability": 0.0127, "steps": 7874}
    noise = dpx.calibrate_dpsgd(3.0, 1e-5, sampling="allocation", **settings)
    print(f"{time.process_time() - began:.1f} s of CPU")
    assert time.process_time() - began < 20
    assert noise < dpx.calibrate_dpsgd(3.0, 1e-5, **settings)
