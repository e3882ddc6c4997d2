"""The front door: clipping arithmetic, masks, groups, what comes back, bad input. Against NumPy, by hand."""

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clipping_exact import METHODS, WIDER, check, check_groups, is_exact, jit, normal, per_example
from jax.extend.core import Primitive
from jax.interpreters import mlir

from dpx import clipping
from dpx.clipping import batches
from dpx.clipping.gradients import plan

pytestmark = pytest.mark.optimized

RELATION = dp_accounting.NeighboringRelation
BY_METHOD = pytest.mark.parametrize("method", METHODS)


def linear_loss(params, x, y):
    return 0.5 * (x @ params["w"] + params["b"] - y) ** 2


@pytest.fixture
def problem():
    """Parameters, 7 examples, and the gradients of each."""
    params, x, y = {"w": 2 * normal(5), "b": normal()}, 2 * normal(7, 5), 2 * normal(7)
    residual = x @ params["w"] + params["b"] - y
    return params, x, y, {"w": residual[:, None] * x, "b": residual}


def norms_of(*gradients):
    return np.sqrt(sum((g.reshape(len(g), -1) ** 2).sum(1) for g in gradients))


def assert_close(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected
    )


@pytest.mark.quick_cases("two_pass-True-100", "two_pass-False-1", "vmap-False-None")
@pytest.mark.parametrize("microbatch_size", [None, 1, 3, 100])
@pytest.mark.parametrize("normalize", [False, True])
@BY_METHOD
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
    params, batch = {"w": 2 * normal(5), "b": np.zeros((), "f4")}, (normal(size, 5), normal(size))
    whole, parts = (
        jax.jit(clipping.clipped_grad(linear_loss, l2_clip_norm=1.3, microbatch_size=n))(
            params, *batch, mask=np.arange(size) % 5 != 3
        )
        for n in (None, 2 if size == 17 else 1)
    )
    assert_close(parts, whole)


@pytest.mark.parametrize("normalize", [False, True])
@BY_METHOD
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
        assert_close(out.grads[name], factors @ gradients[name])
    assert fn.sensitivity(RELATION.ADD_OR_REMOVE_ONE) == pytest.approx(np.hypot(0.5, 0.25))


def many_small():
    """Of two types, which are joined where they share a threshold."""
    sizes = {"a": 6, "b": 9, "c": 9, "d": 6, "e": 1, "f": 4, "g": 8, "h": 8}
    params = [
        {k: jnp.asarray(normal(n, seed=i), "bfloat16" if k in "cdfh" else "f4") for k, n in sizes.items()}
        for i in range(3)
    ]  # fmt: skip

    def loss(params, x):
        flat = jnp.concatenate([block[k].astype("f4") for block in params for k in block])
        return jnp.sum(jnp.tanh(x[:, None] * flat[None, :]))

    return loss, params, (2 * normal(5, 51),)


def alike():
    layers = [normal(8, 8, seed=i) * np.float32(3.0**-i) for i in range(6)]

    def loss(groups, x):
        for w in jax.tree.leaves(groups):
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return loss, [layers[:1], layers[1:4], layers[4:]], (normal(5, 2, 8),)


@pytest.mark.quick_cases("many_small-2", "alike-None")
@pytest.mark.parametrize("microbatch_size", [None, 2])
@pytest.mark.parametrize("make", [many_small, alike], ids=lambda make: make.__name__)
def test_groups_of_many_parameters_are_exact(make, microbatch_size):
    loss, params, batch = make()
    gradients = iter(per_example(loss, params, batch))
    gradients = {i: [next(gradients) for _ in group] for i, group in enumerate(params)}
    clips = [float(np.median(norms_of(*group))) for group in gradients.values()]
    fn = clipping.clipped_grad(loss, l2_clip_norm=clips, microbatch_size=microbatch_size)
    found = jax.jit(fn)(params, *batch)
    if make is alike:
        check_groups(found, gradients, dict(enumerate(clips)))
        return
    for i, clip in enumerate(clips):
        norms = norms_of(*gradients[i])
        np.testing.assert_allclose(found.norms[i], norms, rtol=1e-2)
        factors = np.minimum(1, clip / norms)
        for a, g in zip(found.grads[i].values(), gradients[i], strict=True):
            assert a.dtype == jnp.float32
            np.testing.assert_allclose(a, np.tensordot(factors, g, 1), atol=2e-3)


