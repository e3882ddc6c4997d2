"""Sweeps over several processes, Ray and Slurm: every point once, under one key, whoever dies."""

import contextlib
import importlib.util
import json
import os
import pty
import re
import signal
import subprocess
import time
from concurrent.futures import Future

import pytest
from command_line import ROOT, call, command
from own_runs import own, rows_of, sweep_command

from dpx import _storage as storage
from dpx.release.executors import WorkerDiedError
from dpx.runs import points, records, report, sweep, workers
from dpx.runs.progress import Progress
from dpx.training import keys

# It notes the secret keys that it would use on private data, and draws from the public seed.
EXPERIMENT = """
import os
import time
import jax
import dpx
from dpx.runs.experiment import Measure, Outcome
from dpx.training import keys

def validate(config): pass

def plan(config): return {}

def run(config, workdir):
    opened = keys.open_keys(config, workdir)
    with (workdir / "keys_used").open("a") as file:
        file.write(f"{opened.seed('draw').entropy}\\n")
    os.write(2, b"as compilers print")
    time.sleep(config.seconds)
    if len((workdir / "keys_used").read_text().splitlines()) <= config.fails:
        raise RuntimeError("planted")
    noise = keys.open_keys(config, workdir, synthetic=True).noise("a")
    spent = dpx.PrivacyGuarantee(config.epsilon, 1e-6, dpx.privacy.ADD_OR_REMOVE_ONE, "row", "test")
    value = float(jax.random.normal(noise))
    return Outcome([Measure("a", "error", value)], spent, {"a": spent}, synthetic=True, headline_row="a")
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return own(tmp_path_factory.mktemp("own"), EXPERIMENT, seconds=0.0, fails=0)


def grid_of(source, *axes):
    return sweep.grid(source, list(axes))


def keys_used(folder):
    """By point, in the order of the attempts."""
    return {path.parent.name: path.read_text().split() for path in folder.glob("*/keys_used")}


class Mortal:
    """Two workers, of which those that run the points in `dying` die, once for each time they stand there."""

    size = 2

    def __init__(self, dying=()):
        self.dying, self.most, self.jobs = list(dying), 0, []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.left = True

    def submit(self, attempt, task, quiet):
        job = Future()
        job.waits = 2
        job.done = lambda: job.waits <= 0 or bool(setattr(job, "waits", job.waits - 1))
        if task.name in self.dying:
            self.dying.remove(task.name)
            job.set_exception(WorkerDiedError("the worker ended with status -9"))
        else:
            assert quiet
            job.set_result(attempt(task, quiet=quiet))
        self.jobs.append(job)
        self.most = max(self.most, sum(job.waits > 0 for job in self.jobs))
        return job


def test_a_point_whose_worker_dies_is_tried_once_more(source, tmp_path, capsys):
    pool = Mortal(["seed=1", "seed=2", "seed=2"])
    failed = sweep.run_points(source, grid_of(source, "seed=0,1,2,3"), tmp_path, pool)
    assert failed == [("seed=2", "WorkerDiedError: the worker ended with status -9")]
    assert len(pool.jobs) == 6
    assert pool.most == 2
    assert pool.left
    assert [record.config["seed"] for record in records.read_all(tmp_path)] == [0, 1, 3]
    assert "3 of 4 done, 1 failed" in capsys.readouterr().err


@pytest.mark.parametrize(("fails", "error"), [(1, None), (2, "RuntimeError: planted")])
def test_a_failed_point_is_tried_again_under_its_key(source, tmp_path, fails, error):
    found = grid_of(source, f"fails={fails}")
    failed = sweep.run_points(source, found, tmp_path, Mortal())
    folder = tmp_path / f"fails={fails}"
    assert [text for _, text in failed] == [error] * (error is not None)
    assert "planted" in (folder / points.LOG).read_text()
    assert (folder / points.LOG).stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.rglob("*.png"))
    if failed:  # another command goes on, under the same key still
        assert sweep.run_points(source, found, tmp_path) == []
    (used,) = keys_used(tmp_path).values()
    assert len(used) == fails + 1
    assert len(set(used)) == 1
    assert not (folder / "secret").exists()


def test_a_quiet_attempt_prints_into_the_log_of_its_point(tmp_path, source, capfd):
    task = points.Task(source, {"fails": 1}, str(tmp_path))
    assert points.attempt(task, quiet=True) == ("failed", "RuntimeError: planted")
    assert capfd.readouterr() == ("", "")
    log = (tmp_path / "fails=1" / points.LOG).read_text()
    assert re.match(r"host \S+, process \d+\n\S+mine\.py: started", log)
    assert "as compilers print" in log
    os.write(2, b"still here")
    assert capfd.readouterr().err == "still here"


def test_shards_are_disjoint_and_whole(source):
    found = grid_of(source, "seed=0,1,2,3,4,5,6")
    shards = [sweep.shard(found, f"{number}/3") for number in (1, 2, 3)]
    assert [len(part) for part in shards] == [3, 2, 2]
    assert sorted(point["seed"] for part in shards for point in part) == list(range(7))
    assert sweep.shard(found, "") == found
    for text in ("0/3", "4/3", "1", "1/0", "-1/3", "a/b"):
        with pytest.raises(ValueError, match=f"--shard={text} must be I/N"):
            sweep.shard([], text)


def test_a_report_reads_after_it_has_the_folder(source, tmp_path, monkeypatch):
    """Of two sweeps that end together, the one that writes last must not write what it read before."""
    found = grid_of(source, "seed=0,1")
    sweep.run_points(source, found[:1], tmp_path)
    lock = storage.lock

    def slow(folder, **options):
        if folder == tmp_path:
            sweep.run_points(source, found[1:], tmp_path)
        return lock(folder, **options)

    monkeypatch.setattr(storage, "lock", slow)
    report.write(tmp_path)
    assert len(rows_of(tmp_path)) == 2


def test_executors_that_are_not_there_are_named(tmp_path, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(workers.importlib, "import_module", missing)
    install = r"in the clone of dpx, pip install -e \"\.\[sweep\]\""
    for executor, size, options, words in (
        ("dask", 1, (), "--executor=dask must be one of local, ray, slurm"),
        ("local", 0, (), "--workers=0 must be at least 1"),
        ("local", 1, ["a=b"], "must come with --executor=slurm"),
        ("ray", 2, (), f"must have the package ray: {install}"),
        ("slurm", 2, (), f"must have the package submitit: {install}"),
    ):
        with pytest.raises(ValueError, match=words):
            workers.choose(executor, size, tmp_path, options)
    monkeypatch.undo()
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="--executor=slurm must be started where sbatch is"):
        workers.choose("slurm", 2, tmp_path)
    for option, words in (("partition", "an option of"), ("hours=3", "options of")):
        with pytest.raises(ValueError, match=f"--slurm={option} must be {words} submitit"):
            workers.Slurm(2, tmp_path, [option], cluster="local")


def test_the_table_shows_what_is_done_and_what_is_left(source, tmp_path, capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    sweep.run_points(source, grid_of(source, "seed=0,1"), tmp_path)
    done = {f"seed={record.config['seed']}": record for record in records.read_all(tmp_path)}
    progress = Progress(5, 2, live=True)
    for number, name in enumerate(done, start=1):
        progress.begins(number, name)
    clock[0] = 40.0
    for name, record in done.items():
        progress.done(name, record)
    progress.begins(3, "seed=2")
    progress.failed(3, "seed=2", "RuntimeError: planted", again=True)
    progress.begins(4, "seed=3")
    clock[0] = 70.0
    ends = sorted(done, key=lambda name: done[name].metrics["a/error"])
    low, high = (f"{done[name].metrics['a/error']:.4g} ({name})" for name in ends)
    assert progress.table() == [
        f"2 of 5 done, 1 running, 1 failed; a/error {low} to {high}; about 60 s left",
        "  running  seed=3  30 s",
        "  failed   seed=2  RuntimeError: planted",
    ]
    capsys.readouterr()
    progress.show()
    progress.show()  # too early for another one
    assert capsys.readouterr().err.count("2 of 5 done") == 1
    progress.show(last=True)
    assert capsys.readouterr().err.startswith("\x1b[3A\x1b[J2 of 5 done")


def test_a_command_says_what_is_missing_and_what_failed(source, tmp_path, monkeypatch, capsys):
    given = {"set": ["seed=0,1", "fails=2"], "shard": "1/2"}
    with pytest.raises(SystemExit) as ended:
        sweep_command(monkeypatch, source, tmp_path, {"seconds": 0.01}, **given)
    assert ended.value.code == 1
    told, errors = capsys.readouterr()
    assert "1 of 1 points failed:\n  seed=0,fails=2: RuntimeError: planted" in errors
    assert f"(log: {tmp_path / 'seed=0,fails=2' / points.LOG})" in errors
    assert "2 of the 2 points of the whole grid have not finished" in told
    assert not (tmp_path / "seed=1,fails=2").exists()
    # What has one value at all points is no part of their names.
    stored = json.loads((tmp_path / "seed=0,fails=2" / "config.json").read_text())
    assert stored["config"]["seconds"] == 0.01


# ---------------------------------------------------------------------------------------------------------
# Processes that are killed


@contextlib.contextmanager
def started(source, folder, *arguments, **options):
    given = [f"--config={source}", f"--workdir={folder}", *arguments]
    process = subprocess.Popen(
        command("sweep", *given), cwd=ROOT, stdout=subprocess.DEVNULL, text=True, **options
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


def stop_a_worker(folder, process):
    """Stops a process that has begun a point, and is in it."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the sweep has ended"
        for path in folder.glob("*/keys_used"):
            if not (path.parent / "result.json").exists():
                log = (path.parent / points.LOG).read_text()
                number = int(re.findall(r"process (\d+)", log)[-1])
                os.kill(number, signal.SIGSTOP)
                if not (path.parent / "result.json").exists():
                    return path.parent, number
                os.kill(number, signal.SIGCONT)
        time.sleep(0.02)
    raise TimeoutError


