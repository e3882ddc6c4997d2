"""The workers that run the points of a sweep: this process, other processes, Ray, or Slurm.

Each pool has a number of workers, its `size`. `submit(task)` hands a point to one of them and returns a job
with `done()` and `result()`, which raises if the worker died. Leaving the context ends all workers; the
points that they ran are resumed when the sweep is started again.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from dpx.launch import points
from dpx.launch.points import Ended, Task

EXECUTORS = ("local", "ray", "slurm")
_DAY = 24 * 60  # minutes


class WorkerDiedError(Exception):
    """The error of a point whose worker ended before it."""


class Job(Protocol):
    """A point that a worker runs."""

    def done(self) -> bool: ...

    def result(self) -> Any: ...


class Here:
    """A pool that runs each point in this process, within `submit`; `quiet` as in `points.attempt`."""

    size = 1

    def __init__(self, *, quiet: bool = False):
        self._quiet = quiet

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, task: Task) -> Job:
        ended = Future()
        ended.set_result(points.attempt(task, quiet=self._quiet))
        return ended


class Processes:
    """A pool of processes on this machine, each of which runs many points and keeps compiled programs."""

    def __init__(self, size: int):
        self.size = size
        self._threads = ThreadPoolExecutor(size)  # each waits for one process
        self._all: list[_Process] = []
        self._idle: list[_Process] = []
        self._lock, self._ended = threading.Lock(), False

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._ended = True
        for process in self._all:
            process.kill()
        self._threads.shutdown()

    def submit(self, task: Task) -> Job:
        return self._threads.submit(self._run, task)

    def _run(self, task: Task) -> Ended:
        with self._lock:
            if self._ended:
                raise WorkerDiedError("the sweep has ended")
            if not self._idle:
                self._all.append(_Process())
                self._idle.append(self._all[-1])
            process = self._idle.pop()
        ended = process.run(task)
        with self._lock:
            self._idle.append(process)
        return ended


class _Process:
    """A Python process that reads points from its standard input and answers on its standard output."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from dpx.launch import workers; workers.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            # Only this process gets Ctrl-C, and then ends the others.
            start_new_session=True,
        )

    def run(self, task: Task) -> Ended:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise WorkerDiedError(f"the worker ended with status {self._process.wait()}")
        return Ended(*json.loads(answer))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def serve() -> None:
    """Runs the points that arrive, until there are no more or the sweep that sends them has ended."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(points.attempt(Task(*json.loads(line)), quiet=True)) + "\n")
        answers.flush()


class Ray:
    """A pool of Ray tasks, in the cluster that RAY_ADDRESS names or a new one on this machine."""

    def __init__(self, size: int):
        self.size = size

    def __enter__(self) -> "Ray":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._ray = ray = _import("ray")
        own = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": self.size}
        ray.init(**own, include_dashboard=False, log_to_driver=False, logging_level="error")
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        # Ray must not retry: the sweep counts attempts, and submits the point of a dead worker again.
        self._attempt = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_attempt_in)
        return self

    def __exit__(self, *error: object) -> None:
        self._ray.shutdown()

    def submit(self, task: Task) -> Job:
        return self._attempt.remote(os.getcwd(), task).future()


def _attempt_in(folder: str, task: Task) -> Ended:
    os.chdir(folder)
    return points.attempt(task, quiet=True)


class Slurm:
    """A pool with one Slurm job for each point, with options of submitit, such as `timeout_min=60`."""

    def __init__(self, size: int, folder: Path, options: Sequence[str], cluster: str = "slurm"):
        self.size = size
        self._submitit = _import("submitit")
        if cluster == "slurm" and shutil.which("sbatch") is None:
            raise ValueError(
                "--executor=slurm must be started where sbatch is: log in there, or use --executor=local"
            )
        self._executor = self._submitit.AutoExecutor(folder, cluster=cluster)
        given = {"timeout_min": _DAY, **dict(map(_option, options))}
        try:
            self._executor.update_parameters(name="dpx", **given)
        except (NameError, TypeError, ValueError, AssertionError) as error:
            text = " ".join(str(error).split())
            raise ValueError(
                f"--slurm={','.join(options)} must be options of submitit: {text}"
            ) from None
        self._jobs = []

    def __enter__(self) -> "Slurm":
        return self

    def __exit__(self, *error: object) -> None:
        for job in self._jobs:
            if not job.done():
                job.cancel(check=False)

    def submit(self, task: Task) -> Job:
        self._jobs.append(self._executor.submit(points.attempt, task, quiet=True))
        return self._jobs[-1]


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"--slurm={text} must be an option of submitit: write key=value")
    return name, int(value) if value.isdigit() else value


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise ValueError(
            f"--executor={'ray' if name == 'ray' else 'slurm'} must have the package {name}: in the "
            'clone of dpx, pip install -e ".[sweep]", or use --executor=local'
        ) from None


def choose(
    executor: str, size: int, folder: Path, options: Sequence[str] = (), *, quiet: bool = False
) -> "Pool":
    """The pool that a command line asks for; if it is `quiet`, points print into their folders only.

    Raises:
      ValueError: for an executor that is unknown or not installed.
    """
    if executor not in EXECUTORS:
        raise ValueError(f"--executor={executor} must be one of {', '.join(EXECUTORS)}")
    if size < 1:
        raise ValueError(f"--workers={size} must be at least 1")
    if options and executor != "slurm":
        raise ValueError(
            f"--slurm={options[0]} must come with --executor=slurm: add that, or leave it out"
        )
    if executor == "slurm":
        return Slurm(size, folder / "slurm", options)
    if executor == "ray":
        _import("ray")
        return Ray(size)
    return Here(quiet=quiet) if size == 1 else Processes(size)


Pool = Here | Processes | Ray | Slurm
