"""Noise for bounds that are numbers in 16 bits is that for the same numbers in 64, and so are results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx import audit, gram, ngram, noise
from dpx.cross_attention import DPTreeHighDim
from dpx.data.histories import Histories
from dpx.noisy_head import HyperParameters, gradient_sensitivity
from dpx.recommend import popularity, transitions

KEY = jax.random.key(0)
BUDGET = {"epsilon": 1.3, "delta": 1e-3}
NARROW = pytest.mark.parametrize("narrow", [np.float16, jnp.bfloat16])


def both(narrow, found):
    """What is found with numbers in 16 bits, and with the same numbers in 64."""
    return found(narrow), found(lambda number: float(narrow(number)))


@pytest.mark.quick_cases("bounds0-bfloat16")
@NARROW
@pytest.mark.parametrize(
    "bounds",
    [
        {"column_bound": 1.7},
        {"column_bound": 1.7, "max_column_change": 0.3},
        {"column_bound": 1.7, "neighboring": "add_or_remove_one"},
    ],
)
def test_a_gram_matrix_has_the_noise_of_its_bounds(narrow, bounds):
    X = np.random.default_rng(0).normal(size=(3, 20))

    def release(number):
        own = {k: v if isinstance(v, str) else number(v) for k, v in bounds.items()}
        return gram.release(KEY, X, **own, **BUDGET)

    made, wide = both(narrow, release)
    assert made.noise_std == wide.noise_std
    assert made.guarantee == wide.guarantee
    np.testing.assert_array_equal(made.matrix, wide.matrix)


@pytest.mark.quick_cases("bfloat16")
@NARROW
def test_a_traced_gram_matrix_takes_narrow_bounds(narrow):
    X = np.random.default_rng(0).normal(size=(3, 20)).astype(np.float32)

    def release(number):
        bound = number(1.7)
        return jax.jit(lambda X: gram.release(KEY, X, column_bound=bound, **BUDGET))(X)

    made, wide = both(narrow, release)
    assert made.guarantee == wide.guarantee
    np.testing.assert_array_equal(made.matrix, wide.matrix)


@NARROW
@pytest.mark.parametrize("calibration", ["exact", "paper"])
def test_the_number_of_samples_is_that_of_the_same_eta(narrow, calibration):
    bounds = {"column_bound": 0.7, "max_column_change": 0.003, "n": 3, "calibration": calibration}
    for eta in (0.37, 0.61, 0.83):
        samples = both(narrow, lambda x: gram.max_samples(**BUDGET, eta=x(eta), **bounds))  # noqa: B023
        assert samples[0] == samples[1] > 3


@pytest.mark.slow
@NARROW
def test_integers_are_released_with_the_noise_of_their_unit(narrow):
    def declared(number):
        sizes = {"sensitivity": number(0.7), "unit": number(0.3), "noise_multiplier": 1.3}

        def program(counts):
            return noise.release_integers(KEY, np.array(counts), label="counts", **sizes)

        with audit.recording():
            (seen,) = audit.record(program, list(range(5))).releases
        return seen.noisy[0], float(seen.unit[0])

    (made, unit), (wide, wide_unit) = both(narrow, declared)
    assert unit == wide_unit
    np.testing.assert_array_equal(made, wide)


@pytest.mark.quick_cases("bfloat16")
@NARROW
def test_truncated_noise_reaches_as_far_as_its_guarantee_says(narrow):
    law = noise.TruncatedLaplace(narrow(0.7), 1.903)
    wide = noise.TruncatedLaplace(float(narrow(0.7)), 1.903)
    np.testing.assert_array_equal(law.sample(KEY, (1000,)), wide.sample(KEY, (1000,)))


@pytest.mark.quick_cases("bfloat16")
@NARROW
def test_recommenders_and_counts_of_narrow_bounds_are_those_of_wide_ones(narrow):
    rng = np.random.default_rng(0)
    histories = Histories([rng.integers(0, 9, size=6) for _ in range(20)], 9)
    tokens, mask = rng.integers(0, 4, size=(20, 6)), np.ones((20, 6), bool)
    table = {"order": 2, "vocab_size": 4, "start": 0, "unit": "row"}

    def found(number):
        counted = popularity.fit(
            KEY, histories, l2_clip_norm=number(0.7), age_decay=number(0.9), **BUDGET
        )
        grams = ngram.fit(KEY, tokens, mask, l2_clip_norm=number(1.7), **table, **BUDGET)
        moved = transitions.fit(
            KEY,
            histories,
            num_kept=number(5),
            rounds=number(2),
            max_gap=number(3),
            gap_decay=number(0.87),
            age_decay=number(0.93),
            order_weight=number(0.71),
            position_weight=number(0.13),
            popularity_age_decay=number(0.83),
            popularity_budget_fraction=number(0.13),
            **BUDGET,
        )
        return counted[:2], grams[0], moved.estimate, moved.standard_error, moved.log_popularity

    jax.tree.map(np.testing.assert_array_equal, *both(narrow, found))


@pytest.mark.quick_cases("bfloat16")
@NARROW
def test_trees_of_distances_have_the_noise_of_their_weights(narrow):
    rng = np.random.default_rng(0)
    x, weights = rng.random((6, 2)) / 2, rng.random(6) / 2

    def build(number):
        about = {"weight_bound": number(0.7), "bound": number(0.9), "bins": 4}
        return DPTreeHighDim.build(KEY, x, weights, **about, **BUDGET)

    made, wide = both(narrow, build)
    np.testing.assert_array_equal(made.table, wide.table)
    assert made.guarantee == wide.guarantee


@NARROW
def test_the_sensitivity_of_a_gradient_is_that_of_wide_bounds(narrow):
    def found(number):
        return gradient_sensitivity(HyperParameters(number(1.1), number(0.7), number(2.3)))

    made, wide = both(narrow, found)
    assert float(made) == wide
