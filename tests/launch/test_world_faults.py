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
from zygote import Zygote

import dpx
from dpx import _storage as storage
from dpx.launch import cli, figures, records, report, run, sweep
from dpx.launch.experiment import Measure, Outcome
from dpx.training import checkpoints, keys

SOURCE = "configs/quickstart.py:tiny"
SETTINGS = {
    "data.held_out": 50, "data.limit": 0, "ngrams": (1,), "comparisons": True,
    "prior.budget_fraction": 0.0, "model.kind": "gru",
    "model.dim": 4, "train.steps": 4, "train.batch_size": 32, "train.microbatch_size": 32,
    "train.checkpoint_every": 1, "train.log_every": 1, "non_private.steps": 0,
}  # fmt: skip
PROGRESS = re.compile(r"^(dp_\w+: (step|compiling) |[\w.]+: started|\[\d+/\d+\] )")


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """A private data file."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "names.txt"
    words = ("".join(rng.choice(list("aeinrst"), rng.integers(2, 9))) for _ in range(300))
    path.write_text("\n".join(words) + "\n")
    return path


@pytest.fixture(scope="module")
def config(names):
    found = records.load_config(SOURCE)
    found.update_from_flattened_dict({**SETTINGS, "data.path": str(names)})
    return found


def go(config, folder):
    """The command line's part after its flags."""
    run.prepare(config, SOURCE, folder)
    return run.execute(config, folder)


class Killed(BaseException):
    """As sudden as a process's end can be within the process."""


def kill(*args, **kwargs):
    raise Killed


@pytest.fixture(scope="module")
def begun(config, tmp_path_factory):
    """A run that has its keys, and nothing else yet."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpx.ngram.fit", kill)
        with pytest.raises(Killed):
            go(config, folder)
    assert (folder / "secret" / "keys.json").exists()
    return folder


@pytest.fixture(scope="module")
def killed(config, begun, tmp_path_factory):
    """A run that was killed between its last checkpoint and its result."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    shutil.copytree(begun, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "save_model", kill)
        with pytest.raises(Killed):
            go(config, folder)
    assert list((folder / "checkpoints").rglob("commit_success.txt"))
    return folder


@pytest.fixture(scope="module")
def whole(config, begun, tmp_path_factory):
    """The same run, undisturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    shutil.copytree(begun, folder)
    record = go(config, folder)
    report.summarize(record)
    figures.draw([record], folder)
    return folder


def content(folder):
    """All that a run released: numbers, guarantees, log, samples and the model's arrays."""
    model = checkpoints.load_model(folder, template(folder))
    result = storage.read_json(folder / "result.json")
    return (
        result["metrics"],
        result["privacy"],
        result["notes"],
        (folder / "privacy.json").read_bytes(),
        log.read_bytes() if (log := folder / "metrics.jsonl").exists() else b"",
        [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(model)],
    )


def template(folder):
    from experiments.dp_transformer import corpus as corpora
    from experiments.dp_transformer import text_model

    config = records.read(folder).config
    loaded = records.load_config(SOURCE)
    loaded.update({name: value for name, value in config.items() if name != "noise_seed"})
    corpus = corpora.load(loaded)
    return {"params": text_model.build(loaded, corpus.public)[1]}


def assert_one_line(stderr, *words):
    lines = [line for line in stderr.splitlines() if not PROGRESS.match(line)]
    assert len(lines) == 1, stderr
    assert all(str(word) in lines[0] for word in words), (words, lines[0])


# ---------------------------------------------------------------------------------------------------------
# Damaged files

DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": lambda path: path.write_bytes(_flip(path.read_bytes())),
    "deleted": lambda path: path.unlink(),
    "brackets": lambda path: path.write_bytes(b"[]"),
}


def _flip(text):
    middle = len(text) // 2
    return text[:middle] + bytes([text[middle] ^ 1]) + text[middle + 1 :]


