"""The noise of a training: what it costs, which sampling it takes, and that nothing else is trained."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest
from training_cases import PARAMS, X, Y, fit, loss_fn, same

import dpx
from dpx import privacy
from dpx.training import Allocation, Poisson, calibration, loop
from dpx.training import keys as secrets
from dpx.training.log import Monitoring

SETTINGS: dict[str, Any] = {
    "epsilon": 1.0,
    "delta": 1e-3,
    "num_examples": 40,
    "batch_size": 40,  # every record in every step, which is priced in no time
    "steps": 3,
    "l2_clip_norm": 1.0,
    "normalize": False,
    "accountant": "pld",
    "unit": "patient",
    "assumptions": (),
}


def calibrate(**changes):
    return calibration.calibrate(**SETTINGS | changes)


@pytest.fixture
def one_coefficient(monkeypatch):
    """Bands whose coefficients take no time."""
    monkeypatch.setattr(calibration.correlated, "coefficients", lambda steps, bands: (1.0,) * bands)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_guarantee_is_of_the_accountant_and_the_assumptions_that_were_given(accountant):
    run, found = calibrate(accountant=accountant, assumptions=("theirs",))
    assert found == run.alone
    assert found.unit == "patient"
    assert found.mechanism.endswith(f"{accountant.upper()} accounting")
    assert found.epsilon == privacy.dpsgd_epsilon(
        run.noise_multiplier, 1e-3, sampling_probability=1.0, steps=3, accountant=accountant
    )
    assert "theirs" in found.assumptions
    assert any("sums of clipped gradients count as exact" in words for words in found.assumptions)
    assert run.spent(1) < run.spent(2) < run.spent(3) == found.epsilon
    assert run.count_ratio is None


@pytest.mark.usefixtures("one_coefficient")
def test_steps_of_banded_noise_are_priced_in_whole_blocks():
    run, found = calibrate(batch_size=20, steps=5, bands=2)
    one, three = (
        dpx.gaussian_epsilon(run.noise_multiplier, 1e-3, compositions=blocks) for blocks in (1, 3)
    )
    assert found.epsilon == pytest.approx(three)
    assert run.spent(1) == pytest.approx(one)
    assert run.spent(3) > run.spent(2) == pytest.approx(one)


@pytest.mark.slow
def test_a_budget_includes_what_was_released_before():
    event = privacy.dpsgd_event(
        dpx.gaussian_noise_multiplier(1.0, 1e-5), sampling_probability=1, steps=1
    )
    prior = dpx.PrivacyGuarantee(
        1.0, 1e-5, privacy.ADD_OR_REMOVE_ONE, "patient", "prior", event=event
    )
    budget = {"epsilon": 3.0, "delta": 1e-5, "num_examples": 100, "batch_size": 20, "steps": 6}
    (alone, _), (run, total) = calibrate(**budget), calibrate(**budget, beside=prior)
    assert run.noise_multiplier > alone.noise_multiplier
    assert 0.999 * 3 < total.epsilon <= 3
    assert run.spent(1) < run.spent(6) == total.epsilon


@pytest.mark.slow
@pytest.mark.usefixtures("one_coefficient")
@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, Allocation()),
        ({"accountant": "rdp"}, Poisson()),
        ({"bands": 2}, Poisson()),
        # Where a record that is never sampled counts, and where all records are in each batch
        ({"epsilon": 3.0, "delta": 0.3}, Poisson()),
        ({"batch_size": 60}, Poisson()),
    ],
)
def test_auto_takes_the_sampling_that_needs_less_noise(changes, taken):
    small = {"delta": 1e-5, "num_examples": 60, "batch_size": 6, "steps": 10}
    run, _ = calibrate(sampling=None, **small | {"epsilon": 2.0} | changes)
    assert run.sampling == taken


@pytest.mark.slow
def test_auto_is_what_it_takes():
    taken = fit(sampling="auto")
    assert "random allocation" in taken.guarantee.mechanism
    assert taken.guarantee == fit(sampling=Allocation()).guarantee
    same(taken.params, fit(sampling="allocation").params)
    assert "Poisson sampling" in fit(sampling=Poisson()).guarantee.mechanism


@pytest.mark.quick_cases("priced2-changes2")
@pytest.mark.parametrize(
    ("priced", "changes"),
    [
        (Poisson(), {"steps": 4}),
        (Poisson(), {"batch_size": 21}),
        (Poisson(), {"records": 39}),
        (Poisson(), {"sampling": Allocation()}),
        (Allocation(), {"sampling": Poisson()}),
    ],
)
def test_a_training_does_what_its_guarantee_is_about(priced, changes):
    def train(records=40, sampling=priced, **other):
        private, _ = calibrate(sampling=priced, batch_size=20)
        loop.train(
            loss_fn,
            PARAMS,
            (X[:records], Y[:records]),
            optimizer=optax.sgd(0.1),
            keys=secrets.derive(jax.random.key(0)).training("run"),
            privacy=dataclasses.replace(private, sampling=sampling),
            monitoring=Monitoring("run"),
            **{"batch_size": 20, "steps": 3} | other,
        )

    train()
    with pytest.raises(ValueError, match=r"the guarantee is that of .* calibrate for the records"):
        train(**changes)


@pytest.mark.slow
def test_the_expected_size_divides():
    """Whatever the size of a batch is: without noise to speak of, steps add up to those of the sum."""
    exact = fit(epsilon=1e6, sampling="allocation", steps=7, l2_clip_norm=100, batch_size=50)
    w, b = np.zeros(3), 0.0
    seed = secrets.derive(jax.random.key(1 << 40)).training("training").sampling
    drawn = dpx.training.allocated_batches(100, sampling_probability=0.5, steps=7, seed=seed)
    for indices, mask in drawn:
        x, y = X[indices[mask]], Y[indices[mask]]
        error = 2 * (x @ w + b - y)
        w, b = w - 0.1 * error @ x / 50, b - 0.1 * error.sum() / 50
    np.testing.assert_allclose(exact.params["w"], w, atol=1e-3)
    np.testing.assert_allclose(exact.params["b"], b, atol=1e-3)


def test_a_weighted_mean_counts_no_padding():
    """Ten records in pieces of four leave two slots, which are filled with the first record."""
    x, weights = np.arange(1, 11, dtype=np.float32), np.array([50] + [1] * 9, np.float32)
    _, (record,) = loop.train(
        lambda params, x, weight: x + 0 * params["b"],
        PARAMS,
        (x, weights),
        optimizer=optax.sgd(0.0),
        batch_size=10,
        steps=1,
        keys=secrets.derive(jax.random.key(0)).training("run"),
        privacy=None,
        monitoring=Monitoring("run"),
        computation=loop.Computation(microbatch_size=4, weight_fn=lambda x, weight: weight),
    )
    np.testing.assert_allclose(record.loss, x.sum() / weights.sum(), rtol=1e-6)  # 32-bit floats
