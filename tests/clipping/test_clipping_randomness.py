"""A record's randomness is its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx import clipping


def words(*arguments):
    return np.asarray(jax.random.key_data(clipping.record_keys(*arguments)))


@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3)], ids=["typed", "raw"])
def test_a_record_keeps_its_key_wherever_it_stands(key):
    def of(step, indices):
        keys = clipping.record_keys(key, step, indices)
        return np.asarray(keys if key.ndim else jax.random.key_data(keys))

    here, there = of(5, np.array([7, 2, 100])), of(5, np.array([100, 9, 8, 7]))
    np.testing.assert_array_equal(here[[0, 2]], there[[3, 0]])
    assert len(np.unique(np.concatenate([here, there]), axis=0)) == 5
    assert not np.any(np.all(of(6, np.array([7, 2, 100])) == here, axis=1))
    compiled = jax.jit(clipping.record_keys)(key, 5, jnp.array([7, 2, 100]))
    np.testing.assert_array_equal(compiled if key.ndim else jax.random.key_data(compiled), here)


def test_other_secrets_and_swapped_numbers_give_other_keys():
    found = [
        words(jax.random.key(seed), step, np.array([index]))
        for seed in (0, 1)
        for step in (0, 1, 2)
        for index in (0, 1, 2)
    ]
    assert len(np.unique(np.concatenate(found), axis=0)) == len(found)


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
def test_a_record_keeps_its_key_in_every_implementation(implementation):
    key = jax.random.key(0, impl=implementation)
    whole, rest = (
        jax.random.key_data(clipping.record_keys(key, 1, jnp.arange(first, 4))) for first in (0, 1)
    )
    np.testing.assert_array_equal(whole[1:], rest)
    assert len(np.unique(whole, axis=0)) == 4


def test_wrong_arguments():
    key = jax.random.key(0)
    for indices in (3, [1.0, 2.0], np.zeros((2, 2), int)):
        with pytest.raises(ValueError, match="indices of shape"):
            clipping.record_keys(key, 0, np.asarray(indices))
    with pytest.raises(ValueError, match="key"):
        clipping.record_keys(jax.random.split(key), 0, np.arange(2))
