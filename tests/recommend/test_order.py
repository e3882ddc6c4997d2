"""Which of two items comes first, against slow code and where nothing or everything is known."""

import math

import jax
import numpy as np
import pytest

from dpx.data import Histories
from dpx.recommend import order, transitions

COUNTS = np.array([100.0, 50, 200, 25])
FOUND = np.array([[0, 6.0, 8, -1], [3, 0, 0, 2], [-2, 0, 0, 1], [1, -9, 0, 0]], np.float32)


def test_lateness_is_standardized_and_shrunk():
    sums, error = np.array([20.0, -30, 10, 9]), np.full(4, 3.0)
    relative = [x / n for x, n in zip(sums, COUNTS, strict=True)]
    mean = sum(n * x for n, x in zip(COUNTS, relative, strict=True)) / COUNTS.sum()
    noise = [(3 / n) ** 2 for n in COUNTS]
    spread = sum(n * ((x - mean) ** 2 - e) for n, x, e in zip(COUNTS, relative, noise, strict=True))
    spread /= COUNTS.sum()
    assert spread > 0.01
    expected = [
        (x - mean) / math.sqrt(spread) * spread / (spread + e)
        for x, e in zip(relative, noise, strict=True)
    ]
    np.testing.assert_allclose(order.lateness(sums, error, COUNTS), expected, rtol=1e-5)


def test_positions_without_spread_say_nothing():
    alike = 0.3 * COUNTS
    np.testing.assert_allclose(order.lateness(alike, np.zeros(4), COUNTS), 0, atol=1e-12)
    # Noise alone: its variance is what there is, or more.
    assert (order.lateness(alike + np.array([1, -1, 1, -1]), np.full(4, 9.0), COUNTS) == 0).all()
    assert (order.lateness(alike * [1, 2, 3, 4], np.full(4, np.inf), COUNTS) == 0).all()
    # Nearly alike items are not blown up to unit variance.
    nearly = order.lateness(alike + 0.001 * COUNTS * [1, -1, 1, -1], np.zeros(4), COUNTS)
    assert 0 < np.abs(nearly).max() < 0.02


def test_the_order_shows_as_far_as_the_noise_lets_it():
    error = np.full((4, 4), 2.0, np.float32)
    late = np.array([0.5, -1.0, 0.0, 2.0], np.float32)
    made = order.shares(FOUND, error, 0.5, late)
    for i in range(4):
        for j in range(i + 1, 4):
            together, before = max(FOUND[i, j], 0), FOUND[j, i] / 0.5
            expected = math.tanh(0.7 * (late[j] - late[i]))
            trust = 0.4 * together**2 / (0.4 * together**2 + (2 / 0.5) ** 2)
            if together:
                expected += trust * (before / together - expected)
            expected = (1 + np.clip(expected, -1, 1)) / 2
            assert made[i, j] == pytest.approx(expected, rel=1e-5)
            assert made[j, i] == pytest.approx(1 - expected, rel=1e-5)


def test_the_order_where_it_is_known_and_where_it_is_not():
    nothing = np.zeros(4, np.float32)
    late = np.array([0.0, 9, -9, 0], np.float32)
    certain = order.shares(FOUND, 0 * FOUND, 0.5, late)
    np.testing.assert_allclose(certain[0, :3] * FOUND[0, :3], [0, 6, 2])  # (6 + 6)/2, (8 - 4)/2
    unknown = np.full((4, 4), np.inf, np.float32)
    assert (order.shares(FOUND, unknown, 0.5, nothing) == 0.5).all()
    assert (order.shares(FOUND, unknown, 0.0, nothing) == 0.5).all()
    for weight in (0.0, 0.5):
        by_time = order.shares(FOUND, unknown, weight, late)
        np.testing.assert_allclose(by_time[2], [1, 1, 0.5, 1], atol=1e-5)
        np.testing.assert_allclose(by_time[1], [0, 0.5, 0, 0], atol=1e-5)


def test_late_items_are_raised_in_a_distribution():
    log = np.log([0.4, 0.3, 0.2, 0.1])
    np.testing.assert_allclose(order.raise_late(log, np.array([2, 0]), np.zeros(2)), log)
    made = order.raise_late(log, np.array([2, 0]), np.array([2.0, -1]))
    raised = np.array([0.4 * math.exp(-0.15), 0.3, 0.2 * math.exp(0.3), 0.1])
    np.testing.assert_allclose(np.exp(made), raised / raised.sum())


@pytest.mark.slow
def test_a_pair_without_an_order_of_its_own_gets_that_of_its_times():
    """Items 0 to 3 always come before 4 to 7, and the order of a pair is not counted."""
    rng = np.random.default_rng(0)
    users = [
        np.r_[rng.permutation(4)[:2], 4 + rng.permutation(4)[:2]].astype(np.int32)
        for _ in range(3000)
    ]
    made = transitions.fit(
        jax.random.key(0),
        Histories(tuple(users), 8),
        epsilon=8.0,
        delta=1e-5,
        num_kept=8,
        order_weight=0.0,
    )
    by_item = np.argsort(made.items)
    found = made.estimate[np.ix_(by_item, by_item)]
    assert (found[:4, 4:] > 2 * found[4:, :4].T).all()
