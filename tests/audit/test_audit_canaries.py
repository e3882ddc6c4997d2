"""Runs with canaries: what the auditor sees, honest trainings, and those with a planted fault."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx import audit
from dpx.runs import records, run
from dpx.training import Allocation
from experiments.audit import canaries as experiment
from experiments.audit.regression import fault_bound
from experiments.audit.training_faults import FAULTS

SLOW_FAULTS = set(FAULTS) - {"noise_half_the_variance", "batches_of_fixed_size"}


def squared_error(params, x, y):
    return 0.5 * (x @ params["weights"] - y) ** 2


@pytest.fixture(scope="module")
def regression():
    rng = np.random.default_rng(0)
    data = (rng.normal(size=(4, 3)).astype(np.float32), rng.normal(size=4).astype(np.float32))
    return {"weights": jnp.zeros(3)}, data


def training_of(loss_fn, noise, **changes):
    settings = {
        "sampling_probability": 0.5,
        "steps": 4,
        "expected_batch_size": 2.0,
        "microbatch_size": 1,
    }
    return audit.Training(loss_fn, l2_clip_norm=0.7, noise_multiplier=noise, **(settings | changes))


@pytest.mark.slow
def test_a_gradient_canary_adds_the_clipping_norm_in_its_own_entry(regression):
    params, data = regression
    problem = audit.dirac(squared_error, params, data, canaries=6, seed=1)
    markers = np.asarray(problem.data[0])
    assert (markers[:4] == 0).all()
    assert set(markers[4:] - 1) == set(np.flatnonzero(problem.included))
    gradient = dpx.clipped_grad(problem.loss_fn, l2_clip_norm=0.7)
    canaries = gradient(problem.params, *(rows[4:] for rows in problem.data)).grads
    # Norms are rounded up, so that a clipped gradient is a little shorter than the norm.
    np.testing.assert_allclose(canaries["canaries"], -0.7 * problem.included, rtol=1e-4)
    assert (np.asarray(canaries["model"]["weights"]) == 0).all()
    others = gradient(problem.params, *(rows[:4] for rows in problem.data)).grads
    assert (np.asarray(others["canaries"]) == 0).all()
    plain = dpx.clipped_grad(squared_error, l2_clip_norm=0.7)(params, *data).grads
    np.testing.assert_allclose(others["model"]["weights"], plain["weights"], rtol=1e-4)


@pytest.mark.slow
def test_without_noise_the_auditor_sees_who_was_sampled(regression):
    params, data = regression
    problem = audit.dirac(squared_error, params, data, canaries=1, seed=0)
    base = (np.zeros(4, np.int32), *data)
    canary = (np.int32(1), data[0][0], data[1][0])
    training = training_of(problem.loss_fn, 1e-5)
    runs = audit.many_runs(training, problem.params, base, canary, runs=400, seed=1)
    np.testing.assert_allclose(runs.inside, runs.sampled, atol=1e-3)
    np.testing.assert_allclose(runs.outside, 0, atol=1e-3)
    # Gradient descent on a mean of 2 records, of which the canary is one, at learning rate 0.1.
    moved = 0.1 * 0.7 / 2 * runs.sampled.sum(axis=1)
    np.testing.assert_allclose(runs.final_inside, 1e4 * moved, rtol=1e-3, atol=1.0)
    # 1,600 tosses of a coin, 4σ.
    assert abs(runs.sampled.mean() - 0.5) < 4 * 0.5 / 40
    others = audit.dirac(squared_error, params, data, canaries=300, seed=0)
    one = training_of(others.loss_fn, 1e-2, expected_batch_size=75.0, microbatch_size=50)
    scores = audit.one_run(one, others, seed=2)
    assert (scores[~others.included] < 0).all()
    assert abs((scores[others.included] > 0).mean() - (1 - 0.5**4)) < 0.1


@pytest.mark.slow
def test_an_input_canary_is_seen_at_every_step_beside_other_records(regression):
    params, data = regression
    canary = (np.array([1.0, -1.0, 2.0], np.float32), np.float32(50.0))
    training = training_of(squared_error, 1e-5)
    runs = audit.many_runs(training, params, data, canary, runs=300, seed=1)
    # It adds 1 clipping norm; how many of the others are in the batch moves both sides alike.
    difference = runs.inside.mean() / runs.sampled.mean()
    assert abs(difference - (1 + runs.outside.mean() / runs.sampled.mean())) < 0.2
    assert runs.outside.std() > 0.05


def test_training_refuses_what_no_claim_has(regression):
    for name, value in (
        ("l2_clip_norm", 0.0),
        ("noise_multiplier", np.inf),
        ("microbatch_size", 0),
    ):
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(training_of(squared_error, 1.0), **{name: value})
    with pytest.raises(ValueError, match="runs=3"):
        audit.many_runs(training_of(squared_error, 1.0), *regression, (), runs=3, seed=0)


@pytest.mark.parametrize(("count", "enough"), [(10, False), (39, False), (40, True)])
def test_a_covariance_of_all_steps_needs_more_runs_than_steps(count, enough):
    """Of one run there is none, and of two it has directions without noise that are none."""
    inside, outside = np.random.default_rng(0).normal(size=(2, count, 3))
    runs = audit.Runs(inside, outside, inside > 0, inside[:, 0], outside[:, 0])
    if enough:
        assert runs.statistics(training_of(squared_error, 1.0))[0].shape == (40, 2)
    else:
        with pytest.raises(ValueError, match=f"outside has {count} runs.* use at least 40"):
            runs.statistics(training_of(squared_error, 1.0))


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


@pytest.fixture(scope="module")
def config():
    config = records.load_config("configs/audit.py:tiny")
    config.fault_runs = 1_000
    return config


@pytest.mark.slow
def test_an_honest_training_is_not_accused(config, monkeypatch):
    monkeypatch.setitem(FAULTS, "none", lambda training: training)
    bound = fault_bound("none", config, seed=0)
    assert 0.8 * config.epsilon < bound < config.epsilon


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[pytest.mark.slow] if fault in SLOW_FAULTS else [])
        for fault in FAULTS
    ],
)
def test_the_bound_of_a_training_with_a_fault_passes_the_claim(config, fault):
    assert fault_bound(fault, config, seed=0) > 1.1 * config.epsilon


@pytest.mark.slow
def test_ngrams_are_audited_by_their_probabilities(tmp_path):
    source = "configs/audit.py:ngram,tiny"
    config = records.load_config(source)
    config.runs = 1_000
    run.prepare(config, source, tmp_path / "run")
    metrics = run.execute(config, tmp_path / "run").metrics
    assert 0.6 < metrics["ngram/share"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["train", "recommender"])
def test_every_target_is_audited_at_tiny(tmp_path, variant):
    source = f"configs/audit.py:{variant},tiny"
    config = records.load_config(source)
    if variant == "recommender":
        config.canaries = 2000  # of 200, the seed decides whether they prove anything
    run.prepare(config, source, tmp_path / "run")
    record = run.execute(config, tmp_path / "run")
    honest = {k: v for k, v in record.metrics.items() if k.endswith("/share") and "fault" not in k}
    assert all(0 <= share < 1 for share in honest.values())
    assert record.metrics["one_run/bound"] > 0
    assert [p.name for p in experiment.figures([record], tmp_path)] == ["audit.png"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target": "house"}, "config.target"),
        ({"confidence": 1.0}, "config.confidence"),
        ({"runs": 5}, "config.runs=5"),
        ({"steps": 0}, "config.steps=0"),
        ({"sampling_probability": 1.0}, "config.sampling_probability"),
        ({"faults": ("rain",)}, "config.faults"),
    ],
)
def test_a_config_that_cannot_be_audited_is_refused(changes, named):
    config = records.load_config("configs/audit.py:tiny")
    config.update(changes)
    with pytest.raises(ValueError, match=named):
        run.check(config)
