"""Numbers that are put on a grid at random: the law, and how much of a small error is left in it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dpx.noise import grid

KEY = jax.random.key(5)


def probabilities(x, around):
    """As the module states them, at the whole numbers `around`."""
    below = np.floor(x)
    r = x - below
    return ((1 - r) * 2.0 ** -abs(around - below) + r * 2.0 ** -abs(around - below - 1)) / 3


@pytest.mark.quick_cases("1099511627776.75", "-0.5")
@pytest.mark.parametrize("x", [0.0, 0.25, -0.5, 3.9, -1e-20, 1e-5, 2.0**40 + 0.75])
def test_whole_numbers_have_the_stated_probabilities(x):
    count = 400_000
    with jax.enable_x64(True):
        found = np.asarray(jax.jit(grid.onto)(KEY, jnp.full(count, x)))
    assert found.dtype == np.float64
    cells = np.floor(x) + np.arange(-10, 12)
    observed = np.array([(found == cell).sum() for cell in cells])
    expected = count * probabilities(x, cells)
    rest = [count - observed.sum()], [count - expected.sum()]
    observed, expected = np.append(observed, rest[0]), np.append(expected, rest[1])
    assert stats.chisquare(observed, expected, sum_check=False).pvalue > 1e-3
    np.testing.assert_array_equal(found, np.round(found))
    assert found.var() == pytest.approx(4 + (x % 1) * (1 - x % 1), rel=0.02)


def test_a_small_error_costs_no_more_than_its_size():
    rng = np.random.default_rng(0)
    around = np.arange(-40.0, 40)
    for _ in range(2000):
        x, off = rng.uniform(-3, 3), rng.choice([1, 0.1, 1e-4]) * rng.uniform(-1, 1)
        ratio = np.log(probabilities(x + off, around) / probabilities(x, around))
        assert abs(ratio).max() <= abs(off) * (1 + 1e-9)
    assert probabilities(0.3, around).sum() == pytest.approx(1, abs=1e-9)


@pytest.mark.slow
def test_entries_have_draws_of_their_own_and_tails_have_no_end(monkeypatch):
    x = jnp.zeros((300, 70))
    moved = np.asarray(grid.onto(KEY, x))
    assert abs(np.corrcoef(moved.T) - np.eye(70)).max() < 0.3
    assert 8 < abs(moved).max() < 40
    monkeypatch.setattr(
        grid.tails, "fill", lambda _, last: (jnp.ones_like(last), jnp.zeros_like(last, int) + 10)
    )
    monkeypatch.setattr(jax.lax, "clz", lambda last: jnp.arange(last.size).reshape(last.shape) % 31)
    far = np.asarray(grid.onto(KEY, x[:1, :3]))
    np.testing.assert_array_equal(far, [[-3, -3, -3]])
