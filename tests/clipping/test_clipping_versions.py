"""No parameter loses its rule on another version of JAX, which names and nests equations in its own way."""

import clipping_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core.primitives import closed_call_p
from test_clipping_models import check, jit, per_example

import dpx
from dpx import clipping

# Parameters of each model that have a rule: kernels and tables, but few biases and scales.
WITH_RULE = {
    "linen tied, LayerNorm": 14,
    "linen untied, RMSNorm, gated": 17,
    "linen remat": 14,
    "linen scan": 8,
    "linen scan of remat": 8,
    "nnx tied, dropout": 7,
    "nnx untied": 8,
    "nnx state": 7,
    "linen GRU, tied": 7,
    "linen LSTM, tied": 1,
    "nnx GRU, tied": 3,
    "CNN": 4,
    "one layer twice": 2,
    "tied autoencoder": 1,
    "equinox MLP": 3,
    "haiku MLP": 2,
    "mixed uses": 1,
    "without rules": 2,
}


# Quick to initialise, and among them every kind of equation that holds others.
QUICK = (
    "linen scan of remat",
    "nnx state",
    "equinox MLP",
    "haiku MLP",
    "mixed uses",
    "without rules",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in clipping_models.MODELS],
)
def test_parameters_keep_their_rules(name):
    loss, params, batch = clipping_models.MODELS[name]()
    found = dpx.explain_clipping(loss, params, *batch)
    assert sum(row.has_rule for row in found.rows) >= WITH_RULE[name]


@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
def test_a_traced_function_that_is_called_is_looked_into(method):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)}
    x = rng.normal(size=(5, 2, 4)).astype("f4")
    with jax.default_matmul_precision("highest"):
        called = jax.make_jaxpr(lambda w, x: jnp.tanh(x @ w))(params["w"], x[0])
    bound = closed_call_p.get_bind_params({"call_jaxpr": called})
    # Until 0.10.1 JAX returned the functions of a call apart from its other parameters.
    functions, options = bound if isinstance(bound, tuple) else ((), bound)

    def loss(params, x):
        (hidden,) = closed_call_p.bind(*functions, params["w"], x, **options)
        return jnp.sum(hidden**2)

    (row,) = dpx.explain_clipping(loss, params, x).rows
    assert row.uses == ("dot_general",)
    out = jit(clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method))(params, x)
    check(out, per_example(loss, params, (x,)), 0.5)


@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
def test_what_is_called_twice_is_another_value_each_time(method):
    """Both calls hold the same traced function, and so the same variables."""
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(size=(4, 4)), jnp.float32) for name in "ab"}
    x = rng.normal(size=(5, 2, 4)).astype("f4")
    layer = jax.jit(lambda w, x: jnp.sin(x @ w))

    def loss(params, x):
        return jnp.sum(layer(params["a"], x) * layer(params["b"], x) ** 2)

    out = jit(clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method))(params, x)
    check(out, per_example(loss, params, (x,)), 0.5)


@pytest.mark.slow
def test_numpy_integers_are_explained_without_a_warning(recwarn):
    loss, params, (ids,) = clipping_models.MODELS["linen GRU, tied"]()
    dpx.explain_clipping(loss, params, np.asarray(ids, np.int64))
    clipping.clipped_grad(loss, l2_clip_norm=1.0).rounding(10, params, np.asarray(ids, np.int64))
    assert not [w for w in recwarn if "int64" in str(w.message)]
