"""The bounds of dpx.noisy_head, how they are enforced, and its sensitivities under attack."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from noisy_head_models import HYPER, KEY, descend

from dpx import noisy_head
from dpx.noisy_head.moment_sums import joint_noise, pair_symmetric


def unit_ball(values):
    return values / jnp.maximum(1, jnp.linalg.norm(values))


def neighbours(parameters, hyper):
    """Two prompts as matrices within the bounds and a Γ in the ball, from free parameters."""
    C, G, R = hyper
    query, context, targets, gamma = parameters
    Z = [G * jnp.outer(unit_ball(query[i]), unit_ball(context[i])) for i in range(2)]
    return Z, C * jnp.tanh(targets), R * unit_ball(gamma)


def gradient_gap(parameters, hyper):
    (Z, Z2), t, gamma = neighbours(parameters, hyper)
    one = (jnp.sum(gamma * Z) - t[0]) * Z
    return jnp.linalg.norm(one - (jnp.sum(gamma * Z2) - t[1]) * Z2)


def joint_gap(parameters, hyper):
    """Distance of (H, b·h) between neighbours, in units of the claimed sensitivity."""
    (Z, Z2), t, _ = neighbours(parameters, hyper)
    std_H, std_h = joint_noise(hyper)
    a, b = Z.reshape(-1), Z2.reshape(-1)
    gap_H = jnp.sum((jnp.outer(a, a) - jnp.outer(b, b)) ** 2)
    gap_h = jnp.sum((t[0] * a - t[1] * b) ** 2)
    return jnp.sqrt(gap_H / std_H**2 + gap_h / std_h**2)


def worst_by_ascent(gap, hyper, dim=3, starts=64):
    shapes = [(2, dim), (2, dim), (2,), (dim, dim)]
    keys = jax.random.split(jax.random.key(0), 4)
    drawn = zip(keys, shapes, strict=True)
    parameters = [2 * jax.random.normal(key, (starts, *shape)) for key, shape in drawn]

    @jax.jit
    def ascend(parameters):
        random = jax.vmap(lambda p: gap(p, hyper))(parameters)

        def step(_, p):
            slope = jax.vmap(jax.grad(lambda p: jnp.log(gap(p, hyper) + 1e-12)))(p)
            return [x + 0.05 * jnp.nan_to_num(g) for x, g in zip(p, slope, strict=True)]

        found = jax.lax.fori_loop(0, 600, step, parameters)
        return jnp.maximum(random.max(), jax.vmap(lambda p: gap(p, hyper))(found).max())

    return float(ascend(parameters))


RATIOS = pytest.mark.parametrize("ratio", [0.1, 1.0, 10.0])


@pytest.mark.quick_cases("1.0")
@RATIOS
def test_gradient_sensitivity_under_attack(ratio):
    hyper = noisy_head.HyperParameters(1.5, 0.8, ratio * 1.5 / 0.8)
    worst = worst_by_ascent(gradient_gap, hyper)
    tight = noisy_head.gradient_sensitivity(hyper)
    assert 0.85 * tight <= worst <= tight * (1 + 1e-5)
    assert tight <= noisy_head.gradient_sensitivity(hyper, "paper")
    known = [noisy_head.gradient_sensitivity(HYPER, rule) for rule in ("paper", "tight")]
    np.testing.assert_allclose(known, [84.3, 47.8], atol=0.05)


@pytest.mark.quick_cases("1.0")
@RATIOS
def test_joint_sensitivity_under_attack(ratio):
    worst = worst_by_ascent(joint_gap, noisy_head.HyperParameters(1.5, 0.8, ratio * 1.5 / 0.8))
    assert 0.97 <= worst <= 1 + 1e-5


def test_pair_symmetric_is_the_projection():
    noise = np.random.default_rng(0).normal(size=(3, 3, 3, 3))
    with jax.enable_x64(True):
        projected = np.array(pair_symmetric(jnp.array(noise))).reshape(3, 3, 3, 3)
        np.testing.assert_allclose(
            pair_symmetric(jnp.array(projected)).reshape(-1), projected.reshape(-1)
        )
    for pair in ((2, 1, 0, 3), (0, 3, 2, 1)):
        np.testing.assert_allclose(projected, projected.transpose(pair), atol=1e-15)
    q, s = np.random.default_rng(1).normal(size=(2, 3))
    member = np.einsum("i,k,j,l->ikjl", q, s, q, s)
    np.testing.assert_allclose(np.sum((noise - projected) * member), 0, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("entry", [4e307, 4.6e307, 1e308, 1.7e308])
def test_a_row_of_nearly_the_largest_number_does_not_spoil_the_sum(entry):
    rng = np.random.default_rng(0)
    query, context = rng.normal(size=(2, 20, 3))
    query[0], context[0] = [entry, 0, 0], [0.5, 0, 0]
    features = noisy_head.Features(query, context, rng.normal(size=20))
    hyper = noisy_head.HyperParameters(2.0, 0.5, 1.0)
    budget = {"regularization": 0.1, "epsilon": 1.0, "delta": 1e-5}
    made = noisy_head.fit_one_shot(KEY, features, hyper, **budget)
    assert np.isfinite(made.gamma).all()


@pytest.mark.slow
def test_bounds_are_enforced_on_every_row():
    """Rows far outside, of zero, and non-finite (which only a jit lets through) all end within the bounds."""
    hyper = noisy_head.HyperParameters(1.0, 0.5, 2.0)
    rows = np.array(
        [[1e200, 1.0], [0.0, 0.0], [np.nan, 1.0], [1e-300, 0.0], [3.0, 4.0], [np.inf, 0.0]]
    )
    features = noisy_head.Features(
        rows, np.roll(rows, 1, axis=1) * 1e120, np.array([5, -9, 1, np.nan, 0.3, 1])
    )
    with jax.enable_x64(True):
        bounded = noisy_head.enforce(noisy_head.Features(*map(jnp.asarray, features)), hyper)
    query, context, target = map(np.array, bounded)
    assert all(np.isfinite(part).all() for part in (query, context, target))
    sizes = np.linalg.norm(query, axis=1) * np.linalg.norm(context, axis=1)
    assert (sizes <= 0.5 * (1 + 1e-15)).all()
    assert (np.abs(target) <= 1).all()
    np.testing.assert_allclose(
        np.outer(query[4], context[4]), 0.5 * np.outer([0.6, 0.8], [0.8, 0.6])
    )

    def release(*features):
        run = {"regularization": 1.0, "step_size": 0.5, "steps": 3}
        return descend(noisy_head.Features(*features), hyper, **run)

    with jax.enable_x64(True), np.errstate(all="ignore"):
        assert np.isfinite(jax.jit(release)(*features)).all()
    with pytest.raises(ValueError, match="not finite"):
        release(*features)


@pytest.mark.slow
def test_valid_rule():
    """No prompt beyond G or C but one in N, and R contains ridge for any data within C and G."""
    for length, dim, noise_std in ((63, 5, 0.0), (500, 5, 0.0), (31, 31, 0.0), (40, 3, 0.8)):
        features = noisy_head.sample_features(
            jax.random.key(2), 4000, length, dim, noise_std=noise_std
        )
        size = np.linalg.norm(features.query, axis=1) * np.linalg.norm(features.context, axis=1)
        C, G, _ = noisy_head.hyperparameters(
            400, length, dim, regularization=1.0, noise_std=noise_std
        )
        assert np.mean(size > G) <= 1 / 400
        assert np.mean(np.abs(features.target) > C) <= 1 / 400
    # At L = 500 the paper's G is below what most prompts have.
    long = noisy_head.sample_features(jax.random.key(2), 1000, 500, 5)
    printed = noisy_head.hyperparameters(5000, 500, 5, regularization=0.01, rule="paper")
    assert np.mean(np.linalg.norm(long.context, axis=1) > printed.feature_radius) > 0.5


@pytest.mark.parametrize("regularization", [1e-3, 0.3, 10.0])
def test_valid_radius_is_attained(regularization):
    C, G, R = noisy_head.hyperparameters(4, 10, 2, regularization=regularization)
    # All prompts alike, with ‖Z‖ = min(G, √λ) and targets C: the extreme case of the proof.
    size = min(G, math.sqrt(regularization))
    features = noisy_head.Features(
        np.tile([1.0, 0.0], (4, 1)), np.tile([0.0, size], (4, 1)), np.full(4, C)
    )
    found = np.linalg.norm(noisy_head.ridge(features, regularization))
    np.testing.assert_allclose(found, R, rtol=1e-9)


def test_the_radius_of_the_papers_objective_is_that_of_twice_the_penalty():
    sizes = 100, 20, 3
    found = noisy_head.hyperparameters(*sizes, regularization=0.1, objective="paper")
    assert found == noisy_head.hyperparameters(*sizes, regularization=0.2)
    assert found != noisy_head.hyperparameters(*sizes, regularization=0.1)


def test_paper_rule_is_4_1():
    C = math.sqrt(2 * 1.25 * math.log(1000 * 31 / 0.1))
    hyper = noisy_head.hyperparameters(
        1000, 31, 5, regularization=5.0, noise_std=0.5, kappa=0.1, rule="paper"
    )
    root = math.sqrt(math.log(10)) / 5
    np.testing.assert_allclose(
        hyper,
        [
            C,
            C / math.sqrt(31) * (1 + math.sqrt(math.log(1e4)) / 5),
            C**2 / 5 * math.sqrt(1000 / 31) * (1 + root),
        ],
    )
