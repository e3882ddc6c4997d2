"""What is read off the derivative of a function of weights is true of its results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dpx.clipping import pullback

N = 3
DRAW = np.random.default_rng(0)
GIVEN = [jnp.asarray(1 + DRAW.uniform(size=(N, N)), jnp.float32) for _ in range(3)]

# Of a cotangent g and weights w and v: a result, and the axes of g that its axes are found to follow.
BOTH, NONE = (0, 1), (None, None)
READ = [
    (lambda g, w, v: g * w, BOTH),
    (lambda g, w, v: g * w + 2 * g * w, BOTH),
    (lambda g, w, v: g * w + g * v, BOTH),
    (lambda g, w, v: g * w - g * v * w, BOTH),
    (lambda g, w, v: g * w + g, BOTH),
    (lambda g, w, v: -g * w / v, BOTH),
    (lambda g, w, v: g * v / w, BOTH),
    (lambda g, w, v: g * (w / w), BOTH),
    (lambda g, w, v: g * (1 / w), BOTH),
    (lambda g, w, v: g * w / w, BOTH),
    (lambda g, w, v: g / w, BOTH),
    (lambda g, w, v: g * w * w, BOTH),
    (lambda g, w, v: g * (w + v), BOTH),
    (lambda g, w, v: g * jnp.exp(w), BOTH),
    (lambda g, w, v: g * w + g * w * jnp.exp(v), BOTH),
    (lambda g, w, v: g * (w - jnp.exp(v)), BOTH),
    (lambda g, w, v: g * (2.0 + w), BOTH),
    (lambda g, w, v: g * w * jnp.exp(v) * 2.0, BOTH),
    (lambda g, w, v: g * (jnp.exp(v) * w * 2.0), BOTH),
    (lambda g, w, v: jnp.where(v > 1.5, g * w, 0.0), BOTH),
    (lambda g, w, v: jnp.where(v > 1.5, g * w, g * v), BOTH),
    (lambda g, w, v: jnp.where(v[:1] > 1.5, g, 0.0) * w, BOTH),
    (lambda g, w, v: lax.optimization_barrier((g * w, v))[0], BOTH),
    (lambda g, w, v: (g.T * w).T, BOTH),
    (lambda g, w, v: g.T * w, (1, 0)),
    (lambda g, w, v: g * w + g.T * w, NONE),
    (lambda g, w, v: g * w + (g * v).sum(0), (None, 1)),
    (lambda g, w, v: (g * w).sum(0), (1,)),
    (lambda g, w, v: (g * w).sum(1, keepdims=True) * v, (0, None)),
    (lambda g, w, v: jnp.broadcast_to((g * w).sum(0), (N, N)), (None, 1)),
    (lambda g, w, v: g[::-1] * w, NONE),
    (lambda g, w, v: g.sum() * w, NONE),
    (lambda g, w, v: jnp.cumsum(g * w, 0), NONE),
    (lambda g, w, v: lax.reshape(g * w, (N, N), (1, 0)), NONE),
    (lambda g, w, v: (g * w).reshape(1, N, N).reshape(N, N), BOTH),
    (lambda g, w, v: (g * w).reshape(-1), (None,)),
    (
        lambda g, w, v: jnp.broadcast_to((g * w)[..., None], (N, N, 2)).reshape(N, 2, N).sum(2),
        NONE,
    ),
    (lambda g, w, v: g @ w, NONE),
]


@pytest.mark.parametrize(("function", "axes"), READ, ids=range(len(READ)))
def test_what_is_known_of_a_derivative_is_true(function, axes):
    g, *_ = GIVEN
    derivative = pullback.read(jax.make_jaxpr(function)(*GIVEN), 0, trusted=True)
    (found,), result = derivative.results, function(*GIVEN)
    assert found.axes == axes
    for axis, followed in enumerate(axes):
        if followed is not None:  # Entries depend on those with the same index alone.
            other = jnp.moveaxis(jnp.moveaxis(g, followed, 0).at[0].set(9.0), 0, followed)
            changed = jnp.moveaxis(function(other, *GIVEN[1:]) - result, axis, 0)
            assert not np.any(changed[1:])
    if found.base is not None:
        (multiple,) = derivative(GIVEN, (0,))
        np.testing.assert_allclose(multiple * GIVEN[found.base], result, rtol=1e-5)
    if found.follows(result.shape):
        ones = [jnp.ones_like(g), *GIVEN[1:]]
        array = function(*ones)
        np.testing.assert_allclose(array * g, result, rtol=1e-5)
        for axis in {0, 1} - found.varies:
            np.testing.assert_allclose(array, array.take(jnp.zeros(N, int), axis), rtol=1e-5)
        for axis in {0, 1} - found.ratio if found.base is not None else ():
            (multiple,) = derivative(ones, (0,))
            np.testing.assert_allclose(multiple, multiple.take(jnp.zeros(N, int), axis), rtol=1e-5)


@pytest.mark.parametrize("function", [
    lambda g, w: g + w, lambda g, w: w / g, lambda g, w: g * g, lambda g, w: jnp.abs(g), lambda g, w: g + 1.0,
    lambda g, w: g.astype(int).astype(g.dtype), lambda g, w: jnp.where(w > 1, g, w), lambda g, w: jnp.sort(g),
    lambda g, w: jnp.where(g > 1, g, 0.0), lambda g, w: jnp.max(g, 0), lambda g, w: jnp.maximum(g, 0.0),
    lambda g, w: g + w.T, lambda g, w: g - w.sum(0), lambda g, w: jnp.where(w > 1, g, jnp.ones(N)),
], ids=range(14))  # fmt: skip
def test_what_is_not_linear_is_unclear_unless_it_is_trusted(function):
    closed = jax.make_jaxpr(function)(*GIVEN[:2])
    with pytest.raises(pullback.UnclearError):
        pullback.read(closed, 0, trusted=False)
