"""Losses that would void the guarantee without a word: each is refused or reported."""

import functools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import dpx
from dpx.clipping import ClippingWarning, reports

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 3)).astype(np.float32)
W = {"w": jnp.ones(3)}


def clipped(loss, params=W, batch=(X,), **options):
    return dpx.clipped_grad(loss, l2_clip_norm=1.0, **options)(params, *batch)


def plain(params, x):
    return jnp.square(x @ params["w"])


@pytest.fixture(autouse=True)
def _reports_are_shown_each_time():
    with warnings.catch_warnings():
        warnings.simplefilter("error", ClippingWarning)
        yield


@pytest.mark.parametrize("method", dpx.clipping.METHODS)
def test_a_plain_loss_is_not_reported(method):
    clipped(plain, method=method, strict=True)


@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize(
    "collective",
    [
        lambda x: jax.lax.pmean(x, "rows"),
        lambda x: jax.lax.all_gather(x, "rows").sum(0),
        lambda x: jax.lax.ppermute(x, "rows", [(0, 1)]),
        lambda x: x * jax.lax.axis_index("rows"),
        lambda x: jax.checkpoint(lambda y: jax.lax.psum(y, "rows"))(x),
        lambda x: jax.lax.scan(lambda c, y: (c + jax.lax.psum(y, "rows"), y), 0.0, x)[0] * x,
        lambda x: (
            x
            * jax.lax.while_loop(
                lambda n: jax.lax.psum(n, "rows") < 9, lambda n: n + 1, jax.lax.stop_gradient(x[0])
            )
        ),
    ],
    ids=["pmean", "all_gather", "ppermute", "axis_index", "in remat", "in scan", "in a condition"],
)
def test_collectives_over_other_examples_are_refused(collective, method):
    def step(x):
        return clipped(lambda p, x: plain(p, collective(x)), batch=(x,), method=method).grads

    with pytest.raises(ValueError, match=r"over the axis 'rows', which reads what other examples"):
        jax.vmap(step, axis_name="rows")(np.stack([X, X]))


def test_collectives_over_an_axis_of_the_loss_itself_are_its_own_business():
    def loss(params, x):
        return plain(params, jax.vmap(lambda y: y - jax.lax.pmean(y, "own"), axis_name="own")(x))

    assert (clipped(loss, strict=True).norms > 0).all()
    mesh = jax.make_mesh((1,), ("own",), axis_types=(jax.sharding.AxisType.Auto,))

    def on_mesh(params, x):
        body = functools.partial(jax.lax.psum, axis_name="own")
        return plain(params, jax.shard_map(body, mesh=mesh, in_specs=P("own"), out_specs=P())(x))

    assert (clipped(on_mesh, strict=True).norms > 0).all()

    def over_rows(params, x):
        body = functools.partial(jax.lax.psum, axis_name="rows")
        specs = {"in_specs": P("own"), "out_specs": P("own"), "check_vma": False}
        return plain(params, jax.shard_map(body, mesh=mesh, **specs)(x))

    def step(x):
        return clipped(over_rows, batch=(x,)).grads

    with pytest.raises(ValueError, match="over the axis 'rows'"):
        jax.vmap(step, axis_name="rows")(np.stack([X, X]))


@pytest.mark.parametrize("method", ["auto", "two_pass", "vmap"])
@pytest.mark.parametrize("microbatch_size", [None, 2])
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_a_loss_that_closes_over_the_batch_is_refused(method, microbatch_size, kind):
    x = kind(X)

    def loss(params, row):
        return plain(params, row - jnp.mean(x, 0))

    options = {"method": method, "microbatch_size": microbatch_size}
    with pytest.raises(ValueError, match=r"shape \(4, 3\) that is also in the batch"):
        clipped(loss, batch=(x,), **options)

    @jax.jit
    def step(x):
        return clipped(lambda p, row: plain(p, row - jnp.mean(x, 0)), batch=(x,), **options).grads

    if kind is jnp.asarray:  # under jit too, where the loss closes over a tracer
        with pytest.raises(ValueError, match="also in the batch"):
            step(x)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize(
    "called",
    [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(jax.jit(f)))],
    ids=["jit", "remat", "both"],
)
def test_what_a_function_within_the_loss_closes_over_counts(called, kind):
    x = kind(X)
    centered = called(lambda row: row - jnp.mean(x, 0))
    with pytest.raises(ValueError, match="that is also in the batch"):
        clipped(lambda params, row: plain(params, centered(row)), batch=(x,))
    with pytest.warns(ClippingWarning, match="as many rows"):
        clipped(lambda params, row: plain(params, centered(row)), batch=(X + 1,))


