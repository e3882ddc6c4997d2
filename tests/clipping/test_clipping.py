"""The front door: clipping arithmetic, masks, groups, bad input. Against NumPy, by hand."""

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_clipping_models import WIDER

from dpx import clipping
from dpx.clipping import batches

pytestmark = pytest.mark.optimized

METHODS = [name for name in clipping.METHODS if name != "auto"]  # One of the others.
RELATION = dp_accounting.NeighboringRelation


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


def linear_loss(params, x, y):
    return 0.5 * (x @ params["w"] + params["b"] - y) ** 2


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=5).astype("f4"), "b": np.float32(rng.normal()) + np.zeros(())}
    params["b"] = params["b"].astype("f4")
    x = rng.normal(size=(7, 5)).astype("f4")
    y = rng.normal(size=7).astype("f4")
    residual = x @ params["w"] + params["b"] - y
    gradients = {"w": residual[:, None] * x, "b": residual}
    return params, x, y, gradients


def norms_of(*gradients):
    return np.sqrt(sum((g.reshape(len(g), -1) ** 2).sum(1) for g in gradients))


@pytest.mark.quick_cases("two_pass-True-100", "two_pass-False-1", "vmap-False-None")
@pytest.mark.parametrize("microbatch_size", [None, 1, 3, 100])
@pytest.mark.parametrize("normalize", [False, True])
def test_matches_the_closed_form(method, problem, normalize, microbatch_size):
    params, x, y, gradients = problem
    fn = clipping.clipped_grad(
        linear_loss, l2_clip_norm=1.3, method=method, normalize=normalize,
        microbatch_size=microbatch_size,
    )  # fmt: skip
    mask = np.array([True, True, False, True, True, False, True])
    out = jax.jit(fn)(params, x, y, mask=mask)
    norms = norms_of(gradients["w"], gradients["b"])
    factors = 1.3 / (norms + 0.01) if normalize else np.minimum(1, 1.3 / norms)
    factors = factors * mask
    atol = 1e-6 if WIDER == 1 else 5e-6
    np.testing.assert_allclose(out.norms, norms * mask, rtol=1e-5)
    np.testing.assert_allclose(out.grads["w"], factors @ gradients["w"], rtol=1e-5, atol=atol)
    np.testing.assert_allclose(out.grads["b"], factors @ gradients["b"], rtol=1e-5, atol=atol)
    np.testing.assert_allclose(out.losses, 0.5 * gradients["b"] ** 2 * mask, rtol=1e-5)


@pytest.mark.quick_cases("17")
@pytest.mark.parametrize("size", [20, 16, 17])
def test_more_microbatches_than_are_added_up_plainly(size):
    """Sums of blocks of eight microbatches, the last one of fewer, and of one that is filled up."""
    rng = np.random.default_rng(1)
    params = {"w": rng.normal(size=5).astype("f4"), "b": np.zeros((), "f4")}
    x, y = rng.normal(size=(size, 5)).astype("f4"), rng.normal(size=size).astype("f4")
    mask = np.arange(size) % 5 != 3
    whole, parts = (
        jax.jit(clipping.clipped_grad(linear_loss, l2_clip_norm=1.3, microbatch_size=n))(
            params, x, y, mask=mask
        )
        for n in (None, 2 if size == 17 else 1)
    )
    np.testing.assert_allclose(parts.norms, whole.norms, rtol=1e-6)
    np.testing.assert_allclose(parts.losses, whole.losses, rtol=1e-6)
    for name in params:
        np.testing.assert_allclose(parts.grads[name], whole.grads[name], rtol=1e-5, atol=1e-6)


@pytest.mark.quick_cases("two_pass")
def test_huge_threshold_gives_the_ordinary_gradient(method, problem):
    params, x, y, _ = problem
    out = clipping.clipped_grad(linear_loss, l2_clip_norm=1e8, method=method)(params, x, y)
    plain = jax.grad(lambda p: sum(linear_loss(p, *e) for e in zip(x, y, strict=True)))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), out.grads, plain)


