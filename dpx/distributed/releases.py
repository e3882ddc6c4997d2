"""The map over blocks, the merge of their sums, and the release at the end."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dpx._validate import check_choice, check_integer
from dpx.distributed.executors import Here, Processes, Ray
from dpx.partial import Partial, Passes, Result, Statistic, drive

_GROUPS_PER_WORKER = 4  # what a worker that dies may lose, against the sums that travel


def release(
    source: Iterable[str | Path] | Mapping[str, Any],
    spec: Passes[Result],
    *,
    read: Callable[[Any], Any] | None = None,
    executor: str = "local",
    workers: int = 1,
    retries: int = 3,
) -> Result:
    """Makes a release from blocks of records: what the one call returns for all of them with the same key.

    Guarantee: that of the release, for records of which each lies in one block (`dpx.partial`).

    Args:
      source: Files, one block each, or a mapping from the names of blocks to anything that `read` takes.
      spec: The passes of a release, such as `dpx.recommend.popularity.passes(key, epsilon=1.0, delta=1e-6)`.
        Every pass reads all blocks once.
      read: Turns a path, or a value of the mapping, into a block as the one call takes it; `read_histories`,
        `read_arrays`, `numpy.load`, or your own. It runs where the block is summed, so it has to be a
        function that can be pickled. None takes values as they are.
      executor: "local", processes of this machine, or "ray", the Ray cluster that this process is connected
        to, or one that is started here.
      workers: How many processes; one is this process. With Ray, the CPUs of a cluster that is started here.
      retries: How often what a worker left unfinished, when it died, is done again.

    Returns:
      What the release returns.

    Raises:
      ValueError: for no blocks, a block that is named twice, or an argument out of range; and whatever
        reading or summing a block raises, with a note that names the block.
      RuntimeError: where workers die again and again, or a total lacks a block.
      ImportError: for executor="ray" without Ray.
    """
    check_choice(executor, "executor", ("local", "ray"))
    workers = check_integer(workers, "workers")
    retries = check_integer(retries, "retries", 0)
    blocks = _named(source)
    count = min(len(blocks), _GROUPS_PER_WORKER * workers)
    groups = [blocks[i::count] for i in range(count)]
    if executor == "ray":
        chosen = Ray(workers, retries)
    else:
        chosen = Processes(workers, retries) if workers > 1 else Here()
    names = {name for name, _ in blocks}
    with chosen as running:

        def sum_up(statistic: Statistic) -> Partial:
            total = running.sum_up(statistic, read, groups)
            if lost := sorted(names - total.blocks):
                raise RuntimeError(
                    f"blocks={lost[:3]} must be in the total: they were lost on the way"
                )
            return total

        return drive(spec, sum_up)


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
