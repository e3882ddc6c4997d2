"""Weights that are multiples of themselves: scaled by columns, by rows, by their own length."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_clipping_models import check, jit, per_example

from dpx import clipping
from dpx.clipping.gradients import plan

IN, OUT, BATCH = 12, 9, 4


@pytest.fixture(autouse=True)
def by_factors(monkeypatch):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype("f4") / 2


def weight_norm(w, axis=0):
    return w / jnp.linalg.norm(w, axis=axis, keepdims=True)


def columns(p, x):
    return jnp.sum(jnp.sin(x @ (weight_norm(p["w"]) * p["g"])))


def turned(p, x):
    return jnp.sum(jnp.sin((weight_norm(p["w"].T, 1) * p["g"][:, None]) @ x.T))


def rows(p, x):
    """A scale along the axis that the product sums over, which its result does not have."""
    return jnp.sum(jnp.sin(x @ (weight_norm(p["w"], 1) * p["g"][:, None])))


def number(p, x):
    return jnp.sum(jnp.sin(x @ (p["w"] / jnp.linalg.norm(p["w"]) * p["g"][0])))


def twice(p, x):
    w = weight_norm(p["w"]) * p["g"]
    return jnp.sum(jnp.sin(x @ w) * jnp.cos(x[:, ::-1] @ w)) + 0.1 * jnp.sum(p["w"] ** 2)


def beside_itself(p, x):
    """Not a multiple of the weight, though the derivative by the scale is one."""
    return jnp.sum(jnp.sin(x @ (p["w"] * p["g"] + jnp.tanh(p["w"])))) + 0.1 * jnp.sum(p["w"] ** 2)


def moved(p, x):
    """Not a multiple of the weight either, and its derivative is that of one throughout."""
    w = p["w"] * p["g"] + 0.3
    return jnp.sum(jnp.sin(x @ w)) + 0.1 * jnp.sum(p["w"] ** 2)


CASES = {
    "columns": (columns, OUT),
    "turned": (turned, OUT),
    "rows": (rows, IN),
    "number": (number, 1),
    "twice": (twice, OUT),
    "beside itself": (beside_itself, OUT),
    "moved": (moved, OUT),
}


@pytest.mark.quick_cases("turned-1")
@pytest.mark.parametrize("length", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_norms_and_sums_are_exact(name, length):
    loss, size = CASES[name]
    p, x = {"w": normal(IN, OUT), "g": 1 + normal(size)}, normal(BATCH, length, IN)
    for method in ("one_pass", "two_pass"):
        fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method)
        check(jit(fn)(p, x), per_example(loss, p, (x,)), 0.5)


def scaled(p, x):
    """A scale for each column, and a penalty, whose gradient is a multiple of the weights."""
    return x[0] @ (p["w"] * p["g"]) @ jnp.cos(jnp.arange(OUT)) + x[0, 0] * jnp.sum(p["w"] ** 2)


def one(array, value):
    array[(2,) * array.ndim] = value


UNUSUAL = {
    "a weight of zero": lambda w, g, x: one(w, 0),
    "a scale of zero": lambda w, g, x: one(g, 0),
    "a tiny scale": lambda w, g, x: one(g, 1e-12),
    "a huge scale": lambda w, g, x: one(g, 1e12),
    "a tiny weight": lambda w, g, x: one(w, 1e-35),
    "tiny weights, huge inputs": lambda w, g, x: (
        np.multiply(w, 1e-10, w),
        np.multiply(x, 1e10, x),
    ),
    "tiny weights, huge scales": lambda w, g, x: (
        np.multiply(w, 1e-10, w),
        np.multiply(g, 1e10, g),
    ),
    "huge weights, tiny scales": lambda w, g, x: (
        np.multiply(w, 1e12, w),
        np.multiply(g, 1e-12, g),
    ),
}


QUICK = ("a weight of zero", "a scale of zero", "a tiny weight")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in UNUSUAL],
)
def test_unusual_weights_and_scales(name):
    change = UNUSUAL[name]
    w, g, x = normal(IN, OUT), 1 + normal(OUT), normal(BATCH, 1, IN)
    change(w, g, x)
    p = {"w": w, "g": g}
    fn = jit(clipping.clipped_grad(scaled, l2_clip_norm=0.5, method="one_pass"))
    check(fn(p, x), per_example(scaled, p, (x,)), 0.5)
