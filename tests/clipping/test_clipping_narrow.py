"""What is rounded to less than float32, and products on matrix units that round their factors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clipping_exact import check, jit, normal, per_example

from dpx import clipping
from dpx.clipping import jaxprs
from dpx.clipping.gradients import gram

pytestmark = pytest.mark.optimized

EIGHT = jnp.float8_e4m3fn
CONSTRUCTS = {}


def construct(name, *batch, w):
    def add(loss):
        CONSTRUCTS[name] = loss, w, batch
        return loss

    return add


def of_a_block(name, narrow):
    """A weight whose cotangent is rounded on its way back, and would be rounded again if it were scaled."""

    @construct(name, np.ones((2, 3, 70), "f4"), w=np.eye(70, dtype="f4"))
    def _(w, x):
        return jnp.sum(jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w))(x, narrow(w)))


of_a_block("a cast", lambda w: w.astype(jnp.bfloat16).astype(w.dtype))
of_a_block("reduce_precision", lambda w: jax.lax.reduce_precision(w, 8, 7))
of_a_block("cast of a function",
           lambda w: (w / jnp.linalg.norm(w, axis=0)).astype(jnp.float16).astype(w.dtype))  # fmt: skip
of_a_block("a number", lambda w: w * jnp.sum(w).astype(jnp.bfloat16).astype(w.dtype))
of_a_block("a product", lambda w: jax.lax.dot(
    np.eye(70, dtype="f4"), w, preferred_element_type=jnp.bfloat16).astype("f4"))  # fmt: skip


@construct(
    "a constant", np.linspace(0, 1, 420, dtype="f4").reshape(2, 3, 70), w=np.eye(70, dtype="f4")
)
def _(w, x):
    """Such as the square root of the width, by which some models scale embeddings, in bfloat16."""
    root = jnp.sqrt(70.0).astype(jnp.bfloat16)
    scale = (root * jnp.bfloat16(0.5)).astype(jnp.float32) * x.astype(jnp.bfloat16).max()
    return jnp.sum(jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w))(x * scale, w))


@construct("a masked weight", normal(4, 3, 12), w=normal(12, 9))
def _(w, x):
    mask = np.tril(np.ones((12, 9), np.float32), -1)
    return jnp.sum(jnp.sin(x.astype(jnp.bfloat16) @ (w * mask).astype(jnp.bfloat16))).astype("f4")


@construct("factors", normal(4, 3, 700), w=np.zeros((700, 900), "f4"))
def _(w, x):
    h = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
    return jnp.sum(h.astype(jnp.float32) * jnp.sin(jnp.arange(900.0)))


for table in ("bfloat16", "float8_e5m2", "float8_e4m3fn"):

    @construct(f"a table in {table}", np.array([[3, 5, 3], [999, 0, 0]]), w=normal(1000, 16))
    def _(w, ids, dtype=table):
        return jnp.sum(jnp.sin(w.astype(dtype)[ids].astype(jnp.float32)))


@construct(
    "numbers of eight bits", normal(4, 3, 12), w={"w": normal(12, 12), "b": jnp.zeros(12, EIGHT)}
)
def _(p, x):
    """Which JAX does not promote by itself."""

    @jax.checkpoint
    def block(x, w):
        return jnp.tanh(x.astype(EIGHT).astype(jnp.float32) @ w) + p["b"].astype(jnp.float32)

    return jnp.sum(block(x, p["w"]) ** 2)


for numbers, gain in (("NHWC", "HWIO", "NHWC"), 1), (("HCNW", "WOHI", "WHCN"), 0.5):
    sizes = {"N": 2, "C": 16, "H": 3, "W": 2, "O": 32, "I": 16}
    images, kernel = ([sizes[axis] for axis in numbers[i]] for i in (0, 1))

    @construct(
        f"a kernel that is larger than patches, {numbers[0]}",
        jnp.asarray(normal(3, *images), "bfloat16"), w=jnp.asarray(normal(*kernel) / 8, "bfloat16"),
    )  # fmt: skip
    def _(w, x, numbers=numbers, gain=gain):
        y = jax.lax.conv_general_dilated(x, w * gain, (2, 1), "SAME", dimension_numbers=numbers)
        return jnp.sum(jnp.sin(y.astype("f4")))


@pytest.mark.quick_cases(
    "a product-auto", "a table in bfloat16-one_pass", "numbers of eight bits-auto",
    "a kernel that is larger than patches, NHWC-one_pass",
)  # fmt: skip
@pytest.mark.parametrize("method", ["one_pass", "auto"])
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_narrow_values_are_clipped_as_gradients_that_are_held(name, method):
    """No cotangent is scaled, which would be rounded otherwise; sums are made in float32."""
    loss, params, batch = CONSTRUCTS[name]
    fn, held = (
        jax.jit(clipping.clipped_grad(loss, l2_clip_norm=0.5, method=m)) for m in (method, "vmap")
    )
    found, expected = fn(params, *batch), held(params, *batch)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=2e-2)
    for a, b in zip(jax.tree.leaves(found.grads), jax.tree.leaves(expected.grads), strict=True):
        assert a.dtype == jnp.float32
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b)
    for i in range(len(batch[0])) if method == "one_pass" else ():
        alone = jax.tree.leaves(fn(params, *(x[i : i + 1] for x in batch)).grads)
        assert np.sqrt(sum(np.sum(np.square(g, dtype="f8")) for g in alone)) <= 0.5 * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_narrow_loss_is_exact(dtype):
    """Nothing in it is scaled by clip factors, which would be rounded to its type."""

    def loss(w, x):
        hidden = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)
        return jnp.sum(hidden**2).astype(dtype)

    w, x = 2 * normal(6, 3), 2 * normal(4, 6)
    fn = jit(clipping.clipped_grad(loss, l2_clip_norm=0.1))
    check(fn(w, x), per_example(loss, w, (x,)), 0.1)


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
    program = jax.make_jaxpr(lambda *pairs: gram.squared_norm(layout, pairs))(pair, pair)
    products = [x for x in jaxprs.flat(program).jaxpr.eqns if x.primitive.name == "dot_general"]
    exact = [jaxprs.is_exact(product.params) for product in products]
    assert (exact.count(True), exact.count(False)) == (4, 2)


def test_a_product_is_exact_if_both_of_its_factors_are():
    highest, default = jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT
    for both, exact in (((highest, highest), True), ((highest, default), False)):
        assert jaxprs.is_exact({"precision": both}) == exact
