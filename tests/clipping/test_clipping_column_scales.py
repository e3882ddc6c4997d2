"""Scales of a weight's columns, moved behind its products: exact, and no product more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_clipping_models import check, jit, per_example

from dpx import clipping
from dpx.clipping import column_scales, jaxprs, plan

IN, OUT, LENGTH, BATCH = 24, 32, 3, 4


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape) / 2, jnp.float32)


W = {"w": normal(IN, OUT), "g": normal(OUT) + 1}
X = normal(BATCH, LENGTH, IN, seed=1)


def norm(w, axis=0):
    return jnp.sqrt(jnp.sum(w**2, axis=axis, keepdims=True))


def columns(p, x):
    return x @ (p["g"] * (p["w"] / norm(p["w"])))


def one_number(p, x):
    return x @ (p["w"] / jnp.linalg.norm(p["w"]))


def on_the_left(p, x):
    return (p["w"].T / norm(p["w"].T, 1)) @ x.T


def twice(p, x):
    w = p["w"] * p["g"]
    return x @ w, x[0] @ w


def blocks(p, x):
    """A weight for each head, the scale of which varies over heads and columns, in another order."""
    w = p["w"].reshape(4, IN // 4, OUT) * jnp.exp(p["g"].reshape(8, 4)[:, 0])[None, None, :].repeat(
        4, 2
    )
    return jnp.einsum(
        "lhd,hde->elh", x.reshape(LENGTH, 4, IN // 4), w * jnp.arange(1.0, 5)[:, None, None]
    )


def turned(p, x):
    """A scale over two axes, which change places."""
    w = p["w"].reshape(OUT, 4, IN // 4)
    s = jnp.arange(1.0, 1 + 4 * OUT).reshape(OUT, 4) / OUT
    return jnp.einsum("lhd,ehd->lhe", x.reshape(LENGTH, 4, IN // 4), w * jnp.sin(s)[:, :, None])


def centered(p, x):
    w = p["w"] - jnp.mean(p["w"], 0, keepdims=True)
    return x @ (w / norm(w))


def convolution(p, x):
    w = p["w"].reshape(3, 8, OUT) * p["g"]
    return lax.conv_general_dilated(
        x[None], w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NCW")
    )


def rows(p, x):
    return x @ (p["w"] / norm(p["w"], 1))


def rows_and_columns(p, x):
    return x @ (p["w"] / norm(p["w"], 1) * p["g"])


def elsewhere(p, x):
    w = p["w"] * p["g"]
    return x @ w, jnp.sin(w * x[0, 0])


def in_half(p, x):
    return x.astype(jnp.bfloat16) @ (p["w"] * p["g"]).astype(jnp.bfloat16)


def squared(p, x):
    """The scaled weight stands on both sides."""
    w = p["w"][:, :IN] * p["g"][:IN]
    return x @ (w @ w)


MOVED = (columns, one_number, on_the_left, twice, blocks, turned, centered, convolution)
LEFT = (rows, rows_and_columns, elsewhere, squared, in_half)


def problem(case):
    x = X.reshape(BATCH, -1, 8) if case is convolution else X

    def loss(p, x):
        out = jax.tree.leaves(case(p, x))
        return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in out)

    return loss, W, x


def moved(loss, p, x):
    leaves, tree = jax.tree.flatten(p)
    closed = jaxprs.flat(
        jax.make_jaxpr(lambda *a: loss(tree.unflatten(a[:-1]), a[-1]))(*leaves, x[0])
    )
    return closed, column_scales.behind_products(closed, len(leaves))


@pytest.mark.parametrize("case", [*MOVED, *LEFT], ids=lambda case: case.__name__)
def test_losses_and_gradients_are_the_same(case):
    loss, p, x = problem(case)
    before, after = moved(loss, p, x)
    assert (after is not before) == (case in MOVED)
    given = [*jax.tree.leaves(p), x[1]]
    if case in MOVED:
        found, want = (
            jax.value_and_grad(lambda a, c=c: jax.core.eval_jaxpr(c.jaxpr, c.consts, *a)[0])(given)
            for c in (after, before)
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, want
        )


@pytest.mark.parametrize("favor", [0.0, 1e9], ids=["Gram", "held"])
@pytest.mark.parametrize("case", [*MOVED, *LEFT[:-1]], ids=lambda case: case.__name__)
def test_norms_and_sums_are_exact(monkeypatch, case, favor):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", favor)
    monkeypatch.setattr("dpx.clipping.weights.is_large", lambda shape: len(shape) > 1)
    loss, p, x = problem(case)
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass")
    check(jit(fn)(p, x), per_example(loss, p, (x,)), 0.5)


def test_weight_norm_takes_no_product_more():
    p = {"w": normal(256, 256), "v": normal(256, 256, seed=1), "g": normal(256) + 1}
    x = normal(64, 256)

    def loss(p, x):
        h = jnp.tanh(columns(p, x))
        return jnp.sum(jnp.sin(columns({"w": p["v"], "g": p["g"]}, h)))

    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5)

    def flops(step):
        return jax.jit(step).lower(p, x).compile().cost_analysis()["flops"]

    ordinary = flops(jax.grad(lambda p, x: jax.vmap(lambda x: loss(p, x))(x).mean()))
    assert flops(lambda p, x: fn(p, x).grads) < 1.25 * ordinary