def _files(folder):
    found = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    return sorted(path.relative_to(folder) for path in found)


def _complaint(act, folder):
    """The one line that `act` ends in, or None."""
    try:
        act()
    except (ValueError, *cli.EXPECTED) as error:
        text = cli.in_one_line(error)
        assert str(folder) in text, text
        assert ": " in text, text
        return text
    return None


def _damage_an_unfinished_run(config, killed, whole, folder, name, damage):
    shutil.copytree(killed, folder)
    DAMAGES[damage](folder / name)
    if _complaint(lambda: go(config, folder), folder) is None:
        assert _without_log(content(folder)) == _without_log(content(whole)), (name, damage)
        return
    assert not (folder / "result.json").exists()
    # What was not damaged must be enough where the remedy is to delete it.
    if name.parts[0] in ("checkpoints", "metrics.jsonl"):
        remove = folder / name.parts[0]
        shutil.rmtree(remove) if remove.is_dir() else remove.unlink()
        go(config, folder)
        assert _without_log(content(folder)) == _without_log(content(whole)), (name, damage)


def _without_log(found):
    return (*found[:4], *found[5:])


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["config.json", "secret/keys.json"])
def test_a_damaged_record_of_an_unfinished_run_is_named(config, killed, tmp_path, name, damage):
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    DAMAGES[damage](folder / name)
    text = _complaint(lambda: go(config, folder), folder)
    assert text is not None
    assert name.rsplit("/", 1)[-1] in text
    assert not (folder / "result.json").exists()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_can_be_deleted(config, killed, whole, tmp_path):
    data = [path for path in _files(killed / "checkpoints") if "d" in path.parts]
    largest = max(data, key=lambda path: (killed / "checkpoints" / path).stat().st_size)
    name = (killed / "checkpoints" / largest).relative_to(killed)
    _damage_an_unfinished_run(config, killed, whole, tmp_path / "run", name, "flipped")


@pytest.mark.slow
def test_every_file_of_an_unfinished_run_damaged_in_turn(config, killed, whole, tmp_path):
    cases = [(name, damage) for name in _files(killed) for damage in DAMAGES]
    assert len(cases) > 50
    for number, (name, damage) in enumerate(cases):
        _damage_an_unfinished_run(config, killed, whole, tmp_path / str(number), name, damage)


@pytest.mark.slow
def test_every_file_of_a_finished_run_damaged_in_turn(config, whole, tmp_path):
    """A report says what the undamaged folder's says, or nothing."""
    pristine = report.summarize(records.read(whole))
    drawn = {".png", ".csv"}
    # A report reads neither checkpoints nor the model.
    names = [name for name in _files(whole) if len(name.parts) == 1]
    for number, (name, damage) in enumerate((n, d) for n in names for d in DAMAGES):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        DAMAGES[damage](folder / name)

        def act(folder=folder):
            record = go(config, folder)
            assert report.summarize(record) == pristine
            report.write(folder)

        complaint = _complaint(act, folder)
        if name.name in ("config.json", "privacy.json", "result.json"):
            assert complaint is not None, (name, damage)
        if name.name == "environment.json" or name.suffix in drawn:
            assert complaint is None, (name, damage, complaint)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["empty", "half", "flipped", "deleted"])
def test_a_damaged_model_is_not_loaded(whole, tmp_path, damage):
    pristine = content(whole)[-1]
    for number, name in enumerate(_files(whole / "model")):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        DAMAGES[damage](folder / "model" / name)
        found = []
        complaint = _complaint(lambda f=folder, g=found: g.append(content(f)[-1]), folder)
        assert complaint is not None or found == [pristine], (name, damage)


# ---------------------------------------------------------------------------------------------------------
# What is not ours


