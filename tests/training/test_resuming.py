"""What a training goes on with in its folder, and what it refuses before the folder is touched."""

import contextlib
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict
from training_cases import PARAMS, USERS, X, Y, fit, killed_at, loss_fn, of_users, same, secure

import dpx
from dpx import _processes
from dpx import _storage as storage
from dpx.training import (
    AdaptiveClipNorm,
    Poisson,
    arguments,
    calibration,
    checkpoints,
    purposes,
    resuming,
)
from dpx.training import keys as secrets
from dpx.training.log import MetricLog, evaluated
from dpx.training.sampling import allocated_batches

STREAM = {"secure": True, "key": None}
KINDS = {
    "poisson": {},
    "allocation": {"sampling": "allocation"},
    "cut": {"sampling": Poisson(24)},
    "users": of_users(),
    "adaptive": {"l2_clip_norm": AdaptiveClipNorm(start=30.0)},
    "banded": {"noise": "banded", "bands": 2},
    "bfloat16": {"compute_dtype": "bfloat16", "optimizer": optax.adam(0.1)},
    "bfloat16 parameters": {"params": jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)},
    "keys of a run": {"key": secrets.derive(jax.random.key(5))},
    "secure": STREAM,
    "secure allocation": STREAM | {"sampling": "allocation"},
    "secure, cut": STREAM | {"sampling": Poisson(24)},
    "secure users": STREAM | of_users(),
    "secure, adaptive": STREAM | {"l2_clip_norm": AdaptiveClipNorm(start=30.0)},
    "secure keys of a run": secure(),
}


def own_keys():
    return secrets.derive(jax.random.key(5))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_call_goes_on_bitwise_under_what_it_began_with(kind, tmp_path, monkeypatch):
    """With the steps that were paid for alone, and in the end without the secret or another result."""
    if kind == "banded":
        pytest.importorskip("jax_privacy")
    about, folder = KINDS[kind], tmp_path / "run"
    of_run = isinstance(about.get("key"), dpx.training.Keys)
    drawn = [bytes([n]) * 32 for n in range(40)]

    def urandom(source):
        monkeypatch.setattr(secrets.os, "urandom", lambda size: next(source)[:size])

    urandom(iter(drawn))
    whole = fit(**about, workdir=tmp_path / "whole")
    urandom(iter(drawn))
    with killed_at(4):
        fit(**about, workdir=folder)
    saved = [path.name for path in (folder / "checkpoints" / "training").glob("[0-9]*")]
    assert saved == ([] if kind == "banded" else ["3"])  # it holds noise that is taken back
    kept = folder / "secret" / "keys.json"
    assert kept.exists() != of_run
    assert (folder / "secret").stat().st_mode & 0o077 == 0
    key = {} if of_run else {"key": None if about.get("secure") else jax.random.key(1 << 41)}
    for again in (fit(**about | key, workdir=folder), fit(**about | key, workdir=folder)):
        same(again.params, whole.params)
        assert again.history == whole.history
    spent = [record.epsilon for record in whole.history]
    assert len(spent) == 6
    assert spent == sorted(spent)
    assert spent[-1] == whole.guarantee.epsilon
    assert not kept.exists()
    words = purposes.words_of(jax.random.key(1 << 40)).tobytes()
    left = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    for secret in [*drawn, b"s" * 32, words]:
        assert secret.hex().encode() not in left
        assert len(secret) < 32 or secret not in left
    assert not [t for t in threading.enumerate() if "ThreadPoolExecutor" in t.name]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "finished"])
def test_a_folder_goes_on_with_nothing_else(end, tmp_path):
    """The noise that was drawn for one sum must not be added to another one."""
    with killed_at(3) if end == "killed" else contextlib.nullcontext():
        fit(workdir=tmp_path)
    for changes, named in (
        ({"l2_clip_norm": 5.0}, "l2_clip_norm changed"),
        ({"data": (X + 1, Y)}, "the data or the initial parameters changed"),
        ({"optimizer": optax.sgd(0.2)}, "optimizer changed"),
        ({"loss": lambda *given: 2 * loss_fn(*given)}, "loss_fn changed"),
    ):
        with pytest.raises(secrets.CannotResumeError, match=named):
            fit(**changes, workdir=tmp_path)
    again = fit(loss=lambda *given: loss_fn(*given), workdir=tmp_path)
    same(again.params, fit().params)


