"""Functions of weights alone: exact, strictly bounded, and no per-example gradient of a weight."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from test_clipping_engine import rules_of
from test_clipping_models import check, jit, per_example

from dpx import clipping
from dpx.clipping.gradients import plan
from dpx.clipping import rounding as _rounding
from dpx.clipping import weights as _weights

IN, OUT, LENGTH, BATCH = 12, 9, 3, 4


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape) / 2, jnp.float32)


X = normal(BATCH, LENGTH, IN, seed=1)
IDS = np.array([[0, 1, 0, 5], [2, 2, 2, 2], [11, 3, 4, 3]])


def penalty():
    """An L2 penalty that differs between examples, on a matrix that is used twice, and a bias."""

    def loss(p, x):
        h = jnp.tanh(x @ p["w"] + p["b"])
        penalty = sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(p))
        return jnp.sum((h @ p["w"].T) ** 2) + x[0, 0] * penalty

    return loss, {"w": normal(IN, OUT), "b": normal(OUT)}, (X,)


def penalty_on_heads():
    """A weight whose columns are split into heads, and a penalty on all of it."""

    def loss(p, x):
        h = jnp.einsum("ld,dhe->lhe", x, p["w"].reshape(IN, 3, OUT // 3))
        return jnp.sum(jnp.sin(h) * jnp.cos(h[:, ::-1])) + x[0, 0] * jnp.sum(p["w"] ** 2)

    return loss, {"w": normal(IN, OUT)}, (X,)


def penalty_through_a_scan():
    def loss(p, x):
        h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h @ p["w"] + x), None), jnp.zeros(IN), x)
        return jnp.sum(h**2) + 0.1 * jnp.linalg.norm(p["w"]) * jnp.sum(x)

    return loss, {"w": normal(IN, IN)}, (X,)


def linen_weight_norm():
    layer = nn.WeightNorm(nn.Dense(OUT))
    params = layer.init(jax.random.key(0), X[0])
    return lambda p, x: jnp.sum(layer.apply(p, x) ** 2), params, (X,)


def equinox_weight_norm():
    layer = eqx.nn.WeightNorm(eqx.nn.Linear(IN, OUT, key=jax.random.key(0)))
    return lambda layer, x: jnp.sum(jax.vmap(layer)(x) ** 2), layer, (X,)


def nnx_scaled():
    """A learned scale for each column and a fixed one for each row, before and after a transpose."""

    class Scaled(nnx.Module):
        def __init__(self):
            self.kernel, self.scale = nnx.Param(normal(IN, OUT)), nnx.Param(normal(OUT))

        def __call__(self, x):
            rows = jnp.linspace(0.5, 2, IN)[:, None]
            h = x @ (self.kernel[...] * self.scale[...] * 3)
            return jnp.sin(h) @ (rows * self.kernel[...]).T

    return lambda model, x: jnp.sum(model(x) ** 2), Scaled(), (X,)


def spectral_norm():
    """Two power iterations that are not differentiated, and the derivative of the norm itself."""

    def loss(p, x):
        u = jnp.ones(IN)
        for _ in range(2):
            v = p["w"].T @ u
            u = p["w"] @ (v / jnp.linalg.norm(v))
            u = u / jnp.linalg.norm(u)
        u, v = jax.lax.stop_gradient((u, v / jnp.linalg.norm(v)))
        return jnp.sum((x @ (p["w"] / (u @ p["w"] @ v))) ** 2)

    return loss, {"w": normal(IN, OUT)}, (X,)


def weight_standardisation():
    def loss(p, x):
        w = (p["w"] - p["w"].mean(0)) / jnp.sqrt(p["w"].var(0) + 1e-5)
        return jnp.sum((x @ w) ** 2)

    return loss, {"w": normal(IN, OUT)}, (X,)


def straight_through():
    """Rounded weights with a scale for each column, whose derivative is the identity."""

    @jax.custom_vjp
    def rounded(w):
        scale = jnp.max(jnp.abs(w), 0) / 7
        return jnp.round(w / scale) * scale

    rounded.defvjp(lambda w: (rounded(w), None), lambda _, g: (g,))
    return lambda p, x: jnp.sum((x @ rounded(p["w"])) ** 2), {"w": normal(IN, OUT)}, (X,)


def tied_rows_of_length_one():
    """An embedding with rows of norm one, looked up with repeats and tied to the read-out."""

    def loss(p, ids):
        e = p["e"] / jnp.linalg.norm(p["e"], axis=1, keepdims=True)
        return jax.nn.logsumexp(jnp.sin(e[ids]) @ e.T)

    return loss, {"e": normal(IN, OUT)}, (IDS,)


def function_of_an_embedding():
    return lambda p, ids: jnp.sum(jnp.tanh(p["e"])[ids] ** 2), {"e": normal(IN, OUT)}, (IDS,)


CASES = (
    penalty, penalty_on_heads, penalty_through_a_scan, linen_weight_norm, equinox_weight_norm, nnx_scaled,
    spectral_norm, weight_standardisation, straight_through, tied_rows_of_length_one,
    function_of_an_embedding,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch):
    monkeypatch.setattr(_weights, "is_large", lambda shape: True)
    monkeypatch.setattr(_weights, "SMALL", 2)


def by_gram(monkeypatch, favor):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", favor)
    monkeypatch.setattr(plan, "FAVOR_TABLE", favor)


def compare(monkeypatch, case, favor):
    """Norms and sums with those of one gradient after another; all but biases by factors, or held."""
    by_gram(monkeypatch, favor)
    loss, params, batch = case()
    for path, (_, found, _, opaque) in rules_of(loss, params, *batch).items():
        is_bias = path.endswith(("b", "bias"))
        assert is_bias or (not opaque and found == (favor == 0)), path
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass")
    # Closed over: jit takes no functions, such as an Equinox module has among its leaves.
    check(jit(lambda *batch: fn(params, *batch))(*batch), per_example(loss, params, batch), 0.5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("favor", [0.0, 1e9], ids=["Gram", "held"])
def test_norms_and_sums_are_exact(monkeypatch, case, favor):
    compare(monkeypatch, case, favor)


@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
def test_groups_and_masks(monkeypatch, method):
    by_gram(monkeypatch, 0.0)
    loss, params, (x,) = penalty()
    fn = clipping.clipped_grad(
        loss, l2_clip_norm={"w": 0.3, "b": 0.2}, method=method, microbatch_size=3
    )
    mask = np.array([True, False, True, True])
    out = jit(fn)(params, x, mask=mask)
    for name, gradients in zip(("b", "w"), per_example(loss, params, (x,)), strict=True):
        norms = np.linalg.norm(gradients.reshape(BATCH, -1), axis=1) * mask
        np.testing.assert_allclose(out.norms[name], norms, rtol=1e-4)
        factors = np.minimum(1, {"w": 0.3, "b": 0.2}[name] / np.maximum(norms, 1e-30)) * mask
        np.testing.assert_allclose(
            out.grads[name], np.tensordot(factors, gradients, 1), rtol=1e-4, atol=1e-6
        )


def test_a_scaled_weight_behind_what_is_recomputed(monkeypatch):
    """Its scale needs cotangents from all of the loss, also where only one pass goes through its end."""
    by_gram(monkeypatch, 0.0)

    def loss(p, x):
        h = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, p["a"])
        return jnp.sum(jnp.sin(h @ (p["w"] * jnp.exp(p["scale"]))) ** 2)

    params = {"a": normal(IN, IN), "w": normal(IN, OUT), "scale": normal(OUT)}
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="two_pass")
    check(jit(fn)(params, X), per_example(loss, params, (X,)), 0.5)


def falls_back():
    """Derivatives that are not linear, mix entries, differ, or stand beside a use without a rule."""

    @jax.custom_vjp
    def clipped_backwards(w):
        return w * 2

    clipped_backwards.defvjp(lambda w: (w * 2, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))

    def loss(p, x):
        value = jnp.sum(jnp.tanh(x @ clipped_backwards(p["a"])))
        value += jnp.sum((x @ jnp.cumsum(p["b"], 0)) ** 2)
        value += jnp.sum(jnp.sin(p["c"] * 2) * x[0, 0]) + jnp.sum(x @ (p["c"] * 2))
        return (
            value
            + jnp.sum((x @ jnp.exp(p["d"])) ** 2)
            + jnp.sum((x @ jnp.tanh(p["d"])) ** 2)
            + jnp.sum(clipped_backwards(p["a"]) ** 2) * x[0, 0]
        )

    return loss, {name: normal(IN, OUT, seed=n) for n, name in enumerate("abcd")}, (X,)


def test_what_has_no_rule_is_exact_too(monkeypatch):
    by_gram(monkeypatch, 0.0)
    loss, params, batch = falls_back()
    assert not any(found for _, found, _, _ in rules_of(loss, params, *batch).values())
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass")
    check(jit(fn)(params, *batch), per_example(loss, params, batch), 0.5)


def costs(loss, params, batch, method):
    if method:
        step = clipping.clipped_grad(loss, l2_clip_norm=1.0, method=method)
    else:

        def step(params, *batch):
            return jax.grad(lambda p: jax.vmap(lambda *e: loss(p, *e))(*batch).mean())(params)

    compiled = jax.jit(step).lower(params, *batch).compile()
    return compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes


def wide(normed):
    """Two layers of 256 with weight norm, or two of 512 with an L2 penalty."""
    if normed:
        layers = [nn.WeightNorm(nn.Dense(256)) for _ in range(2)]
        params = [layer.init(jax.random.key(0), jnp.ones(256)) for layer in layers]

        def loss(params, x):
            for layer, p in zip(layers, params, strict=True):
                x = jnp.tanh(layer.apply(p, x))
            return jnp.sum(x**2)

        return loss, params, (normal(64, 256),)

    def loss(params, x):
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.sum(y**2) + 0.01 * sum(jnp.sum(w**2) for w in params)

    return loss, [normal(512, 512, seed=n) for n in range(2)], (normal(32, 512),)


@pytest.mark.slow
@pytest.mark.parametrize("normed", [True, False], ids=["weight norm", "L2 penalty"])
def test_costs_are_those_of_an_ordinary_step(monkeypatch, normed):
    monkeypatch.undo()  # As it is for users.
    problem = wide(normed)
    (flops, _), (ours, held), (_, everything) = (costs(*problem, m) for m in (None, "auto", "vmap"))
    # A penalty takes one sum over each weight, for its part of the norms.
    assert ours < (1.55 if normed else 1.04) * flops
    assert 20 * held < everything


def bounded_loss(params, x, c, y):
    w = params["w"]
    return jnp.sum(c * (x @ (2 * w))) + y * jnp.sum(w**2)


def cancelling(count, rows=40, columns=30):
    """Weights, and examples whose product nearly cancels the gradient of the penalty."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(rows, columns)).astype("f4")
    u, s, v = np.linalg.svd(w.astype("f8"), full_matrices=False)
    x = np.broadcast_to(u.T, (count, columns, rows)) * 2.0 ** rng.integers(
        -3, 4, (count, columns, 1)
    )
    c = -np.broadcast_to(s[:, None] * v, (count, columns, columns)) / (x / u.T).mean(
        2, keepdims=True
    )
    remainder = 10.0 ** -rng.uniform(0, 6, size=(count, 1, 1))
    c = c * (1 + remainder * rng.normal(size=c.shape))
    y = 1e4 * np.ones(count)
    return {"w": jnp.asarray(w)}, [a.astype("f4") for a in (x, 1e4 * c, y)]


def largest_contribution():
    params, batch = cancelling(96)
    fn = clipping.clipped_grad(bounded_loss, l2_clip_norm=1.0, method="one_pass")
    alone = jax.jit(
        lambda *b: jax.lax.map(lambda e: fn(params, *(v[None] for v in e)).grads["w"], b)
    )
    found = np.asarray(alone(*batch), "f8").reshape(96, -1)
    return np.linalg.norm(found, axis=1)


def test_no_example_adds_more_than_the_threshold(monkeypatch):
    by_gram(monkeypatch, 0.0)
    found = largest_contribution()
    assert found.max() <= 1
    assert found.max() > 0.99


def test_the_search_finds_norms_that_are_not_rounded_up(monkeypatch):
    by_gram(monkeypatch, 0.0)
    monkeypatch.setattr(_rounding, "gamma", lambda roundings, dtype: 1e-30)
    monkeypatch.setattr("dpx.clipping.grams.FLOOR", 0.0)
    assert largest_contribution().max() > 1.01
