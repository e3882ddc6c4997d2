"""Noise that is drawn entry by entry is the noise of one long draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.noise import lattice, leaves

SHAPES = ((5, 7), (), (0, 3), (5, 7), (40,), (2, 3, 4))


def same(key, shapes=SHAPES):
    one = leaves._cut(key, shapes)
    each = leaves._by_index(key, shapes=shapes)
    for (normal, uniform), (other, rest), shape in zip(one, each, shapes, strict=True):
        assert normal.shape == uniform.shape == shape
        np.testing.assert_array_equal(normal, other)
        np.testing.assert_array_equal(uniform, rest)
    return one


@pytest.mark.slow
def test_entries_are_those_of_one_draw():
    draws = same(jax.random.key(3))
    assert len({int(x) for draw in draws for x in draw.normal.ravel()}) > 40
    rounded = [int(x) for draw in draws for x in draw.uniform.ravel()]
    assert len(set(rounded)) == len(rounded) == 135


@pytest.mark.slow
def test_other_generators_draw_too():
    """Those that hash no counters."""
    key = jax.random.key(0, impl="rbg")
    (draw,) = leaves.draws_like(key, [jnp.zeros(10_000)])
    assert float(draw.normal.std()) == pytest.approx(lattice.RESOLUTION, rel=0.05)
    assert abs(np.corrcoef(draw.normal, draw.uniform)[0, 1]) < 0.05


@pytest.mark.slow
def test_words_that_are_zero_are_drawn_again(monkeypatch):
    """A quarter of all words, and not one in 2³²."""
    hashed = leaves._hashed
    monkeypatch.setattr(leaves, "_hashed", lambda *a: tuple(word & 3 for word in hashed(*a)))
    shapes = (*SHAPES, (31,))  # of its own, or compiled programs would be found again
    draws = same(jax.random.key(3), shapes)
    largest = max(float(np.abs(x.normal).max(initial=0)) for x in draws)
    assert largest > 11 * lattice.RESOLUTION  # beyond two words, where a column draws a third


def test_places_beyond_32_bits():
    with jax.enable_x64(True):
        index = leaves._index((2, 3), [2**33 + 1])
        high, low = leaves._halves(index)
    index = np.asarray(index)
    np.testing.assert_array_equal(index[0], 2**33 + 1 + np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(high, 2)
    np.testing.assert_array_equal(low, index % 2**32)
