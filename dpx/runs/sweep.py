"""Runs a grid of configurations, each in a folder of its own under --workdir.

dpx sweep --config=NAME[:arg] --workdir=DIR [--set=key=v1,v2 ...] [--config.key=value ...]
    [--executor=local|ray|slurm] [--workers=N] [--shard=I/N] [--slurm=key=value ...]
    [--dry_run] [--noprogress]
    [--select=METRIC --trials=geometric:MEAN|poisson:MEAN [--score_noise=MULTIPLIER]]

The default grid is the config's sweep(). --config.key=value holds at all points, and is in no point's name.
Finished points are skipped, unfinished ones are resumed, and a point that fails is tried once more and does
not stop the others. Several sweeps, on several hosts, may share one folder: each takes points that no other
one runs.

With --select the points are candidates: a random number of trials is drawn from them, and only the best one
by a noisy score is released, in selected/, with one guarantee for all of this.
"""

import contextlib
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from absl import flags

from dpx import _storage as storage
from dpx.runs import (
    cli,
    points,
    records,
    report,
    run,
    selection,
    selection_plan,
    workers,
)
from dpx.runs.grids import grid, shard
from dpx.runs.points import Ended, Task, point_config, point_name
from dpx.runs.progress import Progress

_PATIENCE = 1.0  # seconds between looks at points that other processes run
_TICK = 0.05  # seconds between looks at the workers
_ATTEMPTS = 2


def run_points(
    source: str,
    listed: list[dict],
    folder: Path,
    pool: workers.Pool | None = None,
    out: TextIO | None = None,
    *,
    quiet: bool = False,
    fixed: Mapping[str, Any] = MappingProxyType({}),
) -> list[tuple[str, str]]:
    """Runs the points that are not finished. They must have been checked before.

    A point that another process runs is left to it, and looked at again when all others are done: by then it
    has finished, or its process was killed and it can be resumed here. A point that fails, or whose worker
    dies, is tried once more, with the keys that it began with.

    Args:
      source: The config file, with its argument.
      listed: The points, as returned by `grid`.
      folder: The folder of the sweep.
      pool: The workers; by default this process.
      out: The stream for progress; stderr by default.
      quiet: Whether points print into their folders only, as other processes always do.
      fixed: The overrides that all points have in common, which are in no point's name.

    Returns:
      The names of the points that failed, with their errors, which are also printed.
    """
    pool = workers.Here() if pool is None else pool
    live = out is None and sys.stderr.isatty() and not isinstance(pool, workers.Here)
    tasks = [Task(source, {**fixed, **point}, str(folder), point_name(point)) for point in listed]
    return run_tasks(tasks, pool, Progress(len(tasks), pool.size, live=live, out=out), quiet=quiet)


def run_tasks(
    listed: list[Task], pool: workers.Pool, progress: Progress, *, quiet: bool
) -> list[tuple[str, str]]:
    """Runs points or trials as `run_points` says, and shows the progress."""
    quiet = quiet or not isinstance(pool, workers.Here)
    tasks = dict(enumerate(listed, start=1))
    due = dict.fromkeys(tasks, 0.0)  # when each waiting point may begin
    attempts, failed, held, running = Counter(), [], set(), {}
    with pool:
        while due or running:
            ended = {}
            for number in [n for n, moment in due.items() if moment <= time.monotonic()]:
                if len(running) == pool.size:
                    break
                del due[number]
                task = tasks[number]
                if (task.workdir / "result.json").exists():
                    ended[number] = points.attempt(task)  # it deletes keys that a kill has left
                elif number in held and _busy(task.workdir):
                    ended[number] = Ended("busy")
                else:
                    progress.begins(number, task.name)
                    running[number] = pool.submit(points.attempt, task, quiet=quiet)
            ended |= {n: _result(job) for n, job in running.items() if job.done()}
            for number, (state, error) in ended.items():
                running.pop(number, None)
                name = tasks[number].name
                if state == "done":
                    progress.done(name, records.read(tasks[number].workdir))
                elif state == "busy":
                    progress.held(number, name, first=number not in held)
                    held.add(number)
                    due[number] = time.monotonic() + _PATIENCE
                else:
                    attempts[number] += 1
                    again = attempts[number] < _ATTEMPTS
                    progress.failed(number, name, error, again=again)
                    if again:
                        due[number] = 0.0
                    else:
                        failed.append((name, error))
            progress.show()
            if not ended:
                time.sleep(_TICK)
        progress.show(last=True)
    return failed


def _busy(workdir: Path) -> bool:
    """Whether another process runs a point, which is cheaper to check than to submit a job."""
    try:
        with storage.lock(workdir):
            return False
    except storage.BusyError:
        return True


def _result(job: Any) -> Ended:
    try:
        return Ended(*job.result())
    except Exception as error:  # executors raise many types for a worker that died
        return Ended("failed", f"{type(error).__name__}: {cli.in_one_line(error)}")