@pytest.mark.parametrize("given", [np.arange(4), np.ones((4, 3), np.float32)])
def test_rows_that_are_equal_by_chance_are_no_more_than_reported(given):
    table = jnp.asarray(given)
    with pytest.warns(ClippingWarning, match="as many rows"):
        clipped(lambda params, x, y: plain(params, x) * table.mean(), batch=(X, given))


@pytest.mark.quick_cases("asarray1")
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_fit_refuses_a_loss_that_closes_over_its_data(kind):
    x = kind(np.concatenate([X, X + 1, X + 2]))

    def fit(loss_fn, **options):
        return dpx.training.fit(
            loss_fn, W, x, epsilon=1.0, delta=1e-3, batch_size=3, steps=1, optimizer=optax.sgd(0.1),
            l2_clip_norm=1.0, key=jax.random.key(0), **options,
        )  # fmt: skip

    with pytest.raises(
        ValueError, match=r"shape \(12, 3\) that is also in the batch, or holds the data"
    ):
        fit(lambda params, row: plain(params, row - jnp.mean(x, 0)))
    labels = jnp.arange(12.0)
    with pytest.warns(ClippingWarning, match=r"shape \(12,\), with as many rows"):
        fit(lambda params, row: plain(params, row) + labels.mean())
    with pytest.raises(ValueError, match="as many rows"):
        fit(lambda params, row: plain(params, row) + labels.mean(), strict=True)
    fit(plain, strict=True)


def test_records_that_batches_are_taken_from_are_no_constants_of_a_loss():
    records, labels = jnp.asarray(np.concatenate([X, X + 1, X + 2])), jnp.arange(12.0)
    with reports.records((records, labels[:, None] ** 2)):
        with pytest.raises(ValueError, match="also in the batch, or holds the data it is taken"):
            clipped(lambda params, row: plain(params, row - jnp.mean(records, 0)))
        with pytest.warns(ClippingWarning, match=r"shape \(12,\), with as many rows"):
            clipped(lambda params, row: plain(params, row) + labels.mean())


@pytest.mark.parametrize("form", [lambda x: x.T, lambda x: x[None], lambda x: x.reshape(-1)])
def test_a_loss_that_closes_over_the_batch_in_another_form_is_refused(form):
    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    other = form(x)  # Before JAX sees it.

    def run(loss):
        return clipped(loss, batch=(x,))

    with pytest.raises(ValueError, match="that is also in the batch"):
        run(lambda params, row: plain(params, row - jnp.sum(other)))
    few = np.zeros((3, 4)), np.arange(36.0).reshape(6, 6), x[:, :2].T
    run(lambda params, row: plain(params, row - sum(map(jnp.sum, few))))


def test_a_closed_over_array_with_as_many_rows_is_reported():
    table = jnp.asarray(X + 1)

    def loss(params, row):
        return plain(params, row - table.mean(0))

    with pytest.warns(ClippingWarning, match="as many rows as there are examples"):
        found = clipped(loss)
    with pytest.raises(ValueError, match="as many rows"):
        clipped(loss, strict=True)
    mean = np.asarray(X + 1).mean(0)
    want = clipped(lambda params, row: plain(params, row - mean))
    np.testing.assert_allclose(found.grads["w"], want.grads["w"], rtol=1e-5)
    clipped(loss, batch=(X[:3],), strict=True)  # of other lengths it is a constant
    clipped(loss, batch=(X[:1],), strict=True)


