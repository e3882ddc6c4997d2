"""`fit` where a program has set JAX differently from its defaults."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpx import training

ROWS = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
ABOUT = {
    "sampling": "poisson",
    "epsilon": 3.0,
    "delta": 1e-4,
    "batch_size": 4,
    "steps": 4,
    "l2_clip_norm": 1.0,
}


def fit(params, **options):
    def loss(params, row):
        return jnp.sum(jnp.square((row + params["shift"]) @ params["w"]))

    given = {"key": jax.random.key(0), "optimizer": optax.adam(0.1)}
    return training.fit(loss, params, (ROWS,), **(ABOUT | given | options)).params


@pytest.mark.slow
def test_parameters_may_have_several_types():
    with jax.enable_x64(True):
        params = {"shift": jnp.zeros(3), "w": jnp.ones((3, 40), jnp.float32)}
        found = fit(params)
    assert {name: x.dtype for name, x in found.items()} == {"shift": np.float64, "w": np.float32}


@pytest.mark.quick_cases("rbg")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (jax.default_prng_impl("rbg"), jax.default_prng_impl("unsafe_rbg")),
        (contextlib.nullcontext(), jax.default_prng_impl("rbg")),
        (contextlib.nullcontext(), jax.threefry_partitionable(False)),
    ],
    ids=["rbg", "threefry", "layout"],
)
def test_a_training_does_not_go_on_with_another_generator(tmp_path, before, after):
    params = {"shift": jnp.zeros(3), "w": jnp.ones((3, 2))}

    def stop(params):
        raise KeyboardInterrupt

    about = {"workdir": tmp_path, "evaluate_every": 2, "checkpoint_every": 1}
    with before, pytest.raises(KeyboardInterrupt):
        fit(params, evaluate=stop, **about)
    with after, pytest.raises(training.keys.CannotResumeError, match="generator"):
        fit(params, evaluate=lambda params: {}, **about)
