"""Banded noise against a slow construction, cyclic sampling, and what a training with them costs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx import audit
from dpx.training import AdaptiveClipNorm, Poisson, calibration, checkpoints, correlated, loop
from dpx.training.log import Progress

toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
accounting = pytest.importorskip("jax_privacy.experimental.accounting")

STEPS, BANDS = 12, 3
X = np.random.default_rng(0).normal(size=(60, 2)).astype("f4")


@pytest.fixture(scope="module")
def coefficients():
    return correlated.coefficients(STEPS, BANDS)


def dense(coefficients, steps=STEPS):
    found = np.zeros((steps, steps))
    for back, c in enumerate(coefficients):
        found += c * np.eye(steps, k=-back)
    return found


def mean_loss(params, x):
    return jnp.square(params - x).sum()


def fit(data=X, **changes):
    settings = {
        "epsilon": 3.0,
        "delta": 1e-3,
        "batch_size": 8,
        "sampling": "poisson",
        "steps": 7,
        "optimizer": optax.sgd(0.1),
        "l2_clip_norm": 0.5,
        "key": jax.random.key(2),
        "noise": "banded",
        "bands": BANDS,
        "log_every": 1,
    }
    return dpx.training.fit(mean_loss, jnp.zeros(2), data, **settings | changes)


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


def test_each_step_samples_from_one_group():
    steps, probability = 3000, 0.3
    settings = {"sampling_probability": probability, "steps": steps, "seed": 5, "groups": BANDS}
    taken = np.zeros((steps, 60), bool)
    for step, (indices, mask) in enumerate(dpx.poisson_batches(60, **settings)):
        taken[step, indices[mask]] = True
    groups = [taken[first::BANDS].any(axis=0) for first in range(BANDS)]
    assert (np.sum(groups, axis=0) == 1).all()
    sizes = [int(group.sum()) for group in groups]
    assert min(sizes) > 8
    assert len(set(sizes)) > 1  # each record draws for itself
    for first, group in enumerate(groups):
        assert taken[first::BANDS][:, group].mean() == pytest.approx(probability, abs=0.01)
    later = dpx.poisson_batches(60, **settings | {"start": steps - 1})
    indices, mask = next(later)
    assert indices[mask].tolist() == np.flatnonzero(taken[-1]).tolist()
    # One group is ordinary sampling.
    one, plain = (
        next(dpx.poisson_batches(60, sampling_probability=0.3, steps=1, seed=5, **more))
        for more in ({"groups": 1}, {})
    )
    np.testing.assert_array_equal(one[0], plain[0])


@pytest.mark.slow
def test_it_costs_what_blocks_of_steps_cost():
    trained = fit()
    event = trained.guarantee.event
    z = event.event.event.noise_multiplier
    theirs = accounting.amplified_bandmf_event(z, 7, num_bands=BANDS, sampling_prob=BANDS * 8 / 60)
    assert event == theirs
    expected = dpx.calibrate_dpsgd(3.0, 1e-3, sampling_probability=0.4, steps=3)
    assert z == pytest.approx(expected, rel=1e-6)
    spent = [record.epsilon for record in trained.history]
    # A block of three steps is paid at its first.
    assert spent[0] == spent[2] < spent[3] == spent[5] < spent[6] == trained.guarantee.epsilon
    assert "for each 3 of 7 steps together" in trained.guarantee.mechanism


def fitted(rows, workdir):
    # Nearly every record of a group takes part in each of its steps.
    trained = fit(rows, workdir=workdir, steps=6, batch_size=19.6)
    return {"params": trained.params}


@pytest.mark.slow
def test_a_record_moves_the_releases_of_a_block_by_the_sensitivity():
    """Through the residues too: what it adds at one step is in the next ones' releases."""
    ignore = ["stderr", "file/metrics.jsonl", "file/checkpoints/*", "file/secret/*"]
    first = audit.record(fitted, X, ignore=ignore)
    ids = np.delete(np.arange(60), 11)
    found = audit.replay(fitted, X, X[ids], ids=ids, first=first, ignore=ignore).check()
    ratios = np.array([each.ratio for each in found.compared])
    # A participation moves three releases in a row, by c_0, c_1 and c_2.
    begins = np.flatnonzero(ratios > 1e-3)[0]
    assert begins < BANDS
    coefficients = correlated.coefficients(6, BANDS)
    np.testing.assert_allclose(ratios[begins : begins + BANDS], coefficients, rtol=1e-3)
    assert np.linalg.norm(ratios[begins : begins + BANDS]) <= 1 + 1e-5


@pytest.mark.slow
def test_a_killed_call_starts_again_with_the_same_noise(tmp_path, monkeypatch):
    settings = {"workdir": tmp_path, "checkpoint_every": 1}
    line = Progress.line

    def killed(self, done, *rest):
        if done == 5:
            raise KeyboardInterrupt
        line(self, done, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "line", killed)
        with pytest.raises(KeyboardInterrupt):
            fit(**settings)
    # Nothing that the noise could be taken from is on the disk.
    assert not any((tmp_path / "checkpoints" / "training").glob("[0-9]*"))
    resumed = fit(**settings | {"key": dpx.secret_key()})
    np.testing.assert_array_equal(resumed.params, fit().params)
    assert [record.step for record in resumed.history] == list(range(1, 8))
    again = fit(**settings)
    np.testing.assert_array_equal(again.params, resumed.params)


@pytest.mark.slow
def test_no_checkpoint_is_written_before_the_end(tmp_path, monkeypatch):
    """Its state holds noise that later steps take back."""
    saved = []

    class Checkpoints:
        def __init__(self, *_):
            self.restore = lambda state: (0, state)
            self.save = lambda step, _: saved.append(step)
            self.close = lambda: None

    monkeypatch.setattr(loop, "Checkpoints", Checkpoints)
    fit(workdir=tmp_path, checkpoint_every=1, steps=3, bands=2)
    assert saved == [3]


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


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"noise": "pink"}, "noise='pink'"),
        ({"noise": "independent"}, "bands=3 must come with noise='banded'"),
        ({"bands": None}, "bands=None must be a number with noise='banded'"),
        ({"bands": 1}, "bands=1 must be"),
        ({"bands": 8}, "bands=8 must be at most 7"),
        ({"batch_size": 30}, "bands=3 must be at most 2"),
        ({"sampling": Poisson(20)}, "must be 'poisson' or 'auto' with noise='banded'"),
        ({"sampling": "allocation"}, "must be 'poisson' or 'auto' with noise='banded'"),
        ({"l2_clip_norm": AdaptiveClipNorm()}, "must be 'independent' with an AdaptiveClipNorm"),
    ],
)
def test_wrong_combinations_are_named(changes, named):
    with pytest.raises(ValueError, match=named):
        fit(**changes)


def test_without_jax_privacy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jax_privacy.matrix_factorization", None)
    with pytest.raises(ModuleNotFoundError, match=r"\.\[correlated\]"):
        correlated.coefficients(10, 2)
