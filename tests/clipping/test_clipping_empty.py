"""Parameters without entries, and loops without iterations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_clipping_models import check, jit, per_example

from dpx import clipping

METHODS = pytest.mark.parametrize("method", clipping.METHODS)


def normal(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def between(p, x):
    """A layer of no units."""
    return jnp.sum((x @ p["a"]) @ p["b"] + x @ p["w"])


def last(p, x):
    return jnp.sum(x @ p["a"]) + jnp.sum(jnp.sin(x @ p["w"]))


def loop(p, x):
    h = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["stack"])[0]
    return jnp.sum(jax.checkpoint(lambda h, w: jnp.sin(h @ w))(h, p["w"]))


@pytest.mark.quick_cases("last-one_pass")
@METHODS
@pytest.mark.parametrize("loss", [between, last, loop])
def test_parameters_without_entries(loss, method):
    p = {"a": normal(3, 0), "b": normal(0, 3), "stack": normal(0, 3, 3), "w": normal(3, 3)}
    x = normal(4, 5, 3)
    out = jit(clipping.clipped_grad(loss, l2_clip_norm=1.0, method=method))(p, x)
    assert jax.tree.map(jnp.shape, out.grads) == jax.tree.map(jnp.shape, p)
    check(out, per_example(loss, p, (x,)), 1.0)


@pytest.mark.parametrize("method", ["auto", "one_pass"])
def test_a_gradient_may_be_a_constant_of_the_program(method):
    """That of a number that is added, whatever the example is."""
    params = {"w": jnp.ones(3), "b": jnp.float32(2.0)}
    x = jnp.arange(6.0).reshape(2, 3)
    gradient = clipping.clipped_grad(
        lambda p, x: x @ p["w"] + p["b"], l2_clip_norm=1e3, method=method
    )
    found = jax.jit(gradient)(params, x)
    np.testing.assert_allclose(found.grads["b"], 2.0, rtol=1e-6)
    np.testing.assert_allclose(found.grads["w"], x.sum(0), rtol=1e-6)
