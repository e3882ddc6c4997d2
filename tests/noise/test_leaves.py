"""Noise that is drawn entry by entry is the noise of one long draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.noise import leaves

SHAPES = ((5, 7), (), (0, 3), (5, 7), (40,), (2, 3, 4))


def same(key, dtype, shapes=SHAPES):
    one = leaves._cut(key, shapes, dtype)
    each = leaves._by_index(key, shapes=shapes, dtype=jnp.dtype(dtype))
    return all(map(np.array_equal, each, one))


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
def test_entries_are_those_of_one_draw(dtype):
    with jax.enable_x64(dtype == np.float64):
        assert same(jax.random.key(3), dtype)


@pytest.mark.slow
def test_words_that_are_zero_are_drawn_again(monkeypatch):
    """A quarter of all words, and not one in 2³²."""
    bits, at = jax.random.bits, leaves._bits
    monkeypatch.setattr(jax.random, "bits", lambda *a, **k: bits(*a, **k) & 3)
    monkeypatch.setattr(leaves, "_bits", lambda *a: at(*a) & 3)
    shapes = (*SHAPES, (31,))  # of its own, or compiled programs would be found again
    assert same(jax.random.key(3), np.float32, shapes)
    draws = leaves._cut(jax.random.key(3), shapes, np.float32)
    assert max(float(np.abs(x).max(initial=0)) for x in draws) > 8  # some are from the far tail


def test_places_beyond_32_bits():
    with jax.enable_x64(True):
        index = leaves._index((2, 3), [2**33 + 1])
        high, low = leaves._halves(index)
    index = np.asarray(index)
    np.testing.assert_array_equal(index[0], 2**33 + 1 + np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(high, 2)
    np.testing.assert_array_equal(low, index % 2**32)
