"""What a training goes on with in its folder, and what it refuses before the folder is touched."""

import contextlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

import dpx
from dpx import _processes
from dpx import _storage as storage
from dpx.training import checkpoints, purposes, resuming
from dpx.training import keys as secrets
from dpx.training.log import MetricLog, evaluated

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
SETTINGS = {
    "epsilon": 2.0,
    "delta": 1e-3,
    "batch_size": 16,
    "sampling": "poisson",
    "steps": 3,
    "optimizer": optax.sgd(0.1),
    "l2_clip_norm": 1.0,
}


def loss_fn(params, x):
    return jnp.sum((params["w"] - x) ** 2)


def fit(folder=None, data=X, loss=loss_fn, **changes):
    given = SETTINGS | {"key": jax.random.key(0)} | changes
    return dpx.training.fit(loss, {"w": jnp.zeros(3)}, (data,), workdir=folder, **given)


def own_keys():
    return secrets.derive(jax.random.key(5))


@pytest.mark.slow
def test_under_a_runs_keys_a_result_is_that_of_its_own_arguments(tmp_path):
    first = fit(tmp_path, key=own_keys())
    again = fit(tmp_path, key=own_keys())
    np.testing.assert_array_equal(again.params["w"], first.params["w"])
    np.testing.assert_array_equal(fit(key=own_keys()).params["w"], first.params["w"])
    for changes, named in (
        ({"epsilon": 0.1}, "epsilon changed"),
        ({"steps": 2}, "steps changed"),
        ({"data": X + 1}, "the data changed"),
    ):
        with pytest.raises(secrets.CannotResumeError, match=named):
            fit(tmp_path, key=own_keys(), **changes)
    # Other labels are other trainings, and without its checkpoint one goes through the same steps.
    fit(tmp_path, key=own_keys(), label="second row", epsilon=0.1)
    shutil.rmtree(tmp_path / "checkpoints")
    again = fit(tmp_path, key=own_keys())
    np.testing.assert_array_equal(again.params["w"], first.params["w"])
    kept = "".join(path.read_text() for path in (tmp_path / "secret").iterdir())
    assert "key" not in kept.replace("record_key", "")


@pytest.mark.slow
def test_under_another_version_whose_noise_differs_nothing_goes_on(tmp_path, monkeypatch):
    """The same keys would draw other noise for the same statistic: two releases for the price of one."""
    secrets.open_keys(ConfigDict({"seed": 0, "noise_seed": None}), tmp_path / "run")
    fit(tmp_path / "training", key=own_keys())
    monkeypatch.setattr(resuming, "_RANDOMNESS", resuming._RANDOMNESS + 1)
    for begin in (
        lambda: secrets.open_keys(ConfigDict({"seed": 0, "noise_seed": None}), tmp_path / "run"),
        lambda: fit(tmp_path / "training", key=own_keys()),
    ):
        with pytest.raises(secrets.CannotResumeError, match="draws other noise from its keys"):
            begin()


@pytest.mark.slow
def test_a_runs_keys_and_a_key_of_its_own_do_not_share_a_training(tmp_path):
    fit(tmp_path / "own")
    with pytest.raises(secrets.CannotResumeError, match="did not begin with these keys"):
        fit(tmp_path / "own", key=own_keys(), epsilon=0.1)
    fit(tmp_path / "run", key=own_keys())
    with pytest.raises(secrets.CannotResumeError, match="noise keys are gone"):
        fit(tmp_path / "run")


@pytest.mark.parametrize("name", ["keys.json", "finished.json"])
def test_a_training_with_a_key_of_its_own_is_known_without_checkpoints(tmp_path, name):
    storage.create_private(tmp_path / "secret" / name, {"data": "", "settings": {}})
    with pytest.raises(secrets.CannotResumeError, match="did not begin with these keys"):
        fit(tmp_path, key=own_keys())


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints", "model", "privacy.json"])
def test_what_a_training_left_does_not_go_on_without_its_key(tmp_path, left):
    (tmp_path / left).mkdir()
    with pytest.raises(secrets.CannotResumeError, match=rf"keys\.json is missing, but not {left}"):
        fit(tmp_path)


@pytest.mark.slow
def test_of_two_trainings_under_a_runs_keys_one_works_in_the_folder(tmp_path):
    # The run itself has the folder, and its trainings theirs.
    with storage.lock(tmp_path), storage.lock(tmp_path / "checkpoints" / "training"):
        with pytest.raises(storage.BusyError):
            fit(tmp_path, key=own_keys())
        fit(tmp_path, key=own_keys(), label="other")


