"""What the world does to a run: kills, interrupts, full disks, damaged files, links, two terminals.

Each ends in one line that names the file and says what to do, or in the result, bit for bit, that an
undisturbed run with the same noise key has.
"""

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from command_line import ROOT, call, command
from own_runs import config_of, plain
from zygote import Zygote

import dpx
from dpx import _storage as storage
from dpx.runs import cli, figures, records, report, run, sweep
from dpx.runs.experiment import Measure, Outcome
from dpx.training import checkpoints, keys
from experiments.dp_transformer import corpus as corpora
from experiments.dp_transformer import text_model

SOURCE = "configs/quickstart.py:tiny"
SETTINGS = {
    "data.held_out": 50, "data.limit": 0, "ngrams": (1,), "comparisons": True,
    "prior.budget_fraction": 0.0, "model.kind": "gru",
    "model.dim": 4, "train.steps": 4, "train.batch_size": 32, "train.microbatch_size": 32,
    "train.checkpoint_every": 1, "train.log_every": 1, "non_private.steps": 0,
}  # fmt: skip
KILLS = 20
PROGRESS = re.compile(r"^(dp_\w+: (step|compiling) |[\w.]+: started|\[\d+/\d+\] )")


@pytest.fixture(scope="module")
def zygote():
    with Zygote() as found:
        yield found


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """The overrides of all runs, on a private data file."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "names.txt"
    words = ("".join(rng.choice(list("aeinrst"), rng.integers(2, 9))) for _ in range(300))
    path.write_text("\n".join(words) + "\n")
    return {**SETTINGS, "data.path": str(path)}


@pytest.fixture(scope="module")
def config(settings):
    return config_of(SOURCE, **settings)


def go(config, folder):
    """The command line's part after its flags."""
    run.prepare(config, SOURCE, folder)
    return run.execute(config, folder)


class Killed(BaseException):
    """As sudden as a process's end can be within the process."""


@contextlib.contextmanager
def killed_at(*place):
    """Where a process is killed that gets to a function."""

    def kill(*args, **kwargs):
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*place, kill)
        with pytest.raises(Killed):
            yield


@pytest.fixture(scope="module")
def begun(config, tmp_path_factory):
    """A run that has its keys, and nothing else yet."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    with killed_at("dpx.ngram.fit"):
        go(config, folder)
    assert (folder / "secret" / "keys.json").exists()
    return folder


@pytest.fixture(scope="module")
def killed(config, begun, tmp_path_factory):
    """A run that was killed between its last checkpoint and its result."""
    folder = shutil.copytree(begun, tmp_path_factory.mktemp("killed") / "run")
    with killed_at(checkpoints, "save_model"):
        go(config, folder)
    assert list((folder / "checkpoints").rglob("commit_success.txt"))
    return folder


@pytest.fixture(scope="module")
def whole(config, begun, tmp_path_factory):
    """The same run, undisturbed."""
    folder = shutil.copytree(begun, tmp_path_factory.mktemp("whole") / "run")
    record = go(config, folder)
    report.summarize(record)
    figures.draw([record], folder)
    return folder


def result(folder):
    """The numbers, guarantees and notes of a run, and its log."""
    found = storage.read_json(folder / "result.json")
    log = folder / "metrics.jsonl"
    texts = (folder / "privacy.json").read_bytes(), log.read_bytes() if log.exists() else b""
    return found["metrics"], found["privacy"], found["notes"], *texts


def content(folder):
    """All that a run released, with the model's arrays."""
    config = records.read(folder).config
    loaded = records.load_config(SOURCE)
    loaded.update({name: value for name, value in config.items() if name != "noise_seed"})
    template = {"params": text_model.build(loaded, corpora.load(loaded).public)[1]}
    model = checkpoints.load_model(folder, template)
    return *result(folder), [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(model)]


def assert_one_line(stderr, *words):
    (line,) = [line for line in stderr.splitlines() if not PROGRESS.match(line)]
    assert all(str(word) in line for word in words), (words, line)


# ---------------------------------------------------------------------------------------------------------
# Damaged files


def flipped(path):
    text = bytearray(path.read_bytes())
    text[len(text) // 2] ^= 1
    path.write_bytes(text)


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": flipped,
    "deleted": lambda path: path.unlink(),
    "brackets": lambda path: path.write_bytes(b"[]"),
}


def complaint(folder, act, *arguments):
    """The one line that a call ends in, or None."""
    try:
        act(*arguments)
    except (ValueError, *cli.EXPECTED) as error:
        text = cli.in_one_line(error)
        assert str(folder) in text, text
        assert ": " in text, text
        return text
    return None


