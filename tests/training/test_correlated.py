"""Banded noise against a slow construction, cyclic sampling, and what a training with them costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_cases import PRIVATE_FILES, X, Y, fit

import dpx
from dpx import audit
from dpx.training import calibration, checkpoints, correlated, loop

toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
accounting = pytest.importorskip("jax_privacy.experimental.accounting")

STEPS, BANDS = 12, 3
BANDED = {"noise": "banded", "bands": BANDS}


@pytest.fixture(scope="module")
def coefficients():
    return correlated.coefficients(STEPS, BANDS)


def dense(coefficients, steps=STEPS):
    found = np.zeros((steps, steps))
    for back, c in enumerate(coefficients):
        found += c * np.eye(steps, k=-back)
    return found


@pytest.mark.slow
def test_what_the_optimizer_sees_is_the_slow_construction(coefficients):
    """x + z·C⁻¹Z with a dense inverse, from the draws of independent noise under the same key."""
    sums = np.random.default_rng(1).normal(size=(STEPS, 5)).astype("f4")
    about = {"noise_multiplier": 1.5, "expected_batch_size": 4.0, "key": jax.random.key(7)}
    banded = correlated.banded(coefficients=coefficients, sensitivity=0.8, **about)
    private = dpx.privatize(l2_clip_norm=0.8, **about)
    state, other, seen, draws = banded.init(jnp.zeros(5)), private.init(None), [], []
    for x in sums:
        found, state = banded.update(jnp.asarray(x), state)
        drawn, other = private.update(jnp.zeros(5), other)
        seen.append(found)
        draws.append(drawn)
    independent = 4 * np.array(draws, "f8")
    assert independent.std() == pytest.approx(0.8 * 1.5, rel=0.3)
    correlated_noise = np.linalg.solve(dense(coefficients), independent)
    # Each of the two is rounded to a grid of its own noise.
    np.testing.assert_allclose(seen, (sums + correlated_noise) / 4, atol=8e-3)
    theirs = toeplitz.inverse_as_streaming_matrix(jnp.asarray(coefficients))
    np.testing.assert_allclose(correlated_noise, theirs @ jnp.asarray(independent), atol=1e-4)


@pytest.mark.slow
def test_one_band_is_independent_noise():
    about = {"noise_multiplier": 1.0, "expected_batch_size": 2.0, "key": jax.random.key(7)}
    one = correlated.banded(coefficients=(1.0,), sensitivity=0.5, **about)
    private = dpx.privatize(l2_clip_norm=0.5, **about)
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(
        one.update(x, one.init(x))[0], private.update(x, private.init(x))[0]
    )


def test_the_matrix_has_columns_of_norm_one_that_overlap_within_a_block_only(coefficients):
    matrix = dense(coefficients)
    assert (np.linalg.norm(matrix, axis=0) <= 1 + 1e-12).all()
    for group in range(BANDS):
        columns = matrix[:, group::BANDS]
        assert ((columns != 0).sum(axis=1) <= 1).all()
    # Errors of the sums of gradients, which is what the noise is chosen for.
    sums = np.tril(np.ones((STEPS, STEPS)))
    error = np.square(sums @ np.linalg.inv(matrix)).sum()
    assert error < 0.6 * np.square(sums).sum()


@pytest.mark.slow
def test_it_costs_what_blocks_of_steps_cost():
    trained = fit(**BANDED, steps=7, batch_size=8)
    event = trained.guarantee.event
    z = event.event.event.noise_multiplier
    theirs = accounting.amplified_bandmf_event(z, 7, num_bands=BANDS, sampling_prob=BANDS * 8 / 100)
    assert event == theirs
    expected = dpx.calibrate_dpsgd(2.0, 1e-3, sampling_probability=0.24, steps=3)
    assert z == pytest.approx(expected, rel=1e-6)
    spent = [record.epsilon for record in trained.history]
    # A block of three steps is paid at its first.
    assert spent[0] == spent[2] < spent[3] == spent[5] < spent[6] == trained.guarantee.epsilon
    assert "for each 3 of 7 steps together" in trained.guarantee.mechanism


def fitted(rows, workdir):
    # Nearly every record of a group takes part in each of its steps.
    return {"params": fit(rows, **BANDED, workdir=workdir, batch_size=33, l2_clip_norm=0.01).params}


@pytest.mark.slow
def test_a_record_moves_the_releases_of_a_block_by_the_sensitivity():
    """Through the residues too: what it adds at one step is in the next ones' releases."""
    ids = np.delete(np.arange(100), 11)
    rest = X[ids], Y[ids]
    found = audit.replay(fitted, (X, Y), rest, ids=ids, ignore=PRIVATE_FILES).check()
    ratios = np.array([each.ratio for each in found.compared])
    # A participation moves three releases in a row, by c_0, c_1 and c_2.
    begins = np.flatnonzero(ratios > 1e-3)[0]
    assert begins < BANDS
    coefficients = correlated.coefficients(6, BANDS)
    np.testing.assert_allclose(ratios[begins : begins + BANDS], coefficients, rtol=1e-3)
    assert np.linalg.norm(ratios[begins : begins + BANDS]) <= 1 + 1e-5


def test_no_checkpoint_holds_noise_that_may_be_taken_back(coefficients):
    """Nor the key: of the state of the noise a checkpoint has the count."""
    about = {"noise_multiplier": 1.5, "expected_batch_size": 4.0, "key": jax.random.key(7)}
    banded = correlated.banded(coefficients=coefficients, sensitivity=0.8, **about)
    _, state = banded.update(jnp.ones(5), banded.init(jnp.zeros(5)))
    assert (np.asarray(state.left[0]) != 0).all()
    kept = checkpoints.without_key((jnp.zeros(5), (state, jnp.zeros(2))))
    assert [x.shape for x in jax.tree.leaves(kept)] == [(5,), (), (2,)]


def test_all_groups_of_parameters_are_in_the_sensitivity(monkeypatch):
    given = {}
    monkeypatch.setattr(correlated, "banded", lambda **options: given.update(options))
    clips = {"a": 3.0, "b": 4.0}
    run = calibration.Privacy(clips, False, 1.5, lambda _: 1.0, coefficients=(0.8, 0.6))
    loop._mean(run, 8.0, jax.random.key(0), "training")
    assert (given["sensitivity"], given["noise_multiplier"]) == (5.0, 1.5)


def test_without_jax_privacy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jax_privacy.matrix_factorization", None)
    with pytest.raises(ModuleNotFoundError, match=r"\.\[correlated\]"):
        correlated.coefficients(10, 2)
