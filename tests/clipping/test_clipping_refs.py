"""Mutable arrays: within the loss of one example they are its own; from outside they carry others' values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_clipping_models import check, jit, per_example

from dpx import clipping

W = jnp.asarray(np.random.default_rng(0).normal(size=(66, 66)) / 8, jnp.float32)
X = np.random.default_rng(1).normal(size=(3, 20, 66)).astype("f4")


def written(p, x):
    """What a recomputed block returns, changed in place."""
    hidden = jax.checkpoint(lambda p, x: jnp.tanh(x @ p))(p, x)
    ref = jax.new_ref(jnp.zeros_like(hidden))
    ref[...] = hidden
    ref[0] = ref[0] * 2
    return jnp.sum(jnp.tanh(ref[...]) ** 2)


@pytest.mark.quick_cases("auto", "two_pass")
@pytest.mark.parametrize("method", ["auto", "one_pass", "two_pass", "vmap"])
def test_a_loss_may_write_to_arrays_of_its_own(method):
    fn = clipping.clipped_grad(written, l2_clip_norm=0.5, method=method)
    check(jit(fn)(W, X), per_example(written, W, (X,)), 0.5)


@pytest.mark.parametrize("method", ["auto", "two_pass", "vmap"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_what_one_example_leaves_for_the_next_is_refused(method, wrap):
    ref = jax.new_ref(jnp.zeros(66))

    def left(x):
        ref[...] = ref[...] + x[0]
        return ref[...]

    def loss(p, x):
        return jnp.sum(x @ p * wrap(left)(x))

    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method, microbatch_size=1)
    with pytest.raises(ValueError, match=r"closes over a jax.Ref"):
        fn(W, X)


def test_a_batch_in_a_mutable_array_is_refused():
    ref = jax.new_ref(jnp.asarray(X))
    with pytest.raises(ValueError, match=r"closes over a jax.Ref"):
        clipping.clipped_grad(lambda p, x: jnp.sum(x @ p) * ref[...].mean(), l2_clip_norm=0.5)(W, X)
