"""Noise multipliers of dpx.noisy_head and the guarantees that come with them."""

import dataclasses
import math

import dp_accounting
import jax
import numpy as np
import pytest
from noisy_head_models import HYPER, PAPER, SETTINGS, calibrate, features_of
from scipy import special

from dpx import noisy_head
from dpx.privacy import REPLACE_ONE, Ledger, gaussian_epsilon, gaussian_noise_multiplier


@pytest.mark.parametrize(
    ("settings", "accounting", "expected"),
    [
        ({"steps": 38, "epsilon": 1.0}, "basic", 210.7),
        ({"steps": 38, "epsilon": 1.0}, "zcdp", 30.21),
        ({"steps": 38, "epsilon": 1.0}, "gdp", 23.00),
        ({"steps": 38, "epsilon": 0.2}, "basic", 1054),
        ({"steps": 38, "epsilon": 0.2}, "zcdp", 148.5),
        ({"steps": 38, "epsilon": 0.2}, "gdp", 100.5),
        ({"steps": 5, "epsilon": 1.0}, "basic", 25.83),
        ({"steps": 5, "epsilon": 1.0}, "zcdp", 10.96),
        ({"steps": 5, "epsilon": 1.0}, "gdp", 8.342),
        ({"steps": 480, "epsilon": 0.8}, "basic", 3591),
        ({"steps": 480, "epsilon": 0.8}, "zcdp", 133.7),
        ({"steps": 480, "epsilon": 0.8}, "gdp", 100.2),
    ],
)
def test_noise_multipliers(settings, accounting, expected):
    multiplier, _ = calibrate(HYPER, **{**SETTINGS, **settings}, accounting=accounting)
    np.testing.assert_allclose(multiplier, expected, rtol=5e-4)


def test_last_iterate_multipliers():
    for objective, expected in (("paper", 4.877), ("ridge", 7.842)):
        multiplier, guarantee = calibrate(
            HYPER, **SETTINGS, epsilon=1.0, accounting="last_iterate", objective=objective
        )
        np.testing.assert_allclose(multiplier, expected, rtol=2e-4)
        assert any("only the last iterate" in sentence for sentence in guarantee.assumptions)
        # It composes with others as the one release that it costs, not as one with the noise of a step.
        spent = Ledger().spend(guarantee, "fit").guarantee(guarantee.delta)
        assert spent.epsilon == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 7, 400])
@pytest.mark.parametrize("step_size", [1e-9, 0.05, 0.2, 0.3])
def test_last_iterate_covers_a_linear_map(steps, step_size):
    """Without projection and with H constant, Γ^T is Gaussian: its own μ must not exceed the claimed one."""
    hyper = noisy_head.HyperParameters(1.0, 1.0, 3.0)
    multiplier, _ = calibrate(
        hyper,
        regularization=5.0,
        step_size=step_size,
        steps=steps,
        epsilon=1.0,
        delta=1e-5,
        accounting="last_iterate",
    )
    claimed = 1 / gaussian_noise_multiplier(1.0, 1e-5)
    for curvature in (0.0, 0.4, 1.0):  # H ranges over [0, G²]
        powers = (1 - step_size * (5.0 + curvature)) ** np.arange(steps)
        shift, spread = abs(powers.sum()), np.sqrt((powers**2).sum())
        # A neighbour may also push with alternating signs, where the slope is negative.
        worst = max(shift, np.abs(powers).sum())
        assert worst / spread / multiplier <= claimed * (1 + 1e-9)
    slope = np.abs(1 - step_size * np.array([5.0, 6.0])).max()
    powers = slope ** np.arange(steps)
    attained = powers.sum() / np.sqrt((powers**2).sum()) / multiplier
    np.testing.assert_allclose(attained, claimed, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("accounting", ["basic", "zcdp", "gdp"])
def test_guarantee_is_what_the_noise_gives(accounting):
    features = features_of(40)
    fitted = noisy_head.fit(
        jax.random.key(0), features, HYPER, **SETTINGS, epsilon=1.0, accounting=accounting
    )
    guarantee = fitted.guarantee
    assert (guarantee.epsilon, guarantee.delta) == (1.0, 1e-5)
    assert guarantee.neighboring is REPLACE_ONE
    assert guarantee.unit == "prompt"
    exact = gaussian_epsilon(fitted.noise_multiplier, 1e-5, compositions=38)
    assert exact <= 1.0 + 1e-9
    np.testing.assert_allclose(Ledger().spend(guarantee, "fit").guarantee(1e-5).epsilon, exact)


def test_a_description_is_as_printed_frozen_and_checked_once():
    assert PAPER == {"accounting": "basic", "sensitivity": "paper", "objective": "paper"}
    options = {"regularization": 5.0, "step_size": 0.07, "steps": 38}
    described = noisy_head.Descent((1.0, 2.0, 3.0), **options, **PAPER)
    assert described.hyper.parameter_radius == 3.0
    assert (described.decay, described.change) == (10.0, 2 * 2 * (1 + 3 * 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        described.steps = 1
    with pytest.raises(ValueError, match=r"less than 0.142857, which is 2/\(2λ"):
        dataclasses.replace(described, step_size=2 / 14)


def test_papers_noise_is_of_a_smaller_epsilon():
    multiplier, _ = calibrate(HYPER, **SETTINGS, epsilon=1.0, **PAPER)
    np.testing.assert_allclose(
        gaussian_epsilon(multiplier, 1e-5, compositions=38), 0.089, atol=1e-3
    )


@pytest.mark.slow
def test_one_release_composes_as_one_gaussian():
    fitted = noisy_head.fit_one_shot(
        jax.random.key(0), features_of(40), HYPER, regularization=5.0, epsilon=0.7, delta=1e-6
    )
    assert fitted.guarantee.event == dp_accounting.GaussianDpEvent(fitted.noise_multiplier)
    mu = 1 / fitted.noise_multiplier
    delta = special.ndtr(mu / 2 - 0.7 / mu) - math.exp(0.7) * special.ndtr(-mu / 2 - 0.7 / mu)
    np.testing.assert_allclose(delta, 1e-6, rtol=1e-6)
