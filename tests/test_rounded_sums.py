"""A guarantee says so where a sum is one of 32-bit floats, whose rounding no noise covers."""

import jax
import numpy as np
import pytest

from dpx import audit, cross_attention, gram
from dpx.cross_attention import baselines

pytestmark = pytest.mark.optimized

KEY = jax.random.key(0)
BUDGET = {"epsilon": 1.0, "delta": 1e-5}
MEMORY = {"key_bound": 1.0, "value_bound": 1.0, "clip": True, **BUDGET}
WEIGHED = {"bound": 1.0, "weight_bound": 1.0, **BUDGET}
ROWS = np.full((4, 2), 0.25)
COLUMN = ROWS[:, 0]

RELEASES = {
    "Gram": lambda key, rows: gram.release(key, rows, column_bound=1.0, **BUDGET),
    "sketch": lambda key, rows: cross_attention.build(key, rows, rows, degree=2, **MEMORY),
    "trees": lambda key, rows: cross_attention.build(
        key, rows, rows, mechanism="tree", degree=1, **MEMORY
    ),
    "distances": lambda key, rows: cross_attention.DPTreeHighDim.build(
        key, rows, rows[:, 0], **WEIGHED
    ),
    "sums": lambda key, rows: cross_attention.DPTree.build(
        key, rows[:, 0], sensitivity=1.0, **BUDGET
    ),
    "mean": lambda key, rows: baselines.mean_of_values(key, rows, value_bound=1.0, **BUDGET),
    "fresh noise": lambda key, rows: baselines.fresh_noise(key, ROWS, rows, rows, **MEMORY),
}


def assumes_exact_sums(released) -> bool:
    return any("count as exact" in each for each in released.guarantee.assumptions)


@pytest.mark.quick_cases("Gram")
@pytest.mark.parametrize("name", RELEASES)
def test_sums_of_32_bits_are_an_assumption(name):
    release = RELEASES[name]
    plain = release(KEY, ROWS)
    assert not assumes_exact_sums(plain)
    keyed = jax.eval_shape(lambda key: release(key, ROWS), KEY)
    assert assumes_exact_sums(keyed)
    # Beside it the two say the same of themselves.
    assert keyed.guarantee.assumptions[:-1] == plain.guarantee.assumptions


@pytest.mark.parametrize("name", RELEASES)
def test_sums_of_traced_data_are_an_assumption(name):
    assert assumes_exact_sums(jax.eval_shape(lambda rows: RELEASES[name](KEY, rows), ROWS))


@pytest.mark.parametrize("name", ["Gram", "sketch", "trees"])
def test_64_bits_are_told_apart(name):
    release = RELEASES[name]
    with jax.enable_x64(True):
        assert not assumes_exact_sums(jax.eval_shape(lambda key: release(key, ROWS), KEY))


@pytest.mark.quick_cases("sketch")
@pytest.mark.parametrize("name", RELEASES)
def test_where_nothing_is_said_sums_have_64_bits(name):
    """Of rows with 32 bits too, in a program whose floats have 64."""
    stated = []

    def program(rows):
        made = RELEASES[name](KEY, rows)
        stated.append(assumes_exact_sums(made))
        return jax.tree.leaves(made)

    with jax.enable_x64(True), audit.recording():
        recorded = audit.record(jax.jit(program), ROWS.astype(np.float32))
    assert stated == [False]
    assert {x.dtype for seen in recorded.releases for x in seen.exact} == {np.dtype(np.float64)}


@pytest.mark.slow
def test_a_traced_key_releases_the_same_sums():
    """Data that are known are summed at once, in integers, whatever happens to the key."""

    def release(key):
        options = {"key_bound": 1.0, "value_bound": 1.0, "epsilon": 1e8, "delta": 1e-5}
        return cross_attention.build(key, ROWS, ROWS, degree=2, **options).moments

    # Noise of 1e-4, and sums of 4 in 32 bits.
    np.testing.assert_allclose(jax.jit(release)(KEY), release(KEY), atol=1e-2)
