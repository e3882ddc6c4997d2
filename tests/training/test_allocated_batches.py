"""Random allocation in a training: what is drawn, what it costs, and that a call goes on where it was."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import dpx
from dpx import _watch, audit
from dpx.noise.stream import Stream
from dpx.training import Allocation, Poisson, allocated_batches, calibration, loop
from dpx.training import keys as secrets
from dpx.training.log import Monitoring, Progress

RECORDS, Q = 1000, 0.1
of_both = pytest.mark.parametrize("seed", [0, Stream(bytes(32))], ids=["PCG64", "ChaCha20"])


def batches(count=RECORDS, **changes):
    settings: dict[str, Any] = {"sampling_probability": Q, "steps": 400, "seed": 0}
    drawn = allocated_batches(count, **(settings | changes))
    return [indices[mask] for indices, mask in drawn]


def steps_of(**changes):
    """The step of each record in each epoch of ten, (epochs, records)."""
    drawn = batches(**changes)
    found = np.full((len(drawn) // 10, RECORDS), -1)
    for step, chosen in enumerate(drawn):
        assert (found[step // 10, chosen] == -1).all()
        found[step // 10, chosen] = step % 10
    return found


@of_both
def test_each_record_is_in_one_batch_of_each_epoch(seed):
    assert (steps_of(seed=seed) >= 0).all()
    # Epochs of two and three steps, of which the last is not finished.
    drawn = batches(sampling_probability=0.4, steps=9, seed=seed)
    for begin, end in ((0, 3), (3, 5), (5, 8)):
        assert sorted(np.concatenate(drawn[begin:end])) == list(range(RECORDS))
    assert 250 < len(drawn[8]) < 750


@of_both
def test_batch_sizes_follow_the_binomial_law(seed):
    """A shuffle that is cut into batches would make all of one size: a chi-squared test over 400 epochs."""
    sizes = np.array([len(chosen) for chosen in batches(steps=4000, seed=seed)[::10]])
    edges = stats.binom.ppf([0.1, 0.25, 0.4, 0.6, 0.75, 0.9], RECORDS, Q)
    observed = np.bincount(np.searchsorted(edges, sizes), minlength=7)
    cumulative = np.concatenate([[0], stats.binom.cdf(edges, RECORDS, Q), [1]])
    _, p = stats.chisquare(observed, np.diff(cumulative) * len(sizes))
    assert p > 1e-3


@of_both
def test_steps_are_uniform_and_records_independent(seed):
    found = steps_of(steps=4000, seed=seed)
    _, p = stats.chisquare(np.bincount(found.ravel(), minlength=10))
    assert p > 1e-3
    together = (found[:, :, None] == found[:, None, :100]).mean(axis=0)[100:]
    assert together.mean() == pytest.approx(Q, abs=5 * 0.3 / np.sqrt(400 * together.size))


@of_both
def test_each_epoch_is_drawn_anew(seed):
    found = steps_of(steps=4000, seed=seed)
    again = (found[1:] == found[:-1]).mean()
    assert again == pytest.approx(Q, abs=5 * 0.3 / np.sqrt(found[1:].size))
    assert not np.array_equal(found, steps_of(steps=4000, seed=1 << 40))


def test_it_goes_on_at_any_step_and_is_padded():
    whole = batches(steps=47)
    for start in (3, 10, 29, 46):
        tail = batches(steps=47, start=start)
        assert all(map(np.array_equal, whole[start:], tail))
    for indices, mask in allocated_batches(
        50, sampling_probability=0.2, steps=5, seed=0, multiple_of=8
    ):
        assert len(indices) == len(mask)
        assert len(mask) % 8 == 0


def test_a_record_moves_its_own_batches_alone(monkeypatch):
    whole, ids = batches(), np.delete(np.arange(RECORDS), 7)
    monkeypatch.setattr(_watch, "record_ids", lambda count: ids)
    for full, less in zip(whole, batches(RECORDS - 1), strict=True):
        assert set(full) - {7} == set(ids[less])


X = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)


def loss_fn(params, x):
    return 10 * jnp.sum((params["w"] - x) ** 2)


def fit(data=X, **changes):
    settings: dict[str, Any] = {
        "epsilon": 2.0,
        "delta": 1e-4,
        "batch_size": 17,
        "steps": 9,
        "optimizer": optax.adam(0.1),
        "l2_clip_norm": 0.5,
        "key": jax.random.key(3),
        "sampling": "allocation",
        "progress": False,
    }
    return dpx.training.fit(loss_fn, {"w": jnp.zeros(3)}, data, **(settings | changes))


@pytest.mark.quick_cases("allocation")
@pytest.mark.parametrize("sampling", ["allocation", "poisson"])
def test_what_is_drawn_costs_what_is_stated(sampling):
    """Of a replay, which reads epochs and probabilities off the batches. A record moves its own steps."""

    def program(rows):
        trained = fit(rows, sampling=sampling)
        return {"params": trained.params, "epsilon": trained.guarantee.epsilon}

    ids = np.delete(np.arange(60), 14)
    found = audit.replay(program, X, X[ids], ids=ids, ignore=["stderr"]).check()
    assert 0.999 < found.largest_ratio < 1 + 1e-6
    moved = sum(each.ratio > 0 for each in found.compared)
    assert moved in ((2, 3) if sampling == "allocation" else range(1, 9))
    cost = found.recording.epsilon(1e-4)
    assert found.recording.left["result/epsilon"] == pytest.approx(cost, rel=1e-3)
    assert 1.99 < cost <= 2.0


@pytest.mark.slow
def test_the_expected_size_divides():
    """Whatever the size of a batch is: without noise to speak of, steps add up to those of the sum."""
    exact = fit(
        epsilon=1e6, delta=1e-3, optimizer=optax.sgd(0.01), steps=7, l2_clip_norm=100, batch_size=30
    )
    w = np.zeros(3)
    keys = secrets.derive(jax.random.key(3)).training("training")
    drawn = allocated_batches(60, sampling_probability=0.5, steps=7, seed=keys.sampling)
    for indices, mask in drawn:
        w = w - 0.01 * (20 * (w - X[indices[mask]])).sum(axis=0) / 30
    np.testing.assert_allclose(exact.params["w"], w, atol=1e-3)


@pytest.mark.slow
def test_a_killed_training_goes_on_within_an_epoch(tmp_path, monkeypatch):
    whole = fit(log_every=1)
    line = Progress.line

    def killed(self, done, *rest):
        if done == 5:
            raise KeyboardInterrupt
        line(self, done, *rest)

    kept = {"workdir": tmp_path, "log_every": 1, "checkpoint_every": 1}
    monkeypatch.setattr(Progress, "line", killed)
    with pytest.raises(KeyboardInterrupt):
        fit(**kept)
    monkeypatch.setattr(Progress, "line", line)
    with pytest.raises(ValueError, match="sampling changed"):
        fit(**kept, sampling="poisson")
    resumed = fit(**kept)
    np.testing.assert_array_equal(resumed.params["w"], whole.params["w"])
    spent = [record.epsilon for record in resumed.history if record.epsilon]
    assert spent == sorted(set(spent))
    assert spent[-1] == resumed.guarantee.epsilon == whole.guarantee.epsilon


@pytest.mark.slow
def test_auto_takes_the_one_that_needs_less_noise(monkeypatch):
    monkeypatch.setattr(calibration.correlated, "coefficients", lambda steps, bands: (1.0,) * bands)
    budget: dict[str, Any] = {"delta": 1e-5, "num_examples": 60, "batch_size": 6, "steps": 10}
    about: dict[str, Any] = {
        "l2_clip_norm": 1.0,
        "normalize": False,
        "unit": "x",
        "assumptions": (),
    }

    def auto(accountant="pld", **changes):
        private, _ = calibration.calibrate(
            sampling=None, accountant=accountant, **about, **budget | changes
        )
        return private.sampling

    assert auto(epsilon=2.0) == Allocation()
    assert auto(epsilon=2.0, accountant="rdp") == Poisson()
    assert auto(epsilon=2.0, bands=2) == Poisson()
    # Of a δ at which a record that is never sampled counts, and where all records are in each batch
    assert auto(epsilon=3.0, delta=0.3) == Poisson()
    assert auto(epsilon=2.0, batch_size=60) == Poisson()


@pytest.mark.slow
def test_auto_is_what_it_takes():
    taken = fit(sampling="auto")
    assert "random allocation" in taken.guarantee.mechanism
    assert taken.guarantee == fit(sampling=Allocation()).guarantee
    np.testing.assert_array_equal(taken.params["w"], fit().params["w"])
    assert "Poisson sampling" in fit(sampling=Poisson()).guarantee.mechanism


def test_a_limit_may_be_numpys():
    assert type(Poisson(np.int64(9)).max_batch_size) is int
    assert Poisson(np.float64(9)) == Poisson(9)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"sampling": "shuffle"},
            "sampling='shuffle' is not known: use one of auto, poisson, allocation",
        ),
        ({"sampling": 3}, "sampling=3 must be one of"),
        ({"sampling": Allocation}, "must be one of"),
        ({"accountant": "rdp"}, "accountant='rdp' must be 'pld' with sampling='allocation'"),
    ],
)
def test_what_cannot_be_drawn_is_named(changes, named):
    with pytest.raises(ValueError, match=named):
        fit(**changes)


@pytest.mark.slow
def test_a_training_runs_with_the_sampling_that_is_priced():
    settings: dict[str, Any] = {
        "epsilon": 2.0,
        "delta": 1e-4,
        "num_examples": 60,
        "batch_size": 17,
        "steps": 9,
        "l2_clip_norm": 0.5,
        "normalize": False,
        "accountant": "pld",
        "unit": "record",
        "assumptions": (),
    }
    for priced, run in ((Poisson(), Allocation()), (Allocation(), Poisson())):
        private, _ = calibration.calibrate(sampling=priced, **settings)
        private = dataclasses.replace(private, sampling=run)
        with pytest.raises(ValueError, match="the guarantee is that of"):
            loop.train(
                loss_fn,
                {"w": jnp.zeros(3)},
                (X,),
                optimizer=optax.sgd(0.1),
                batch_size=17,
                steps=9,
                keys=secrets.derive(jax.random.key(0)).training("run"),
                privacy=private,
                monitoring=Monitoring("run"),
            )
