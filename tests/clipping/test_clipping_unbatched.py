"""Losses that `jax.vmap` refuses, one example at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from test_clipping_models import check, jit, per_example

from dpx import clipping

METHODS = [name for name in clipping.METHODS if name != "auto"]  # One of the others.
RNG = np.random.default_rng(0)

# Multiplies by two, and has no rule for batches.
twice_p = Primitive("twice_without_batching")
twice_p.def_impl(lambda x: 2 * x)
twice_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(twice_p, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))


@jax.custom_vjp
def twice(x):
    return twice_p.bind(x)


twice.defvjp(lambda x: (twice(x), None), lambda _, g: (2 * g,))


def own_primitive(params, x, groups):
    del groups
    return jnp.sum(twice(jnp.tanh(x @ params["w"][0]) @ params["v"]) ** 2)


def mixture_of_experts(params, x, groups):
    return jnp.sum((jnp.tanh(jax.lax.ragged_dot(x, params["w"], groups)) @ params["v"]) ** 2)


LOSSES = {"own primitive": own_primitive, "ragged_dot": mixture_of_experts}
PARAMS = {
    "w": jnp.asarray(RNG.normal(size=(3, 4, 5)), jnp.float32),
    "v": jnp.asarray(RNG.normal(size=(5, 2)), jnp.float32),
}
BATCH = (
    RNG.normal(size=(4, 6, 4)).astype("f4"),
    np.array([[1, 2, 3], [0, 6, 0], [2, 2, 2], [5, 0, 1]], np.int32),
)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", LOSSES)
def test_run_one_example_at_a_time(name, method):
    loss = LOSSES[name]
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method, microbatch_size=1)
    mask = np.arange(4) != 1
    out = jit(fn)(PARAMS, *BATCH, mask=mask)
    check(out, per_example(loss, PARAMS, BATCH), 0.5, mask)


def test_their_other_results_come_back():
    def loss(params, x, groups):
        value = own_primitive(params, x, groups)
        return value, twice(value)

    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, microbatch_size=1, has_aux=True)
    out = jit(fn)(PARAMS, *BATCH)
    np.testing.assert_allclose(out.aux, 2 * out.losses, rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_in_batches_the_error_says_what_to_do(method):
    fn = clipping.clipped_grad(own_primitive, l2_clip_norm=0.5, method=method)
    with pytest.raises(NotImplementedError) as raised:
        fn(PARAMS, *BATCH)
    assert "microbatch_size=1" in "".join(raised.value.__notes__)
