"""Functions of weights alone: exact, and strictly bounded."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from test_clipping_models import check, jit, per_example

from dpx import clipping
from dpx.clipping.gradients import plan

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


def by_gram(monkeypatch, favor):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", favor)


def compare(monkeypatch, case, favor):
    """Norms and sums with those of one gradient after another."""
    by_gram(monkeypatch, favor)
    loss, params, batch = case()
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass")
    # Closed over: jit takes no functions, such as an Equinox module has among its leaves.
    check(jit(lambda *batch: fn(params, *batch))(*batch), per_example(loss, params, batch), 0.5)


@pytest.mark.quick_cases(
    "held-straight_through", "held-function_of_an_embedding", "held-weight_standardisation"
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("favor", [0.0, 1e9], ids=["Gram", "held"])
def test_norms_and_sums_are_exact(monkeypatch, case, favor):
    compare(monkeypatch, case, favor)


@pytest.mark.quick_cases
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


@pytest.mark.slow
def test_what_has_no_rule_is_exact_too(monkeypatch):
    by_gram(monkeypatch, 0.0)
    loss, params, batch = falls_back()
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass")
    check(jit(fn)(params, *batch), per_example(loss, params, batch), 0.5)


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