@pytest.mark.parametrize("normalize", [False, True])
def test_groups_are_clipped_on_their_own(method, problem, normalize):
    params, x, y, gradients = problem
    fn = clipping.clipped_grad(
        linear_loss, l2_clip_norm={"w": 0.5, "b": 0.25}, method=method, normalize=normalize
    )
    out = fn(params, x, y)
    for name, clip in {"w": 0.5, "b": 0.25}.items():
        norms = norms_of(gradients[name])
        np.testing.assert_allclose(out.norms[name], norms, rtol=1e-5)
        factors = clip / (norms + 0.01) if normalize else np.minimum(1, clip / norms)
        expected = factors @ gradients[name]
        np.testing.assert_allclose(out.grads[name], expected, rtol=1e-5, atol=1e-6)
    assert fn.sensitivity(RELATION.ADD_OR_REMOVE_ONE) == pytest.approx(np.hypot(0.5, 0.25))


def test_sensitivity_by_relation(problem):
    fn = clipping.clipped_grad(linear_loss, l2_clip_norm=2.0)
    assert fn.sensitivity(RELATION.ADD_OR_REMOVE_ONE) == 2.0
    assert fn.sensitivity(RELATION.REPLACE_SPECIAL) == 2.0
    assert fn.sensitivity(RELATION.REPLACE_ONE) == 4.0
    assert fn.sensitivity("replace_one") == 4.0
    with pytest.raises(ValueError, match="relation="):
        fn.sensitivity("remove_one")


@pytest.mark.quick_cases("two_pass")
def test_sensitivity_is_attained_and_never_exceeded(method, problem):
    params, x, y, _ = problem
    x = x * 100.0  # Every gradient is clipped.
    fn = clipping.clipped_grad(linear_loss, l2_clip_norm=1.5, method=method)
    total = fn(params, x, y).grads
    for i in range(len(x)):
        rest = fn(params, np.delete(x, i, 0), np.delete(y, i, 0)).grads
        moved = np.sqrt(sum(np.sum((total[k] - rest[k]) ** 2) for k in total))
        assert moved == pytest.approx(1.5, rel=1e-4)


@pytest.mark.quick_cases("vmap-None-nan")
@pytest.mark.parametrize("bad", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow), 1e38])
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_non_finite_examples_add_nothing(method, problem, bad, microbatch_size):
    params, x, y, _ = problem
    fn = clipping.clipped_grad(
        linear_loss, l2_clip_norm=1.0, method=method, microbatch_size=microbatch_size
    )
    poisoned = x.copy()
    poisoned[2] = bad
    out = jax.jit(fn)(params, poisoned, y)
    expected = fn(params, np.delete(x, 2, 0), np.delete(y, 2, 0))
    assert out.norms[2] == np.inf
    for name in params:
        np.testing.assert_allclose(out.grads[name], expected.grads[name], rtol=1e-5, atol=1e-6)
    out = fn(params, poisoned, y, mask=np.arange(7) != 2)
    assert out.norms[2] == 0
    assert out.losses[2] == 0
    for name in params:
        np.testing.assert_allclose(out.grads[name], expected.grads[name], rtol=1e-5, atol=1e-6)


@pytest.mark.quick_cases("two_pass")
def test_long_examples_that_are_not_finite_add_nothing(method):
    x = np.random.default_rng(0).normal(size=(3, 1025)).astype(np.float32)
    fn = clipping.clipped_grad(lambda w, x: jnp.tanh(x @ w), l2_clip_norm=1.0, method=method)
    w = np.full(1025, 0.01, np.float32)
    expected = fn(w, x[::2])
    x[1, 7] = np.nan
    for mask in (np.array([True, True, True]), np.array([True, False, True])):
        out = jax.jit(fn)(w, x, mask=mask)
        np.testing.assert_allclose(out.norms[::2], expected.norms, rtol=1e-5)
        np.testing.assert_allclose(out.grads, expected.grads, rtol=1e-5, atol=1e-6)


