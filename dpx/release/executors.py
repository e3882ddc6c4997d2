"""Executors that sum blocks: in this process, in processes of this machine, or in Ray tasks.

`sum_up` takes a statistic, the function that reads a block, and groups of named blocks, and returns their
total. Workers live until `close`, or until the executor is garbage.
"""

import functools
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import jax

from dpx.release.sums import Partial, Statistic, merge

Group = list[tuple[str, Any]]
Read = Callable[[Any], Any] | None


def sum_blocks(statistic: Statistic, read: Read, blocks: Group) -> Partial:
    """The sum over a group of blocks, of which one at a time is in memory."""
    return functools.reduce(merge, (_sum_block(statistic, read, *block) for block in blocks))


def _sum_block(statistic: Statistic, read: Read, name: str, value: Any) -> Partial:
    try:
        return statistic(value if read is None else read(value)).as_block(name)
    except Exception as error:
        error.add_note(f"in block {name}")
        raise


class Here:
    """Sums blocks in this process, one after the other."""

    def sum_up(self, statistic: Statistic, read: Read, groups: list[Group]) -> Partial:
        return sum_blocks(statistic, read, [block for group in groups for block in group])

    def close(self) -> None:
        """Does nothing, since there are no workers."""


class Processes:
    """Sums groups of blocks in processes of this machine, and replaces processes that die.

    JAX does not survive a fork, so that each process imports the main module anew: a script has to guard its
    code by `if __name__ == "__main__":`. The processes compute on CPUs.
    """

    def __init__(self, workers: int, retries: int):
        self._workers = workers
        self._retries = retries
        self._pool: ProcessPoolExecutor | None = None

    def sum_up(self, statistic: Statistic, read: Read, groups: list[Group]) -> Partial:
        waiting, total, died = dict(enumerate(groups)), None, 0
        while waiting:
            before = len(waiting)
            for index, part in self._finished(statistic, read, waiting):
                total = part if total is None else merge(total, part)
                waiting = {left: group for left, group in waiting.items() if left != index}
            if not waiting:
                break
            self.close()
            died = 0 if len(waiting) < before else died + 1
            if died > self._retries:
                names = [name for group in waiting.values() for name, _ in group]
                raise RuntimeError(
                    f"workers died {died} times over the blocks {names[:3]}: use smaller blocks or fewer "
                    "workers, if memory ran out"
                )
        assert total is not None
        return total

    def _finished(
        self, statistic: Statistic, read: Read, groups: dict[int, Group]
    ) -> Iterator[tuple[int, Partial]]:
        """Yields the index and the sum of each group as it is done; ends early if a worker dies."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_on_cpus,
            )
        try:
            running = {
                self._pool.submit(sum_blocks, statistic, read, group): index
                for index, group in groups.items()
            }
            for future in as_completed(running):
                # Popped, so that a sum that is merged is not kept.
                yield running.pop(future), future.result()
        except BrokenProcessPool:
            return

    def close(self) -> None:
        """Ends the processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def _on_cpus() -> None:
    jax.config.update("jax_platforms", "cpu")


class Ray:
    """Sums groups of blocks in Ray tasks, and merges the sums in a tree of tasks.

    Ray itself repeats the tasks of a worker that died. Sums travel between workers through Ray's store; only
    the total comes to this process.
    """

    def __init__(self, workers: int, retries: int):
        try:
            import ray  # type: ignore[import-not-found]
        except ImportError:
            raise ModuleNotFoundError(
                'executor="ray" needs Ray: pip install ray', name="ray"
            ) from None
        self._ray: Any = ray
        self._workers = workers
        self._options = {"num_cpus": 1, "max_retries": retries}
        self._started = False

    def close(self) -> None:
        """Ends the cluster, if it was started here."""
        if self._started:
            self._ray.shutdown()
            self._started = False

    def sum_up(self, statistic: Statistic, read: Read, groups: list[Group]) -> Partial:
        if not self._ray.is_initialized():
            self._ray.init(num_cpus=self._workers, include_dashboard=False, log_to_driver=False)
            self._started = True
        task = self._ray.remote(**self._options)
        shared = self._ray.put(statistic)
        parts = [task(sum_blocks).remote(shared, read, group) for group in groups]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=False)
            merged = [task(merge).remote(*pair) for pair in pairs]
            parts = merged + parts[2 * len(merged) :]
        return self._ray.get(parts[0])
