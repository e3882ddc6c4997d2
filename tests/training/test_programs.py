"""A training goes on with the loss and the optimizer that it began with, and with no others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from command_line import ROOT, paths, python
from jax._src import pretty_printer

from dpx.training import programs

X = np.random.default_rng(0).normal(size=3).astype(np.float32)
W = {"w": jnp.zeros(3)}
SCHEDULE = optax.cosine_decay_schedule(0.1, 4)


@jax.custom_vjp
def identity(x):
    return x


identity.defvjp(lambda x: (x, None), lambda _, g: (g,))


@jax.custom_vjp
def scaled(x):
    return x


scaled.defvjp(lambda x: (x, None), lambda _, g: (3 * g,))


def closed_over(numbers):
    held = jnp.asarray(numbers, jnp.float32)
    return lambda params, x: jnp.sum(params["w"] * x * held)


def held_inside(numbers):
    held = jnp.asarray(numbers, jnp.float32)
    inner = jax.jit(lambda y: jnp.sum(y * held))
    return lambda params, x: inner(params["w"] * x)


LOSSES = {
    "a number": [lambda p, x, c=c: jnp.sum(p["w"] * x) * c for c in (0.1, 0.1 + 1e-8)],
    "an array": [closed_over([1, 2, c]) for c in (3, 4)],
    "an array of an inner function": [held_inside([1, 2, c]) for c in (3, 4)],
    "a gradient of its own": [lambda p, x, f=f: jnp.sum(f(p["w"]) * x) for f in (identity, scaled)],
    "a key": [
        lambda p, x, s=s: jnp.sum(p["w"] * x * jax.random.normal(jax.random.key(s), (3,)))
        for s in (0, 1)
    ],
}
OPTIMIZERS = {
    "a rate": [optax.adam(0.1), optax.adam(0.1 + 1e-8)],
    "a schedule": [optax.adam(SCHEDULE), optax.adam(optax.cosine_decay_schedule(0.1, 5))],
    "a decay": [optax.adamw(0.1, weight_decay=d) for d in (1e-4, 1e-5)],
    "a mask": [optax.masked(optax.adam(0.1), {"w": kept}) for kept in (True, False)],
    "a first state": [optax.adagrad(0.1, initial_accumulator_value=v) for v in (0.1, 0.2)],
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_told_from_one_that_differs_in(name):
    first, second = (programs.of_loss(loss, W, X) for loss in LOSSES[name])
    assert first != second


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_told_from_one_that_differs_in(name):
    first, second = (programs.of_optimizer(each, W) for each in OPTIMIZERS[name])
    assert first != second


@pytest.mark.slow
def test_a_program_is_the_same_in_another_process():
    """Addresses and the order of sets differ between processes, and count for nothing."""
    code = "import test_programs as t; print(t.both())"
    settings = {"PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths()}
    ran = python("-c", code, folder=ROOT / "tests/training", **settings)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.split() == both().split()


def test_a_program_is_the_same_where_stdout_is_a_terminal(monkeypatch):
    """A training that began in one goes on under a job's scheduler, where JAX prints without colours."""
    before = both()
    monkeypatch.setattr(pretty_printer, "CAN_USE_COLOR", True)
    assert "\x1b" in str(jax.make_jaxpr(jnp.sin)(1.0))
    assert both() == before


def both() -> str:
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def block(params, x):
        return scaled(jax.nn.gelu(jax.nn.relu(params["w"] * x)))

    def loss(params, x):
        seen = jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct((3,), jnp.float32), x)
        return jax.lax.cond(x[0] > 0, jnp.sum, jnp.max, block(params, x) + seen)

    return f"{programs.of_loss(loss, W, X)} {programs.of_optimizer(optax.adamw(SCHEDULE), W)}"
