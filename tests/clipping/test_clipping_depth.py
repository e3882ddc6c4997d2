"""What keeps deep models quick to trace and to compile: parameters that are alike are normed together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx import clipping
from dpx.clipping import alike

DIM, LENGTH, BATCH = 32, 6, 3


def model(blocks):
    """Blocks that are written one after the other, and a batch."""
    draw = np.random.default_rng(0)

    def weight(*shape):
        return jnp.asarray(draw.normal(size=shape) / 8, "f4")

    params = [
        {
            "in": weight(DIM, 2 * DIM),
            "bias": weight(2 * DIM),
            "out": weight(2 * DIM, DIM),
            "scale": weight(DIM),
        }
        for _ in range(blocks)
    ]

    def loss(params, x):
        for block in params:
            hidden = jnp.tanh(x @ block["in"] + block["bias"])
            x = x + hidden @ block["out"] * (1 + block["scale"])
        return jnp.mean(x**2)

    return loss, params, weight(BATCH, LENGTH, DIM)


def equations(function, *arguments):
    """The number of equations in the jaxpr of a function, and of what it calls where it stands."""

    def count(jaxpr):
        inner = [
            count(getattr(value, "jaxpr", value))
            for eqn in jaxpr.eqns
            for value in jax.tree.leaves(list(eqn.params.values()))
            if hasattr(getattr(value, "jaxpr", value), "eqns")
        ]
        return len(jaxpr.eqns) + sum(inner)

    return count(jax.make_jaxpr(function)(*arguments).jaxpr)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [False, True], ids=["one group", "a group for each block"])
def test_norms_that_are_taken_together_are_those_of_each(monkeypatch, groups):
    loss, params, x = model(3)
    clip = [0.1, 0.2, 0.3] if groups else 0.1
    together = clipping.clipped_grad(loss, l2_clip_norm=clip)(params, x)
    oracle = clipping.clipped_grad(loss, l2_clip_norm=clip, method="vmap")(params, x)
    monkeypatch.setattr(alike, "SMALL", 0)
    alone = clipping.clipped_grad(loss, l2_clip_norm=clip)(params, x)
    for other, tolerance in ((alone, 1e-6), (oracle, 1e-3)):  # Norms are rounded up by up to 1e-3.
        for a, b in zip(jax.tree.leaves(together.norms), jax.tree.leaves(other.norms), strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance)
    for a, b in zip(jax.tree.leaves(together.grads), jax.tree.leaves(alone.grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_block_more_adds_little_to_the_program(monkeypatch):
    """Equations are what tracing and the compiler's passes take time for."""

    def per_block():
        counts = [
            equations(clipping.clipped_grad(loss, l2_clip_norm=1.0), params, x)
            for loss, params, x in (model(4), model(8))
        ]
        return (counts[1] - counts[0]) / 4

    def ordinary(blocks):
        loss, params, x = model(blocks)
        return equations(jax.grad(lambda p: jax.vmap(loss, (None, 0))(p, x).mean()), params)

    plain = (ordinary(8) - ordinary(4)) / 4
    together = per_block()
    monkeypatch.setattr(alike, "SMALL", 0)
    assert together < 4 * plain
    assert per_block() > 1.5 * together


def test_one_gradient_that_is_not_finite_among_those_taken_together():
    loss, params, x = model(3)
    x = x.at[1, 0, 0].set(jnp.inf)
    gradient = clipping.clipped_grad(loss, l2_clip_norm=1.0)
    found = gradient(params, x)
    expected = gradient(params, x[jnp.array([0, 2])])
    assert np.isinf(found.norms[1])
    for a, b in zip(jax.tree.leaves(found.grads), jax.tree.leaves(expected.grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
