"""Noise multipliers of dpx.noisy_head and the guarantees that come with them."""

import dataclasses

import jax
import numpy as np
import pytest
from noisy_head_models import HYPER, PAPER, SETTINGS, calibrate, features_of

from dpx import noisy_head
from dpx.privacy import REPLACE_ONE, Ledger, gaussian_epsilon, gaussian_noise_multiplier


@pytest.mark.parametrize(
    ("steps", "epsilon", "basic", "zcdp", "gdp"),
    [
        (38, 1.0, 210.7, 30.21, 23.00),
        (38, 0.2, 1054, 148.5, 100.5),
        (5, 1.0, 25.83, 10.96, 8.342),
        (480, 0.8, 3591, 133.7, 100.2),
    ],
)
def test_noise_multipliers(steps, epsilon, basic, zcdp, gdp):
    settings = SETTINGS | {"steps": steps, "epsilon": epsilon}
    for accounting, expected in (("basic", basic), ("zcdp", zcdp), ("gdp", gdp)):
        multiplier, _ = calibrate(HYPER, **settings, accounting=accounting)
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
    options = {"step_size": step_size, "steps": steps, "accounting": "last_iterate"}
    hyper = noisy_head.HyperParameters(1.0, 1.0, 3.0)
    multiplier, _ = calibrate(hyper, **SETTINGS | options, epsilon=1.0)
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
