"""What `fit` says before it begins: of optimizers, losses, keys and units that are not what they seem."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import training_cases
from optax import contrib

import dpx
from dpx.clipping import ClippingWarning
from dpx.privacy import Ledger
from dpx.training import keys as secrets
from dpx.training import log

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
PARAMS = {"w": jnp.ones(3), "encoder": jnp.eye(3)}


def loss_fn(params, x):
    return jnp.square(jax.lax.stop_gradient(params["encoder"]) @ x @ params["w"] - 1)


def linear(w, x):
    return jnp.square(x @ w - 1)


def fit(loss=linear, params=PARAMS["w"], data=X, **changes):
    settings = {"steps": 2, "key": dpx.secret_key()}
    return training_cases.fit(data, loss, params, **settings | changes)


@pytest.mark.quick_cases
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
        optax.inject_hyperparams(optax.adamw)(1e-2),
        contrib.schedule_free_sgd(0.1),
        optax.apply_if_finite(optax.adam(1e-2), 3),
    ],
)
def test_optimizers_of_gradients_alone_are_taken(optimizer):
    assert np.isfinite(fit(optimizer=optimizer).params).all()


@pytest.mark.slow
def test_what_no_gradient_reaches_is_named_by_the_names_of_the_caller(tmp_path):
    with pytest.warns(ClippingWarning) as found:
        noised = fit(loss_fn, PARAMS)
    (said,) = {str(each.message) for each in found}
    assert "no gradient of loss_fn reaches encoder: " in said
    assert not np.array_equal(noised.params["encoder"], PARAMS["encoder"])
    with pytest.raises(ValueError, match="no gradient of loss_fn reaches encoder"):
        fit(loss_fn, PARAMS, strict=True, workdir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    wrt = eval(said[said.index("lambda") :])
    kept = fit(loss_fn, PARAMS, strict=True, wrt=wrt)
    np.testing.assert_array_equal(kept.params["encoder"], PARAMS["encoder"])


@pytest.mark.slow
def test_what_is_given_all_records_at_once_is_named():
    centered = jax.custom_batching.custom_vmap(lambda x: x * 1.0)
    centered.def_vmap(lambda size, batched, x: (x - x.mean(0), True))

    def loss(w, x):
        return linear(w, centered(x))

    with pytest.warns(ClippingWarning, match="with a batching rule of its own"):
        fit(loss)
    with pytest.raises(ValueError, match="with a batching rule of its own"):
        fit(loss, strict=True)
    fit(loss, strict=True, microbatch_size=1)


@pytest.mark.slow
def test_what_is_frozen_comes_back_as_arrays_that_the_loss_takes():
    params = {"table": np.eye(3, dtype=np.float32), "w": np.ones(3, np.float32)}

    def loss(params, x, row):
        return linear(params["w"], x + params["table"][row])

    def mean(params):
        return float(jax.vmap(loss, (None, 0, 0))(params, X, rows).mean())

    def evaluate(params):
        seen.append(params)
        return {"loss": mean(params)}

    rows, seen = np.arange(64) % 3, []
    wrt = {"table": False, "w": True}
    trained = fit(loss, params, (X, rows), wrt=wrt, evaluate=evaluate, evaluate_every=2)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(trained.params))
    # Those that it was given are its own, also after steps that followed.
    losses = [record.evaluation["loss"] for record in trained.history if record.evaluation]
    assert losses == [*map(mean, seen)]
    assert losses[-1] == mean(trained.params)


@pytest.mark.slow
def test_a_unit_is_what_a_row_is_called():
    assert fit().guarantee.unit == "record"
    spent = fit(unit="patient").guarantee
    assert "one row of the data, which is called patient" in str(spent)
    assert Ledger().spend(spent, "a").spend(spent, "b").guarantee(1e-3).unit == spent.unit
    with pytest.raises(ValueError, match="unit"):
        Ledger().spend(spent, "a").spend(dpx.PrivacyGuarantee(
            1.0, 1e-3, "add_or_remove_one", "patient", "of all visits"
        ), "b")  # fmt: skip


@pytest.mark.slow
def test_losses_are_on_stderr_unless_they_should_not_be(capfd, tmp_path):
    trained = fit(workdir=tmp_path)
    printed = capfd.readouterr()
    assert "loss" not in printed.err + printed.out
    assert trained.history[-1].loss is not None  # for the data holder
    fit(progress=True)
    assert "loss" in capfd.readouterr().err
    with log.quiet():
        fit(progress=True)
    assert "loss" not in capfd.readouterr().err


GUESSED = pytest.warns(UserWarning, match=r"(key|seed) can be guessed")


@pytest.mark.quick_cases
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "key", [jax.random.key(0), jax.random.PRNGKey(0), jax.random.key(2**32 - 1)]
)
def test_keys_that_can_be_guessed_are_warned_of(key, recwarn):
    with GUESSED as found:
        fit(key=key)
    assert "4294967295" not in str(found[0].message)
    with GUESSED:
        dpx.privatize(l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=1, key=key)
    with GUESSED:
        dpx.gram.release(key, X.T, epsilon=1.0, delta=1e-3, column_bound=9.0)
    with GUESSED:
        dpx.poisson_batches(4, sampling_probability=0.5, steps=1, seed=7)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:(key|seed) can be guessed")
def test_keys_that_nobody_guesses_are_not():
    fit(key=dpx.secret_key())
    fit(key=jax.random.key_data(dpx.secret_key()))
    jax.jit(lambda key: dpx.privatize(
        l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=1, key=key
    ).init(X).count)(jax.random.key(0))  # fmt: skip
    for known in (key := dpx.secret_key(), jax.random.key_data(key)):  # which a program closes over
        closed = jax.jit(lambda x, known=known: dpx.noise.release(
            known, x, sensitivity=1.0, noise_multiplier=1.0, label="numbers"
        ))  # fmt: skip
        assert closed(X).shape == X.shape
    seed = np.random.SeedSequence()
    dpx.poisson_batches(4, sampling_probability=0.5, steps=1, seed=seed)
    dpx.poisson_batches(4, sampling_probability=0.5, steps=1, seed=int(seed.entropy))


@pytest.mark.slow
@pytest.mark.filterwarnings("error:key has been used")
def test_a_key_that_trained_before_is_warned_of(tmp_path):
    again = pytest.warns(UserWarning, match="key has been used by another training")
    key = dpx.secret_key()
    fit(key=key)
    with again as found:
        fit(key=jax.random.key_data(key))
    assert not any(str(word) in str(found[0].message) for word in jax.random.key_data(key))
    with again:
        fit(key=key, workdir=tmp_path / "one")
    key = dpx.secret_key()
    fit(key=key, workdir=tmp_path / "two")
    fit(key=key, workdir=tmp_path / "two")  # which returns what it found
    with again:
        fit(key=key, workdir=tmp_path / "three")
    run = secrets.derive(dpx.secret_key())
    fit(key=run, label="one")
    fit(key=run, label="two")