AXES = ("seed=" + ",".join(map(str, range(24))), "seconds=0.3")
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: extra [sweep]"
)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["local", pytest.param("ray", marks=needs_ray)])
def test_24_points_with_one_of_two_workers_killed(source, tmp_path, executor):
    found, whole, folder = grid_of(source, *AXES), tmp_path / "whole", tmp_path / "sweep"
    sweep.run_points(source, [{**point, "seconds": 0.3} for point in found], whole)
    report.write(whole)
    axes = [f"--set={axis}" for axis in AXES]
    axes += [f"--executor={executor}", "--workers=2"]
    with started(source, folder, *axes, stderr=subprocess.PIPE) as process:
        victim, number = stop_a_worker(folder, process)
        key = (victim / "secret" / "keys.json").read_bytes()
        os.kill(number, signal.SIGKILL)
        stderr = process.communicate(timeout=200)[1]
    assert process.returncode == 0, stderr
    assert len(rows_of(folder)) == len(list(folder.glob("*/result.json"))) == 24
    assert rows_of(folder) == rows_of(whole)
    used = keys_used(folder)
    assert {name: len(found) for name, found in used.items()} == {
        name: 1 + (name == victim.name) for name in used
    }
    assert len({found[0] for found in used.values()}) == 24
    assert used[victim.name] == [str(keys._of_stored(json.loads(key)).seed("draw").entropy)] * 2
    logs = "".join(path.read_text() for path in folder.glob("*/log.txt"))
    assert len(set(re.findall(r"process (\d+)", logs))) >= 3  # the killed one has a successor
    assert "once more" in stderr


