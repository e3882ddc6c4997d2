"""`dpx.training.fit`: anyone's model, anyone's data, in one call."""

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
from training_cases import PARAMS, X, Y, close, fit, keys, loss_fn

import dpx
from dpx.training import Poisson, loop


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
    own = keys()
    multiplier = dpx.calibrate_dpsgd(2.0, 1e-3, sampling_probability=0.2, steps=6)
    gradient = dpx.clipped_grad(loss_fn, l2_clip_norm=0.5)
    private = dpx.privatize(
        l2_clip_norm=0.5, noise_multiplier=multiplier, expected_batch_size=20, key=own.noise
    )
    optimizer = optax.chain(private, optax.sgd(0.1))
    params, state, losses = PARAMS, optimizer.init(PARAMS), []
    batches = dpx.poisson_batches(100, sampling_probability=0.2, steps=6, seed=own.sampling)
    for indices, mask in batches:
        clipped = gradient(params, X[indices], Y[indices], mask=mask)
        losses.append(clipped.losses.sum() / mask.sum())
        updates, state = optimizer.update(clipped, state, params)
        params = optax.apply_updates(params, updates)
    close(trained.params, params, 1e-6)
    # In the units of the loss, whatever the padding.
    np.testing.assert_allclose([record.loss for record in trained.history], losses, rtol=1e-5)
    assert trained.guarantee.epsilon == trained.history[-1].epsilon == pytest.approx(2, rel=1e-2)
    assert trained.history[0].epsilon < 1.5
    assert any("number of records is public" in text for text in trained.guarantee.assumptions)


@pytest.mark.quick_cases("sparse")
@pytest.mark.parametrize(
    ("data", "inferred", "loss"),
    [
        ((X.tolist(), Y.tolist()), False, loss_fn),
        ((pd.DataFrame(X), pd.Series(Y)), True, loss_fn),
        ((X, Y.tolist()), False, loss_fn),
        ((jnp.asarray(X), Y.astype(np.float64)), False, loss_fn),
        ((X.astype(np.longdouble), Y.astype(">f8")), False, loss_fn),
        ((sparse.csr_array(X), Y), False, loss_fn),
        # What is no tuple is one argument of the loss.
        ({"x": X, "y": Y}, False, lambda params, row: loss_fn(params, **row)),
        (
            pd.DataFrame(np.column_stack([X, Y])),
            True,
            lambda params, row: loss_fn(params, row[:3], row[3]),
        ),
    ],
    ids=[
        "lists", "pandas", "one list", "jax and float64", "of another byte order", "sparse", "dict",
        "one frame",
    ],
)  # fmt: skip
def test_takes_what_users_have_and_says_whether_types_follow_from_it(data, inferred, loss):
    trained = fit(data, loss, steps=2)
    close(trained.params, fit(steps=2).params, 1e-6)
    said = [text for text in trained.guarantee.assumptions if "follow from all records" in text]
    assert len(said) == inferred


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


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_a_record_beyond_32_bits_is_read_without_a_warning():
    """Which would tell of the record, whose gradient is not finite and counts as zero."""
    beyond, zeros = X.astype(np.float64), Y.astype(np.float64)
    beyond[3] = 1e300
    trained = fit((beyond, zeros), steps=2, key=dpx.secret_key())
    assert np.isfinite(trained.params["w"]).all()