def _select(source: str, fixed: dict, folder: Path) -> None:
    """Selects among the points of the grid instead of running all of them."""
    flag = flags.FLAGS
    for name, given, why in (
        ("dry_run", flag.dry_run, "which prints its price first"),
        (
            "shard",
            flag.shard,
            "whose trials are drawn from the whole grid: sweeps share the folder",
        ),
    ):
        if given:
            raise ValueError(f"--{name} must be left out with --select, {why}")
    asked = (flag.select, flag.trials, flag.score_noise)
    planned = selection_plan.plan(source, grid(source, flag.set, fixed), *asked, fixed=fixed)
    selection.begin(planned, folder)
    private = folder / records.PRIVATE
    pool = workers.choose(flag.executor, flag.workers, private, flag.slurm)
    print(f"{planned.words}\nHow far it is: {private / points.LOG}, for the data holder alone.")
    with storage.appending(private / points.LOG) as log:

        def run_trials(tasks: list[Task]) -> list[tuple[str, str]]:
            progress = Progress(len(tasks), pool.size, out=log)
            return run_tasks(tasks, pool, progress, quiet=True)

        selection.finish(planned, folder, run_trials)
    print(report.write(folder))


def _show(configs: Mapping[str, Any]) -> None:
    """Prints what each point will cost, and all of them together, as a report adds them up."""
    kinds = defaultdict(list)
    for name, config in configs.items():
        spent = run.compose(dict(run.plan(config).releases))
        kinds[spent.neighboring.name.lower(), spent.unit].append(spent)
        print(f"{name}: {run.price(spent)}")
    for (relation, unit), each in kinds.items():
        epsilon, delta = (
            math.fsum(getattr(x, name) for x in each) for name in ("epsilon", "delta")
        )
        words = f"planned total of {len(each)} points, if all are about the same data"
        kind = f" ({relation}, {unit}), which is not added to the others" * (len(kinds) > 1)
        print(f"{words}: ε = {epsilon:.6g}, δ = {delta:.3g}{kind}")


def main() -> None:
    flag = flags.FLAGS
    with cli.OneLine(ValueError):
        if flag.config is None or not (flag.workdir or flag.dry_run):
            raise ValueError("--config=NAME and --workdir=DIR are both needed")
        source, fixed = cli.given_config()
        folder = Path() if flag.dry_run else cli.workdir("DIR")
        cli.hurry(source)
        if flag.select is not None or flag.trials is not None:
            _select(source, fixed, folder)
            return
        whole = grid(source, flag.set, fixed)
        mine = shard(whole, flag.shard)
        configs = {point_name(point): point_config(source, fixed | point) for point in mine}
        for config in configs.values():
            run.check(config)
            if (log := config.get("log")) and Path(str(log)).is_absolute():
                raise ValueError(
                    f"config.log={log} must be no absolute path: each point has a table of its own"
                )
        if flag.dry_run:
            _show(configs)
            return
        pool = workers.choose(flag.executor, flag.workers, folder, flag.slurm)
        # All folders are claimed before anything is computed, so that a mistake shows at once.
        for name, config in configs.items():
            records.begin(config, source, folder / name)
    with cli.OneLine():
        quiet = not flag.progress
        log = storage.appending(folder / points.LOG) if quiet else contextlib.nullcontext()
        with log as out:
            failed = run_points(source, mine, folder, pool, out, quiet=quiet, fixed=fixed)
        if records.read_all(folder):
            print(report.write(folder))
    unfinished = sum(not (folder / point_name(p) / "result.json").exists() for p in whole)
    if unfinished:
        print(
            f"{unfinished} of the {len(whole)} points of the whole grid have not finished: totals over runs "
            "on the same data count the finished ones, and grow with the others."
        )
    if failed:
        sys.stderr.write(f"{len(failed)} of {len(mine)} points failed:\n")
        for name, error in failed:
            sys.stderr.write(f"  {name}: {error} (log: {folder / name / points.LOG})\n")
        sys.exit(1)


def start() -> None:
    """The command line."""
    cli.define_config("name or file of the config, with :arg if any")
    flags.DEFINE_string("workdir", None, "folder of the sweep, which all workers share")
    flags.DEFINE_multi_string(
        "set", [], "key=v1,v2: an axis, instead of sweep(); tuples as [a,b] or (a,b)"
    )
    flags.DEFINE_string("executor", "local", "who runs the points: local, ray or slurm")
    flags.DEFINE_integer("workers", 1, "how many points run at a time")
    flags.DEFINE_bool(
        "progress",
        True,
        "say on stderr how far it is, with metrics of private data: --noprogress writes that into log.txt of "
        "--workdir",
    )
    flags.DEFINE_bool(
        "dry_run", False, "print what each point will cost, and all of them, and stop"
    )
    flags.DEFINE_string("shard", "", "I/N: run every N-th point only, from the I-th on")
    flags.DEFINE_multi_string("slurm", [], "key=value: a job's option, such as timeout_min=60")
    flags.DEFINE_string(
        "select", None, "metric of which the best model is given away, and it alone"
    )
    flags.DEFINE_string("trials", None, "geometric:MEAN or poisson:MEAN, the law of their number")
    flags.DEFINE_float("score_noise", 5.0, "noise of the metric, in units of what a record changes")
    cli.start(main)
