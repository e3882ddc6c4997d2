"""Blocks of records that workers sum, and the one place where a release asks for a sum."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, wait
from pathlib import Path
from typing import Any

import jax

from dpx._validate import check_choice, check_integer
from dpx.release.executors import Here, Processes, Ray, WorkerDiedError
from dpx.release.sums import Partial, Statistic, merge

_GROUPS_PER_WORKER = 4  # more groups lose less work when a worker dies, but send more sums


class Blocks:
    """Records in named blocks, which a release takes in place of records. Each sum reads every block once.

    Workers start with the first sum and live as long as this object, or until `close`.

    Args:
      source: Files, one block each, or a mapping from the names of blocks to anything that `read` takes.
      read: A function that turns a path, or a value of the mapping, into the records of a block, in the form
        that the release takes; if the release takes several arguments (tokens and mask, K and V), into their
        tuple. It may be `read_histories`, `read_arrays`, `numpy.load`, or your own. It runs where the block
        is summed, so it must be possible to pickle it. With None, values are blocks already.
      executor: "local" for processes of this machine, or "ray" for the Ray cluster that this process is
        connected to, or a new one.
      workers: The number of processes; with 1, this process does all. With Ray, the CPUs of a new cluster.
      retries: How often the work of a worker that died is done again.

    Raises:
      ValueError: for no blocks, a block that is named twice, or an argument out of range.
      ModuleNotFoundError: for executor="ray" without Ray.
    """

    def __init__(
        self,
        source: Iterable[str | Path] | Mapping[str, Any],
        *,
        read: Callable[[Any], Any] | None = None,
        executor: str = "local",
        workers: int = 1,
        retries: int = 3,
    ):
        check_choice(executor, "executor", ("local", "ray"))
        workers = check_integer(workers, "workers")
        retries = check_integer(retries, "retries", 0)
        blocks = _named(source)
        if executor == "ray":
            start = functools.partial(Ray, workers, on_cpus=True, retries=retries)
        else:
            start = functools.partial(Processes, workers, on_cpus=True) if workers > 1 else Here
        self._start, self._executor = start, start()
        count = 1 if start is Here else min(len(blocks), _GROUPS_PER_WORKER * workers)
        self._names = {name for name, _ in blocks}
        self._groups = [blocks[i::count] for i in range(count)]
        self._read, self._retries = read, retries

    def __repr__(self) -> str:
        return f"Blocks({len(self._names)} blocks)"

    def total(self, statistic: Statistic) -> Partial:
        """The sum over all blocks, without noise: it is private data.

        Raises:
          RuntimeError: if workers die more often than `retries`, or the sum lacks a block.
          Exception: whatever reading or summing a block raises, with a note that names the block.
        """
        job = functools.partial(_sum_blocks, statistic, self._read)
        summed = _sum_up(self._executor, job, self._groups, self._retries)
        if lost := sorted(self._names - summed.blocks):
            raise RuntimeError(f"blocks={lost[:3]} must be in the total: they were lost on the way")
        return summed

    def close(self) -> None:
        """Ends the workers; a later sum starts new ones."""
        self._executor.shutdown()
        self._executor = self._start()


def _sum_up(executor: Executor, job: Callable, groups: list, retries: int) -> Partial:
    """The sum over all groups. A group whose worker dies is submitted again."""
    running = {executor.submit(job, group): (group, 0) for group in groups}
    total = None
    try:
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                group, died = running.pop(future)
                try:
                    part = future.result()
                except WorkerDiedError as error:
                    if died == retries:
                        names = [name for name, _ in group[:3]]
                        raise RuntimeError(
                            f"workers died {died + 1} times over the blocks {names}: use smaller blocks or "
                            f"fewer workers, if memory ran out ({error})"
                        ) from None
                    running[executor.submit(job, group)] = group, died + 1
                else:
                    total = part if total is None else merge(total, part)
    finally:
        for future in running:
            future.cancel()
    assert total is not None
    return total


def _sum_blocks(
    statistic: Statistic, read: Callable | None, blocks: list[tuple[str, Any]]
) -> Partial:
    """The sum over a group of blocks, of which one at a time is in memory."""
    return functools.reduce(merge, (_sum_block(statistic, read, *block) for block in blocks))


def _sum_block(statistic: Statistic, read: Callable | None, name: str, value: Any) -> Partial:
    try:
        return statistic(value if read is None else read(value)).as_block(name)
    except Exception as error:
        error.add_note(f"in block {name}")
        raise


def total(statistic: Statistic, *records: Any) -> Partial:
    """The sum that a release adds its noise to: it is private data.

    Args:
      statistic: The function that sums a block of records.
      records: The arguments of the release that hold records; together they are one block. Or `Blocks` or a
        `Partial`, followed by None for each further argument.

    Raises:
      ValueError: if another argument is given beside `Blocks` or a `Partial`.
    """
    first, *others = records
    if isinstance(first, Partial | Blocks):
        if any(other is not None for other in others):
            raise ValueError(
                f"what comes after {first} must be None: blocks hold all that is summed"
            )
        return first if isinstance(first, Partial) else first.total(statistic)
    # Records are concrete arrays: where only the key is traced, they are summed at once all the same.
    with jax.ensure_compile_time_eval():
        return statistic(records if others else first)


def are_summed(records: Any) -> bool:
    """Whether the argument is `Blocks` or a `Partial`, and not records themselves."""
    return isinstance(records, Partial | Blocks)


def _named(source: Iterable[str | Path] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    if isinstance(source, str | Path):
        raise ValueError(f"source={source!s} must be several files: pass a list of paths")
    blocks: list[tuple[str, Any]]
    if isinstance(source, Mapping):
        blocks = [(str(name), value) for name, value in source.items()]
    else:
        paths = [Path(path) for path in source]
        blocks = [(str(path.resolve()), path) for path in paths]
    if not blocks:
        raise ValueError("source has no blocks: give at least one, even of no records")
    name, count = Counter(name for name, _ in blocks).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f"source has {name} {count} times: each block counts once, so name it once"
        )
    return blocks