@pytest.mark.quick_cases("two_pass")
@BY_METHOD
def test_groups_by_gram_matrices(monkeypatch, method):
    """With a penalty, a mask, and examples that are not finite."""
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)

    def loss(p, x, scale):
        h = jnp.tanh(x @ p["w"] + p["b"])
        penalty = jnp.sum(p["w"] ** 2) + jnp.sum(p["b"] ** 2)
        return scale * (jnp.sum((h @ p["w"].T) ** 2) + x[0, 0] * penalty)

    params, x = {"w": normal(12, 9), "b": normal(9)}, normal(5, 3, 12)
    scale, mask = np.array([1, np.inf, 1, np.nan, 1], "f4"), np.arange(5) != 2
    clips, good = {"b": 0.2, "w": 0.3}, mask & np.isfinite(scale)
    fn = clipping.clipped_grad(loss, l2_clip_norm=clips, method=method, microbatch_size=3)
    out = jit(fn)(params, x, scale, mask=mask)
    assert out.num_not_finite == 2
    norms = jax.tree.map(lambda n: np.where(mask & ~good, 0, n), out.norms)
    gradients = zip(clips, per_example(loss, params, (x, np.ones(5, "f4"))), strict=True)
    found = clipping.ClippedGrads(out.grads, norms, out.losses, out.clips)
    check_groups(found, {name: [g] for name, g in gradients}, clips, good)


def test_sensitivity_by_relation():
    fn = clipping.clipped_grad(linear_loss, l2_clip_norm=2.0)
    assert fn.sensitivity(RELATION.ADD_OR_REMOVE_ONE) == 2.0
    assert fn.sensitivity(RELATION.REPLACE_SPECIAL) == 2.0
    assert fn.sensitivity(RELATION.REPLACE_ONE) == 4.0
    assert fn.sensitivity("replace_one") == 4.0
    with pytest.raises(ValueError, match="relation="):
        fn.sensitivity("remove_one")


@pytest.mark.quick_cases("two_pass")
@BY_METHOD
def test_sensitivity_is_attained_and_never_exceeded(method, problem):
    params, x, y, _ = problem
    x = x * 100.0  # Every gradient is clipped.
    fn = jax.jit(clipping.clipped_grad(linear_loss, l2_clip_norm=1.5, method=method))
    total = fn(params, x, y).grads
    for i in range(len(x)):
        rest = fn(params, x, y, mask=np.arange(len(x)) != i).grads
        moved = np.sqrt(sum(np.sum((total[k] - rest[k]) ** 2) for k in total))
        assert moved == pytest.approx(1.5, rel=1e-4)


@pytest.mark.quick_cases("vmap-None-nan")
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
@pytest.mark.parametrize("microbatch_size", [None, 2])
@BY_METHOD
def test_non_finite_examples_add_nothing(method, problem, bad, microbatch_size):
    params, x, y, _ = problem
    options = {"l2_clip_norm": 1.0, "method": method, "microbatch_size": microbatch_size}
    fn = jax.jit(clipping.clipped_grad(linear_loss, **options))
    poisoned, others = x.copy(), np.arange(7) != 2
    poisoned[2] = bad
    expected, out = fn(params, x, y, mask=others), fn(params, poisoned, y)
    assert out.norms[2] == np.inf
    assert_close(out.grads, expected.grads)
    assert_close(fn(params, poisoned, y, mask=others), expected)


@BY_METHOD
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
        assert not any(map(np.any, jax.tree.leaves(out.grads)))
        np.testing.assert_array_equal(out.norms, np.where(mask, np.inf, 0.0))


@pytest.mark.quick_cases("two_pass")
@BY_METHOD
def test_non_finite_examples_do_not_stand_in_for_masked_ones(method, problem):
    params, x, y, _ = problem
    fn = jax.jit(clipping.clipped_grad(linear_loss, l2_clip_norm=1.0, method=method))
    poisoned = x.copy()
    poisoned[:2] = np.nan
    out = fn(params, poisoned, y, mask=np.arange(7) != 1)
    expected = fn(params, x, y, mask=np.arange(7) > 1)
    np.testing.assert_array_equal(out.norms[:2], [np.inf, 0.0])
    assert_close((out.grads, out.norms[2:], out.losses[1:]),
                 (expected.grads, expected.norms[2:], expected.losses[1:]))  # fmt: skip


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


@BY_METHOD
def test_one_non_finite_group_silences_the_whole_example(method):
    def loss(params, x):
        return x * params["a"] + jnp.where(x > 0, jnp.inf, 1.0) * params["b"]

    params = {"a": jnp.float32(1), "b": jnp.float32(1)}
    fn = clipping.clipped_grad(loss, l2_clip_norm={"a": 1.0, "b": 1.0}, method=method)
    out = fn(params, jnp.array([1.0, -0.5]))
    np.testing.assert_allclose(out.norms["b"], [np.inf, 1.0], rtol=1e-5)
    np.testing.assert_allclose(out.grads["a"], -0.5, rtol=1e-5)