class BeginsError(Exception):
    """Training would begin now."""


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """What a call with these changes would find in a folder: a digest of its data, and its settings."""

    def begins(key, workdir, *, data, settings):
        raise BeginsError(resuming.digest(data), settings)

    monkeypatch.setattr(secrets, "of_training", begins)

    def calibrated(*, sampling, **_):
        return calibration.Privacy(1.0, False, 1.0, float, sampling=sampling or Poisson()), None

    monkeypatch.setattr(calibration, "calibrate", calibrated)

    def call(**changes):
        with pytest.raises(BeginsError) as found:
            fit(**changes, workdir=tmp_path)
        return found.value.args

    return call


ADAPTIVE = {"l2_clip_norm": AdaptiveClipNorm(start=1.0)}
PART = {"wrt": {"w": True, "b": False}}
TWO = {"x": jnp.zeros(()), "y": jnp.zeros(())}
NESTED = {"params": PARAMS | {"c": TWO, "d": TWO}}


def parted(name):
    """Five thresholds, of which two are of one part of the parameters, and one is of the other."""
    return {"l2_clip_norm": dict.fromkeys((*PARAMS, "c", "d"), 0.5) | {name: {"x": 0.5, "y": 0.5}}}


@pytest.mark.parametrize(
    ("before", "changes", "named"),
    [
        ({}, {"epsilon": 1.0}, "epsilon"),
        ({}, {"delta": 1e-4}, "delta"),
        ({}, {"batch_size": 8}, "batch_size"),
        ({}, {"steps": 5}, "steps"),
        ({}, {"l2_clip_norm": 0.6}, "l2_clip_norm"),
        ({}, {"l2_clip_norm": {"w": 0.5, "b": 0.25}}, "l2_clip_norm"),
        (NESTED | parted("c"), parted("d"), "l2_clip_norm"),
        (ADAPTIVE, {"l2_clip_norm": AdaptiveClipNorm(quantile=0.9)}, "l2_clip_norm"),
        (ADAPTIVE, {"l2_clip_norm": AdaptiveClipNorm(learning_rate=0.1)}, "l2_clip_norm"),
        (ADAPTIVE, {"l2_clip_norm": AdaptiveClipNorm(count_noise=9.0)}, "l2_clip_norm"),
        ({}, {"normalize": True}, "normalize"),
        ({}, {"accountant": "rdp"}, "accountant"),
        ({}, {"unit": "patient"}, "unit"),
        ({}, {"assumptions": ("nobody looks",)}, "assumptions"),
        ({}, {"microbatch_size": 8}, "microbatch_size"),
        ({}, {"sampling": Poisson(40)}, "sampling"),
        ({}, {"sampling": "allocation"}, "sampling"),
        ({"sampling": Poisson(40)}, {"sampling": Poisson(41)}, "sampling"),
        ({}, {"compute_dtype": "bfloat16"}, "compute_dtype, loss_fn"),
        (
            {"loss": lambda params, *row: loss_fn(params, *row[:2])},
            {"record_key": True},
            "record_key",
        ),
        ({}, {"noise": "banded", "bands": 2}, "bands"),
        ({"noise": "banded", "bands": 2}, {"bands": 3}, "bands"),
        ({}, {"secure": True, "key": None}, "secure"),
        ({}, of_users(), "the data"),
        (of_users(), {"records_per_user": 3}, "records_per_user"),
        (of_users(), {"users": np.where(USERS == 3, 4, USERS)}, "the data"),
        (of_users(), {"users": np.roll(USERS, 1)}, "the data"),
        ({}, PART, "the data"),
        (PART, {"wrt": {"b": True, "w": False}}, "the data"),
        ({}, {"data": (X + 1, Y)}, "the data"),
        ({}, {"params": PARAMS | {"w": jnp.ones(3)}}, "the data"),
        (PART, {"params": PARAMS | {"b": jnp.ones(())}}, "the data"),
    ],
)
def test_a_call_that_goes_on_differs_in_nothing_that_counts(
    begun, before, changes, named, tmp_path
):
    data, settings = begun(**before)
    kept = {"data": data, "settings": settings}
    resuming.unchanged(kept, tmp_path, *begun(**before))
    with pytest.raises(secrets.CannotResumeError, match=rf"{named}\b.* changed since"):
        resuming.unchanged(kept, tmp_path, *begun(**before | changes))