@pytest.mark.slow
def test_a_finished_run_keeps_nothing_of_its_trainings(tmp_path):
    fit(tmp_path, key=own_keys())
    storage.create_private(tmp_path / "secret" / "salt.json", {"salt": "00"})
    secrets.discard(tmp_path)
    assert [path.name for path in (tmp_path / "secret").iterdir()] == ["salt.json"]


@pytest.mark.quick_cases("nothing")
@pytest.mark.parametrize("left", ["nothing", "a file"])
def test_a_finished_training_does_not_train_again(tmp_path, left):
    fit(tmp_path)
    last = tmp_path / "checkpoints" / "training" / "3"
    shutil.rmtree(last)
    if left == "a file":
        last.write_text("")
    with pytest.raises(secrets.CannotResumeError, match="whose result is gone: use a new workdir"):
        fit(tmp_path, key=dpx.secret_key())


@pytest.mark.slow
def test_a_finished_training_is_not_said_to_start_again(tmp_path):
    fit(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "training" / "3" / "state")
    with pytest.raises(storage.StorageError, match="its key is gone: restore the folder"):
        fit(tmp_path)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        (
            {"l2_clip_norm": dpx.training.AdaptiveClipNorm(count_noise=0.1)},
            ValueError,
            "count_noise=",
        ),
        ({"loss": lambda params, x: jnp.sum(params["v"])}, KeyError, "v"),
        ({"label": "../up"}, ValueError, r"label='\.\./up' must be a plain name"),
        ({"label": ".."}, ValueError, r"label='\.\.' must be a plain name"),
        ({"label": 3}, ValueError, "label=3 must be a plain name"),
        ({"assumptions": "nobody looks"}, ValueError, "must be a tuple of sentences"),
        ({"assumptions": (3,)}, ValueError, "must be a tuple of sentences"),
        ({"normalize": "yes"}, ValueError, "normalize='yes' must be True or False"),
        ({"record_key": 1}, ValueError, "record_key=1 must be True or False"),
    ],
)
def test_a_refused_call_leaves_no_trace(tmp_path, changes, error, named):
    with pytest.raises(error, match=named):
        fit(tmp_path / "run", **changes)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_bools_may_be_numpys(tmp_path):
    fit(tmp_path, normalize=np.True_, record_key=np.False_)
    fit(tmp_path, normalize=True)


