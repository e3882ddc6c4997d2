"""Norms of parameters that are taken together: as far above the exact ones as those of each alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.clipping import alike
from dpx.clipping.gradients import gram
from dpx.clipping.rules import Layout, Pair

pytestmark = pytest.mark.optimized

BATCH, BLOCKS, POSITIONS = 2, 2, 16
ONCE, LOOKED_UP, TIED = ("multiplied",), ("looked up",), ("looked up", "multiplied")

# Sums over short rows and columns, and over long ones, round differently.
LONG_ROWS, SHORT, LONG_COLUMNS = (600, 3), (5, 7), (3, 600)


def pairs_of(shape, uses, size, seed):
    """The layout of a parameter, and the factors of its gradients."""
    draw = np.random.default_rng(seed)

    def normal(n):
        return jnp.asarray(draw.normal(size=(BATCH, BLOCKS, POSITIONS, n)), jnp.float32)

    def rows(use):
        indices = draw.integers(0, shape[0], (BATCH, BLOCKS, POSITIONS))
        return jnp.asarray(indices, jnp.int32) if use == "looked up" else normal(shape[0])

    pairs = [Pair(rows(use), normal(shape[1]) * size) for use in uses]
    return Layout((BLOCKS, *shape), (0,), (1,), (2,)), pairs


@pytest.mark.parametrize(
    ("bounded", "parameters"),
    [
        (
            alike._bounded,
            [(SHORT, ONCE), (LONG_ROWS, TIED), (LONG_COLUMNS, ONCE * 5), (LONG_COLUMNS, LOOKED_UP)],
        ),
        (alike._of_several_shapes, [(LONG_ROWS, ONCE), (SHORT, ONCE), (LONG_COLUMNS, ONCE)]),
    ],
    ids=["uses apart", "parameters stacked"],
)
@pytest.mark.parametrize("size", [1.0, 1e-19], ids=["rounded", "flushed"])
def test_bounds_of_several_are_those_of_each(bounded, parameters, size):
    made = [pairs_of(shape, uses, size, k) for k, (shape, uses) in enumerate(parameters)]

    def of(function, layout, *pairs):
        return function(layout, pairs)

    @jax.jit
    def both():
        of_each = [jax.vmap(functools.partial(of, grams.products, a))(*pairs) for a, pairs in made]
        alone = [
            jax.vmap(functools.partial(of, grams.squared_norm, a))(*pairs) for a, pairs in made
        ]
        return bounded([a for a, _ in made], of_each), jnp.stack(alone)

    together, alone = both()
    # What they are raised by is 1e-6 of them or more, as there are so many positions: adding up in another
    # order moves them less. Where squares are flushed, what is raised is all there is.
    assert np.all(together >= alone * (1 - 4e-7))
    # All are taken to have as many uses as any, and the lengths of one-hot rows are rounded up by 1 %,
    # which is 2 % of their squares.
    assert np.all(together <= alone * (1 + (4e-6 if size == 1.0 else 0.021)))