@pytest.mark.parametrize(
    ("name", "set_to"),
    [
        ("rbg", jax.default_prng_impl("rbg")),
        ("unsafe_rbg", jax.default_prng_impl("unsafe_rbg")),
        ("threefry2x32, not partitionable", jax.threefry_partitionable(False)),
    ],
)
def test_nor_in_the_generator_of_the_noise(begun, name, set_to):
    _, first = begun()
    with set_to:
        _, settings = begun(key=jax.random.key(1 << 40))
    assert (first["generator"], settings["generator"]) == (None, name)


@pytest.mark.slow
def test_under_a_runs_keys_a_result_is_that_of_its_own_arguments(tmp_path):
    first = fit(workdir=tmp_path, key=own_keys())
    same(fit(workdir=tmp_path, key=own_keys()).params, first.params)
    same(fit(key=own_keys()).params, first.params)
    for changes, named in (
        ({"epsilon": 0.1}, "epsilon changed"),
        ({"steps": 2}, "steps changed"),
        ({"data": (X + 1, Y)}, "the data or the initial parameters changed"),
    ):
        with pytest.raises(secrets.CannotResumeError, match=named):
            fit(workdir=tmp_path, key=own_keys(), **changes)
    with pytest.raises(secrets.CannotResumeError, match="the keys changed"):
        fit(workdir=tmp_path, key=secrets.derive(jax.random.key(6)))
    # Other labels are other trainings, and without its checkpoint one goes through the same steps.
    fit(workdir=tmp_path, key=own_keys(), label="second row", epsilon=0.1)
    shutil.rmtree(tmp_path / "checkpoints")
    same(fit(workdir=tmp_path, key=own_keys()).params, first.params)
    kept = "".join(path.read_text() for path in (tmp_path / "secret").iterdir())
    assert "key" not in kept.replace("record_key", "")
    storage.create_private(tmp_path / "secret" / "salt.json", {"salt": "00"})
    secrets.discard(tmp_path)
    assert [path.name for path in (tmp_path / "secret").iterdir()] == ["salt.json"]


def test_a_training_under_keys_goes_on_under_these_keys_alone(tmp_path):
    """Half an epoch of random allocation under other keys would take a quarter of the records twice."""
    of = {"sampling_probability": 1 / 6, "steps": 6}
    halves = (own_keys(), range(3)), (secrets.derive(jax.random.key(6)), range(3, 6))
    taken = np.zeros(4000)
    for keys, steps in halves:
        drawn = [*allocated_batches(4000, seed=keys.training("a").sampling, **of)]
        for step in steps:
            taken[drawn[step][0][drawn[step][1]]] += 1
    assert np.mean(taken == 2) == pytest.approx(0.25, abs=0.03)

    (tmp_path / "checkpoints" / "a").mkdir(parents=True)
    settings = {"label": "a"}
    for _ in range(2):
        resuming.check_training(tmp_path, "data", settings, own_keys().shown())
    with pytest.raises(secrets.CannotResumeError, match="the keys changed"):
        resuming.check_training(tmp_path, "data", settings, halves[1][0].shown())