NEEDED = ("config.json", "keys.json", "privacy.json", "result.json")


@pytest.mark.slow
@pytest.mark.parametrize("state", ["killed", "whole"])
def test_every_file_of_a_run_damaged_in_turn(config, whole, tmp_path, request, state):
    """A run goes on, is read and is reported as if nothing were damaged, or ends in a line with its name."""

    def released(folder):
        told = report.summarize(go(config, folder))
        if state == "whole":
            report.write(folder)
        *found, _, model = content(folder)
        return told, found, model

    left = request.getfixturevalue(state)
    pristine = released(shutil.copytree(whole, tmp_path / "whole"))
    files = [path for path in left.rglob("*") if path.is_file() and path.stat().st_size]
    assert len(files) > 10
    for name in sorted(path.relative_to(left) for path in files):
        for damage in DAMAGES:
            folder, found = shutil.copytree(left, tmp_path / "run"), []
            DAMAGES[damage](folder / name)
            said = complaint(folder, lambda f=folder, g=found: g.append(released(f)))
            if said is None:
                assert found == [pristine], (name, damage)
                assert name.name not in NEEDED, damage
            else:
                assert name.name != "environment.json", said
                assert name.suffix not in (".png", ".csv"), said
                assert name.name in said or state == "whole" or "checkpoints" in name.parts, said
            # What was not damaged must be enough where the remedy is to delete it.
            if state == "killed" and said and name.parts[0] in ("checkpoints", "metrics.jsonl"):
                assert not (folder / "result.json").exists()
                remove = folder / name.parts[0]
                shutil.rmtree(remove) if remove.is_dir() else remove.unlink()
                assert released(folder) == pristine, (name, damage)
            shutil.rmtree(folder)


# ---------------------------------------------------------------------------------------------------------
# What is not ours


def moved(path, elsewhere):
    shutil.move(path, elsewhere / path.name)
    path.symlink_to(elsewhere / path.name)


root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.mark.parametrize(
    "plant",
    [
        moved,
        lambda secret, elsewhere: moved(secret / "keys.json", elsewhere),
        lambda secret, elsewhere: secret.chmod(0o755),
        lambda secret, elsewhere: (secret / "keys.json").chmod(0o644),
        lambda secret, elsewhere: (shutil.rmtree(secret), secret.write_text("")),
        pytest.param(lambda secret, elsewhere: os.chown(secret, 65534, 65534), marks=root),
        pytest.param(
            lambda secret, elsewhere: os.chown(secret / "keys.json", 65534, 65534), marks=root
        ),
    ],
)
def test_links_and_open_folders_are_not_taken_for_secrets(config, begun, tmp_path, plant):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder = shutil.copytree(begun, tmp_path / "run")
    plant(folder / "secret", tmp_path / "elsewhere")
    said = complaint(folder, go, config, folder)
    assert said is not None
    assert "remove it" in said


@pytest.mark.parametrize("name", ["config.json", "environment.json"])
def test_a_link_in_place_of_a_partial_file_is_not_followed(config, tmp_path, monkeypatch, name):
    target, folder = tmp_path / "target", tmp_path / "run"
    target.write_text("precious")
    folder.mkdir()
    monkeypatch.setattr(storage.secrets, "token_hex", lambda count: "guessed")
    (folder / f"{name}.guessed.partial").symlink_to(target)
    said = complaint(folder, go, config, folder)
    assert said is not None
    assert name in said
    assert target.read_text() == "precious"
    assert not (folder / "config.json").exists()