def test_where_no_gradient_is_finite_the_sums_are_zero(method, problem):
    params, x, y, _ = problem
    fn = jax.jit(clipping.clipped_grad(linear_loss, l2_clip_norm=1.0, method=method))
    for scale, bad, mask in (
        (1.0, np.inf, np.arange(7) < 7),
        (1.0, np.nan, np.arange(7) < 3),
        (1.0, 1.0, np.zeros(7, bool)),
        (np.nan, 1.0, np.arange(7) < 7),  # Whatever stands in, its gradient is not finite.
        (np.nan, 1.0, np.zeros(7, bool)),
    ):
        out = fn(jax.tree.map(lambda p, scale=scale: scale * p, params), x * bad, y, mask=mask)
        for total in out.grads.values():
            np.testing.assert_array_equal(total, 0.0)
        np.testing.assert_array_equal(out.norms, np.where(mask, np.inf, 0.0))


@pytest.mark.quick_cases("two_pass")
def test_non_finite_examples_do_not_stand_in_for_masked_ones(method, problem):
    params, x, y, _ = problem
    fn = clipping.clipped_grad(linear_loss, l2_clip_norm=1.0, method=method)
    poisoned = x.copy()
    poisoned[:2] = np.nan
    out = jax.jit(fn)(params, poisoned, y, mask=np.arange(7) != 1)
    expected = fn(params, x[2:], y[2:])
    np.testing.assert_array_equal(out.norms[:2], [np.inf, 0.0])
    np.testing.assert_allclose(out.norms[2:], expected.norms, rtol=1e-6)
    np.testing.assert_allclose(out.losses[1:], [0.0, *expected.losses], rtol=1e-6)
    for name in params:
        np.testing.assert_allclose(out.grads[name], expected.grads[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_another_example_stands_in_whole():
    """In arrays of every type, where a mask of tokens that is False throughout has no finite gradient."""
    draw = np.random.default_rng(0).integers(0, 2, (4, 3))
    draw[:, 0], draw[2, 1] = [0, 0, 1, 1], 0
    types = (bool, "uint8", "int16", "int32", "bfloat16", "float32", "complex64")
    batch = *(jnp.asarray(draw, dtype) for dtype in types), jax.random.split(jax.random.key(0), 4)
    keep = jnp.array([False, False, True, True])
    for before, after in zip(batch, batches._filled(batch, keep), strict=True):
        assert after.dtype == before.dtype
        assert (after == before[np.array([2, 2, 2, 3])]).all()


def test_one_non_finite_group_silences_the_whole_example(method):
    def loss(params, x):
        return x * params["a"] + jnp.where(x > 0, jnp.inf, 1.0) * params["b"]

    params = {"a": jnp.float32(1), "b": jnp.float32(1)}
    fn = clipping.clipped_grad(loss, l2_clip_norm={"a": 1.0, "b": 1.0}, method=method)
    out = fn(params, jnp.array([1.0, -0.5]))
    np.testing.assert_allclose(out.norms["b"], [np.inf, 1.0], rtol=1e-5)
    np.testing.assert_allclose(out.grads["a"], -0.5, rtol=1e-5)


@pytest.mark.quick_cases("two_pass")
def test_batches_of_none_and_of_one(method, problem):
    params, x, y, _ = problem
    fn = jax.jit(clipping.clipped_grad(linear_loss, l2_clip_norm=1.0, method=method))
    empty = fn(params, x[:0], y[:0])
    assert empty.norms.shape == empty.losses.shape == (0,)
    assert all(not np.any(g) for g in jax.tree.leaves(empty.grads))
    groups = clipping.clipped_grad(linear_loss, l2_clip_norm={"w": 1.0, "b": 2.0}, method=method)
    assert jax.tree.map(jnp.shape, groups(params, x[:0], y[:0]).norms) == {"w": (0,), "b": (0,)}
    masked = fn(params, x, y, mask=np.zeros(7, bool))
    assert all(not np.any(g) for g in jax.tree.leaves(masked))
    one = fn(params, x[:1], y[:1])
    assert one.norms.shape == (1,)


@pytest.mark.quick_cases("one_pass")
def test_bfloat16_sums_are_float32(method):
    if method == "two_pass":
        pytest.skip("refused, see below")

    def loss(params, x):
        return jnp.sum((x @ params["w"]) ** 2).astype(jnp.float32)

    params = {"w": jnp.ones((4, 3), jnp.bfloat16)}
    out = clipping.clipped_grad(loss, l2_clip_norm=1.0, method=method)(
        params, jnp.ones((5, 4), jnp.bfloat16)
    )
    assert out.grads["w"].dtype == jnp.float32
    assert out.norms.dtype == jnp.float32
    np.testing.assert_allclose(np.linalg.norm(out.grads["w"]), 5.0, rtol=1e-5)
    empty = clipping.clipped_grad(loss, l2_clip_norm=1.0, method=method)(
        params, jnp.ones((0, 4), jnp.bfloat16)
    )
    assert empty.grads["w"].dtype == jnp.float32


@pytest.mark.slow
def test_nnx_module_state_and_prefix(method):
    model = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 2, rngs=nnx.Rngs(1)))

    def loss(model, x):
        return jnp.sum(model(x) ** 2)

    x = np.random.default_rng(0).normal(size=(6, 3)).astype("f4")
    out = clipping.clipped_grad(loss, l2_clip_norm=0.1, method=method)(model, x)
    assert isinstance(out.grads, nnx.State)
    plain = nnx.grad(lambda m: jax.vmap(lambda x: loss(m, x))(x).sum())(model)
    assert jax.tree.structure(out.grads) == jax.tree.structure(plain)
    groups = {"layers": {0: 1e8, 1: {"kernel": 0.1, "bias": 1e8}}}
    out = clipping.clipped_grad(loss, l2_clip_norm=groups, method=method)(model, x)
    np.testing.assert_allclose(
        out.grads["layers"][0]["kernel"][...], plain["layers"][0]["kernel"][...], rtol=1e-5
    )
    assert np.linalg.norm(out.grads["layers"][1]["kernel"][...]) < 0.6


