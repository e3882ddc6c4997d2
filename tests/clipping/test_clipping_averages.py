"""Moving averages of examples, as a BatchNorm in training mode keeps them, are refused in every framework."""

import functools
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import dpx

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
REFUSED = r"BatchNorm in training mode.*use GroupNorm"


def clipped(loss, params, **options):
    return dpx.clipped_grad(loss, l2_clip_norm=1.0, **options)(params, X)


def _nnx_outside(training):
    module = nnx.BatchNorm(3, use_running_average=not training, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def loss_fn(params, x):
        return nnx.merge(graph, params, jax.tree.map(lambda leaf: leaf, rest))(x).sum()

    return loss_fn, params


def _nnx_module(training):
    module = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    return lambda module, x: module(x, use_running_average=not training).sum(), module


def _linen(training, wrap=lambda f: f):
    module = nn.BatchNorm(use_running_average=not training)
    variables = module.init(jax.random.key(0), jnp.ones((1, 3)))

    def loss_fn(params, x):
        rest = {"params": params, "batch_stats": variables["batch_stats"]}
        return wrap(lambda x: module.apply(rest, x, mutable=["batch_stats"]))(x)[0].sum()

    return loss_fn, variables["params"]


def _linen_trained(training):
    """All variables are given as parameters."""
    module = nn.BatchNorm(use_running_average=not training)
    variables = module.init(jax.random.key(0), jnp.ones((1, 3)))
    loss_fn = lambda v, x: module.apply(v, x, mutable=["batch_stats"])[0].sum()  # noqa: E731
    return loss_fn, variables


def _linen_scanned(training):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.BatchNorm(use_running_average=not training)(nn.Dense(3)(x)), None

    axes: Any = {"params": 0, "batch_stats": 0}
    stack = nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=2)()
    variables = stack.init(jax.random.key(0), X[0], None)

    def loss_fn(params, x):
        rest = {"params": params, "batch_stats": variables["batch_stats"]}
        return stack.apply(rest, x, None, mutable=["batch_stats"])[0][0].sum()

    return loss_fn, variables["params"]


def _haiku(training):
    module = hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9)(x, training))
    with_training = hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9)(x, True))
    params, state = with_training.init(jax.random.key(0), jnp.ones((1, 3)))
    return lambda params, x: module.apply(params, state, None, x[None])[0].sum(), params


MAKERS = {
    "nnx outside": _nnx_outside,
    "nnx module": _nnx_module,
    "linen": _linen,
    "linen in jit": functools.partial(_linen, wrap=jax.jit),
    "linen in remat": functools.partial(_linen, wrap=jax.checkpoint),
    "linen, scanned": _linen_scanned,
    "haiku": _haiku,
}


@pytest.mark.quick_cases("linen-auto")
@pytest.mark.parametrize("method", ["auto", pytest.param("vmap", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", MAKERS)
def test_a_moving_average_of_examples_is_refused(make, method):
    loss_fn, params = MAKERS[make](False)
    assert (clipped(loss_fn, params, method=method, strict=True).norms > 0).all()
    loss_fn, params = MAKERS[make](True)
    with pytest.raises(ValueError, match=REFUSED):
        clipped(loss_fn, params, method=method)


@pytest.mark.filterwarnings("ignore:params holds batch_stats")
def test_an_average_that_is_handed_out_or_trained_is_refused():
    loss_fn, params = _linen_trained(True)
    with pytest.raises(ValueError, match=REFUSED):
        clipped(loss_fn, params)
    module = nn.BatchNorm(use_running_average=False)
    variables = module.init(jax.random.key(0), jnp.ones((1, 3)))

    def with_state(params, x):
        given = {"params": params, "batch_stats": variables["batch_stats"]}
        out, state = module.apply(given, x, mutable=["batch_stats"])
        return out.sum(), state

    with pytest.raises(ValueError, match=REFUSED):
        clipped(with_state, variables["params"], has_aux=True)


def test_what_is_no_average_of_examples_is_taken():
    mean, std, prior = (jnp.asarray(row) for row in X[:3])

    def loss(w, x):
        out = w * x
        mixed = 0.5 * prior + 0.5 * w  # of parameters
        halved = 0.5 * (prior + out)
        return jnp.square(0.9 * out + 0.1 * prior).sum(), (out * std + mean, mixed, halved)

    assert (clipped(loss, jnp.ones(3), has_aux=True, strict=True).norms > 0).all()
