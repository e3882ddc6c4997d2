"""What a training tells while it runs: its history, metrics.jsonl, and lines of progress."""

import contextlib
import contextvars
import dataclasses
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dpx import _processes
from dpx import _storage as storage
from dpx._context import within
from dpx._validate import check_integer, check_number
from dpx.training import trackers
from dpx.training.arguments import check_flag


@dataclasses.dataclass(frozen=True)
class Record:
    """One entry of a history. None of it is covered by a guarantee, apart from ε and the clipping norm.

    Attributes:
      step: Number of steps done.
      loss: Mean loss of the records in that step's batch, in the units of the loss.
      epsilon: ε spent by then; None without privacy.
      evaluation: What `evaluate` returned after that step, if it was called.
      l2_clip_norm: What an adaptive clipping norm became in that step, which is covered.
    """

    step: int
    loss: float | None = None
    epsilon: float | None = None
    evaluation: Mapping[str, float] | None = None
    l2_clip_norm: float | None = None


_PLAIN = re.compile(r"\w[\w .+=-]*")  # no separator of paths, and neither "." nor ".."
_LONGEST = 200  # file systems allow names of 255 bytes, and names are made of a label
# The names of an entry that an evaluation may not take.
_RESERVED = ("run", "step", "epsilon", "l2_clip_norm")


def evaluated(numbers: Any) -> dict[str, float]:
    """The numbers that `evaluate` returned, as an entry of the log.

    Raises:
      ValueError: for anything but numbers by name, and for a name that stands for something else: an
        evaluation called `epsilon` would be read as what the training has spent, and one called
        `l2_clip_norm` as a number that a guarantee covers.
    """
    if not isinstance(numbers, Mapping):
        raise ValueError(
            f"evaluate returned a {type(numbers).__name__}, which must be a dict of numbers by name: return "
            'one such as {"accuracy": 0.9}'
        )
    if wrong := [name for name in numbers if not isinstance(name, str) or name in _RESERVED]:
        raise ValueError(
            f"evaluate returned a number named {wrong[0]!r}, which must be another word than "
            f"{', '.join(_RESERVED)}: rename it"
        )
    try:
        return {name: check_number(value, f"evaluate: {name}") for name, value in numbers.items()}
    except ValueError as error:
        raise ValueError(
            f"{error}: return one, or leave the name out where there is none"
        ) from None


@dataclasses.dataclass(frozen=True)
class Monitoring:
    """What a training tells while it runs, where it keeps that, and after how many steps each time.

    Attributes:
      label, progress, evaluate: As in `dpx.training.fit`.
      workdir: The folder of metrics.jsonl and of the checkpoints; None for neither.
      evaluate_every, log_every, checkpoint_every: Numbers of steps.

    Raises:
      ValueError: for a value that cannot be used.
    """

    label: str
    workdir: Path | None = None
    progress: bool = True
    evaluate: Callable[[Any], Mapping[str, float]] | None = None
    evaluate_every: int = 1
    log_every: int = 1
    checkpoint_every: int = 1

    def __post_init__(self):
        if not isinstance(self.label, str) or not _PLAIN.fullmatch(self.label):
            raise ValueError(
                f"label={self.label!r} must be a plain name, of which a folder is named: use letters, "
                "digits, spaces and _ . + = -"
            )
        if len(self.label.encode()) > _LONGEST:
            raise ValueError(
                f"label={self.label[:20]!r}… has {len(self.label.encode())} bytes, which must be at most "
                f"{_LONGEST}: a folder is named so"
            )
        check_flag(self.progress, "progress")
        if self.evaluate is not None and not callable(self.evaluate):
            raise ValueError(
                f"evaluate={self.evaluate!r} must be a function of the parameters: pass one"
            )
        for name, steps in self.every.items():
            object.__setattr__(self, name, check_integer(steps, name))

    @property
    def every(self) -> dict[str, int]:
        """The three numbers of steps, by name."""
        names = ("evaluate_every", "log_every", "checkpoint_every")
        return {name: getattr(self, name) for name in names}


class MetricLog:
    """The log of a training: its lines of metrics.jsonl, if there is a folder, and its history.

    Only the owner of the file may read it. Lines that a killed run wrote after its last checkpoint are
    dropped.
    """

    def __init__(self, path: Path | None, label: str, start: int, track: trackers.Tracker):
        self._path, self._label, self._entries, self._track = path, label, [], track
        if path is not None and path.exists():
            written = storage.read_lines(path)
            kept = [e for e in written if e.get("run") != label or e.get("step", 0) <= start]
            text = "".join(json.dumps(entry) + "\n" for entry in kept)
            storage.write_text(path, text, mode=storage.PRIVATE)
            self._entries = [e for e in kept if e.get("run") == label]

    def write(self, entry: dict) -> None:
        """Appends a line."""
        entry = {"run": self._label, **entry}
        self._entries.append(entry)
        if self._path is not None and _processes.is_first():
            with storage.naming(self._path), storage.appending(self._path) as file:
                file.write(json.dumps(entry) + "\n")
        self._track(entry["step"], trackers.named(entry))

    @property
    def history(self) -> list[Record]:
        """A record for each step, from all its entries."""
        records: dict[int, Record] = {}
        for entry in self._entries:
            rest = {k: v for k, v in entry.items() if k not in ("run", "step")}
            record = records.get(entry["step"], Record(entry["step"]))
            changes = rest if "epsilon" in rest else {"evaluation": rest}
            records[entry["step"]] = dataclasses.replace(record, **changes)
        return list(records.values())


_QUIET: contextvars.ContextVar[bool] = contextvars.ContextVar("quiet", default=False)


def quiet() -> contextlib.AbstractContextManager[None]:
    """A context in which no training tells stderr how far it is: losses are private, and logs may not be."""
    return within(_QUIET, True)


def say(text: str, *, shown: bool) -> None:
    """Writes a line to stderr, if lines are shown; of several processes, only the first one writes."""
    if shown and not _QUIET.get() and _processes.is_first():
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


class Progress:
    """Lines on stderr, if they are shown: steps done, loss, ε spent, and how long the rest will take."""

    def __init__(self, label: str, steps: int, start: int, *, shown: bool = True):
        self._label, self._steps, self._start = label, steps, start
        self._shown = shown
        self._began = time.monotonic()
        self._say(f"{label}: compiling {steps} steps, {start} of them done")

    def line(self, done: int, loss: float, spent: float | None) -> None:
        """Reports on the steps done."""
        speed = (done - self._start) / max(time.monotonic() - self._began, 1e-9)
        epsilon = "" if spent is None else f"  ε {spent:.3f}"
        left = (self._steps - done) / speed
        self._say(
            f"{self._label}: step {done}/{self._steps}  loss {loss:.4f}{epsilon}  "
            f"{speed:.1f} steps/s  {left:.0f} s left"
        )

    def _say(self, text: str) -> None:
        say(text, shown=self._shown)