@pytest.mark.quick_cases("two_pass")
@BY_METHOD
def test_batches_of_none_and_of_one(method, problem):
    params, x, y, _ = problem
    fn = jax.jit(
        clipping.clipped_grad(linear_loss, l2_clip_norm={"w": 1.0, "b": 2.0}, method=method)
    )
    empty = fn(params, x[:0], y[:0])
    assert jax.tree.map(jnp.shape, empty.norms) == {"w": (0,), "b": (0,)}
    assert empty.losses.shape == (0,)
    assert not any(map(np.any, jax.tree.leaves(empty.grads)))
    assert not any(map(np.any, jax.tree.leaves(fn(params, x, y, mask=np.zeros(7, bool)))))
    assert fn(params, x[:1], y[:1]).norms["w"].shape == (1,)


@pytest.mark.quick_cases("one_pass")
@BY_METHOD
def test_types_of_sums_and_leaves_that_are_not_trained(method):
    """Sums of bfloat16 are float32; functions, integers and Python's numbers are constants."""
    params = {
        "w": jnp.ones((4, 3), jnp.bfloat16),
        "steps": jnp.arange(3),
        "act": jnp.square,
        "p": 1.0,
    }

    def loss(p, x):
        return (jnp.sum(p["act"](x @ p["w"])) * p["p"] + p["steps"].sum()).astype(jnp.float32)

    fn = clipping.clipped_grad(loss, l2_clip_norm=1.0, method=method)
    out, empty = (fn(params, jnp.ones((n, 4), jnp.bfloat16)) for n in (5, 0))
    assert out.grads["w"].dtype == empty.grads["w"].dtype == out.norms.dtype == jnp.float32
    np.testing.assert_allclose(np.linalg.norm(out.grads["w"]), 5.0, rtol=1e-5)
    assert all(out.grads[name] is None for name in ("steps", "act", "p"))


def loss_with_aux(params, x):
    hidden = jnp.tanh(x @ params["w"])
    logits = hidden @ params["v"]
    # A use of `w` that the loss does not depend on has no gradient.
    aux = {"logits": logits, "right": [logits[:, 0] > 0, 3], "size": jnp.sum(params["w"] ** 2)}
    return jnp.sum(logits**2), aux


AUX = {"w": 2 * normal(8, 5), "v": 2 * normal(5, 5)}, 2 * normal(7, 3, 8)


@pytest.mark.quick_cases("two_pass-3")
@pytest.mark.parametrize("microbatch_size", [None, 1, 3])
@BY_METHOD
def test_aux_is_stacked_per_example_and_changes_no_gradient(method, microbatch_size):
    params, x = AUX
    fn = clipping.clipped_grad(
        loss_with_aux, l2_clip_norm=0.5, method=method, microbatch_size=microbatch_size,
        has_aux=True,
    )  # fmt: skip
    mask, poisoned = np.arange(7) != 2, x.copy()
    poisoned[2] = np.nan
    out = jit(fn)(params, poisoned, mask=mask)
    check(out, per_example(lambda params, x: loss_with_aux(params, x)[0], params, (x,)), 0.5, mask)
    losses, expected = jax.vmap(loss_with_aux, (None, 0))(params, x)
    assert jax.tree.map(jnp.result_type, out.aux) == jax.tree.map(jnp.result_type, expected)
    wanted = jax.tree.map(lambda a: np.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, 0), expected)
    assert_close((out.losses, out.aux), (losses * mask, wanted))
    empty = jit(fn)(params, x[:0]).aux
    assert (empty["logits"].shape, empty["right"][0].dtype) == ((0, 3, 5), bool)


# Multiplies by two, and has no rule for batches.
twice_p = Primitive("twice_without_batching")
twice_p.def_impl(lambda x: 2 * x)
twice_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(twice_p, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))
twice = jax.custom_vjp(lambda x: twice_p.bind(x))
twice.defvjp(lambda x: (twice(x), None), lambda _, g: (2 * g,))


def own_primitive(params, x, groups):
    del groups
    return jnp.sum(twice(jnp.tanh(x @ params["w"][0]) @ params["v"]) ** 2)


def mixture_of_experts(params, x, groups):
    return jnp.sum((jnp.tanh(jax.lax.ragged_dot(x, params["w"], groups)) @ params["v"]) ** 2)


UNBATCHED = (
    {"w": normal(3, 4, 5), "v": normal(5, 2)},
    (normal(4, 6, 4), np.array([[1, 2, 3], [0, 6, 0], [2, 2, 2], [5, 0, 1]], np.int32)),
)


@pytest.mark.quick_cases("own_primitive-two_pass")
@BY_METHOD
@pytest.mark.parametrize("loss", [own_primitive, mixture_of_experts], ids=lambda f: f.__name__)
def test_what_is_not_vectorised_is_exact_one_example_at_a_time(loss, method):
    is_exact(loss, *UNBATCHED, method=method, microbatch_size=1)
    if loss is own_primitive:
        params, batch = UNBATCHED
        with pytest.raises(NotImplementedError) as raised:
            clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method)(params, *batch)
        assert "microbatch_size=1" in "".join(raised.value.__notes__)


