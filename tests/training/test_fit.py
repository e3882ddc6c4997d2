"""`dpx.training.fit`: anyone's model, anyone's data, in one call."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from dp_accounting import TruncatedSubsampledGaussianDpEvent
from flax import nnx
from scipy import sparse
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import dpx
from dpx.training import Poisson, loop
from dpx.training import keys as secrets
from dpx.training.log import Progress

X = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
Y = X @ np.array([1.0, -2.0, 3.0], np.float32)
PARAMS = {"w": jnp.zeros(3), "b": jnp.zeros(())}
SETTINGS = {
    "epsilon": 2.0,
    "delta": 1e-3,
    "batch_size": 20,
    "sampling": "poisson",
    "steps": 6,
    "optimizer": optax.sgd(0.1),
    "l2_clip_norm": 0.5,
    "log_every": 1,
    "checkpoint_every": 2,
}


def loss_fn(params, x, y):
    return (x @ params["w"] + params["b"] - y) ** 2


def fit(data=(X, Y), loss=loss_fn, params=PARAMS, **changes):
    settings = SETTINGS | {"key": jax.random.key(0)} | changes
    return dpx.training.fit(loss, params, data, **settings)


@pytest.mark.slow
def test_digits():
    """The lines of the README, with a key that is not secret."""
    pixels, digits = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(pixels / 16 - 0.3, digits, random_state=0)
    model = nnx.Linear(64, 10, rngs=nnx.Rngs(0))

    def loss_fn(model, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y)

    trained = dpx.training.fit(
        loss_fn, model, (train_x, train_y), epsilon=3.0, delta=1e-4, batch_size=1347, steps=40,
        optimizer=optax.sgd(2.0, momentum=0.9, nesterov=True),
        l2_clip_norm=1.0, key=jax.random.key(0),
    )  # fmt: skip
    accuracy = (trained.params(test_x).argmax(axis=1) == test_y).mean()
    assert accuracy >= 0.93
    assert trained.guarantee.epsilon <= 3


@pytest.mark.slow
def test_it_is_the_loop_with_the_calibrated_noise():
    """The same steps by hand: the door adds nothing to the loop but its calibration."""
    trained = fit(microbatch_size=8)
    keys = secrets.derive(jax.random.key(0)).training("training")
    multiplier = dpx.calibrate_dpsgd(2.0, 1e-3, sampling_probability=0.2, steps=6)
    gradient = dpx.clipped_grad(loss_fn, l2_clip_norm=0.5)
    private = dpx.privatize(
        l2_clip_norm=0.5, noise_multiplier=multiplier, expected_batch_size=20, key=keys.noise
    )
    optimizer = optax.chain(private, optax.sgd(0.1))
    params, state, losses = PARAMS, optimizer.init(PARAMS), []
    batches = dpx.poisson_batches(100, sampling_probability=0.2, steps=6, seed=keys.sampling)
    for indices, mask in batches:
        clipped = gradient(params, X[indices], Y[indices], mask=mask)
        losses.append(clipped.losses.sum() / mask.sum())
        updates, state = optimizer.update(clipped, state, params)
        params = optax.apply_updates(params, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), trained.params, params)
    # In the units of the loss, whatever the padding.
    np.testing.assert_allclose([record.loss for record in trained.history], losses, rtol=1e-5)
    assert trained.guarantee.epsilon == trained.history[-1].epsilon == pytest.approx(2, rel=1e-2)
    assert trained.history[0].epsilon < 1.5
    assert any("number of records is public" in text for text in trained.guarantee.assumptions)


@pytest.mark.quick_cases("sparse")
@pytest.mark.parametrize(
    ("data", "inferred"),
    [
        ((X.tolist(), Y.tolist()), False),
        ((pd.DataFrame(X), pd.Series(Y)), True),
        ((X, Y.tolist()), False),
        ((jnp.asarray(X), Y.astype(np.float64)), False),
        ((X.astype(np.longdouble), Y.astype(">f8")), False),
        ((sparse.csr_array(X), Y), False),
    ],
    ids=["lists", "pandas", "one list", "jax and float64", "of another byte order", "sparse"],
)
def test_takes_what_users_have_and_says_whether_types_follow_from_it(data, inferred):
    expected = fit(steps=2).params["w"]
    trained = fit(data, steps=2)
    np.testing.assert_allclose(trained.params["w"], expected, atol=1e-6)
    said = [text for text in trained.guarantee.assumptions if "follow from all records" in text]
    assert len(said) == inferred


@pytest.mark.slow
def test_what_is_no_tuple_is_one_argument():
    expected = fit(steps=2).params["w"]
    found = fit({"x": X, "y": Y}, lambda params, e: loss_fn(params, e["x"], e["y"]), steps=2)
    np.testing.assert_allclose(found.params["w"], expected, atol=1e-6)
    frame = pd.DataFrame(np.column_stack([X, Y]))
    found = fit(frame, lambda params, row: loss_fn(params, row[:3], row[3]), steps=2)
    np.testing.assert_allclose(found.params["w"], expected, atol=1e-6)


@pytest.mark.slow
def test_a_module_is_trained_and_the_old_one_is_not():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    before = np.array(model.kernel[...])
    trained = fit(
        loss=lambda model, x, y: (model(x)[0] - y) ** 2,
        params=model,
        evaluate=lambda model: {"bias": model.bias[0]},
        evaluate_every=3,
    )
    assert isinstance(trained.params, nnx.Linear)
    assert np.array_equal(model.kernel[...], before)
    assert np.abs(trained.params.kernel[...] - before).max() > 0.01
    evaluated = {r.step: r.evaluation for r in trained.history if r.evaluation}
    assert list(evaluated) == [3, 6]
    assert evaluated[6]["bias"] == pytest.approx(float(trained.params.bias[0]))
    assert "evaluation" in trained.not_covered[0]


@pytest.mark.slow
def test_parameters_in_bfloat16_have_sums_and_state_in_float32(tmp_path):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    trained = fit(params=params, optimizer=optax.adam(0.1), steps=3, workdir=tmp_path)
    assert trained.params["w"].dtype == jnp.bfloat16
    assert np.abs(trained.params["w"].astype(np.float32)).max() > 0.05


def killed_at(step, monkeypatch, folder, **changes):
    line = Progress.line

    def killed(self, done, *rest):
        if done == step:
            raise KeyboardInterrupt
        line(self, done, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "line", killed)
        with pytest.raises(KeyboardInterrupt):
            fit(workdir=folder, **changes)


@pytest.mark.slow
def test_a_killed_call_goes_on_bitwise_under_the_key_that_it_began_with(tmp_path, monkeypatch):
    whole = fit(workdir=tmp_path / "whole")
    folder = tmp_path / "killed"
    killed_at(5, monkeypatch, folder)
    assert (folder / "secret").stat().st_mode & 0o777 == 0o700
    resumed = fit(workdir=folder, key=dpx.secret_key())
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    assert resumed.history == whole.history
    assert [record.step for record in whole.history] == [1, 2, 3, 4, 5, 6]
    # Finished: the key is gone, and a repeated call returns the result.
    assert not (folder / "secret" / "keys.json").exists()
    again = fit(workdir=folder, key=dpx.secret_key())
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)
    assert again.history == whole.history


@pytest.mark.slow
def test_a_folder_goes_on_with_nothing_else(tmp_path, monkeypatch):
    def refuses_others():
        for changes, named in [
            ({"l2_clip_norm": 5.0}, "l2_clip_norm changed"),
            ({"accountant": "rdp"}, "accountant changed"),
            ({"unit": "user"}, "unit changed"),
            ({"assumptions": ("nobody looks",)}, "assumptions changed"),
            ({"wrt": {"w": True, "b": False}}, "changed since"),
            ({"data": (X + 1, Y)}, "the data changed"),
            ({"params": {"w": jnp.ones(3), "b": jnp.zeros(())}}, "the data changed"),
        ]:
            with pytest.raises(secrets.CannotResumeError, match=named):
                fit(workdir=tmp_path, **changes)

    killed_at(3, monkeypatch, tmp_path)
    refuses_others()
    fit(workdir=tmp_path)
    refuses_others()
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(secrets.CannotResumeError, match="whose result is gone"):
        fit(workdir=tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"epsilon": 0.0}, "epsilon=0.0 must be in"),
        ({"delta": 1.0}, "delta=1.0 must be in"),
        ({"batch_size": 101}, "batch_size=101 must be positive and at most 100"),
        ({"batch_size": 0}, "batch_size=0 must"),
        ({"steps": 2.5}, "steps=2.5 must be a whole number"),
        ({"microbatch_size": 0}, "microbatch_size=0 must"),
        (
            {"sampling": Poisson(max_batch_size=19)},
            "max_batch_size=19 must be at least 20, the expected size",
        ),
        ({"sampling": Poisson(30), "accountant": "rdp"}, "accountant='rdp' must be 'pld'"),
        ({"log_every": 0}, "log_every=0 must"),
        ({"accountant": "moments"}, "accountant='moments' is not known"),
        ({"l2_clip_norm": -1.0}, "l2_clip_norm=-1.0 must"),
        ({"l2_clip_norm": {"w": 1.0}}, "is not a prefix of the parameter tree"),
        ({"optimizer": 0.1}, "optimizer=0.1 must be an Optax optimizer"),
        ({"loss": 3}, "loss_fn=3 must be a function"),
        ({"evaluate": 3}, "evaluate=3 must be a function"),
        ({"key": 0}, r"key of type int must be one JAX key: use dpx.secret_key\(\)"),
        ({"key": None}, "key of type NoneType must be one JAX key"),
        (
            {"key": jax.random.key(0, impl="rbg")},
            "key of the generator rbg must be one of the default",
        ),
        ({"key": np.array([0.3, 0.9])}, "must be one JAX key"),
        ({"key": np.array([1, 2])}, "must be one JAX key"),
        ({"params": {}}, "params has no floating-point array"),
        ({"params": nnx.Linear}, "give parameters, or an instance of a model"),
        ({"data": ()}, "data holds no array"),
        ({"data": (X, Y[:50])}, r"data has .*'data\[1\]': 50.* rows"),
        (
            {"data": [X, Y]},
            r"rows of one length: .*, and several arrays go into a tuple, as \(x, y\)",
        ),
        ({"data": (X, 3.0)}, r"data\[1\]=3.0 must be an array"),
        ({"data": ([[1.0], [2.0, 3.0]],)}, r"data\[0\] must be an array, with rows of one length"),
        ({"data": {"x": X, "y": ["a"] * 100}}, r"data\['y'\] has dtype <U1, which must be real"),
        ({"data": (X, np.full(100, 2**31))}, r"data\[1\] holds 2147483648, which int32 does not"),
        ({"data": (X, np.full(100, -(2**40)))}, r"data\[1\] holds -1099511627776, which int32"),
        ({"data": (X, np.full(100, 2**32, np.uint64))}, r"holds 4294967296, which uint32 does not"),
        ({"data": (X[:0], Y[:0])}, "data has no rows"),
        ({"data": (X, [1] * 99 + [0.5])}, r"data\[1\] is a list that holds float64 and int64"),
        ({"data": (X, [1] * 99 + [True])}, r"data\[1\] is a list that holds bool and int64"),
        ({"data": [*X, np.zeros(3, np.float64)]}, "data is a list that holds float32 and float64"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_drawn(changes, named, monkeypatch):
    monkeypatch.setattr(loop, "train", lambda *args, **rest: pytest.fail("training began"))
    with pytest.raises(ValueError, match=named):
        fit(**changes)


@pytest.mark.slow
def test_samples_that_are_cut_off_are_those_that_are_accounted(monkeypatch):
    """All steps have one shape, and the noise is what the cut takes."""
    seen = []
    step = loop._step

    def watched(*arguments):
        seen.append(arguments[-4][1].shape)  # traced once for each shape
        return step(*arguments)

    monkeypatch.setattr(loop, "_step", watched)
    settings = {"steps": 30, "microbatch_size": 4}
    plain, cut = (fit(sampling=sampling, **settings) for sampling in (Poisson(), Poisson(24)))
    assert seen[-1] == (24,)
    assert len(seen) == 2
    event = cut.guarantee.event.event
    assert isinstance(event, TruncatedSubsampledGaussianDpEvent)
    assert (event.dataset_size, event.truncated_batch_size) == (101, 24)
    assert event.noise_multiplier > 1.1 * plain.guarantee.event.event.event.noise_multiplier
    assert cut.guarantee.epsilon == pytest.approx(2.0, rel=2e-3)
    assert "cut off at 24 records" in cut.guarantee.mechanism


def test_batch_norm_in_training_mode_is_refused():
    model = nnx.Sequential(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="BatchNorm in training mode"):
        fit(loss=lambda model, x, y: (model(x)[0] - y) ** 2, params=model)


def test_secret_keys_come_from_the_system_word_by_word(monkeypatch):
    size = jax.random.key_data(jax.random.key(0)).size
    monkeypatch.setattr(secrets.os, "urandom", lambda count: bytes(range(1, count + 1)))
    words = jax.random.key_data(dpx.secret_key())
    assert np.asarray(words).tobytes() == bytes(range(1, 4 * size + 1))
    monkeypatch.undo()
    drawn = {np.asarray(jax.random.key_data(dpx.secret_key())).tobytes() for _ in range(5)}
    assert len(drawn) == 5


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_a_record_beyond_32_bits_is_read_without_a_warning():
    """Which would tell of the record, whose gradient is not finite and counts as zero."""
    beyond, zeros = X.astype(np.float64), Y.astype(np.float64)
    beyond[3] = 1e300
    trained = fit((beyond, zeros), steps=2, key=dpx.secret_key())
    assert np.isfinite(trained.params["w"]).all()
