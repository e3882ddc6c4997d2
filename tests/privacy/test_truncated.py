"""Truncated samples outside of accounting: an attack on them, files that keep their price, and replays."""

import math
from typing import Any

import dp_accounting
import numpy as np
import pytest
from scipy import stats

import dpx
from dpx import _watch, privacy
from dpx.training import Trained, poisson_batches

RECORDS, Q, LIMIT, NOISE, DELTA = 12, 0.4, 4, 2.0, 1e-2
GRID = np.linspace(-50, 50, 200_001)


def density_of_sum(with_record: bool) -> np.ndarray:
    """Of the noisy sum over a truncated sample, if all records are -1 but one, which is 1 or absent."""
    total = np.zeros_like(GRID)
    for count in range(RECORDS):
        joined = Q * min(1.0, LIMIT / (count + 1)) if with_record else 0.0
        without = stats.norm.pdf(GRID, -min(count, LIMIT), NOISE)
        inside = stats.norm.pdf(GRID, 1 - min(count, LIMIT - 1), NOISE)
        weight = stats.binom.pmf(count, RECORDS - 1, Q)
        total += weight * ((1 - joined) * without + joined * inside)
    return total


def test_an_attack_exceeds_the_price_of_whole_samples_but_not_that_of_truncated_ones():
    present, absent = density_of_sum(True), density_of_sum(False)

    def attained(epsilon: float) -> float:
        excess = np.maximum(present - math.exp(epsilon) * absent, 0)
        return float(excess.sum() * (GRID[1] - GRID[0]))

    step: dict[str, Any] = {"sampling_probability": Q, "steps": 1}
    whole = privacy.dpsgd_epsilon(NOISE, DELTA, **step)
    truncated = privacy.dpsgd_epsilon(
        NOISE, DELTA, **step, num_examples=RECORDS, max_batch_size=LIMIT
    )
    assert attained(whole) > 1.5 * DELTA
    assert 0 < attained(truncated) <= DELTA


def test_a_release_on_truncated_samples_is_saved_with_its_event(tmp_path):
    event = privacy.dpsgd_event(
        NOISE, sampling_probability=Q, steps=3, num_examples=RECORDS, max_batch_size=LIMIT
    )
    guarantee = privacy.PrivacyGuarantee(
        epsilon=1.0,
        delta=DELTA,
        neighboring=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        unit="record",
        mechanism="DP-SGD",
        event=event,
    )
    dpx.save(Trained({"w": np.ones(2)}, guarantee, []), tmp_path / "trained")
    assert dpx.load(tmp_path / "trained").guarantee.event == event


def test_a_replay_refuses_what_it_cannot_price(monkeypatch):
    monkeypatch.setattr(_watch, "_watcher", object())
    with pytest.raises(ValueError, match="max_batch_size=4 must be None in a replay"):
        poisson_batches(RECORDS, sampling_probability=Q, steps=1, seed=0, max_batch_size=4)


@pytest.mark.quick_cases("5-2")
@pytest.mark.parametrize(("records", "limit"), [(5, 2), (12, 4), (50, 17), (1000, 310)])
def test_a_cut_costs_more_among_more_records(records, limit):
    """So that the price of N + 1 records covers those who leave as well as those who join."""
    settings = {"sampling_probability": 0.3, "steps": 3, "max_batch_size": limit}
    costs = [
        privacy.dpsgd_epsilon(NOISE, DELTA, num_examples=count, **settings)
        for count in (records - 1, records, records + 1)
    ]
    assert costs == sorted(costs)
