"""What `fit` hands on: to its folder, all that a repeated call must find unchanged, and to its guarantee."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx import privacy
from dpx.training import AdaptiveClipNorm, Poisson, calibration, fitting, resuming

PARAMS = {"w": np.zeros(3, np.float32), "b": np.ones(3, np.float32)}
X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)


class BeginsError(Exception):
    """Training would begin now."""


def loss_fn(params, x, *key):
    return jnp.sum((params["w"] + params["b"] - x) ** 2)


@pytest.fixture
def begun(monkeypatch):
    """What a call with these changes would find in a folder: a digest of its data, and its settings."""

    def begins(key, workdir, *, data, settings):
        raise BeginsError(resuming.digest(data), settings)

    monkeypatch.setattr(fitting.secrets, "of_training", begins)

    def calibrated(*, sampling, **_):
        return calibration.Privacy(1.0, False, 1.0, float, sampling=sampling or Poisson()), None

    monkeypatch.setattr(calibration, "calibrate", calibrated)

    def call(params=PARAMS, **changes):
        settings = {
            "epsilon": 2.0,
            "delta": 1e-3,
            "batch_size": 16,
            "steps": 6,
            "optimizer": optax.sgd(0.1),
            "l2_clip_norm": 1.0,
            "key": jax.random.key(0),
        }
        with pytest.raises(BeginsError) as found:
            dpx.training.fit(loss_fn, params, X, **settings | changes)
        return found.value.args

    return call


ADAPTIVE = {"l2_clip_norm": AdaptiveClipNorm(start=1.0)}


@pytest.mark.parametrize(
    ("before", "changes"),
    [
        ({}, {"epsilon": 1.0}),
        ({}, {"delta": 1e-4}),
        ({}, {"batch_size": 8}),
        ({}, {"steps": 5}),
        ({}, {"l2_clip_norm": 0.5}),
        ({}, {"l2_clip_norm": {"w": 1.0, "b": 0.5}}),
        (ADAPTIVE, {"l2_clip_norm": AdaptiveClipNorm(start=1.0, quantile=0.9)}),
        (ADAPTIVE, {"l2_clip_norm": AdaptiveClipNorm(start=1.0, learning_rate=0.1)}),
        (ADAPTIVE, {"l2_clip_norm": AdaptiveClipNorm(start=1.0, count_noise=9.0)}),
        ({}, {"normalize": True}),
        ({}, {"microbatch_size": 8}),
        ({"sampling": "poisson"}, {"sampling": Poisson(40)}),
        ({"sampling": "poisson"}, {"sampling": "allocation"}),
        ({"sampling": Poisson(40)}, {"sampling": Poisson(41)}),
        ({}, {"compute_dtype": "bfloat16"}),
        ({}, {"record_key": True}),
        ({}, {"noise": "banded", "bands": 2}),
        ({"noise": "banded", "bands": 2}, {"bands": 3}),
        ({}, {"wrt": {"b": True, "w": False}}),  # whose arrays come in the same order
        ({}, {"params": PARAMS | {"w": PARAMS["w"] + 1}}),
        ({"wrt": {"w": True, "b": False}}, {"params": PARAMS | {"b": PARAMS["b"] + 1}}),
    ],
)
def test_a_call_that_goes_on_differs_in_nothing_that_counts(begun, before, changes):
    first = begun(**before)
    assert begun(**before) == first
    assert begun(**before | changes) != first


SETTINGS = {
    "epsilon": 1.0,
    "delta": 1e-3,
    "num_examples": 40,
    "batch_size": 40,  # every record in every step, which is priced in no time
    "steps": 3,
    "l2_clip_norm": 1.0,
    "normalize": False,
    "unit": "patient",
}


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_guarantee_is_of_the_accountant_and_the_assumptions_that_were_given(accountant):
    run, found = calibration.calibrate(accountant=accountant, assumptions=("theirs",), **SETTINGS)
    assert found == run.alone
    assert found.unit == "patient"
    assert found.mechanism.endswith(f"{accountant.upper()} accounting")
    assert found.epsilon == privacy.dpsgd_epsilon(
        run.noise_multiplier, 1e-3, sampling_probability=1.0, steps=3, accountant=accountant
    )
    assert "theirs" in found.assumptions
    assert any("sums of clipped gradients count as exact" in words for words in found.assumptions)
    assert run.spent(1) < run.spent(2) < run.spent(3) == found.epsilon


def test_steps_of_banded_noise_are_priced_in_whole_blocks(monkeypatch):
    monkeypatch.setattr(calibration.correlated, "coefficients", lambda steps, bands: (1.0,) * bands)
    settings = SETTINGS | {"batch_size": 20, "steps": 5}
    run, found = calibration.calibrate(accountant="pld", assumptions=(), bands=2, **settings)
    one, three = (
        dpx.gaussian_epsilon(run.noise_multiplier, 1e-3, compositions=blocks) for blocks in (1, 3)
    )
    assert found.epsilon == pytest.approx(three)
    assert run.spent(1) == pytest.approx(one)
    assert run.spent(3) > run.spent(2) == pytest.approx(one)
