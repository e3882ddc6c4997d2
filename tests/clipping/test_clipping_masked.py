"""Masked weights and other functions of a weight entry by entry: exact, and bounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_clipping_models import check, jit, per_example

from dpx import clipping
from dpx.clipping.gradients import plan

IN, OUT, LENGTH, BATCH = 12, 9, 3, 4
MASK = np.tril(np.ones((IN, OUT), np.float32), -1)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape) / 2, jnp.float32)


ROW, X = normal(BATCH, IN, seed=1), normal(BATCH, LENGTH, IN, seed=1)
W = {"w": normal(IN, OUT)}


def autoregressive():
    """One position, and a mask: a layer of MADE."""
    return lambda p, x: jnp.sum(jnp.sin(x @ (p["w"] * MASK))), W, (ROW,)


def several_positions():
    return lambda p, x: jnp.sum(jnp.sin(x @ jnp.tanh(p["w"]))), W, (X,)


def used_twice():
    """One derived weight, as it is and transposed."""

    def loss(p, x):
        w = jax.nn.softplus(p["w"])
        return jnp.sum(jnp.tanh(x @ w) @ w.T)

    return loss, W, (X,)


def looked_up_and_tied():
    ids = np.array([[0, 1, 0, 5], [2, 2, 2, 2], [11, 3, 4, 3]])

    def loss(p, ids):
        e = jnp.exp(p["w"])
        return jax.nn.logsumexp(jnp.sin(e[ids]) @ e.T)

    return loss, W, (ids,)


def blocks():
    """A weight for each head: the array varies over heads, rows and columns."""

    def loss(p, x):
        return jnp.sum(jnp.sin(jnp.einsum("lhd,hde->lhe", x, jnp.exp(p["w"]))))

    return loss, {"w": normal(3, 4, 5)}, (normal(BATCH, 2, 3, 4, seed=1),)


def heads():
    """A masked weight whose columns are split."""

    def loss(p, x):
        h = jnp.einsum("ld,dhe->lhe", x, (p["w"] * MASK).reshape(IN, 3, OUT // 3))
        return jnp.sum(jnp.sin(h) * jnp.cos(h[:, ::-1]))

    return loss, W, (X,)


def convolution():
    """A mask that hides the pixels that come later: PixelCNN."""
    mask = np.ones((3, 3, 2, 4), np.float32)
    mask[1, 1:] = mask[2] = 0

    def loss(p, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            x[None], p["w"] * mask, (1, 1), "SAME", dimension_numbers=numbers
        )
        return jnp.sum(jnp.sin(y))

    return loss, {"w": normal(3, 3, 2, 4)}, (normal(BATCH, 5, 5, 2, seed=1),)


def scan():
    def loss(p, x):
        w = jnp.tanh(p["w"])
        return jnp.sum(jax.lax.scan(lambda h, x: (jnp.sin(h @ w + x), None), jnp.ones(IN), x)[0])

    return loss, {"w": normal(IN, IN)}, (X,)


def bfloat16():
    def loss(p, x):
        return jnp.sum(jnp.sin(x.astype(jnp.bfloat16) @ (p["w"] * MASK).astype(jnp.bfloat16)))

    return loss, W, (X,)


CASES = (
    autoregressive,
    several_positions,
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (used_twice, looked_up_and_tied, blocks, heads, convolution, scan)
    ),
)


def keep_factors(monkeypatch, favor=0.0):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", favor)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_norms_and_sums_are_exact(monkeypatch, case):
    keep_factors(monkeypatch)
    loss, params, batch = case()
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass")
    check(jit(fn)(params, *batch), per_example(loss, params, batch), 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("case", [autoregressive, several_positions], ids=lambda c: c.__name__)
@pytest.mark.parametrize(
    "options", [{"method": "two_pass"}, {"microbatch_size": 3}, {"microbatch_size": 1}], ids=str
)
def test_other_ways_give_the_same(monkeypatch, case, options):
    keep_factors(monkeypatch)
    loss, params, batch = case()
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, **options)
    check(jit(fn)(params, *batch), per_example(loss, params, batch), 0.5)


@pytest.mark.slow
def test_a_penalty_beside_it(monkeypatch):
    keep_factors(monkeypatch)
    masked, params, batch = several_positions()

    def loss(p, x):
        return masked(p, x) + x[0, 0] * jnp.sum(p["w"] ** 2)

    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass")
    check(jit(fn)(params, *batch), per_example(loss, params, batch), 0.5)


def test_two_functions_of_one_weight_fall_back(monkeypatch):
    keep_factors(monkeypatch)

    def loss(p, x):
        return jnp.sum(jnp.sin(x @ jnp.exp(p["w"]))) + jnp.sum(jnp.cos(x @ jnp.tanh(p["w"])))

    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass")
    check(jit(fn)(W, X), per_example(loss, W, (X,)), 0.5)


@pytest.mark.slow
def test_several_vmapped_calls(monkeypatch):
    """Parameters may have an axis of their own, as models with different seeds have."""
    keep_factors(monkeypatch)
    loss, _, batch = several_positions()
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass")
    many = {"w": normal(2, IN, OUT)}
    together = jax.vmap(lambda p: fn(p, *batch).grads["w"])(many)
    alone = [fn({"w": w}, *batch).grads["w"] for w in many["w"]]
    np.testing.assert_allclose(together, np.stack(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", [autoregressive, several_positions], ids=lambda c: c.__name__)
def test_an_example_that_is_not_finite_adds_nothing(monkeypatch, case):
    keep_factors(monkeypatch)
    loss, params, (x,) = case()
    fn = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass"))
    out = fn(params, x.at[1].set(jnp.inf))
    rest = fn(params, x, mask=np.arange(BATCH) != 1)
    assert out.num_not_finite == 1
    np.testing.assert_allclose(out.grads["w"], rest.grads["w"], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_narrow_factors(monkeypatch):
    keep_factors(monkeypatch)
    loss, params, batch = bfloat16()
    found, expected = (
        jax.jit(clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method))(params, *batch)
        for method in ("one_pass", "vmap")
    )
    np.testing.assert_allclose(found.norms, expected.norms, rtol=2e-2)
    np.testing.assert_allclose(found.grads["w"], expected.grads["w"], rtol=5e-2, atol=5e-3)


def largest_contribution(length, out=300):
    """Of examples whose positions nearly cancel, and whose gradients are long enough to be clipped."""
    rng, half = np.random.default_rng(0), length // 2
    x, c = rng.normal(size=(64, length, 40)), rng.normal(size=(64, length, out))
    remainder = 10.0 ** -rng.uniform(0, 5, size=(64, 1, 1))
    x[:, half : 2 * half] = x[:, :half] * (1 + remainder * rng.normal(size=(64, half, 40)))
    c[:, half : 2 * half] = -c[:, :half]
    params = {"w": normal(40, out)}
    batch = [a.astype("f4") for a in (x, 1e6 * c)]

    def loss(p, x, c):
        return jnp.sum(c * (x @ jnp.exp(4 * p["w"])))

    fn = clipping.clipped_grad(loss, l2_clip_norm=1.0, method="one_pass")
    alone = jax.jit(
        lambda *b: jax.lax.map(lambda e: fn(params, *(v[None] for v in e)).grads["w"], b)
    )
    return np.linalg.norm(np.asarray(alone(*batch), "f8").reshape(64, -1), axis=1)


@pytest.mark.quick_cases("64-300")
@pytest.mark.parametrize(("length", "out"), [(1, 300), (64, 300), (64, 304)])
def test_no_example_adds_more_than_the_threshold(monkeypatch, length, out):
    keep_factors(monkeypatch)
    found = largest_contribution(length, out)
    assert found.max() <= 1
    assert found.max() > 0.99