@pytest.mark.quick_cases("one_pass")
def test_static_leaves_stay_static(method):
    params = {"w": jnp.ones(3), "steps": jnp.arange(3), "act": jnp.tanh, "p": 0.5}
    out = clipping.clipped_grad(
        lambda p, x: p["act"](p["w"] @ x) * p["p"] + p["steps"].sum(),
        l2_clip_norm=1.0,
        method=method,
    )(params, jnp.ones((2, 3)))
    assert out.grads["steps"] is None
    assert out.grads["act"] is None
    assert out.grads["w"].shape == (3,)


@pytest.mark.parametrize(
    "l2_clip_norm",
    [
        0.0,
        -1.0,
        np.nan,
        np.inf,
        1e200,
        10**400,
        1e-30,
        True,
        np.True_,
        "one",
        "1.0",
        1j,
        {},
        {"w": 0.0},
    ],
)
def test_bad_threshold(l2_clip_norm):
    with pytest.raises(ValueError, match="l2_clip_norm="):
        clipping.clipped_grad(linear_loss, l2_clip_norm=l2_clip_norm)


def test_bad_arguments(problem):
    params, x, y, _ = problem
    with pytest.raises(ValueError, match="method="):
        clipping.clipped_grad(linear_loss, l2_clip_norm=1.0, method="ghost")
    for size in (0, 2.0, True, "2"):
        with pytest.raises(ValueError, match="microbatch_size="):
            clipping.clipped_grad(linear_loss, l2_clip_norm=1.0, microbatch_size=size)
    fn = clipping.clipped_grad(linear_loss, l2_clip_norm=1.0)
    with pytest.raises(ValueError, match="batch axes differ"):
        fn(params, x, y[:3])
    for mask in (np.ones(7), np.ones(1, bool), np.ones((7, 1), bool), np.ones((), bool)):
        with pytest.raises(ValueError, match="mask of shape"):
            fn(params, x, y, mask=mask)
    with pytest.raises(ValueError, match="no batch axis"):
        fn(params, x, 1.0)
    with pytest.raises(ValueError, match="nothing to differentiate"):
        fn({"w": 1}, x, y)
    with pytest.raises(ValueError, match="prefix"):
        clipping.clipped_grad(linear_loss, l2_clip_norm={"v": 1.0})(params, x, y)
    with pytest.raises(ValueError, match="scalar loss of one example"):
        clipping.clipped_grad(lambda p, x: p["w"] * x, l2_clip_norm=1.0)(params, x)