def test_what_is_not_trained_is_no_batch():
    class Scaled(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
            self.scale = nnx.Variable(jnp.ones(4))

    def loss(model, x):
        return (model.linear(x) * model.scale.get_value().sum()).sum()

    assert (clipped(loss, Scaled(), strict=True).norms > 0).all()


def test_a_fallback_of_a_large_parameter_is_an_error_in_a_strict_call():
    params = {"small": jnp.ones(3), "large": jnp.ones((256, 256)) / 256}

    def loss(params, x):
        large = jnp.cumsum(params["large"], axis=0)
        return jnp.square(x @ params["small"]) + (x[0] * large).sum() ** 2

    clipped(loss, params)
    with pytest.raises(
        ValueError, match=r"params\[large\] of 65536 elements has no rule for cumsum"
    ):
        clipped(loss, params, strict=True)
    params["large"] = params["large"][:200]
    clipped(loss, params, strict=True)


def test_uses_that_split_axes_differently_are_a_fallback():
    params = {"w": jnp.ones((16, 16, 256)) / 256}

    def loss(params, x):
        a = jnp.einsum("i,ijk->jk", x, params["w"])
        return jnp.square(a).sum() + jnp.einsum("ij,ijk->k", jnp.outer(x, x), params["w"]).sum()

    x = np.ones((2, 16), np.float32)
    clipped(loss, params, (x,))
    (row,) = dpx.explain_clipping(loss, params, x).rows
    assert row.rule == "gradient (uses split its axes differently)"
    with pytest.raises(
        ValueError, match=r"params\[w\] of 65536 elements has no rule for dot_general"
    ):
        clipped(loss, params, (x,), strict=True)


@pytest.mark.parametrize(
    "loss",
    [
        plain,
        lambda p, x: plain(p, x) + 0 * jnp.sum(jax.lax.stop_gradient(p["v"])),
        lambda p, x: jax.checkpoint(lambda p: plain(p, x) * jax.lax.stop_gradient(p["v"][0]))(p),
    ],
    ids=["unused", "stopped", "stopped in a block"],
)
@pytest.mark.parametrize("method", ["auto", "one_pass"])
def test_a_gradient_that_is_zero_for_every_example_is_reported(loss, method):
    params = {"w": jnp.ones(3), "v": jnp.ones(5)}
    with pytest.warns(ClippingWarning, match="no gradient of loss_fn reaches v"):
        found = clipped(loss, params, method=method)
    assert not found.grads["v"].any()
    assert found.grads["w"].any()
    with pytest.raises(ValueError, match="no gradient of loss_fn reaches v"):
        clipped(loss, params, method=method, strict=True)
    clipped(loss, params, method=method, strict=True, wrt={"w": True, "v": False})


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_parameters_that_are_not_finite_are_named_outside_jit(bad):
    params = {"a": jnp.ones(3), "w": jnp.array([1.0, bad, 1.0])}

    def loss(params, x):
        return plain(params, x * params["a"])

    with pytest.raises(ValueError, match=r"params\[w\] holds NaN or infinity"):
        clipped(loss, params)
    found = jax.jit(lambda params: clipped(loss, params))(params)
    assert not found.grads["w"].any()
    assert found.num_not_finite == 4


@pytest.mark.parametrize("l2_clip_norm", [1.0, {"v": 1.0, "w": 2.0}])
def test_examples_that_are_not_finite_are_counted(l2_clip_norm):
    x = X.copy()
    x[1, 2], x[3, 0] = np.nan, np.inf
    params = {"v": jnp.ones(3), "w": jnp.ones(3)}

    def loss(params, x):
        return jnp.square(x @ params["w"]) + jnp.square(params["v"] - 2).sum()

    found = jax.jit(dpx.clipped_grad(loss, l2_clip_norm=l2_clip_norm))(params, x)
    assert found.num_not_finite == 2
    mask = np.array([True, False, True, True])
    assert (
        dpx.clipped_grad(loss, l2_clip_norm=l2_clip_norm)(params, x, mask=mask).num_not_finite == 1
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (True, r"batch\[1\]=True has no batch axis.*functools.partial"),
        ("train", r"batch\[1\]='train' has no batch axis.*functools.partial"),
        (jnp.ones(()), r"batch\[1\]=.* has no batch axis"),
        (jax.random.key(0), r"batch\[1\] is a single key.*one key for each"),
        (np.array(["a"] * len(X)), r"batch\[1\] has dtype <U1.*pass numbers"),
    ],
)
def test_what_is_no_batch_is_named_with_the_remedy(given, words):
    with pytest.raises(ValueError, match=words):
        clipped(lambda params, x, other: plain(params, x), batch=(X, given))


def test_a_raw_key_in_place_of_two_is_reported():
    batch = X[:2], jax.random.PRNGKey(0)
    with pytest.warns(ClippingWarning, match="looks like one raw PRNGKey"):
        clipped(lambda params, x, key: plain(params, x), batch=batch)
    with pytest.raises(ValueError, match="looks like one raw PRNGKey"):
        clipped(lambda params, x, key: plain(params, x), batch=batch, strict=True)


def test_equinox_batch_norm_is_refused():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, axis_name="rows", mode="batch")

    def step(x):
        return clipped(lambda norm, x: norm(x, state)[0].sum(), norm, batch=(x,)).losses

    with pytest.raises(ValueError, match="statistics mix examples"):
        jax.vmap(step, axis_name="rows")(np.stack([X, X]))
