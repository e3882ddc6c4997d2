"""Plans of a training: what is given is kept, the rest follows from public numbers, and `fit` takes it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import training_cases

import dpx
from dpx import audit
from dpx.training import plan, planning

BUDGET: Any = {"epsilon": 3.0, "delta": 1e-4}
X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)


def loss_fn(params, x):
    return jnp.sum((params["w"] - x) ** 2)


def fit(data=X, **changes):
    chosen = dict.fromkeys(("batch_size", "steps", "optimizer", "l2_clip_norm"))
    settings = chosen | {"epsilon": 3.0, "sampling": "auto", "key": dpx.secret_key()}
    return training_cases.fit(data, loss_fn, {"w": jnp.zeros(3)}, **settings | changes)


@pytest.mark.slow
def test_a_plan_has_the_noise_of_what_it_says():
    found = plan(1500, **BUDGET, epochs=4)
    epsilon = dpx.dpsgd_epsilon(
        found.noise_multiplier,
        found.delta,
        sampling_probability=found.batch_size / 1500,
        steps=found.steps,
        sampling=found.sampling.name,
    )
    assert 0.999 * 3 <= epsilon <= 3
    assert found.epochs == pytest.approx(4, rel=0.02)
    assert found.step_noise == found.noise_multiplier / found.batch_size
    assert found.training_noise == pytest.approx(found.step_noise / math.sqrt(found.steps))


@pytest.mark.slow
def test_the_sampling_is_the_one_with_less_noise():
    found = plan(1500, **BUDGET, batch_size=300, steps=20)
    other = {"allocation": "poisson", "poisson": "allocation"}[found.sampling.name]
    noise = dpx.calibrate_dpsgd(3.0, 1e-4, sampling_probability=0.2, steps=20, sampling=other)
    assert found.noise_multiplier < noise


@pytest.mark.slow
def test_whole_batches_have_the_least_noise_and_the_limit_is_right():
    whole = plan(1000, **BUDGET, batch_size=1000, epochs=10)
    assert whole.training_noise == pytest.approx(whole.least_noise)
    for size in (250, 50):
        found = plan(1000, **BUDGET, batch_size=size, epochs=10)
        ratio = found.training_noise / whole.least_noise
        assert ratio > 1
        assert planning.inflation(found, found.epochs, found.steps) == pytest.approx(
            ratio, rel=0.03
        )


@pytest.mark.quick_cases("1.0-2000")
@pytest.mark.parametrize("records", [2_000, 5_000, 100_000])
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_the_rule_takes_as_many_steps_as_the_noise_of_the_mean_allows(records, epsilon):
    budget = {"epsilon": epsilon, "delta": 0.1 / records}
    size, steps = planning.complete(records, **budget, epochs=10, batch_size=None, steps=None)
    assert planning.LEAST_STEPS <= steps <= planning.MOST_STEPS
    assert size * steps / records == pytest.approx(10, rel=0.02)

    def noise(steps):
        size = 10 * records / steps
        share = size / records
        return dpx.calibrate_dpsgd(**budget, sampling_probability=share, steps=steps) / size

    if steps > planning.LEAST_STEPS:  # Poisson sampling needs some percent more than the limit
        assert noise(steps) <= 1.1 * planning.STEP_NOISE
    if steps < planning.MOST_STEPS:
        assert noise(round(1.1 * steps)) >= planning.STEP_NOISE


@pytest.mark.slow
def test_batches_have_a_record_at_least_and_all_at_most():
    assert plan(10, epsilon=1.0, delta=1e-3, epochs=2).batch_size == 1
    assert plan(10, epsilon=1.0, delta=1e-3, epochs=3000).batch_size == 10


@pytest.mark.quick_cases
@pytest.mark.parametrize(
    ("given", "batch_size", "steps"),
    [
        ({"batch_size": 250, "steps": 7}, 250, 7),
        ({"batch_size": 250, "epochs": 5}, 250, 20),
        ({"steps": 20, "epochs": 5}, 250, 20),
    ],
)
def test_what_is_given_is_kept(given, batch_size, steps):
    found = plan(1000, **BUDGET, **given)
    assert (found.batch_size, found.steps) == (batch_size, steps)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "epochs=None must be a number with batch_size=None and steps=None: say how often"),
        ({"steps": 5}, "epochs=None must be a number with batch_size=None and steps=5"),
        ({"batch_size": 5}, "epochs=None must be a number with batch_size=5"),
        ({"batch_size": 5, "steps": 5, "epochs": 5}, "leave one of the three out"),
        ({"steps": 5, "epochs": 6}, "must be at most steps=5"),
        ({"batch_size": 65, "epochs": 6}, "batch_size=65 must be positive and at most 64"),
        ({"epochs": 0}, "epochs=0 must be finite and positive"),
        ({"epochs": math.inf}, "epochs=inf must be finite and positive"),
    ],
)
def test_what_does_not_fit_together_is_one_line_before_there_is_a_folder(given, words, tmp_path):
    for call in (
        lambda: plan(64, epsilon=3.0, delta=1e-3, **given),
        lambda: fit(**given, workdir=tmp_path / "run"),
    ):
        with pytest.raises(ValueError, match=words) as found:
            call()
        assert "\n" not in str(found.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_fit_takes_the_plan_and_says_so(capfd):
    key = dpx.secret_key()
    planned = plan(64, epsilon=3.0, delta=1e-3, epochs=3, steps=8)
    taken = fit(epochs=3, steps=8, key=key, progress=True)
    assert (
        "training: takes 8 steps of 24 records, Adam whose learning rate" in capfd.readouterr().err
    )
    with pytest.warns(UserWarning, match="key"):
        given = fit(
            batch_size=planned.batch_size,
            steps=8,
            sampling=planned.sampling,
            optimizer=planning.untuned(8),
            l2_clip_norm=1.0,
            normalize=True,
            key=key,
            progress=True,
        )
    assert "takes" not in capfd.readouterr().err
    np.testing.assert_array_equal(taken.params["w"], given.params["w"])
    assert taken.guarantee == given.guarantee
    noise = float(taken.guarantee.mechanism.split("noise multiplier ")[1].split(",")[0])
    assert noise == pytest.approx(planned.noise_multiplier, rel=1e-5)


@pytest.mark.slow
def test_with_users_a_plan_is_of_users(capfd):
    ids = np.arange(64) // 4  # of 16 users
    trained = fit(users=ids, records_per_user=2, epochs=1, steps=4, progress=True)
    assert "takes 4 steps of 4 users" in capfd.readouterr().err
    found = plan(16, epsilon=3.0, delta=1e-3, epochs=1, steps=4)
    noise = float(trained.guarantee.mechanism.split("noise multiplier ")[1].split(",")[0])
    assert noise == pytest.approx(found.noise_multiplier, rel=1e-5)


@pytest.mark.slow
def test_a_plan_does_not_follow_the_records():
    """Neither does the number of records: a neighbour has an empty record in place of one."""

    def program(rows):
        about = {"epochs": 1, "steps": 5, "key": training_cases.KEY, "log_every": 1000}
        return fit(jnp.stack(rows), **about).params

    with audit.recording():
        replayed = audit.replay(program, list(X[:20]), list(X[:19])).check()
    assert replayed.recording.releases


@pytest.mark.slow
def test_the_rate_is_found_over_six_orders_of_magnitude():
    """Without noise, and whatever the scale of the answer, also of parameters in 16 bits."""
    optimizer = planning.untuned(1000)

    @jax.jit
    def step(params, state, target):
        gradient = params.astype(jnp.float32) - target
        gradient /= jnp.linalg.norm(gradient) + 1e-9
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    for scale, dtype in ((1e-2, "f4"), (1.0, "f4"), (1e2, "f4"), (1.0, "bfloat16")):
        params, target = jnp.zeros(4, dtype), scale * jnp.array([1.0, -1.0, 0.5, 2.0])
        state = optimizer.init(params.astype(jnp.float32))
        for _ in range(1000):
            params, state = step(params, state, target)
        error = jnp.linalg.norm(params - target) / jnp.linalg.norm(target)
        assert error < 0.1, (scale, dtype, error)


@pytest.mark.slow
def test_digits_are_learned_by_whoever_chooses_nothing():
    """Ten classes, where a tuned training has 0.86 and this one 0.85 (experiments/bench/README.md)."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y = np.asarray(x / 16, "f4"), np.asarray(y)
    trained = dpx.training.fit(
        lambda w, x, y: optax.softmax_cross_entropy_with_integer_labels(x @ w, y),
        jnp.zeros((64, 10)),
        (x[:1500], y[:1500]),
        epsilon=3.0,
        delta=1e-4,
        epochs=10,
        key=jax.random.key(2**40),
        progress=False,
    )
    assert jnp.mean(jnp.argmax(x[1500:] @ trained.params, 1) == y[1500:]) > 0.8
