"""Executors as those of `concurrent.futures`: this process, processes that may die, and Ray tasks.

Each has a number of workers, its `size`, which start with the first calls and live until `shutdown`, or until
the executor is garbage. What is called, its arguments and its result must be possible to pickle.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import jax

_SPAWN = multiprocessing.get_context("spawn")  # JAX does not survive a fork


class WorkerDiedError(Exception):
    """The error of a call whose worker ended before it."""


class Here(Executor):
    """An executor that makes each call in this process, within `submit`."""

    size = 1

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        """Makes the call, and returns its future, which is done."""
        future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Processes(Executor):
    """An executor of processes on this machine, each of which makes many calls and keeps compiled programs.

    A process that dies costs the call that it was in, and is replaced. Each process imports the main module
    anew: a script has to guard its code by `if __name__ == "__main__":`.

    Args:
      size: The number of processes.
      on_cpus: Whether they compute on CPUs, and leave accelerators to this process.
    """

    def __init__(self, size: int, *, on_cpus: bool = False):
        self.size = size
        self._on_cpus = on_cpus
        self._threads = ThreadPoolExecutor(size)  # each waits for one process, its `_own.worker`
        self._own = threading.local()
        self._lock, self._started, self._ended = threading.Lock(), [], False

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        """Hands the call to a process, and returns its future, which may raise WorkerDiedError."""
        return self._threads.submit(self._call, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        """Ends all processes at once, and the calls that they are in."""
        with self._lock:
            self._ended = True
            for process in self._started:
                process.kill()
        self._threads.shutdown(wait, cancel_futures=cancel_futures)
        for process in self._started:
            process.join()

    def _call(self, *call: Any) -> Any:
        with self._lock:
            if self._ended:
                raise WorkerDiedError("the executor was shut down")
            if not hasattr(self._own, "worker"):
                self._own.worker = _Worker(self._on_cpus)
                self._started.append(self._own.worker.process)
        try:
            self._own.worker.pipe.send(call)
            result, error = self._own.worker.pipe.recv()
        except (EOFError, OSError):
            process = self._own.worker.process
            del self._own.worker
            process.join()
            raise WorkerDiedError(f"the worker ended with status {process.exitcode}") from None
        if error is not None:
            raise error
        return result


class _Worker:
    """A process that makes the calls that come through a pipe, until the pipe's other end is gone."""

    def __init__(self, on_cpus: bool):
        self.pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(theirs, on_cpus))
        self.process.start()
        theirs.close()


def _serve(pipe: Any, on_cpus: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this process gets it, and ends it
    os.dup2(2, 1)
    if on_cpus:
        jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            pipe.send(_answer(pipe.recv_bytes()))


def _answer(call: bytes) -> tuple[Any, Exception | None]:
    try:
        fn, args, kwargs = pickle.loads(call)
        return fn(*args, **kwargs), None
    except Exception as error:
        error.add_note(traceback.format_exc())
        return None, error


class Ray(Executor):
    """An executor of Ray tasks, in the cluster of this process, that of RAY_ADDRESS, or a new one.

    Args:
      size: The number of calls at a time, and of the CPUs of a new cluster.
      on_cpus: Whether tasks leave the accelerators of the cluster alone; each takes one otherwise.
      retries: How often Ray repeats a call whose worker died, before its future raises one of Ray's errors.

    Raises:
      ModuleNotFoundError: without Ray.
    """

    def __init__(self, size: int, *, on_cpus: bool = False, retries: int = 0):
        try:
            import ray  # type: ignore[import-not-found]
        except ImportError:
            raise ModuleNotFoundError(
                'executor="ray" needs Ray: pip install ray', name="ray"
            ) from None
        self.size = size
        self._ray: Any = ray
        self._on_cpus, self._retries = on_cpus, retries
        self._started, self._task = False, None

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        """Hands the call to a task, which works in the folder of this process, and returns its future."""
        if self._task is None:
            self._task = self._start()
        return self._task.remote(os.getcwd(), fn, args, kwargs).future()

    def _start(self) -> Any:
        ray = self._ray
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            own = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": self.size}
            ray.init(**own, include_dashboard=False, log_to_driver=False, logging_level="error")
            self._started = True
        gpus = 0 if self._on_cpus or not ray.cluster_resources().get("GPU") else 1
        return ray.remote(num_cpus=1, num_gpus=gpus, max_retries=self._retries)(_call_in)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        """Leaves the cluster, which ends if it was started here."""
        if self._started:
            self._ray.shutdown()
        self._started, self._task = False, None


def _call_in(folder: str, fn: Callable, args: tuple, kwargs: dict) -> Any:
    os.chdir(folder)
    return fn(*args, **kwargs)
