"""Parameters that would get noise and nothing else: they are named, with the `wrt` that leaves them out."""

import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clipping_exact import normal
from flax import nnx
from flax.training.train_state import TrainState

import dpx
from dpx.clipping import ClippingWarning

X = 2 * normal(4, 3)
PARAMS = {"a": jnp.ones(3), "b": {"w": jnp.full(3, 0.5)}}
STOP = jax.lax.stop_gradient


@jax.custom_vjp
def frozen_product(x, w):
    return x @ w


frozen_product.defvjp(lambda x, w: (x @ w, w), lambda w, g: (g * w, None))


def in_scan(p, x):
    def body(carry, one):
        return carry + one * STOP(p["a"]).sum() * p["b"]["w"].sum(), None

    return jax.lax.scan(body, 0.0, x)[0]


# How `a` is used; the gradient of `b/w` is never zero.
UNREACHED = {
    "not used": lambda p, x: 0.0,
    "stop_gradient": lambda p, x: x @ STOP(p["a"]),
    "in jit": lambda p, x: x @ jax.jit(STOP)(p["a"]),
    "in remat": lambda p, x: jax.checkpoint(lambda a: x @ STOP(a))(p["a"]),
    "in scan": in_scan,
    "derivative by hand": lambda p, x: frozen_product(x, p["a"]),
    "sign": lambda p, x: x @ jnp.sign(p["a"]),
    "integers": lambda p, x: x @ jnp.round(p["a"] * 3).astype(int),
    "compared": lambda p, x: jnp.where(x > p["a"], x, 0).sum(),
    "kept in a branch": lambda p, x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x @ STOP(p["a"])),
}
REACHED = {
    "product": lambda p, x: x @ p["a"],
    "once of two": lambda p, x: x @ STOP(p["a"]) + p["a"][0],
    "one branch": lambda p, x: jax.lax.cond(x[0] > 9, lambda a: a.sum(), lambda a: 0.0, p["a"]),
    "carried": lambda p, x: jax.lax.fori_loop(0, 3, lambda i, c: c * x.sum(), p["a"].sum()),
}


def loss_of(use):
    def loss(p, x):
        return jnp.square(use(p, x) + x @ p["b"]["w"])

    return loss


def clipped(loss, params=PARAMS, batch=(X,), **options):
    return dpx.clipped_grad(loss, l2_clip_norm=1.0, **options)(params, *batch)


def named(words, loss, params=PARAMS, **options):
    """What is reported with these words, with what it says to do: that is taken in a strict call."""
    with pytest.warns(ClippingWarning, match=words) as found:
        grads = clipped(loss, params, **options).grads
    with pytest.raises(ValueError, match=words):
        clipped(loss, params, strict=True, **options)
    (said,) = {str(each.message) for each in found if each.category is ClippingWarning}
    wrt = eval(re.search(r"(lambda path, leaf: .*|nnx.Param$)", said)[0])
    return grads, clipped(loss, params, strict=True, wrt=wrt, **options).grads


@pytest.mark.quick_cases("in jit-vmap", "in remat-one_pass", "derivative by hand-vmap")
@pytest.mark.parametrize("method", dpx.clipping.METHODS)
@pytest.mark.parametrize("use", UNREACHED)
def test_what_no_gradient_reaches_is_named(use, method):
    words = r"no gradient of loss_fn reaches a: "
    grads, others = named(words, loss_of(UNREACHED[use]), method=method)
    assert not np.any(grads["a"])
    assert others["a"] is None
    np.testing.assert_allclose(others["b"]["w"], grads["b"]["w"], rtol=1e-6)


@pytest.mark.quick_cases("once of two", "one branch")
@pytest.mark.parametrize("use", REACHED)
def test_what_a_gradient_may_reach_is_not(use):
    many = 8 * normal(64, 3)
    assert clipped(loss_of(REACHED[use]), batch=(many,), strict=True).grads["a"].any()


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)])
        self.norm = nnx.BatchNorm(3, use_running_average=True, rngs=rngs)

    def __call__(self, x):
        x = STOP(self.layers[0].kernel[...]) @ x
        return self.layers[1](self.norm(x[None])[0]).sum()


@pytest.mark.slow
def test_names_within_modules_are_those_that_wrt_takes():
    _, grads = named("layers/0/bias, layers/0/kernel: ", lambda m, x: m(x), Net(nnx.Rngs(0)))
    assert set(grads) == {"layers", "norm"}
    assert set(grads["layers"]) == {1}


class WithRngs(nnx.Module):
    """It keeps its streams of keys, as many modules do: an `Rngs` has an attribute of any name."""

    def __init__(self, rngs):
        self.layer, self.rngs = nnx.Linear(3, 1, rngs=rngs), rngs

    def __call__(self, x):
        return self.layer(x).sum()


def test_a_module_may_keep_its_streams_of_keys():
    grads = clipped(lambda m, x: m(x), WithRngs(nnx.Rngs(0)), strict=True).grads
    assert [leaf.shape for leaf in jax.tree.leaves(grads)] == [(1,), (3, 1)]


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=True)(x)).sum()


@pytest.mark.slow
def test_running_statistics_are_no_parameters():
    variables = Norm().init(jax.random.key(0), X[0])
    words = "params holds batch_stats beside the parameters"
    assert jax.tree.leaves(named(words, Norm().apply, variables)[1])
    graph, state = nnx.split(Net(nnx.Rngs(0)))

    def loss(state, x):
        return nnx.merge(graph, state)(x)

    with pytest.warns(ClippingWarning, match="params holds BatchStat beside the parameters"):
        clipped(loss, state)
    with pytest.raises(ValueError, match="holds BatchStat"):
        clipped(loss, state, strict=True)
    assert "mean" not in clipped(loss, state, wrt=nnx.Param).grads["norm"]


def holders():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    tx = optax.adam(1e-3)
    key = jax.random.key(0)
    _, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, axis_name="batch", mode="batch")
    private = dpx.privatize(l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=2, key=key)
    trained = dpx.training.Trained(PARAMS, None, [])
    return {
        "TrainState": TrainState.create(apply_fn=None, params=PARAMS, tx=tx),
        "ScaleByAdamState": (PARAMS, tx.init(PARAMS)),
        "Optimizer": nnx.Optimizer(model, tx, wrt=nnx.Param),
        "State": (PARAMS, state),
        "PrivatizeState": {"params": PARAMS, "opt": private.init(PARAMS)},
        "Trained": trained,
    }


@pytest.mark.parametrize("name", holders())
def test_what_holds_more_than_parameters_is_refused(name):
    with pytest.raises(ValueError, match=rf"params (is|holds) a {name}, which has more than") as f:
        clipped(loss_of(REACHED["product"]), holders()[name])
    assert "\n" not in str(f.value)


def test_where_wrt_names_what_is_trained_the_rest_is_the_callers():
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adam(1e-3))

    def loss(state, x):
        return loss_of(REACHED["product"])(state.params, x)

    grads = clipped(loss, state, wrt=lambda path, leaf: path[0] == "params", strict=True).grads
    want = clipped(loss_of(REACHED["product"])).grads
    jax.tree.map(np.testing.assert_array_equal, grads.params, want)