@pytest.mark.slow
def test_under_another_version_whose_noise_differs_nothing_goes_on(tmp_path, monkeypatch):
    """The same keys would draw other noise for the same statistic: two releases for the price of one."""
    secrets.open_keys(ConfigDict({"seed": 0, "noise_seed": None}), tmp_path / "run")
    fit(workdir=tmp_path / "training", key=own_keys())
    monkeypatch.setattr(resuming, "_RANDOMNESS", resuming._RANDOMNESS + 1)
    for begin in (
        lambda: secrets.open_keys(ConfigDict({"seed": 0, "noise_seed": None}), tmp_path / "run"),
        lambda: fit(workdir=tmp_path / "training", key=own_keys()),
    ):
        with pytest.raises(secrets.CannotResumeError, match="draws other noise from its keys"):
            begin()


@pytest.mark.slow
def test_a_runs_keys_and_a_key_of_its_own_do_not_share_a_training(tmp_path):
    fit(workdir=tmp_path / "own")
    with pytest.raises(secrets.CannotResumeError, match="did not begin with these keys"):
        fit(workdir=tmp_path / "own", key=own_keys(), epsilon=0.1)
    fit(workdir=tmp_path / "run", key=own_keys())
    with pytest.raises(secrets.CannotResumeError, match="noise keys are gone"):
        fit(workdir=tmp_path / "run")


@pytest.mark.parametrize("name", ["keys.json", "finished.json"])
def test_a_training_with_a_key_of_its_own_is_known_without_checkpoints(tmp_path, name):
    storage.create_private(tmp_path / "secret" / name, {"data": "", "settings": {}})
    with pytest.raises(secrets.CannotResumeError, match="did not begin with these keys"):
        fit(workdir=tmp_path, key=own_keys())


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints", "model", "privacy.json"])
def test_what_a_training_left_does_not_go_on_without_its_key(tmp_path, left):
    (tmp_path / left).mkdir()
    with pytest.raises(secrets.CannotResumeError, match=rf"keys\.json is missing, but not {left}"):
        fit(workdir=tmp_path)


@pytest.mark.slow
def test_of_two_trainings_under_a_runs_keys_one_works_in_the_folder(tmp_path):
    # The run itself has the folder, and its trainings theirs.
    with storage.lock(tmp_path), storage.lock(tmp_path / "checkpoints" / "training"):
        with pytest.raises(storage.BusyError):
            fit(workdir=tmp_path, key=own_keys())
        fit(workdir=tmp_path, key=own_keys(), label="other")


@pytest.mark.quick_cases("nothing")
@pytest.mark.parametrize(
    ("left", "named"),
    [
        ("nothing", "whose result is gone: use a new workdir"),
        ("a file", "whose result is gone: use a new workdir"),
        ("a part", "its key is gone: restore the folder"),
    ],
    ids=["nothing", "a file", "a part"],
)
def test_a_finished_training_does_not_train_again(tmp_path, left, named):
    fit(workdir=tmp_path)
    last = tmp_path / "checkpoints" / "training" / "6"
    shutil.rmtree(last / "state" if left == "a part" else last)
    if left == "a file":
        last.write_text("")
    with pytest.raises((secrets.CannotResumeError, storage.StorageError), match=named):
        fit(workdir=tmp_path, key=dpx.secret_key())


