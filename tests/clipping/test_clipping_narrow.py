"""What is rounded to less than float32, and products on matrix units that round their factors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_clipping_models import check, jit, per_example

from dpx import clipping
from dpx.clipping import jaxprs
from dpx.clipping.gradients import gram

pytestmark = pytest.mark.optimized


@pytest.mark.quick_cases("a product")
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
def test_what_is_rounded_on_the_way_back_is_not_rounded_again(narrow):
    """No cotangent is scaled, which would be rounded otherwise; sums are made in float32."""

    def loss(w, x):
        return jnp.sum(jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w))(x, narrow(w)))

    w, x = np.eye(70, dtype="f4"), np.ones((2, 3, 70), "f4")
    auto, one = (
        clipping.clipped_grad(loss, l2_clip_norm=1.0, method=method)(w, x)
        for method in ("auto", "one_pass")
    )
    np.testing.assert_allclose(auto.norms, one.norms, rtol=1e-2)
    np.testing.assert_allclose(auto.grads, one.grads, rtol=2e-2, atol=1e-3)


@pytest.mark.slow
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
def test_a_narrow_loss_is_exact(dtype):
    """Nothing in it is scaled by clip factors, which would be rounded to its type."""

    def loss(params, x):
        hidden = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, params["w"])
        return jnp.sum(hidden**2).astype(dtype)

    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(6, 3)).astype("f4")}
    x = rng.normal(size=(4, 6)).astype("f4")
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


@pytest.mark.quick_cases("False-one_pass")
@pytest.mark.parametrize("method", ["one_pass", "auto"])
@pytest.mark.parametrize("tied", [False, True])
def test_matrix_units_multiply_numbers_of_11_bits(as_on_a_gpu, tied, method):
    """In float32 the program's own products round their factors on a GPU: norms and sums are of those."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(300, 80)).astype("f4") / 10
    x = rng.normal(size=(4, 6, 300)).astype("f4")
    ids = rng.integers(0, 300, (4, 6))

    def loss(w, x, ids):
        h = jax.checkpoint(lambda w, x: jnp.sin(x @ w))(w, x)
        h = h + w[ids] if tied else h
        return 30 * jnp.sum(h * jnp.cos(x[:, :80]))

    fn = clipping.clipped_grad(loss, l2_clip_norm=0.3, method=method)
    cpu = jit(fn)(w, x, ids)
    as_on_a_gpu()
    program = jit(fn).lower(w, x, ids).as_text()
    assert program.count("format = e8m10") >= 4  # Both factors, and both parts of what is scaled.
    # Look-ups are rounded by nobody; what is multiplied with them is not either.
    assert ("HIGHEST" in program) == tied
    gpu = jit(fn)(w, x, ids)
    np.testing.assert_allclose(gpu.norms, cpu.norms, rtol=2e-3)
    np.testing.assert_allclose(gpu.grads, cpu.grads, rtol=1e-2, atol=1e-3)
    for one in range(4):
        given = (a[one : one + 1] for a in (x, ids))
        alone = np.asarray(jit(fn)(w, *given).grads, "f8")
        assert 0.999 * 0.3 < np.linalg.norm(alone) <= 0.3
    with jax.default_matmul_precision("highest"):
        assert "reduce_precision" not in jit(fn).lower(w, x, ids).as_text()


def test_what_blocks_make_again_for_sums_is_rounded_as_it_was_for_norms():
    """Both factors, by an operation that stays where a compiler drops casts."""

    def loss(w, x):
        h = jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x) @ w))(x, w.astype(jnp.bfloat16))
        return jnp.sum(jnp.sin(h.astype(jnp.float32)))

    fn = clipping.clipped_grad(loss, l2_clip_norm=1.0, method="two_pass")
    program = str(jax.make_jaxpr(fn)(jnp.eye(64), jnp.ones((2, 3, 64), jnp.bfloat16)))
    # What the block is given, its factors for the norm, and its factors for the sum.
    assert program.count("reduce_precision[") == 2 + 2 + 2


def test_a_product_of_two_terms_rounds_what_either_of_them_would_not():
    """Inner products of both go by TensorFloat-32 only if the factors of both have no more bits."""
    layout = gram.Layout((3, 4), (), (0,), (1,), (True, False))
    pair = gram.Pair(jnp.ones((1, 2, 3)), jnp.ones((1, 2, 4)))
    program = str(jax.make_jaxpr(lambda *pairs: gram.squared_norm(layout, pairs))(pair, pair))
    exact, fast = (program.count(f"precision=(Precision.{x}") for x in ("HIGHEST", "DEFAULT"))
    assert (exact, fast) == (4, 2)


def test_a_product_is_exact_if_both_of_its_factors_are():
    highest, default = jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT
    for both, exact in (((highest, highest), True), ((highest, default), False)):
        assert jaxprs.is_exact({"precision": both}) == exact
