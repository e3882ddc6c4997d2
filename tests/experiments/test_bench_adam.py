"""The kinds of Adam that a benchmark compares: those of optax, and of the paper that subtracts noise."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpx.training import planning
from experiments.bench._adam import Setting, falling, untuned

STEPS, START = 20, jnp.array([0.5, -1.0, 2.0])
GRADIENTS = np.random.default_rng(0).normal([1.0, 0.1, -0.01], 0.2, (STEPS, 3)).astype("f4")


def walk(optimizer: optax.GradientTransformation) -> np.ndarray:
    params: Any
    params, state = START, optimizer.init(START)
    for gradient in GRADIENTS:
        updates, state = optimizer.update(jnp.asarray(gradient), state, params)
        params = optax.apply_updates(params, updates)
    return np.asarray(params)


@pytest.mark.parametrize(
    ("setting", "plain"),
    [
        (Setting(0.1), optax.adam(optax.linear_schedule(0.1, 0, STEPS))),
        (
            Setting(0.1, decay=0.3),
            optax.adamw(optax.linear_schedule(0.1, 0, STEPS), weight_decay=0.3),
        ),
    ],
    ids=["adam", "adamw"],
)
def test_without_a_variance_it_is_optax(setting, plain):
    np.testing.assert_allclose(walk(falling(STEPS, setting)), walk(plain), rtol=2e-5)


@pytest.mark.slow
def test_what_finds_its_rate_is_what_fit_takes():
    found = walk(untuned(STEPS, Setting(1.0)))
    np.testing.assert_allclose(found, walk(planning.untuned(STEPS)), rtol=2e-5)
    assert abs(found - START).min() > 1e-3


def test_the_variance_is_subtracted_from_the_second_moment():
    """The formula of DP-AdamBC (arXiv 2312.14334), a coordinate at a time."""
    variance, floor, expected = 0.04, 0.01, []
    for coordinate, at in zip(GRADIENTS.T.astype("f8"), START.tolist(), strict=True):
        mean = square = 0.0
        for step, gradient in enumerate(coordinate, 1):
            mean = 0.9 * mean + 0.1 * gradient
            square = 0.999 * square + 0.001 * gradient**2
            second = max(square / (1 - 0.999**step) - variance, floor)
            rate = 0.1 * (1 - (step - 1) / STEPS)
            at -= rate * mean / (1 - 0.9**step) / np.sqrt(second)
        expected.append(at)
    moved = walk(falling(STEPS, Setting(0.1, variance, floor)))
    np.testing.assert_allclose(moved, expected, rtol=1e-4)
    assert abs(moved - walk(falling(STEPS, Setting(0.1)))).max() > 0.05