def test_processes_with_other_arguments_are_refused_before_anything_is_kept(tmp_path, monkeypatch):
    """The other process clips to 1000: what it adds would have a thousandth of the noise."""

    def of_each(own):
        others = {"l2_clip_norm": [1000.0], "bands": 2} if "l2_clip_norm" in own else {}
        return [own, own | others]  # nor is any program that is compared another one

    monkeypatch.setattr(_processes, "of_each", of_each)
    with pytest.raises(ValueError, match="bands, l2_clip_norm must be the same in all"):
        fit(workdir=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_data_that_another_process_has_otherwise_are_refused(monkeypatch):
    assert resuming.digest_of_each([X]) == resuming.digest([X])
    monkeypatch.setattr(_processes, "of_each", lambda own: [own, resuming.digest([X + 1])])
    with pytest.raises(secrets.CannotResumeError, match="not the same in all processes"):
        resuming.digest_of_each([X])


def test_digests_tell_shapes_types_and_places_apart():
    x = np.arange(6, dtype=np.int32)
    shapes = [x], [x.reshape(2, 3)], [x.reshape(3, 2)], [x.astype(np.uint32)]
    kinds = (*shapes, [x[:3], x[3:]], [x[:2], x[2:]])
    assert len({resuming.digest(data) for data in kinds}) == len(kinds)


def test_keys_have_all_bits_of_their_entropy(monkeypatch):
    """A seed of 32 bits can be searched."""
    drawn = secrets._draw()
    assert len(bytes.fromhex(drawn["noise"])) == 8
    assert len(bytes.fromhex(drawn["sampling"])) == 32
    keys = np.array([jax.random.key_data(dpx.secret_key()) for _ in range(4)])
    assert len(np.unique(keys[:, 0])) == len(np.unique(keys[:, 1])) == 4
    monkeypatch.setattr(secrets.os, "urandom", lambda count: bytes(range(1, count + 1)))
    assert purposes.words_of(dpx.secret_key()).tobytes() == bytes(range(1, 9))


def test_a_log_goes_on_after_the_last_checkpoint_and_only_its_owner_reads_it(tmp_path):
    """No guarantee covers the losses; log.txt, to which they go too, has the same mode."""
    path = tmp_path / "metrics.jsonl"
    first = MetricLog(path, "training", 0, lambda *_: None)
    for step in (1, 2, 3):
        first.write({"step": step, "loss": 1.0, "epsilon": 0.1 * step})
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with path.open("a") as file:  # by a process that was killed while it wrote
        file.write('{"run": "training", "st')
    found = MetricLog(path, "training", 1, lambda *_: None)
    assert [record.step for record in found.history] == [1]
    assert [entry["step"] for entry in storage.read_lines(path)] == [1]
    assert path.stat().st_mode & 0o777 == 0o600  # written anew


def test_a_checkpoint_with_other_arrays_is_damaged(tmp_path, monkeypatch):
    state = jnp.zeros(3), (dpx.training.PrivatizeState(jax.random.key(0), jnp.int32(4)),)
    with contextlib.closing(checkpoints.Checkpoints(tmp_path / "kept")) as kept:
        kept.save(4, state)
    with contextlib.closing(checkpoints.Checkpoints(tmp_path / "kept")) as kept:
        assert kept.restore(state)[0] == 4
        monkeypatch.setattr(checkpoints, "_digest", lambda _: {"sha256": "of others"})
        with pytest.raises(storage.StorageError, match="cannot be read"):
            kept.restore(state)


def test_a_finished_training_keeps_a_digest_and_no_key(tmp_path):
    settings = {"label": "training", "steps": 3}
    for finished in (False, True):
        about = {"data": [X], "settings": settings}
        with secrets.of_training(jax.random.key(4), tmp_path, **about) as opened:
            assert opened.finished == finished
            kept = tmp_path / "secret" / "keys.json"
            assert kept.exists() != finished
            if not finished:  # a process that was killed between two calls leaves its copy
                shutil.copy(kept, tmp_path / "secret" / "tmp0.partial")
        found = [path.name for path in (tmp_path / "secret").iterdir()]
        assert found == ["finished.json"]
        assert {*storage.read_private(tmp_path / "secret" / "finished.json")} == {*about}


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
        (
            {"b": 1.0, "a": None},
            "^evaluate: a=None must be a number: return one, or leave the name out",
        ),
    ],
)
def test_an_evaluation_is_numbers_by_names_that_mean_nothing_else(found, named):
    """One called `l2_clip_norm` went to a log as what a guarantee covers."""
    with pytest.raises(ValueError, match=named):
        evaluated(found)


def test_flags_may_be_numpys_and_numbers_of_an_evaluation_are_floats():
    assert arguments.check_flag(np.True_, "normalize") is True
    found = evaluated({"a": np.float16(0.5), "b": jnp.ones(()), "c": 2})
    assert found == {"a": 0.5, "b": 1.0, "c": 2.0}
    assert all(type(value) is float for value in found.values())
