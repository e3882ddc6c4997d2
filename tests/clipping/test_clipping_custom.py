"""Products whose backward pass is written by hand: exact, and by factors where these can be read off."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_clipping_engine import rules_of
from test_clipping_models import check, jit, per_example

from dpx import clipping
from dpx.clipping.gradients import plan

IN, OUT, LENGTH, BATCH = 6, 6, 3, 4


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape) / 2, jnp.float32)


X = normal(BATCH, LENGTH, IN, seed=1)
W = {"w": normal(IN, OUT)}


def rounded(x, largest):
    return jnp.round(x / (largest / 7)).astype(jnp.int8)


@jax.custom_vjp
def quantised(x, w, most_x, most_w):
    """A product of 4-bit integers, with the derivative of an ordinary one."""
    product = jnp.matmul(rounded(x, most_x), rounded(w, most_w), preferred_element_type=jnp.int32)
    return product * (most_x / 7) * (most_w / 7)


def quantised_backward(kept, g):
    x, w = kept
    zeros = jnp.zeros((*x.shape[:1], 1)), jnp.zeros((1, w.shape[1]))
    return (g @ w.T, (g.T @ x).T, *zeros)


quantised.defvjp(lambda x, w, *most: (quantised(x, w, *most), (x, w)), quantised_backward)


def in_integers(x, w):
    largest = functools.partial(jnp.max, keepdims=True)
    return quantised(x, w, largest(jnp.abs(x), axis=1), largest(jnp.abs(w), axis=0))


def once():
    return lambda p, x: jnp.sum(jnp.sin(in_integers(x, p["w"]))), W, (X,)


def transposed_and_tied():
    """One weight, quantised as it is, transposed, and in an ordinary product."""

    def loss(p, x):
        h = jnp.tanh(in_integers(x, p["w"].T))
        return jnp.sum(jnp.sin(in_integers(h, p["w"])) @ p["w"])

    return loss, W, (X,)


def concatenated():
    def loss(p, x):
        w = jnp.concatenate([p["w"], p["v"]], axis=1)
        return jnp.sum(jnp.sin(in_integers(x, w)) ** 2)

    return loss, W | {"v": normal(IN, 4)}, (X,)


def scanned():
    """A layer of a stack in every iteration, recomputed in the backward pass."""

    def loss(p, x):
        step = jax.checkpoint(lambda h, w: (jnp.tanh(in_integers(h, w)), None))
        return jnp.sum(jax.lax.scan(step, x, p["w"])[0] ** 2)

    return loss, {"w": normal(3, IN, IN)}, (X,)


def heads():
    """A weight for each head, whose factors are rounded to bfloat16 in the backward pass."""

    @jax.custom_vjp
    def product(x, w):
        return jnp.einsum("lhd,hde->lhe", x, w)

    def backward(kept, g):
        x, w = (y.astype(jnp.bfloat16).astype(jnp.float32) for y in kept)
        return jnp.einsum("lhe,hde->lhd", g, w), jnp.einsum("lhd,lhe->hde", x, g / 3)

    product.defvjp(lambda x, w: (product(x, w), (x, w)), backward)
    return (
        lambda p, x: jnp.sum(jnp.sin(product(x, p["w"]))),
        {"w": normal(3, 4, 5)},
        (normal(BATCH, 2, 3, 4, seed=1),),
    )


CASES = (once, transposed_and_tied, concatenated, scanned, heads)


@pytest.mark.quick_cases("one_pass-concatenated")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
def test_norms_and_sums_are_exact(monkeypatch, case, method):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)
    loss, params, batch = case()
    for path, (_, by_factors, _, unruled) in rules_of(loss, params, *batch).items():
        assert by_factors, path
        assert not unruled, path
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method)
    check(jit(fn)(params, *batch), per_example(loss, params, batch), 0.5)


def with_backward(backward):
    """A product whose weight has the given cotangent, and that of a number beside it."""

    @jax.custom_vjp
    def product(x, w, scale):
        return (x @ w) * scale

    def both(kept, g):
        x, w, scale = kept
        return (g @ w.T, *backward(x, w, scale, g))

    product.defvjp(lambda *kept: (product(*kept), kept), both)

    def loss(p, x):
        return jnp.sum(jnp.sin(product(x, p["w"], jnp.exp(p["scale"]))))

    return loss, W | {"scale": normal(OUT)}, (X,)


@pytest.mark.slow
def test_a_cotangent_that_is_no_product_of_both_sides_falls_back(monkeypatch):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)
    for cotangent in (
        lambda x, w, scale, g: jnp.clip(x.T @ g, -0.1, 0.1),
        lambda x, w, scale, g: x.T @ g + w,
    ):
        loss, params, batch = with_backward(
            lambda x, w, scale, g, of=cotangent: (of(x, w, scale, g), jnp.sum(g, 0))
        )
        assert rules_of(loss, params, *batch)["w"][3], cotangent
        fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass")
        check(jit(fn)(params, *batch), per_example(loss, params, batch), 0.5)


@pytest.mark.slow
def test_a_barrier_for_several_cotangents_is_passed(monkeypatch):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)

    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(
        lambda x, w: (x @ w, (x, w)),
        lambda kept, g: jax.lax.optimization_barrier((g @ kept[1].T, kept[0].T @ g)),
    )

    def loss(p, x):
        return jnp.sum(jnp.sin(product(jnp.sin(x @ p["v"]), p["w"])))

    params, x = {"v": normal(6, 6, seed=1), "w": normal(6, 6)}, normal(3, 2, 6)
    assert not rules_of(loss, params, x)["w"][3]
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass")
    check(jit(fn)(params, x), per_example(loss, params, (x,)), 0.5, slack=1e-3)


@pytest.mark.slow
def test_only_a_cotangent_of_zeros_counts_for_nothing(monkeypatch):
    """One that is the same for all entries is a gradient like any other."""
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)
    for number, is_used in ((0.0, False), (1.0, True)):
        loss, params, batch = with_backward(
            lambda x, w, scale, g, n=number: (x.T @ g, jnp.full(OUT, n))
        )
        assert (rules_of(loss, params, *batch)["scale"][0] is plan.Held) == is_used
        fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass")
        check(jit(fn)(params, *batch), per_example(loss, params, batch), 0.5)


@pytest.mark.quick_cases("auto")
@pytest.mark.parametrize("method", ["one_pass", "auto", "two_pass"])
def test_derivatives_that_are_refused_are_not_asked_for(method):
    """Equinox has functions that must not be differentiated with respect to some of their operands."""

    @jax.custom_vjp
    def product(x, w, fixed):
        return x @ w * fixed

    def forward(x, w, fixed):
        assert not fixed.perturbed
        return product(x.value, w.value, fixed.value), (x.value, w.value, fixed.value)

    def backward(kept, g):
        x, w, fixed = kept
        return g @ w.T * fixed, x.T @ g * fixed, jnp.zeros(())

    product.defvjp(forward, backward, symbolic_zeros=True)

    def loss(p, x):
        layer = jax.checkpoint(lambda x, w: product(x, w, jax.lax.stop_gradient(x[0, 0])))
        return jnp.sum(jnp.sin(layer(x, p["w"])))

    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method)
    check(jit(fn)(W, X), per_example(loss, W, (X,)), 0.5)
    check(fn(W, X), per_example(loss, W, (X,)), 0.5)  # JAX remembers what was traced before.


def test_several_results_fall_back(monkeypatch):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)

    @jax.custom_vjp
    def both(x, w):
        return x @ w, jnp.sum(w)

    both.defvjp(
        lambda x, w: (both(x, w), (x, w)),
        lambda kept, g: (g[0] @ kept[1].T, kept[0].T @ g[0] + g[1]),
    )

    def loss(p, x):
        h, total = both(x, p["w"])
        return jnp.sum(jnp.sin(h)) * total

    assert rules_of(loss, W, X)["w"][3]
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass")
    check(jit(fn)(W, X), per_example(loss, W, (X,)), 0.5)


@pytest.mark.slow
def test_quantised_weights_hold_no_gradient_for_each_example():
    w = normal(128, 256)

    def held(batch):
        def loss(w, x):
            return jnp.sum(jnp.sin(in_integers(x, w)))

        step = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=1.0, method="one_pass"))
        compiled = step.lower(w, jnp.ones((batch, 4, 128))).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert (held(16) - held(8)) / 8 < w.size * 4 / 2


@jax.custom_vjp
def limited(x, w):
    """A product with a backward pass that is not linear."""
    return x @ w


def limited_backward(kept, g):
    x, w = kept
    return g @ w.T, x.T @ jnp.clip(g, -0.1, 0.1)


limited.defvjp(lambda x, w: (x @ w, (x, w)), limited_backward)


@pytest.mark.quick_cases("3.0", "0.25")
@pytest.mark.parametrize("gain", [-1.0, 0.25, 3.0])
def test_a_limit_in_the_backward_pass_holds_before_the_gain_of_the_weight(gain):
    w, x = {"w": normal(32, 32)}, normal(BATCH, LENGTH, 32, seed=1)

    def loss(p, x):
        return jnp.sum((limited(x, gain * p["w"]) - 1) ** 2)

    with jax.default_matmul_precision("highest"):
        gradients = jax.vmap(jax.grad(loss), (None, 0))(w, x)["w"]
    norms = jnp.linalg.norm(gradients.reshape(BATCH, -1), axis=1)
    found = clipping.clipped_grad(loss, l2_clip_norm=1e9, method="one_pass")(w, x)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-3)
    np.testing.assert_allclose(found.grads["w"], gradients.sum(0), rtol=1e-4, atol=1e-4)
