"""Releases over shards that no process holds together: events a second, and the memory of a worker.

    python -m experiments.bench.blocks --workdir=runs/bench_blocks
    python -m experiments.bench.blocks --workdir=runs/bench_blocks --events=100000000 --executor=ray

Shards of synthetic histories are written once to `--workdir`: users with 20 events in the mean, who half
follow one rule and half draw from a Zipf popularity. They are summed by the workers of `dpx.release.Blocks`,
each of which may allocate `--memory` GiB and fails beyond that. Time is CPU time: of the workers, who read
shards and sum them, without their start; and of the process that starts them and adds the noise.

Writes blocks.csv and blocks.md.
"""

import functools
import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

from dpx import release
from dpx.recommend import popularity, transitions
from dpx.release.sums import Statistic
from dpx.runs import cli
from experiments.bench import _tables

MEAN_LENGTH = 20
BUDGET: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-9}
RELEASES: dict[str, Callable[..., Any]] = {
    "popularity": popularity.fit,
    "transitions, 1 round": functools.partial(transitions.fit, rounds=1),
    "transitions, 6 rounds": functools.partial(transitions.fit, rounds=6),
}

_WORKDIR = flags.DEFINE_string("workdir", None, "Where shards and table go.", required=True)
_EVENTS = flags.DEFINE_integer("events", 10**7, "Events in all shards.", lower_bound=1000)
_SHARDS = flags.DEFINE_integer("shards", 100, "Files of events.", lower_bound=1)
_ITEMS = flags.DEFINE_integer("items", 20_000, "Items of the catalogue.", lower_bound=2)
_WORKERS = flags.DEFINE_integer("workers", 2, "Workers.", lower_bound=1)
_EXECUTOR = flags.DEFINE_enum("executor", "local", ["local", "ray"], "Who runs the workers.")
_MEMORY = flags.DEFINE_float("memory", 2.0, "GiB that a worker may allocate.", lower_bound=0.1)
_RELEASES = flags.DEFINE_multi_enum(
    "release", list(RELEASES), list(RELEASES), "What is released; all by default."
)


def write_shard(path: Path, *, events: int, items: int, seed: int) -> None:
    """Writes a file of events, users one after the other; it is there as a whole or not at all."""
    rng = np.random.default_rng(seed)
    users = np.sort(rng.integers(0, max(1, events // MEAN_LENGTH), events))
    first = np.diff(users, prepend=-1) > 0
    popular = np.cumsum(1 / np.arange(1, items + 1))
    drawn = np.searchsorted(popular, rng.random(events) * popular[-1])
    # Where an event follows the one before it, its item is the next number.
    chosen = first | (rng.random(events) < 0.5)
    last = np.maximum.accumulate(np.where(chosen, np.arange(events), 0))
    found = (drawn[last] + np.arange(events) - last) % items
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, user=users.astype(np.int32), item=found.astype(np.int32))
    partial.replace(path)


class Watched(release.Blocks):
    """Shards of which workers note in `folder` what each sum took, and how many sums there were."""

    def __init__(self, shards: list[Path], folder: Path, items: int, memory: float, **options: Any):
        super().__init__(shards, **options)
        self._noted = folder, items, memory
        self.passes = 0

    def total(self, statistic: Statistic) -> release.Partial:
        self.passes += 1
        return super().total(functools.partial(noted, statistic, *self._noted))


def noted(
    statistic: Statistic, folder: Path, items: int, memory: float, path: Path
) -> release.Partial:
    """The sum over a shard, by a process that may not grow beyond `memory` GiB from here on."""
    limit, start = int(memory * 2**30), time.process_time()
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    part = statistic(release.read_histories(path, num_items=items))
    cpu = time.process_time() - start
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    with (folder / str(os.getpid())).open("a") as file:
        file.write(json.dumps({"cpu": cpu, "gib": gib}) + "\n")
    return part


def measure(name: str, shards: list[Path], workdir: Path) -> dict[str, Any]:
    """The row of one release."""
    folder = workdir / "workers"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    wall, cpu = time.monotonic(), time.process_time()
    blocks = Watched(
        shards,
        folder.resolve(),
        _ITEMS.value,
        _MEMORY.value,
        executor=_EXECUTOR.value,
        workers=_WORKERS.value,
    )
    RELEASES[name](jax.random.key(0), blocks, **BUDGET)
    blocks.close()
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    lines = "".join(path.read_text() for path in folder.iterdir()).splitlines()
    notes = [json.loads(line) for line in lines]
    return {
        "release": name, "events": _EVENTS.value, "passes": blocks.passes, "wall": wall,
        "cpu": sum(note["cpu"] for note in notes), "driver": cpu,
        "gib": max(note["gib"] for note in notes),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in markdown, with an estimate: 64 cores divide the workers' time, and not the driver's."""
    return _tables.markdown(
        [
            {
                "release": row["release"],
                "passes": f"{row['passes']}",
                "CPU time of workers, driver": f"{row['cpu']:.0f} s, {row['driver']:.0f} s",
                "events a second and core": f"{row['events'] / row['cpu']:,.0f}",
                "peak memory of a worker": f"{row['gib']:.2f} GiB",
                "estimate for 64 cores": f"{row['cpu'] / 64 + row['driver']:.0f} s",
            }
            for row in rows
        ]
    )


def main(argv: list[str]) -> None:
    del argv
    workdir = Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    shards = []
    for number in range(_SHARDS.value):
        # Events that do not divide evenly go to the first shards.
        events = len(range(number, _EVENTS.value, _SHARDS.value))
        shards.append(workdir / f"{events}_of_{_ITEMS.value}_{number}.npz")
        if not shards[-1].exists():
            write_shard(shards[-1], events=events, items=_ITEMS.value, seed=number)
    rows = []
    for name in _RELEASES.value:
        rows.append(measure(name, shards, workdir))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        _tables.write(workdir / "blocks.csv", rows, table(rows))
    print(table(rows))


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