def test_links_and_open_folders_are_not_taken_for_secrets(config, begun, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    for number, plant in enumerate(
        (
            lambda secret: (shutil.rmtree(secret), secret.symlink_to(elsewhere)),
            lambda secret: secret.chmod(0o755),
            lambda secret: (secret / "keys.json").chmod(0o644),
            lambda secret: (
                shutil.move(secret / "keys.json", elsewhere / "keys.json"),
                (secret / "keys.json").symlink_to(elsewhere / "keys.json"),
            ),
            lambda secret: (shutil.rmtree(secret), secret.write_text("")),
        )
    ):
        folder = tmp_path / f"run{number}"
        shutil.copytree(begun, folder)
        plant(folder / "secret")
        text = _complaint(lambda f=folder: go(config, f), folder)
        assert text is not None
        assert "remove it" in text
    assert [path.name for path in elsewhere.iterdir()] == ["keys.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_secret_is_refused(config, begun, tmp_path):
    for number, part in enumerate(("secret", "secret/keys.json")):
        folder = tmp_path / str(number)
        shutil.copytree(begun, folder)
        os.chown(folder / part, 65534, 65534)
        text = _complaint(lambda f=folder: go(config, f), folder)
        assert text is not None
        assert "remove it" in text


@pytest.mark.parametrize("name", ["config.json", "environment.json"])
def test_a_link_in_place_of_a_partial_file_is_not_followed(config, tmp_path, monkeypatch, name):
    target, folder = tmp_path / "target", tmp_path / "run"
    target.write_text("precious")
    folder.mkdir()
    monkeypatch.setattr(storage.secrets, "token_hex", lambda count: "guessed")
    (folder / f"{name}.guessed.partial").symlink_to(target)
    text = _complaint(lambda: go(config, folder), folder)
    assert text is not None
    assert name in text
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
        text = cli.in_one_line(error.value)
        assert text.startswith(f"{path}: {os.strerror(code)}: ")
    assert storage.read_json(path) == {"a": 1}
    assert [found.name for found in tmp_path.iterdir()] == ["a.json"]


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, to be sized by its user."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", folder], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def remount(folder, options):
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


@pytest.mark.slow
def test_a_run_on_a_full_or_read_only_disk_ends_in_one_line_and_goes_on(
    begun, whole, names, disk, zygote
):
    folder = disk / "run"
    remount(disk, "size=64k")
    shutil.copytree(begun, folder)
    failed = 0
    for size in ("32k", "56k", "96k", "160k", "240k", "320k"):
        remount(disk, f"size={size}")
        status, stderr, _ = zygote.start("run", *arguments(names, folder), folder=folder)
        assert status in (0, 2), stderr
        assert not list(folder.glob("*.partial")), stderr
        if status:
            failed += 1
            assert_one_line(stderr, folder, ": ")
        assert (folder / "result.json").exists() or status == 2
    assert failed >= 3
    remount(disk, "size=4m,ro")
    status, stderr, _ = zygote.start("run", *arguments(names, folder), folder=folder)
    assert status == 2
    assert_one_line(stderr, folder, "writable")
    remount(disk, "size=4m,rw")
    status, stderr, _ = zygote.start("run", *arguments(names, folder), folder=folder)
    assert status == 0, stderr
    assert content(folder) == content(whole)


# ---------------------------------------------------------------------------------------------------------
# Kills and interrupts


@pytest.fixture(scope="module")
def zygote():
    with Zygote() as found:
        yield found


def arguments(names, folder):
    settings = {**SETTINGS, "data.path": names}
    flags = (f"--config.{name}={value}" for name, value in settings.items())
    return [f"--config={SOURCE}", *flags, f"--workdir={folder}"]


def _kill_and_go_on(zygote, begun, whole, module, given, folder, moments, compare):
    """Kills a command at each moment, repeats it, and counts the kills that hit."""
    hit = 0
    for moment in moments:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(begun, folder)
        status, stderr, _ = zygote.start(module, *given, folder=folder, kill_at=moment)
        assert status in (-signal.SIGKILL, 0), stderr
        hit += status == -signal.SIGKILL
        status, stderr, _ = zygote.start(module, *given, folder=folder)
        assert status == 0, (moment, stderr)
        assert compare(folder) == compare(whole), moment
        assert not list(folder.rglob("keys.json"))
    return hit


@pytest.mark.slow
@pytest.mark.parametrize(
    "count", [2, pytest.param(20, marks=pytest.mark.slow)], ids=lambda count: f"{count}_kills"
)
def test_a_run_killed_at_any_moment_goes_on_to_the_same_result(
    begun, whole, names, tmp_path, zygote, count
):
    folder = tmp_path / "run"
    given = arguments(names, folder)
    shutil.copytree(begun, folder)
    status, stderr, operations = zygote.start("run", *given, folder=folder)
    assert status == 0, stderr
    assert content(folder) == content(whole)
    moments = np.linspace(3, operations - 2, count + 2).astype(int)[1:-1].tolist()
    hit = _kill_and_go_on(zygote, begun, whole, "run", given, folder, moments, content)
    print(f"{hit} of {count} kills among {operations} file operations, all bitwise equal")
    assert hit >= 0.9 * count


@pytest.fixture(scope="module")
def begun_sweep(config, tmp_path_factory):
    """A sweep whose points have their keys, and its config file."""
    folder = tmp_path_factory.mktemp("begun_sweep") / "sweep"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpx.ngram.fit", kill)
        for point in _points(config):
            own = sweep.point_config(SOURCE, point)
            run.prepare(own, SOURCE, folder / sweep.point_name(point))
            with pytest.raises(Killed):
                run.execute(own, folder / sweep.point_name(point))
    return folder


def _points(config):
    return sweep.grid(SOURCE, _axes(config))


def _axes(config):
    settings = {**SETTINGS, "data.path": config.data.path, "seed": "0,1"}
    return [f"{name}={value}" for name, value in settings.items() if name != "ngrams"]


def _sweep_arguments(config, folder):
    return [
        f"--config={SOURCE}",
        *(f"--set={axis}" for axis in _axes(config)),
        f"--workdir={folder}",
    ]


def _sweep_content(folder):
    rows = [
        (path.parent.name, *_result(path.parent)) for path in sorted(folder.glob("*/result.json"))
    ]
    return rows, (folder / "report.md").read_text()


def _result(folder):
    result = storage.read_json(folder / "result.json")
    texts = [(folder / name).read_bytes() for name in ("privacy.json", "metrics.jsonl")]
    return result["metrics"], result["privacy"], result["notes"], *texts


@pytest.mark.slow
def test_a_sweep_killed_at_any_moment_goes_on_to_the_same_result(
    config, begun_sweep, tmp_path, zygote
):
    folder, whole = tmp_path / "sweep", tmp_path / "whole"
    shutil.copytree(begun_sweep, whole)
    status, stderr, operations = zygote.start(
        "sweep", *_sweep_arguments(config, whole), folder=whole
    )
    assert status == 0, stderr
    assert len(_sweep_content(whole)[0]) == 2
    moments = np.linspace(3, operations - 2, 22).astype(int)[1:-1].tolist()
    given = _sweep_arguments(config, folder)
    hit = _kill_and_go_on(
        zygote, begun_sweep, whole, "sweep", given, folder, moments, _sweep_content
    )
    print(f"{hit} of 20 kills among {operations} file operations, all bitwise equal")
    assert hit >= 18


@pytest.mark.slow
def test_an_interrupt_ends_in_one_line_and_the_run_goes_on(begun, whole, names, tmp_path, zygote):
    folder = tmp_path / "run"
    shutil.copytree(begun, folder)
    process = subprocess.Popen(
        command("run", *arguments(names, folder)), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    first = process.stderr.readline() + process.stderr.readline()  # it has begun to train
    process.send_signal(signal.SIGINT)
    stderr = first + process.communicate(timeout=120)[1]
    assert process.returncode == 130, stderr
    assert_one_line(stderr, "interrupted", "goes on")
    status, stderr, _ = zygote.start("run", *arguments(names, folder), folder=folder)
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


@pytest.mark.slow
def test_of_two_processes_on_one_fresh_folder_one_runs(names, tmp_path):
    """From the first look at the folder on: the claims, locks and keys of two processes."""
    script = (
        "import sys, time, pathlib; from dpx import _storage as storage\n"
        "from dpx.launch import records, run; from dpx.training import keys\n"
        "config = records.load_config(sys.argv[1]); config.data.path = sys.argv[2]\n"
        "class Experiment:\n"
        "    validate = staticmethod(lambda config: None)\n"
        "    def run(config, workdir):\n"
        "        words = keys.open_keys(config, workdir).seed('draw').entropy\n"
        "        with (workdir / 'drawn').open('a') as file: file.write(f'{words}\\n')\n"
        "        time.sleep(0.02)\n"
        "        raise storage.StorageError('as if killed')\n"
        "records.experiment = lambda config: Experiment\n"
        "print('ready', flush=True)\n"
        "for line in sys.stdin:\n"
        "    folder, status = pathlib.Path(line.strip()), 'ran'\n"
        "    try: run.prepare(config, sys.argv[1], folder); run.execute(config, folder)\n"
        "    except storage.BusyError: status = 'busy'\n"
        "    except storage.StorageError: pass\n"
        "    print(status, flush=True)\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, SOURCE, names],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    ended = []
    for race in range(200):
        folder = tmp_path / str(race)
        for process in processes:
            process.stdin.write(f"{folder}\n")
            process.stdin.flush()
        ended += [process.stdout.readline().strip() for process in processes]
        drawn = (folder / "drawn").read_text().splitlines()
        assert len(set(drawn)) == 1, race
    for process in processes:
        process.stdin.close()
        process.wait()
    print({status: ended.count(status) for status in set(ended)})
    assert set(ended) <= {"ran", "busy"}


@pytest.mark.slow
def test_a_second_process_ends_in_one_line(config, begun, names, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(begun, folder)
    with storage.lock(folder):
        ended = call("run", *arguments(names, folder))
    assert ended.returncode == 2
    assert_one_line(ended.stderr, folder, "in use by another process")


def test_two_sweeps_share_the_points_of_a_folder(tmp_path, monkeypatch, capsys):
    source = "configs/noisy_head.py:low_dim,tiny"
    points = sweep.grid(source, ["seed=0,1,2"])
    monkeypatch.setattr(sweep, "_PATIENCE", 0.01)
    execute, ran = run.execute, []
    other = storage.lock(tmp_path / "seed=1")
    outcome = Outcome([Measure("a", "b", 1.0)], _plain(), {"a": _plain()}, synthetic=True)
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


def _plain():
    return dpx.PrivacyGuarantee(1.0, 1e-5, dpx.privacy.ADD_OR_REMOVE_ONE, "name", "test")


@pytest.mark.slow
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
    transform = dpx.privatize(
        l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=2, key=jax.random.key(0)
    )
    state = (params, (transform.init(params),))
    with contextlib.closing(checkpoints.Checkpoints(tmp_path)) as saved:
        saved.save(1, state)
    with contextlib.closing(checkpoints.Checkpoints(tmp_path)) as saved:
        assert saved.restore(state)[0] == 1
    digest = checkpoints._digest
    with (
        monkeypatch.context() as patch,
        contextlib.closing(checkpoints.Checkpoints(tmp_path)) as other,
    ):
        patch.setattr(
            checkpoints, "_digest", lambda kept: digest(jax.tree.map(lambda x: x + 1, kept))
        )
        other.save(2, state)
    with (
        contextlib.closing(checkpoints.Checkpoints(tmp_path)) as saved,
        pytest.raises(storage.StorageError, match=r"cannot be read .* delete it"),
    ):
        saved.restore(state)
