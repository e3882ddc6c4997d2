"""Numbers in 16 bits cost, and need, what the same numbers cost and need in 64."""

import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

import dpx
from dpx import noisy_head
from dpx.cross_attention.trees.node_noise import split_budget
from dpx.gram.accounting import Columns

NARROW = pytest.mark.parametrize("narrow", [np.float16, jnp.bfloat16, np.float32, jnp.float32])


@NARROW
def test_gaussian_noise_is_as_much_as_its_epsilon_needs(narrow):
    for epsilon in (narrow(0.7), narrow(5.0)):
        multiplier = dpx.gaussian_noise_multiplier(epsilon, narrow(1e-3))
        assert float(multiplier) == dpx.gaussian_noise_multiplier(
            float(epsilon), float(narrow(1e-3))
        )
        found = float(dpx.gaussian_epsilon(epsilon, 1e-5))
        assert found == dpx.gaussian_epsilon(float(epsilon), 1e-5)


@pytest.mark.quick_cases("pld-bfloat16", "rdp-float16")
@NARROW
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_sampled_noise_does_not_cost_less(narrow, accountant):
    noise, share = narrow(1.3), narrow(0.01)
    found, wide = (
        float(dpx.dpsgd_epsilon(m, 1e-5, sampling_probability=q, steps=10, accountant=accountant))
        for m, q in ((noise, share), (float(noise), float(share)))
    )
    assert found == wide > 0


@pytest.mark.quick_cases("float16")
@NARROW
def test_a_ledger_of_narrow_events_is_one_of_wide_events(narrow):
    found = []
    for number in (narrow, lambda x: float(narrow(x))):
        sampled = PoissonSampledDpEvent(number(0.01), GaussianDpEvent(number(1.3)))
        for event in (GaussianDpEvent(number(0.7)), SelfComposedDpEvent(sampled, 10)):
            stated = dpx.PrivacyGuarantee(
                1.0, 1e-5, "add_or_remove_one", "record", "noise", event=event
            )
            for spent in (event, stated):
                found.append(dpx.Ledger().spend(spent, "a release").guarantee(1e-5).epsilon)
    assert found[:4] == found[4:]


@pytest.mark.parametrize("law", [dpx.noise.Laplace, dpx.noise.Gaussian])
@pytest.mark.parametrize("size", [np.float16(0.3), np.float32(0.3)])
def test_a_law_of_narrow_size_claims_what_a_wide_one_claims(law, size):
    about = {"neighboring": "replace_one", "unit": "row"}
    about |= {"delta": 1e-5} if law is dpx.noise.Gaussian else {}
    sensitivity = type(size)(0.7)
    narrow = law(size).guarantee(sensitivity, **about)
    assert float(narrow.epsilon) == law(float(size)).guarantee(float(sensitivity), **about).epsilon
    with pytest.raises(ValueError, match="must be a number"):
        law(np.array([1.0, 0.1])).guarantee(1.0, **about)


@NARROW
def test_sensitivities_and_budgets_of_narrow_bounds_are_those_of_wide_ones(narrow):
    def found(number):
        hyper = noisy_head.HyperParameters(number(1.1), number(0.7), number(2.3))
        descent = noisy_head.Descent(
            hyper, regularization=number(0.3), step_size=number(0.1), steps=3, accounting="zcdp"
        )
        law = dpx.noise.TruncatedLaplace.calibrate(number(0.7), number(0.3), number(1e-3))
        numbers = [
            Columns(number(1.1), number(0.7)).sensitivity,
            Columns(number(1.1), None, "add_or_remove_one").sensitivity,
            descent.change,
            descent.calibrate(number(0.7), number(1e-3))[0],
            law.scale,
            law.bound,
            *split_budget(number(0.7), number(1e-3), 7),
        ]
        return [float(number) for number in numbers]  # NumPy compares in 16 bits

    assert found(narrow) == found(lambda x: float(narrow(x)))


def test_what_is_no_event_is_refused():
    about = {"neighboring": "replace_one", "unit": "row", "mechanism": "none"}
    with pytest.raises(ValueError, match="event=3 must be a DpEvent"):
        dpx.PrivacyGuarantee(1.0, 1e-5, event=3, **about)
