"""The private fits of dpx.noisy_head: what they compute, their noise, misuse."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from noisy_head_models import HYPER, KEY, PAPER, SETTINGS, descend, features_of

from dpx import noisy_head
from dpx.noisy_head import descent, moment_sums
from dpx.privacy import gaussian_noise_multiplier

pytestmark = pytest.mark.optimized


@pytest.mark.parametrize("dim", [4, pytest.param(10, marks=pytest.mark.slow)])
def test_zero_noise_is_projected_gradient_descent(dim):
    """Algorithm 1 as printed, in NumPy, on prompts that its bounds bite."""
    features = features_of(60, 6, dim)
    hyper = noisy_head.HyperParameters(0.8, 0.15, 0.3)
    run = {"regularization": 0.2, "step_size": 2.0, "steps": 5, "objective": "paper"}
    found = descend(features, hyper, trajectory=True, **run)
    Z = np.einsum("ni,nj->nij", features.query, features.context)
    Z *= np.minimum(1, 0.15 / np.linalg.norm(Z, axis=(1, 2)))[:, None, None]
    t = np.clip(features.target, -0.8, 0.8)
    gamma = np.zeros((dim, dim))
    for step in range(5):
        residual = np.einsum("ij,nij->n", gamma, Z) - t
        gamma = (1 - 2 * 0.2 * 2.0) * gamma - 2.0 * np.einsum("n,nij->ij", residual, Z) / 60
        gamma *= min(1, 0.3 / np.linalg.norm(gamma))
        np.testing.assert_allclose(found[step], gamma, atol=1e-14)


@pytest.mark.slow
def test_every_iterate_lies_in_the_ball_that_the_sensitivity_assumes():
    """Under noise that throws each of them out of it."""
    fitted = noisy_head.fit(
        KEY, features_of(60, 6, 3), noisy_head.HyperParameters(0.8, 0.5, 0.3),
        regularization=0.2, step_size=2.0, steps=5, epsilon=0.1, delta=1e-5, trajectory=True,
    )  # fmt: skip
    np.testing.assert_allclose(np.linalg.norm(fitted.gamma, axis=(1, 2)), 0.3, rtol=1e-12)


@pytest.mark.slow
def test_a_traced_start_outside_the_ball_starts_on_it():
    """Nothing can be raised there, and the first gradient would move by more than the sensitivity."""
    features, hyper = features_of(20, 6, 3), noisy_head.HyperParameters(0.8, 0.5, 0.3)

    def run(start):
        return descend(features, hyper, init=start, regularization=0.2, step_size=2.0, steps=1)

    edge = np.full((3, 3), 0.1)
    with jax.enable_x64(True):
        np.testing.assert_allclose(jax.jit(run)(100 * edge), run(edge), rtol=1e-12)


@pytest.mark.slow
def test_huge_budget_is_ridge():
    features = features_of()
    hyper = noisy_head.HyperParameters(10.0, 3.0, 5.0)
    exact = noisy_head.ridge(features, 2.0)
    run = {"regularization": 2.0, "epsilon": 1e8, "delta": 1e-5}
    iterated = noisy_head.fit(KEY, features, hyper, step_size=2 / 13, steps=200, **run)
    # Multiplier √200/14142 = 1e-3, sensitivity 105 over 300 prompts: a stationary std of 7.5e-5, four of
    # which are 1 % of ridge's largest entry.
    np.testing.assert_allclose(iterated.gamma, exact, atol=3e-4)
    one_shot = noisy_head.fit_one_shot(KEY, features, hyper, **run)
    np.testing.assert_allclose(one_shot.gamma, exact, atol=3e-5)  # std 7e-6


@pytest.mark.slow
def test_noise_has_the_stated_size():
    """One step from zero: Γ¹ = −η(gradient + noise), noise std = multiplier × sensitivity / N per entry."""
    features, hyper = features_of(50, 6, 3), noisy_head.HyperParameters(1.0, 0.5, 1e6)
    run = {"regularization": 1.0, "step_size": 0.5, "steps": 1}

    def draw(key):
        return noisy_head.fit(key, features, hyper, epsilon=1.0, delta=1e-5, **run).gamma

    gammas = np.array(jax.vmap(draw)(jax.random.split(jax.random.key(1), 4000)))
    noise = (gammas - np.array(descend(features, hyper, **run))).reshape(4000, -1)
    std = 0.5 * gaussian_noise_multiplier(1.0, 1e-5) * noisy_head.gradient_sensitivity(hyper) / 50
    # 36,000 normals: relative standard error of the std 0.4 %, of the mean 0.5 % of it.
    np.testing.assert_allclose(noise.std(), std, rtol=0.015)
    assert abs(noise.mean()) < 0.02 * std
    correlation = np.corrcoef(noise.T) - np.eye(9)
    assert np.abs(correlation).max() < 0.08


@pytest.mark.slow
def test_excess_risks_of_the_paper_and_of_the_release():
    """N = 4000, ε = 1, 40 trials: 0.036 as printed; the one-shot release is 20,000 times below."""
    sizes, run = (4000, 63, 5), {"regularization": 5.0}
    printed = noisy_head.hyperparameters(*sizes, **run, rule="paper")
    valid = noisy_head.hyperparameters(*sizes, **run)
    step_size = 3.17 / (5 + printed.feature_radius**2) ** 2
    steps = math.ceil(2.5 * math.log(4000) / -math.log1p(-5 * step_size))
    descent = noisy_head.Descent(printed, **run, step_size=step_size, steps=steps, **PAPER)
    multiplier, _ = descent.calibrate(1.0, 1e-5)
    once = gaussian_noise_multiplier(1.0, 1e-5)

    def trial(key):
        features = noisy_head.sample_features(key, *sizes)
        gammas = (
            noisy_head.noisy_descent(key, features, descent, noise_multiplier=multiplier),
            noisy_head.one_shot(key, features, valid, noise_multiplier=once, **run),
            jnp.zeros((5, 5)),
        )
        reference = noisy_head.ridge(features, 5.0)
        return [noisy_head.population_risk(gamma, 63, reference=reference) for gamma in gammas]

    with jax.enable_x64(True):
        keys = jax.random.split(KEY, 40)
        paper, one_shot, zero = np.mean(
            jax.jit(lambda keys: jax.lax.map(trial, keys))(keys), axis=1
        )
    # The risk of a trial scatters by a third, so the mean of 40 by 5 %.
    np.testing.assert_allclose(paper, 0.036, rtol=0.25)
    assert paper > 20_000 * one_shot
    np.testing.assert_allclose(zero, 2.8e-6, rtol=0.1)


@pytest.mark.slow
def test_sphere_start_has_norm_R_and_is_no_function_of_the_data():
    bounds = noisy_head.HyperParameters(1.0, 1.0, 3.0)

    def start(key, seed):
        run = {"init": "sphere", "regularization": 1.0, "step_size": 1e-12, "steps": 1}
        return np.array(descend(features_of(20, seed=seed), bounds, jax.random.key(key), **run))

    first = start(5, 0)
    np.testing.assert_allclose(np.linalg.norm(first), 3.0)
    np.testing.assert_allclose(first, start(5, 1), atol=1e-10)
    assert np.linalg.norm(first - start(6, 0)) > 1


@pytest.mark.slow
def test_same_key_same_fit_under_vmap_and_jit():
    features = features_of(30)

    def fit(key):
        return noisy_head.fit(key, features, HYPER, **SETTINGS, epsilon=1.0).gamma

    keys = jax.random.split(KEY, 3)
    each = np.stack([np.array(fit(key)) for key in keys])
    np.testing.assert_allclose(jax.vmap(fit)(keys), each, atol=1e-13)
    with pytest.raises(ValueError, match=r"jax\.enable_x64"):
        jax.jit(fit)(keys[0])
    with jax.enable_x64(True):
        np.testing.assert_allclose(jax.jit(jax.vmap(fit))(keys), each, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"step_size": 0.4}, "step_size=0.4 does not contract: use less than 0.305"),
        ({"step_size": 0.2, "objective": "paper"}, "less than 0.173"),
        ({"accounting": "rdp"}, "accounting='rdp'"),
        ({"sensitivity": "loose"}, "sensitivity='loose'"),
        ({"objective": "lasso"}, "objective='lasso'"),
        ({"accounting": "basic", "epsilon": 38.0}, "classical Gaussian bound"),
        ({"accounting": "last_iterate", "trajectory": True}, "last iterate alone"),
        ({"init": "ones"}, "init='ones'"),
        ({"init": np.ones((4, 4))}, "init has shape"),
        ({"init": np.full((5, 5), 1e3)}, "outside the ball"),
        ({"init": 0.9 * HYPER.parameter_radius * np.eye(5)}, "outside the ball"),
        ({"init": np.full((5, 5), np.nan)}, "init holds values"),
        ({"hyper": noisy_head.HyperParameters(1.0, 0.0, 1.0)}, "hyper.feature_radius=0"),
        ({"features": features_of(5)._replace(target=np.ones(3))}, "features have shapes"),
        ({"features": features_of(5)._replace(target=np.full(5, np.nan))}, "features.target"),
    ],
)
def test_misuse(changed, message):
    arguments = {"features": features_of(5), "hyper": HYPER, **SETTINGS, "epsilon": 1.0, **changed}
    features, hyper = arguments.pop("features"), arguments.pop("hyper")
    with pytest.raises(ValueError, match=message):
        noisy_head.fit(KEY, features, hyper, **arguments)


@pytest.mark.parametrize("size", [1e-200, 1e-31, 1e31, 1e200])
@pytest.mark.parametrize("name", noisy_head.HyperParameters._fields)
def test_bounds_whose_products_are_no_floats_are_refused(name, size):
    """With them noise would be zero or infinite, and a guarantee of it wrong."""
    hyper = noisy_head.HyperParameters(1.0, 1.0, 1.0)._replace(**{name: size})
    budget = {"regularization": 1.0, "epsilon": 1.0, "delta": 1e-5}
    with pytest.raises(ValueError, match=f"hyper.{name}"):
        noisy_head.fit_one_shot(KEY, features_of(5), hyper, **budget)
    with pytest.raises(ValueError, match=f"hyper.{name}"):
        noisy_head.fit(KEY, features_of(5), hyper, step_size=0.1, steps=2, **budget)


@pytest.mark.quick_cases("1e-20")
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e10])
def test_bounds_in_range_are_released_finite(size):
    hyper = noisy_head.HyperParameters(size, size, size)
    budget = {"regularization": 1.0, "epsilon": 1.0, "delta": 1e-5}
    made = noisy_head.fit_one_shot(KEY, features_of(5), hyper, **budget)
    assert 0 < np.linalg.norm(made.gamma) <= size * (1 + 1e-9)


def test_a_guarantee_says_what_its_user_must_see_to(monkeypatch):
    # What is released does not matter.
    monkeypatch.setattr(descent, "noisy_descent", lambda *_, **__: None)
    arguments = {**SETTINGS, "epsilon": 1.0}
    made = [
        noisy_head.fit(KEY, features_of(5), HYPER, **arguments, **options)
        for options in ({}, {"accounting": "last_iterate", "init": np.zeros((5, 5))})
    ]
    words = ("the number of prompts is public",)
    assert made[0].guarantee.assumptions == words
    assert made[1].guarantee.assumptions == (
        *words,
        "only the last iterate is released: no other iterate, no loss, nothing else of any step",
        "the number of steps, the step size and the noise were fixed without looking at the prompts",
        "the initial Γ does not depend on the prompts",
    )


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True])
def test_noise_of_one_release_covers_the_rounding_of_features(traced, monkeypatch):
    """Sums of integers, and of floats under `jit`, whose noise is the same."""
    given = []
    for name in ("_one_shot", "ridge_of"):
        monkeypatch.setattr(moment_sums, name, lambda *args: given.append(args[-1]))
    hyper, features = noisy_head.HyperParameters(1.5, 0.8, 1.0), features_of(5, dim=3)
    options = {"regularization": 1.0, "noise_multiplier": 1.0}
    if traced:
        noisy_head.one_shot(KEY, features, hyper, **options)
    else:
        budget = {"regularization": 1.0, "epsilon": 1.0, "delta": 1e-5}
        noisy_head.fit_one_shot(KEY, features, hyper, **budget)
    # Rounding in units of 2⁻¹⁸ makes a feature of nine entries longer by up to ⌈0.51·3⌉ of them.
    longest = 0.8 * (1 + 2 * 2.0**-18)
    expected = 2 * math.sqrt(2) * longest**2, 2 * 1.5 * longest
    np.testing.assert_allclose(given, [expected], rtol=1e-12)
