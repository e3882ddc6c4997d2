"""The workers that run the points of a sweep: executors of `dpx.release.executors`, or Slurm.

Leaving the context of a pool ends all workers; the points that they ran are resumed when the sweep is started
again.
"""

import importlib
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from types import ModuleType
from typing import Any

from dpx.release.executors import Here, Processes, Ray

EXECUTORS = ("local", "ray", "slurm")
_DAY = 24 * 60  # minutes


class Slurm(Executor):
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

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        """Ends all jobs."""
        for job in self._jobs:
            if not job.done():
                job.cancel(check=False)

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Any:
        """Starts a job that makes the call, and returns it: it has `done()` and `result()`."""
        self._jobs.append(self._executor.submit(fn, *args, **kwargs))
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


def choose(executor: str, size: int, folder: Path, options: Sequence[str] = ()) -> "Pool":
    """The pool that a command line asks for.

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
    return Here() if size == 1 else Processes(size)


Pool = Here | Processes | Ray | Slurm
