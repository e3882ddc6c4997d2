"""The price of truncated samples, against integrals: it covers what replacing another record adds."""

import numpy as np
import pytest
from scipy import stats

import dpx
from dpx import privacy


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


def test_a_sample_that_is_cut_off_is_priced_for_one_record_more():
    event = privacy.dpsgd_event(
        1.0, sampling_probability=0.1, steps=3, num_examples=50, max_batch_size=9
    )
    assert event.event.dataset_size == 51  # type: ignore[attr-defined]


@pytest.mark.quick_cases("5-2")
@pytest.mark.parametrize(("records", "limit"), [(5, 2), (12, 4), (50, 17), (1000, 310)])
def test_a_cut_costs_more_among_more_records(records, limit):
    """So that the price of N + 1 records covers those who leave as well as those who join."""
    settings = {"sampling_probability": 0.3, "steps": 3, "max_batch_size": limit}
    costs = [
        privacy.dpsgd_epsilon(2.0, 1e-2, num_examples=count, **settings)
        for count in (records - 1, records, records + 1)
    ]
    assert costs == sorted(costs)
