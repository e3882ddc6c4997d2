"""What is rounded to less than float32 takes one pass: a second one would round what is scaled."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_clipping_models import check, jit, per_example

from dpx import clipping
from dpx.clipping import two_pass

pytestmark = pytest.mark.optimized


@pytest.mark.parametrize(
    "narrow",
    [
        pytest.param(lambda w: w.astype(jnp.bfloat16).astype(w.dtype), marks=pytest.mark.slow),
        lambda w: jax.lax.reduce_precision(w, 8, 7),
        lambda w: (w / jnp.linalg.norm(w, axis=0)).astype(jnp.float16).astype(w.dtype),
        lambda w: w * jnp.sum(w).astype(jnp.bfloat16).astype(w.dtype),
        lambda w: jax.lax.dot(
            np.eye(70, dtype="f4"), w, preferred_element_type=jnp.bfloat16
        ).astype("f4"),
    ],
    ids=["cast", "reduce_precision", "cast of a function", "a number", "a product"],
)
def test_what_is_rounded_on_the_way_back_takes_one_pass(narrow):
    """A second pass would round cotangents that are scaled, and sums of them, to what the loss rounds to."""

    def loss(w, x):
        return jnp.sum(jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w))(x, narrow(w)))

    w, x = np.eye(70, dtype="f4"), np.ones((2, 3, 70), "f4")
    with pytest.raises(ValueError, match="use 'one_pass'"):
        clipping.clipped_grad(loss, l2_clip_norm=1.0, method="two_pass")(w, x)
    auto, one = (
        clipping.clipped_grad(loss, l2_clip_norm=1.0, method=method)(w, x)
        for method in ("auto", "one_pass")
    )
    np.testing.assert_array_equal(auto.grads, one.grads)


def test_narrow_parameters_take_one_pass():
    """Also those that are made wider before anything else: their gradients are as narrow as they are."""

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w.astype(jnp.float32)))

    fn = clipping.clipped_grad(loss, l2_clip_norm=1.0, method="two_pass")
    with pytest.raises(ValueError, match="use 'one_pass'"):
        jax.eval_shape(fn, jnp.ones((4, 3), jnp.bfloat16), jnp.ones((2, 4)))


def test_constants_may_be_narrow():
    """Such as the square root of the width, by which some models scale embeddings, in bfloat16."""
    root = jnp.sqrt(70.0).astype(jnp.bfloat16)

    def loss(w, x):
        scale = (root * jnp.bfloat16(0.5)).astype(jnp.float32) * x.astype(jnp.bfloat16).max()
        return jnp.sum(jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w))(x * scale, w))

    w, x = np.eye(70, dtype="f4"), np.linspace(0, 1, 420, dtype="f4").reshape(2, 3, 70)
    two, vmap = (
        clipping.clipped_grad(loss, l2_clip_norm=1.0, method=method)(w, x)
        for method in ("two_pass", "vmap")
    )
    np.testing.assert_allclose(two.grads, vmap.grads, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_narrow_loss_takes_one_pass(dtype):
    """Two passes would scale it by clip factors that are rounded to its type."""

    def loss(params, x):
        hidden = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, params["w"])
        return jnp.sum(hidden**2).astype(dtype)

    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(6, 3)).astype("f4")}
    x = rng.normal(size=(4, 6)).astype("f4")
    with pytest.raises(ValueError, match="use 'one_pass'"):
        clipping.clipped_grad(loss, l2_clip_norm=0.1, method="two_pass")(params, x)
    check(
        jit(clipping.clipped_grad(loss, l2_clip_norm=0.1))(params, x),
        per_example(loss, params, (x,)),
        0.1,
    )


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """What is traced is what a GPU would run; the CPU runs it."""

    def begin():
        jax.clear_caches()
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    yield begin
    jax.clear_caches()


@pytest.mark.parametrize("positions", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_matrix_units_multiply_bfloat16_numbers(as_on_a_gpu, positions):
    """On GPUs what clip factors multiply is the sum of two such numbers."""

    def loss(w, x):
        wide = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        return jnp.sum(wide.astype(jnp.float32) * jnp.cos(x[:, :80]))

    rng = np.random.default_rng(0)
    w = rng.normal(size=(90, 80)).astype("f4")
    x = rng.normal(size=(4, positions, 90)).astype("f4")
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.3, method="one_pass")
    cpu = jit(fn)(w, x)
    clipped = np.stack([np.asarray(jit(fn)(w, one[None]).grads, "f8") for one in x])
    as_on_a_gpu()
    program = jit(fn).lower(w, x).as_text()
    assert len(re.findall(r"bf16>, \S+bf16>\) -> tensor<(?:90x80|80x90)xf32>", program)) == 2
    gpu = jit(fn)(w, x)
    np.testing.assert_allclose(gpu.norms, cpu.norms, rtol=1e-3)
    assert (gpu.norms > cpu.norms).all()
    exact = np.tensordot(np.asarray(cpu.norms, "f8") / gpu.norms, clipped, 1)
    assert np.linalg.norm(gpu.grads - exact) / np.linalg.norm(exact) < 1e-5
    for one in x:
        alone = np.asarray(jit(fn)(w, one[None]).grads, "f8")
        assert 0.999 * 0.3 < np.linalg.norm(alone) <= 0.3


def test_clip_factors_in_another_type_are_rounded_down():
    """Such as those of float64 parameters, in the type of a float32 loss."""
    factors = jnp.asarray(np.random.default_rng(0).uniform(size=1000), jnp.float32)
    found = two_pass._rounded_down(factors, jnp.bfloat16).astype(jnp.float32)
    assert (found <= factors).all()
    assert (found >= factors * (1 - 2.0**-7)).all()
