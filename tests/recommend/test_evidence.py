"""The thresholds of pairs against slow code, and where nothing speaks for a pair."""

import numpy as np
import pytest

from dpx.recommend import evidence


def slow(found, error, late):
    size = len(late)
    apart = [[abs(late[i] - late[j]) for j in range(size)] for i in range(size)]
    needed = [[2 + 0.2 * (apart[i][j] - np.mean(apart)) for j in range(size)] for i in range(size)]
    above = np.zeros((size, size))
    for i in range(size):
        for j in range(size):
            low, high = min(i, j), max(i, j)
            if low < high and error[low, high] > 0:
                above[i, j] = max(found[low, high] / error[low, high] - needed[i][j], 0)
    degrees = [max(sum(row), 2) for row in above]
    made = np.zeros((size, size))
    for i in range(size):
        for j in range(size):
            steps = sum(min(above[i, k], 4) * min(above[k, j], 4) for k in range(size))
            steps /= np.sqrt(degrees[i] * degrees[j])
            made[i, j] = needed[i][j] - min(3 * steps, 2)
    return made


def test_thresholds_follow_from_times_and_from_two_steps():
    rng = np.random.default_rng(0)
    found = (4 * rng.normal(size=(9, 9))).astype(np.float32)
    error = rng.uniform(0.5, 2, size=(9, 9)).astype(np.float32)
    error[0, 5] = 0  # of a pair that nothing has summed
    np.fill_diagonal(error, np.inf)
    late = rng.normal(size=9).astype(np.float32)
    made = evidence.thresholds(found, error, late)
    np.testing.assert_allclose(made, slow(found, error, late), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(made, made.T, rtol=1e-5)
    assert made.min() < 1 < 2 < made.max()


def test_a_third_item_speaks_for_a_pair_and_a_time_apart_against_it():
    found = np.zeros((4, 4), np.float32)
    found[0, 1] = found[1, 2] = 5
    error, alike = np.ones((4, 4), np.float32), np.zeros(4, np.float32)
    made = evidence.thresholds(found, error, alike)
    # Each of the two pairs is 3 above its threshold, and items 0 and 2 have no other.
    assert made[0, 2] == pytest.approx(0, abs=1e-6)
    assert made[0, 1] == made[0, 3] == 2
    apart = evidence.thresholds(0 * found, error, np.array([0, 0, 0, 3], np.float32))
    assert apart[0, 3] - apart[0, 1] == pytest.approx(0.6, abs=1e-6)
    assert apart.mean() == pytest.approx(2, abs=1e-6)