# ---------------------------------------------------------------------------------------------------------
# Disks


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_disk_that_takes_no_more_leaves_nothing_half_written(tmp_path, monkeypatch, code):
    path = tmp_path / "a.json"
    storage.write_json(path, {"a": 1})

    def refuse(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    for write in (storage.write_json, storage.create_private):
        with pytest.raises(OSError, match=re.escape(os.strerror(code))) as error:
            write(path, {"a": 2})
        assert cli.in_one_line(error.value).startswith(f"{path}: {os.strerror(code)}: ")
    assert storage.read_json(path) == {"a": 1}
    assert [found.name for found in tmp_path.iterdir()] == ["a.json"]


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, to be sized by its user."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.slow
def test_a_run_on_a_full_or_read_only_disk_ends_in_one_line_and_goes_on(
    begun, whole, settings, disk, zygote
):
    folder = disk / "run"

    def on(options):
        subprocess.run(["mount", "-o", f"remount,{options}", disk], check=True)
        if folder.exists():
            return zygote.start("run", *arguments(settings, folder), folder=folder)[:2]
        return shutil.copytree(begun, folder)

    on("size=64k")
    failed = 0
    for size in ("32k", "56k", "96k", "160k", "240k", "320k"):
        status, stderr = on(f"size={size}")
        assert status in (0, 2), stderr
        assert not list(folder.glob("*.partial")), stderr
        if status:
            failed += 1
            assert_one_line(stderr, folder, ": ")
        assert (folder / "result.json").exists() or status == 2
    assert failed >= 3
    status, stderr = on("size=4m,ro")
    assert status == 2
    assert_one_line(stderr, folder, "writable")
    status, stderr = on("size=4m,rw")
    assert status == 0, stderr
    assert content(folder) == content(whole)


# ---------------------------------------------------------------------------------------------------------
# Kills and interrupts


def arguments(settings, folder):
    flags = (f"--config.{name}={value}" for name, value in settings.items())
    return [f"--config={SOURCE}", *flags, f"--workdir={folder}"]


def axes(settings):
    values = {**settings, "seed": "0,1"}
    return [f"{name}={value}" for name, value in values.items() if name != "ngrams"]


@pytest.fixture(scope="module")
def begun_sweep(settings, tmp_path_factory):
    """A sweep whose points have their keys."""
    folder = tmp_path_factory.mktemp("begun_sweep") / "sweep"
    for point in sweep.grid(SOURCE, axes(settings)):
        with killed_at("dpx.ngram.fit"):
            go(sweep.point_config(SOURCE, point), folder / sweep.point_name(point))
    return folder


def content_of_sweep(folder):
    found = sorted(path.parent for path in folder.glob("*/result.json"))
    assert len(found) == 2
    return [(path.name, *result(path)) for path in found], (folder / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("module", ["run", "sweep"])
def test_a_command_killed_at_any_moment_goes_on_to_the_same_result(
    module, request, settings, tmp_path, zygote
):
    begun = request.getfixturevalue("begun" if module == "run" else "begun_sweep")
    released = content if module == "run" else content_of_sweep
    folder = shutil.copytree(begun, tmp_path / "run")
    given = arguments(settings, folder)
    if module == "sweep":
        given = [given[0], given[-1], *(f"--set={axis}" for axis in axes(settings))]
    status, stderr, operations = zygote.start(module, *given, folder=folder)
    assert status == 0, stderr
    whole, hit = released(folder), 0
    for moment in np.linspace(3, operations - 2, KILLS + 2).astype(int)[1:-1].tolist():
        shutil.rmtree(folder)
        shutil.copytree(begun, folder)
        status, stderr, _ = zygote.start(module, *given, folder=folder, kill_at=moment)
        assert status in (-signal.SIGKILL, 0), stderr
        hit += status == -signal.SIGKILL
        status, stderr, _ = zygote.start(module, *given, folder=folder)
        assert status == 0, (moment, stderr)
        assert released(folder) == whole, moment
        assert not list(folder.rglob("keys.json"))
    print(f"{hit} of {KILLS} kills among {operations} file operations, all bitwise equal")
    assert hit >= 0.9 * KILLS


@pytest.mark.slow
def test_an_interrupt_ends_in_one_line_and_the_run_goes_on(
    begun, whole, settings, tmp_path, zygote
):
    folder = shutil.copytree(begun, tmp_path / "run")
    given = arguments(settings, folder)
    process = subprocess.Popen(command("run", *given), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    first = process.stderr.readline() + process.stderr.readline()  # it has begun to train
    process.send_signal(signal.SIGINT)
    stderr = first + process.communicate(timeout=120)[1]
    assert process.returncode == 130, stderr
    assert_one_line(stderr, "interrupted", "goes on")
    status, stderr, _ = zygote.start("run", *given, folder=folder)
    assert status == 0, stderr
    assert content(folder) == content(whole)


# ---------------------------------------------------------------------------------------------------------
# Two processes


@pytest.mark.parametrize("races", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_of_two_runs_on_one_fresh_folder_both_have_one_key(config, tmp_path, races):
    """Without any lock around it: a key is created once, and the other process reads it."""
    for race in range(races):
        folder, found, barrier = tmp_path / str(race), [], threading.Barrier(4)

        def draw(folder=folder, found=found, barrier=barrier):
            barrier.wait()
            opened = keys.open_keys(config, folder)
            words = jax.random.key_data(opened.noise("release")).tolist()
            found.append((words, opened.seed("draw").entropy))

        threads = [threading.Thread(target=draw) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert len(found) == 4
        assert all(key == found[0] for key in found), race


RACER = """
import sys, time, pathlib
from dpx import _storage as storage
from dpx.runs import records, run
from dpx.training import keys

config = records.load_config(sys.argv[1])
config.data.path = sys.argv[2]

class Experiment:
    validate = staticmethod(lambda config: None)
    def run(config, workdir):
        with (workdir / 'drawn').open('a') as file:
            file.write(f"{keys.open_keys(config, workdir).seed('draw').entropy}\\n")
        time.sleep(0.02)
        raise storage.StorageError('as if killed')

records.experiment = lambda config: Experiment
print('ready', flush=True)
for line in sys.stdin:
    folder, status = pathlib.Path(line.strip()), 'ran'
    try:
        run.prepare(config, sys.argv[1], folder)
        run.execute(config, folder)
    except storage.BusyError:
        status = 'busy'
    except storage.StorageError:
        pass
    print(status, flush=True)
"""


@pytest.mark.slow
def test_of_two_processes_on_one_fresh_folder_one_runs(settings, tmp_path):
    """From the first look at the folder on: the claims, locks and keys of two processes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    given = [sys.executable, "-c", RACER, SOURCE, settings["data.path"]]
    processes = [subprocess.Popen(given, cwd=ROOT, **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    ended = []
    for race in range(200):
        for process in processes:
            process.stdin.write(f"{tmp_path / str(race)}\n")
            process.stdin.flush()
        ended += [process.stdout.readline().strip() for process in processes]
        assert len(set((tmp_path / str(race) / "drawn").read_text().splitlines())) == 1, race
    for process in processes:
        process.communicate()
    print({status: ended.count(status) for status in set(ended)})
    assert set(ended) <= {"ran", "busy"}


@pytest.mark.slow
def test_a_second_process_ends_in_one_line(begun, settings, tmp_path):
    folder = shutil.copytree(begun, tmp_path / "run")
    with storage.lock(folder):
        ended = call("run", *arguments(settings, folder))
    assert ended.returncode == 2
    assert_one_line(ended.stderr, folder, "in use by another process")


def test_two_sweeps_share_the_points_of_a_folder(tmp_path, monkeypatch, capsys):
    source = "noisy_head:low_dim,tiny"
    points = sweep.grid(source, ["seed=0,1,2"])
    monkeypatch.setattr(sweep, "_PATIENCE", 0.01)
    execute, ran = run.execute, []
    other = storage.lock(tmp_path / "seed=1")
    outcome = Outcome([Measure("a", "b", 1.0)], plain(), {"a": plain()}, synthetic=True)
    monkeypatch.setattr("experiments.noisy_head.excess_risk.run", lambda config, workdir: outcome)

    def watching(config, workdir):
        record = execute(config, workdir)
        ran.append(config.seed)
        # The other process lets go of its point when all others are done.
        if len(ran) == 2:
            other.__exit__(None, None, None)
        return record

    for point in points:
        run.prepare(sweep.point_config(source, point), source, tmp_path / sweep.point_name(point))
    other.__enter__()
    monkeypatch.setattr(run, "execute", watching)
    assert sweep.run_points(source, points, tmp_path) == []
    assert ran == [0, 2, 1]
    assert "runs in another process" in capsys.readouterr().err
    assert len(records.read_all(tmp_path)) == 3


def test_a_log_cut_off_in_its_last_line_is_read_and_another_is_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [entry["step"] for entry in storage.read_lines(path)] == [1, 2]
    for text in ('{"step": 1}\n{"st\n', "[]\n", "3\n"):
        path.write_text(text)
        with pytest.raises(storage.StorageError, match="is damaged: delete it"):
            storage.read_lines(path)


@pytest.mark.slow
def test_a_checkpoint_of_other_arrays_than_were_written_is_refused(tmp_path, monkeypatch):
    """What TensorStore cannot notice: whole files that hold something else."""
    params = {"w": np.arange(3.0)}
    options = {"l2_clip_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 2}
    state = (params, (dpx.privatize(**options, key=jax.random.key(0)).init(params),))
    digest = checkpoints._digest

    def changed(kept):
        return digest(jax.tree.map(lambda x: x + 1, kept))

    def opened():
        return contextlib.closing(checkpoints.Checkpoints(tmp_path))

    with opened() as saved:
        saved.save(1, state)
    with opened() as saved:
        assert saved.restore(state)[0] == 1
    with monkeypatch.context() as patch, opened() as other:
        patch.setattr(checkpoints, "_digest", changed)
        other.save(2, state)
    with (
        opened() as saved,
        pytest.raises(storage.StorageError, match=r"cannot be read .* delete it"),
    ):
        saved.restore(state)
