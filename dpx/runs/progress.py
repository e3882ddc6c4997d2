"""The live table of a sweep: points that are done, running or failed, the best so far, and the time left."""

import shutil
import sys
import time
from typing import TextIO

from dpx.runs.experiment import Measure
from dpx.runs.records import Record

_MOST_LINES = 12  # the most lines for points that run or failed
_REDRAW = 0.5  # seconds


class Progress:
    """The progress of a sweep, shown as a table on a terminal or as lines of a log.

    Args:
      count: The number of points of the sweep.
      size: The number of workers.
      live: Whether a table is redrawn in place, on a terminal to which nothing else is printed.
      out: The stream to print to.
    """

    def __init__(self, count: int, size: int, *, live: bool = False, out: TextIO | None = None):
        self._count, self._size, self._live = count, size, live
        self._out = sys.stderr if out is None else out
        self._running: dict[str, float] = {}
        self._failed: dict[str, str] = {}
        self._seconds: list[float] = []
        self._best: dict[str, Measure] = {}
        self._done, self._lost, self._drawn, self._last = 0, 0, 0, 0.0

    def begins(self, number: int, name: str) -> None:
        """Notes that a worker begins a point."""
        self._running[name] = time.monotonic()
        self._failed.pop(name, None)
        self._say(f"[{number}/{self._count}] {name}")

    def held(self, number: int, name: str, *, first: bool) -> None:
        """Notes that another process runs the point."""
        self._running.pop(name, None)
        if first:
            self._say(f"[{number}/{self._count}] runs in another process: later")

    def done(self, name: str, record: Record | None) -> None:
        """Notes that a point is done; only one that was begun here counts for the time that is left."""
        began = self._running.pop(name, None)
        if began is not None:
            self._seconds.append(time.monotonic() - began)
        self._done += 1
        if record is not None:
            rows = [m for m in record.measures if record.headline_row in ("", m.row)]
            if rows:
                self._best[name] = rows[0]
        self._say(self.summary())

    def failed(self, number: int, name: str, error: str, *, again: bool) -> None:
        """Notes that an attempt has failed."""
        self._running.pop(name, None)
        self._failed[name] = error
        self._lost += not again
        after = "it is tried once more" if again else self.summary()
        self._say(f"[{number}/{self._count}] failed: {error}; {after}")

    def summary(self) -> str:
        """The progress in one line."""
        parts = [f"{self._done} of {self._count} done"]
        parts += [f"{len(self._running)} running"] if self._running else []
        parts += [f"{len(self._failed)} failed"] if self._failed else []
        return "; ".join([", ".join(parts), *self._ends(), *self._left()])

    def table(self) -> list[str]:
        """The progress as a table, with a line for each point that runs or failed."""
        now = time.monotonic()
        points = [f"  running  {name}  {_time(now - t)}" for name, t in self._running.items()]
        points += [f"  failed   {name}  {error}" for name, error in self._failed.items()]
        more = [f"  and {len(points) - _MOST_LINES} more"] * (len(points) > _MOST_LINES)
        return [self.summary(), *points[:_MOST_LINES], *more]

    def show(self, *, last: bool = False) -> None:
        """Redraws the table, if it is live; the last table stays."""
        if not self._live or (not last and time.monotonic() - self._last < _REDRAW):
            return
        self._last = time.monotonic()
        width = shutil.get_terminal_size().columns - 1
        lines = [line[:width] for line in self.table()]
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        self._out.write(up + "\x1b[J" + "\n".join(lines) + "\n")
        self._out.flush()
        self._drawn = len(lines)

    def _say(self, line: str) -> None:
        if not self._live:
            self._out.write(line + "\n")
            self._out.flush()

    def _ends(self) -> list[str]:
        """The points with the least and the largest headline metric; the reader knows which is better."""
        if not self._best:
            return []
        found = sorted(self._best.items(), key=lambda pair: pair[1].value)
        low, *_, high = [f"{measure.value:.4g} ({name})" for name, measure in (*found, found[-1])]
        return [f"{found[0][1].name} {low}" + (f" to {high}" if len(found) > 1 else "")]

    def _left(self) -> list[str]:
        left = self._count - self._done - self._lost
        if not self._seconds or not left:
            return []
        seconds = sum(self._seconds) / len(self._seconds) * left / self._size
        return [f"about {_time(seconds)} left"]


def _time(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