@pytest.mark.quick_cases("one_pass")
@BY_METHOD
def test_a_loss_is_clipped_where_ranks_must_not_be_promoted(method):
    """The setting is for mistakes in the loss, which are still found."""

    def loss(params, x, shift):
        h = jnp.tanh(jnp.dot(params["table"][x], params["w"])) + shift
        return jnp.square(jnp.dot(h, params["table"].T)).mean()

    params = {"table": 2 * normal(70, 8), "w": 2 * normal(8, 8)}
    gradient = clipping.clipped_grad(loss, l2_clip_norm=0.1, method=method)
    tokens = np.random.default_rng(0).integers(0, 70, (3, 4))
    expected = gradient(params, tokens, np.ones((3, 1, 8), "f4"))
    with jax.numpy_rank_promotion("raise"):
        found = gradient(params, tokens, np.ones((3, 1, 8), "f4"))
        with pytest.raises(ValueError, match="rank_promotion"):
            gradient(params, tokens, np.ones((3, 8), "f4"))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("method", ["one_pass", "two_pass", "auto"])
def test_a_normalized_example_cannot_make_the_sum_infinite(method):
    """Its gradient is zero, because its inputs are; the cotangent is close to the largest float."""

    def loss(w, x, scale):
        return scale * jnp.sum(jax.checkpoint(lambda x: x @ w)(x))

    x = 2 * normal(3, 40, 4)
    x[0] = 0.0
    gradient = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=1.0, method=method, normalize=True))
    sums = [
        gradient(np.ones((4, 4), "f4"), x, np.array([s, 1, 1], "f4")).grads for s in (1.0, 1e37)
    ]
    np.testing.assert_allclose(sums[1], sums[0], rtol=1e-5)


@pytest.mark.parametrize(
    "l2_clip_norm",
    [0.0, -1.0, np.nan, np.inf, 1e200, 10**400, 1e-30, True, np.True_, "one", "1.0", 1j, {}, {"w": 0.0}],
)  # fmt: skip
def test_bad_threshold(l2_clip_norm):
    with pytest.raises(ValueError, match="l2_clip_norm="):
        clipping.clipped_grad(linear_loss, l2_clip_norm=l2_clip_norm)


def test_bad_arguments(problem):
    params, x, y, _ = problem
    for options, match in (
        ({"method": "ghost"}, "method="),
        *(({"microbatch_size": size}, "microbatch_size=") for size in (0, 2.0, True, "2")),
    ):
        with pytest.raises(ValueError, match=match):
            clipping.clipped_grad(linear_loss, l2_clip_norm=1.0, **options)
    fn = clipping.clipped_grad(linear_loss, l2_clip_norm=1.0)
    for mask in (np.ones(7), np.ones(1, bool), np.ones((7, 1), bool), np.ones((), bool)):
        with pytest.raises(ValueError, match="mask of shape"):
            fn(params, x, y, mask=mask)
    for given, match in (
        ((params, x, y[:3]), "batch axes differ"),
        ((params, x, 1.0), "no batch axis"),
        (({"w": 1}, x, y), "nothing to differentiate"),
    ):
        with pytest.raises(ValueError, match=match):
            fn(*given)
    with pytest.raises(ValueError, match="prefix"):
        clipping.clipped_grad(linear_loss, l2_clip_norm={"v": 1.0})(params, x, y)


@pytest.mark.parametrize(
    ("returned", "has_aux", "match"),
    [
        (lambda loss, x: None, False, "must return the scalar loss alone"),
        (lambda loss, x: (loss, x), False, "must return the scalar loss alone.*has_aux=True"),
        (lambda loss, x: x, False, "scalar loss of one example"),
        (lambda loss, x: loss, True, "a pair"),
        (lambda loss, x: (loss, x, 1), True, "a pair"),
        (lambda loss, x: (loss, {"k": jax.random.key(0)}), True, r"aux\['k'\]"),
    ],
)
def test_a_loss_that_returns_something_else_is_named(returned, has_aux, match):
    fn = clipping.clipped_grad(
        lambda p, x: returned(jnp.sum(p * x), x), l2_clip_norm=1.0, has_aux=has_aux
    )
    with pytest.raises(ValueError, match=match):
        fn(jnp.ones(2), jnp.ones((3, 2)))


@pytest.mark.parametrize("method", clipping.METHODS)
def test_complex_parameters_are_refused(method):
    fn = clipping.clipped_grad(
        lambda p, x: jnp.sum(jnp.abs(x @ p["w"]) ** 2), l2_clip_norm=1.0, method=method
    )
    with pytest.raises(ValueError, match=r"params\[w\] is complex"):
        fn({"w": jnp.ones((3, 2), "complex64")}, np.ones((2, 3), "f4"))
