"""Losses whose examples share their random numbers are reported."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from test_clipping_silent import X, clipped, plain

from dpx.clipping import ClippingWarning, record_keys


@pytest.fixture(autouse=True)
def _reports_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error", ClippingWarning)
        yield


@pytest.mark.slow
def test_masks_that_repeat_are_reported():
    model = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))

    def loss(model, x):
        return model(x).sum()

    with pytest.warns(ClippingWarning, match="the same for all examples and steps"):
        clipped(loss, model)
    with pytest.raises(ValueError, match="give every record a key of its own"):
        clipped(loss, model, strict=True)
    model.layers[1].deterministic = True
    clipped(loss, model, strict=True)


def _drawn(key, x):
    return jax.random.bernoulli(jax.random.fold_in(key, 3), 0.5, x.shape)


def _drawn_in_a_scan(key, x):
    def body(key, row):
        key, drawn = jax.random.split(key)
        return key, row * jax.random.normal(drawn)

    return jax.lax.scan(body, key, x)[1]


def _drawn_in_a_branch(key, x):
    return jax.lax.cond(x[0] > 0, lambda: jax.random.normal(key, x.shape), lambda: 0 * x)


def _drawn_in_a_loop(key, x):
    def body(state):
        return state[0] + 1, state[1] + jax.random.normal(jax.random.fold_in(key, state[0]))

    return jax.lax.while_loop(lambda state: state[0] < 3 + 0 * x[0], body, (0, x[1]))[1]


def _drawn_by_rejection(key, x):
    return jax.random.gamma(key, 2.0, x.shape)


@pytest.mark.quick_cases("_drawn_by_rejection", "_drawn_in_a_scan")
@pytest.mark.parametrize(
    "draw",
    [_drawn, _drawn_in_a_scan, _drawn_in_a_branch, _drawn_in_a_loop, _drawn_by_rejection],
)
def test_keys_that_all_examples_share_are_reported_and_their_own_are_not(draw):
    def loss(params, x, key):
        return plain(params, x * jax.lax.stop_gradient(draw(key, x)))

    keys = jax.random.split(jax.random.key(0), 4)
    clipped(loss, batch=(X, keys), strict=True)
    with pytest.raises(ValueError, match="the same for all"):
        clipped(functools.partial(loss, key=jax.random.key(0)), strict=True)


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_a_key_that_a_loop_replaces_by_a_shared_one_is_reported(loop):
    def loss(params, x, key):
        def step(i, state):
            key, total = state
            return jax.random.key(5), total + jax.random.normal(key)

        # JAX makes a scan of a loop over a number of iterations that it knows.
        last = 3 if loop == "scan" else jnp.where(x[0] > 0, 3, 2)
        return plain(params, x * jax.lax.fori_loop(0, last, step, (key, 0.0))[1])

    keys = jax.random.split(jax.random.key(0), 4)
    with pytest.raises(ValueError, match="the same for all examples"):
        clipped(loss, batch=(X, keys), strict=True)


def test_a_function_that_draws_for_the_example_and_then_for_all_is_reported():
    @jax.jit
    def draw(key):
        return jax.random.normal(key, (3,))

    def loss(params, x, key):
        return jnp.square(x * draw(key) * draw(jax.random.key(1)) @ params["w"])

    keys = jax.random.split(jax.random.key(0), 4)
    with pytest.raises(ValueError, match="the same for all"):
        clipped(loss, batch=(X, keys), strict=True)


@pytest.mark.quick_cases("auto-rbg")
@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
@pytest.mark.parametrize("method", ["auto", pytest.param("vmap", marks=pytest.mark.slow)])
def test_keys_that_jax_draws_from_by_place_are_refused(implementation, method):
    """A batch of them draws from the first: the record that has it would change the masks of all others."""

    def loss(params, x, key):
        return plain(params, x * jax.random.bernoulli(key, 0.5, x.shape))

    keys = record_keys(jax.random.key(0, impl=implementation), 3, jnp.arange(4))
    call = functools.partial(clipped, loss, method=method)
    with pytest.raises(ValueError, match="threefry2x32"):
        call(batch=(X, keys))
    whole, rest = (
        call(batch=(X[first:], keys[first:]), microbatch_size=1, strict=True) for first in (0, 1)
    )
    assert jnp.array_equal(whole.norms[1:], rest.norms)
    shared = jax.random.key(0, impl=implementation)

    def replaced(params, x, key):
        """A loop draws from a key of the example, but for its first step."""

        def step(drawn, row):
            return key, row * jax.random.normal(drawn)

        return plain(params, jax.lax.scan(step, shared, x)[1])

    def rejected(params, x, key):
        return plain(params, x * jax.random.gamma(key, 2.0, x.shape))

    for other in (replaced, rejected):
        with pytest.raises(ValueError, match="threefry2x32"):
            clipped(other, batch=(X, keys), method=method)
    with pytest.raises(ValueError, match="the same for all"):
        clipped(lambda params, x: loss(params, x, shared), strict=True)