def test_processes_with_other_arguments_are_refused_before_anything_is_kept(tmp_path, monkeypatch):
    """The other process clips to 1000: what it adds would have a thousandth of the noise."""

    def of_each(own):
        others = {"l2_clip_norm": [1000.0], "bands": 2} if "l2_clip_norm" in own else {}
        return [own, own | others]  # nor is any program that is compared another one

    monkeypatch.setattr(_processes, "of_each", of_each)
    with pytest.raises(ValueError, match="bands, l2_clip_norm must be the same in all"):
        fit(tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_data_that_another_process_has_otherwise_are_refused(monkeypatch):
    assert resuming.digest_of_each([X]) == resuming.digest([X])
    monkeypatch.setattr(_processes, "of_each", lambda own: [own, resuming.digest([X + 1])])
    with pytest.raises(secrets.CannotResumeError, match="not the same in all processes"):
        resuming.digest_of_each([X])


def test_digests_tell_shapes_types_and_places_apart():
    x = np.arange(6, dtype=np.int32)
    kinds = (
        [x],
        [x.reshape(2, 3)],
        [x.reshape(3, 2)],
        [x.astype(np.uint32)],
        [x[:3], x[3:]],
        [x[:2], x[2:]],
    )
    assert len({resuming.digest(data) for data in kinds}) == len(kinds)


def test_keys_have_all_bits_of_their_entropy():
    """A seed of 32 bits can be searched."""
    drawn = secrets._draw()
    assert len(bytes.fromhex(drawn["noise"])) == 8
    assert len(bytes.fromhex(drawn["sampling"])) == 32
    keys = np.array([jax.random.key_data(dpx.secret_key()) for _ in range(4)])
    assert len(np.unique(keys[:, 0])) == len(np.unique(keys[:, 1])) == 4
    with pytest.raises(ValueError, match="must be one JAX key"):
        purposes.check(jax.random.split(jax.random.key(0), 2))


def test_a_log_goes_on_after_the_last_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricLog(path, "training", 0, lambda *_: None)
    for step in (1, 2, 3):
        first.write({"step": step, "loss": 1.0, "epsilon": 0.1 * step})
    with path.open("a") as file:  # by a process that was killed while it wrote
        file.write('{"run": "training", "st')
    found = MetricLog(path, "training", 1, lambda *_: None)
    assert [record.step for record in found.history] == [1]
    assert [entry["step"] for entry in storage.read_lines(path)] == [1]


def test_only_the_owner_reads_the_losses(tmp_path):
    """No guarantee covers them; log.txt, to which they go too, has the same mode."""
    path = tmp_path / "metrics.jsonl"
    MetricLog(path, "training", 0, lambda *_: None).write({"step": 1, "loss": 1.0, "epsilon": 0.1})
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    MetricLog(path, "training", 1, lambda *_: None)  # one that goes on writes it anew
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_checkpoint_with_other_arrays_is_damaged(tmp_path, monkeypatch):
    state = (
        jnp.zeros(3),
        (
            dpx.privatize(
                l2_clip_norm=1.0,
                noise_multiplier=1.0,
                expected_batch_size=1.0,
                key=jax.random.key(0),
            ).init(None),
        ),
    )
    with contextlib.closing(checkpoints.Checkpoints(tmp_path / "kept")) as kept:
        kept.save(4, state)
    with contextlib.closing(checkpoints.Checkpoints(tmp_path / "kept")) as kept:
        assert kept.restore(state)[0] == 4
        monkeypatch.setattr(checkpoints, "_digest", lambda _: {"sha256": "of others"})
        with pytest.raises(storage.StorageError, match="cannot be read"):
            kept.restore(state)


@pytest.mark.parametrize(
    "now", [{"a": 1}, {"a": 1, "bands": 3}, {"a": 1, "bands": 2, "wrt": ["w"]}]
)
def test_settings_that_come_go_or_change_are_named(tmp_path, now):
    stored = {"data": "digest", "settings": {"a": 1, "bands": 2}}
    resuming.unchanged(stored, tmp_path, "digest", {"bands": 2, "a": 1})
    name = "wrt" if "wrt" in now else "bands"
    with pytest.raises(resuming.CannotResumeError, match=f"{name} changed since the training"):
        resuming.unchanged(stored, tmp_path, "digest", now)


def test_a_finished_training_keeps_a_digest_and_no_key(tmp_path):
    settings = {"label": "training", "steps": 3}
    for finished in (False, True):
        with secrets.of_training(
            jax.random.key(4), tmp_path, data=[X], settings=settings
        ) as opened:
            assert opened.finished == finished
            kept = tmp_path / "secret" / "keys.json"
            assert kept.exists() != finished
            if not finished:  # a process that was killed between two calls leaves its copy
                shutil.copy(kept, tmp_path / "secret" / "tmp0.partial")
        found = [path.name for path in (tmp_path / "secret").iterdir()]
        assert found == ["finished.json"]
        assert set(storage.read_private(tmp_path / "secret" / "finished.json")) == {
            "data",
            "settings",
        }


def test_a_fingerprint_says_nothing_of_a_seed_in_another_folder(tmp_path):
    """Without the bytes of its folder, whoever reads it could try all small seeds."""
    shown = [secrets.fingerprint(7, tmp_path / name, new=True) for name in ("one", "other")]
    assert shown[0] != shown[1]
    assert shown[0] == secrets.fingerprint(7, tmp_path / "one")
    assert shown[0] != secrets.fingerprint(8, tmp_path / "one")
    kept = storage.read_private(tmp_path / "one" / "secret" / "salt.json")
    assert len(bytes.fromhex(kept["salt"])) == 32


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (None, "returned a NoneType"),
        (3.0, "returned a float"),
        ({"epsilon": 0.1}, "'epsilon'"),
        ({"l2_clip_norm": 0.1}, "'l2_clip_norm'"),
        ({"step": 1.0}, "'step'"),
        ({"run": 1.0}, "'run'"),
        ({3: 1.0}, "named 3"),
        ({"accuracy": np.ones(2)}, "evaluate: accuracy"),
    ],
)
def test_an_evaluation_is_numbers_by_names_that_mean_nothing_else(found, named):
    """A number called `epsilon` was read as what the training had spent, one called `step` as its step, and
    one called `l2_clip_norm` went to a log as what a guarantee covers."""
    with pytest.raises(ValueError, match=named):
        evaluated(found)


def test_numbers_of_an_evaluation_are_floats():
    found = evaluated({"a": np.float16(0.5), "b": jnp.ones(()), "c": 2})
    assert found == {"a": 0.5, "b": 1.0, "c": 2.0}
    assert all(type(value) is float for value in found.values())
