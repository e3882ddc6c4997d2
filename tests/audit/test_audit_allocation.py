"""Canaries in trainings with random allocation: bounds below the claim, and above it with a fault."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx import audit
from dpx.training import Allocation, allocated_batches

EPSILON, DELTA = 4.0, 1e-5
ABOUT: dict[str, Any] = {"sampling_probability": 0.25, "steps": 8}  # two epochs


def squared_error(params, x, y):
    return 0.5 * (x @ params["weights"] - y) ** 2


def bound(sampling, runs=6000, **changes):
    """A lower bound on the ε of a training that claims random allocation at ε = 4."""
    rng = np.random.default_rng(0)
    data = rng.normal(size=(4, 3)).astype("f4"), rng.normal(size=4).astype("f4")
    problem = audit.dirac(squared_error, {"weights": jnp.zeros(3)}, data, canaries=1, seed=0)
    noise = dpx.calibrate_dpsgd(EPSILON, DELTA, sampling="allocation", **ABOUT)
    settings: dict[str, Any] = {"expected_batch_size": 1.0, "sampling": sampling} | ABOUT | changes
    training = audit.Training(problem.loss_fn, l2_clip_norm=1.0, noise_multiplier=noise, **settings)
    others = np.zeros(4, np.int32), *data
    canary = np.int32(1), data[0][0], data[1][0]
    found = audit.many_runs(training, problem.params, others, canary, runs=runs, seed=1)
    inside, outside = found.statistics(training)
    return audit.curve_lower_bound(inside, outside, DELTA, model=training.model), found


@pytest.mark.slow
def test_an_honest_allocation_is_not_accused():
    found, runs = bound(Allocation())
    assert 0.8 * EPSILON < found.epsilon < EPSILON
    assert (runs.sampled.reshape(-1, 2, 4).sum(axis=2) == 1).all()


@dataclasses.dataclass(frozen=True)
class Twice(Allocation):
    """A record is in two batches of each epoch."""

    def batches(self, num_examples, **settings):
        others: dict[str, Any] = settings | {"seed": np.random.SeedSequence(9)}
        for one, other in zip(
            allocated_batches(num_examples, **settings),
            allocated_batches(num_examples, **others),
            strict=True,
        ):
            chosen = np.union1d(one[0][one[1]], other[0][other[1]]).astype(np.int32)
            size = settings["multiple_of"]
            yield (
                np.resize(np.append(chosen, np.zeros(size)), size).astype(np.int32),
                np.arange(size) < len(chosen),
            )


@pytest.mark.slow
def test_a_record_in_two_batches_of_an_epoch_is_found():
    assert bound(Twice())[0].epsilon > EPSILON


def test_the_ratio_is_that_of_epochs_some_of_whose_steps_are_not_taken():
    training = audit.Training(
        squared_error,
        l2_clip_norm=1.0,
        noise_multiplier=0.8,
        sampling_probability=0.4,  # epochs of three, two and three steps
        steps=7,
        expected_batch_size=1.0,
        sampling=Allocation(),
    )
    x = np.random.default_rng(0).normal(size=(5, 7))
    each = np.exp((x - 0.5) / 0.8**2)
    expected = np.log(each[:, :3].mean(axis=1)) + np.log(each[:, 3:5].mean(axis=1))
    expected += np.log((each[:, 5:].sum(axis=1) + 1) / 3)
    np.testing.assert_allclose(training.log_likelihood_ratio(x), expected)
    assert training.model == audit.SampledGaussian(0.4, 7, "allocation")