@pytest.mark.slow
def test_an_interrupted_sweep_ends_its_workers_and_goes_on(source, tmp_path):
    """On a terminal, where Ctrl-C goes to the whole group, and the table is drawn."""
    master, terminal = pty.openpty()
    axes = ["--set=seed=0,1,2", "--set=seconds=1", "--workers=2"]
    options = {"stderr": terminal, "start_new_session": True}
    with started(source, tmp_path / "a", *axes, **options) as process:
        os.close(terminal)
        victim, number = stop_a_worker(tmp_path / "a", process)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
    shown = ""
    with contextlib.suppress(OSError):  # at the end of what is written to a terminal
        while part := os.read(master, 100_000):
            shown += part.decode(errors="ignore")
    os.close(master)
    assert "interrupted: the same command goes on" in shown
    assert "0 of 3 done" in shown
    assert "Traceback" not in shown
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
    assert not (victim / "result.json").exists()
    again = call("sweep", f"--config={source}", f"--workdir={tmp_path / 'a'}", *axes)
    assert again.returncode == 0, again.stderr
    used = keys_used(tmp_path / "a")
    assert len(used[victim.name]) == 2
    assert all(len(set(found)) == 1 for found in used.values())


@pytest.mark.slow
def test_slurm_runs_points_as_jobs_of_submitit(source, tmp_path):
    pytest.importorskip("submitit")
    found = grid_of(source, "seed=0,1", "fails=0,2")
    sweep.run_points(source, [found[0], found[2]], tmp_path / "here")
    pool = workers.Slurm(2, tmp_path / "slurm", ["timeout_min=5"], cluster="local")
    failed = sweep.run_points(source, found, tmp_path / "jobs", pool)
    assert sorted(name for name, _ in failed) == ["seed=0,fails=2", "seed=1,fails=2"]
    report.write(tmp_path / "here")
    report.write(tmp_path / "jobs")
    assert rows_of(tmp_path / "jobs") == rows_of(tmp_path / "here")
    assert all(len(set(used)) == 1 for used in keys_used(tmp_path / "jobs").values())
