"""A point of a sweep: its configuration, its folder, and an attempt to run it, in any process."""

import contextlib
import hashlib
import os
import platform
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import ml_collections

from dpx import _storage as storage
from dpx.runs import cli, records, run, sources
from dpx.training import keys

LOG = "log.txt"
_LONGEST_NAME = 200


class Task(NamedTuple):
    """The description of a point for a worker. It consists of plain values, so that it can go through a pipe.

    Attributes:
      source: The config file, with its argument.
      overrides: The values that differ from it, by dotted name.
      folder: The folder of the sweep.
      label: The name of the point's folder, if that is not made from all overrides.
      data: The digest of the only data on which it may run, if a selection was planned for them.
    """

    source: str
    overrides: dict
    folder: str
    label: str = ""
    data: str | None = None

    @property
    def name(self) -> str:
        return self.label or point_name(self.overrides)

    @property
    def workdir(self) -> Path:
        return Path(self.folder) / self.name


class Ended(NamedTuple):
    """The end of an attempt: `done`, `busy` (another process runs the point) or `failed`, with the error."""

    state: str
    error: str = ""


def point_config(source: str, overrides: dict) -> ml_collections.ConfigDict:
    """The configuration of one point.

    Raises:
      ValueError: for a value of the wrong type.
    """
    config = records.load_config(source)
    for name, value in overrides.items():
        kind, default = sources.kind_of(config, name), records.flatten(config)[name]
        if isinstance(value, bool) and kind in (int, float):
            raise ValueError(f"--set={name}={value} must be a number: yes and true are none")
        try:
            # YAML reads 1e-3 as text. A key without a default may stay None.
            if kind is float and (default, value) != (None, None):
                value = float(value)
            config.update_from_flattened_dict({name: value})
        except (TypeError, ValueError) as error:
            raise ValueError(f"--set={name}={value}: {error}") from None
    return sources.find_home(config)


def point_name(overrides: dict) -> str:
    """The name of a point's folder: its overrides, in the order of the grid.

    File systems allow names of 255 bytes; a longer name is cut, and ends in a digest of the whole name.
    """
    name = ",".join(f"{key}={value}" for key, value in overrides.items()).replace("/", "_") or "all"
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    start = name.encode()[: _LONGEST_NAME - 17].decode(errors="ignore")
    return f"{start},{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def attempt(task: Task, *, quiet: bool = False) -> Ended:
    """Runs a point, resumes it if it was killed, or leaves it to the process that runs it.

    The folder's lock keeps other processes out. All attempts use the keys in the folder: a point that fails
    and is tried again draws the same noise, so that its cost counts once.

    Args:
      task: The point.
      quiet: Whether all that is printed goes to log.txt in the point's folder, as errors always do.
    """
    task = Task(*task)
    try:
        config = point_config(task.source, task.overrides)
        records.begin(config, task.source, task.workdir)
        logged = _logged(task.workdir / LOG) if quiet else contextlib.nullcontext()
        with logged, keys.only_of(task.data):
            run.execute(config, task.workdir)
        return Ended("done")
    except storage.BusyError:
        return Ended("busy")
    except cli.EXPECTED as raised:
        error, text = raised, f"error: {cli.in_one_line(raised)}\n"
    except Exception as raised:
        error, text = raised, traceback.format_exc()
    if not quiet:
        sys.stderr.write(text)
    with contextlib.suppress(OSError), storage.appending(task.workdir / LOG) as log:
        log.write(text)
    return Ended("failed", f"{type(error).__name__}: {cli.in_one_line(error)}")


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Redirects all output of this process to a file, also that of compilers below Python."""
    with storage.appending(path) as log:
        sys.stdout.flush()
        sys.stderr.flush()
        kept = [(number, os.dup(number)) for number in (1, 2)]
        try:
            for number, _ in kept:
                os.dup2(log.fileno(), number)
            with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                print(f"host {platform.node()}, process {os.getpid()}")
                yield
        finally:
            for number, copy in kept:
                os.dup2(copy, number)
                os.close(copy)
