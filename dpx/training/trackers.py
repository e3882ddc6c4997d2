"""Where the log of a training also goes: TensorBoard, Weights & Biases, Trackio, a table, or a function.

A log has the numbers of metrics.jsonl. ε and an adaptive clipping norm follow from public numbers or are paid
for. All others were computed on private data, and no guarantee covers them: their names begin with
`not_covered/`.
"""

import contextlib
import contextvars
import csv
import importlib
import importlib.util
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dpx import _processes
from dpx import _storage as storage
from dpx._context import within

Tracker = Callable[[int, Mapping[str, float]], Any]  # of a step and numbers by name

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
_COVERED = ("epsilon", "l2_clip_norm")
_COLUMNS = ("run", "step", "name", "value")
_TARGET: contextvars.ContextVar[Any] = contextvars.ContextVar("target", default=None)


def check(target: Any, workdir: Any = ".") -> str | Tracker | None:
    """Returns where a log goes; raises ValueError for anything else, or for a package that is missing."""
    if target is None or callable(target):
        return target
    if not isinstance(target, str) or not (target in _PACKAGES or target.endswith(".csv")):
        raise ValueError(
            f'log={target!r} must be "tensorboard", "wandb", "trackio", a path that ends in .csv, or a '
            "function of a step and a dict of numbers"
        )
    package = _PACKAGES.get(target)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(f"log={target!r} needs a package: pip install {package}")
    if target == "tensorboard" and workdir is None:
        raise ValueError("log='tensorboard' needs a folder: give a workdir")
    return target


def check_table(target: Any, folder: Path | None) -> None:
    """Raises StorageError for a table that is no log of this module; what is no table passes."""
    if isinstance(target, str) and target.endswith(".csv"):
        _rows((folder or Path()) / target)


def to(target: str | Tracker | None) -> contextlib.AbstractContextManager[None]:
    """A context in which trainings also log to `target`; None changes nothing."""
    return within(_TARGET, _TARGET.get() if target is None else check(target))


@contextlib.contextmanager
def opened(folder: Path | None, label: str, start: int, steps: int) -> Iterator[Tracker]:
    """A context with the function that logs numbers of a training, of which `start` steps are done."""
    target = _TARGET.get()
    if target is None or start == steps or not _processes.is_first():
        yield lambda step, numbers: None
    elif callable(target):
        yield target
    elif target == "tensorboard":
        assert folder is not None
        writer = importlib.import_module("tensorboardX").SummaryWriter(
            str(folder / "tensorboard" / label), purge_step=start + 1
        )

        def write(step: int, numbers: Mapping[str, float]) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)

        with writer:
            yield write
    elif target in _PACKAGES:
        name = label if folder is None else f"{folder.name}/{label}"
        run = importlib.import_module(target).init(project="dpx", name=name)
        try:
            yield lambda step, numbers: run.log(dict(numbers), step=step)
        finally:
            run.finish()
    else:
        yield _table((folder or Path()) / target, label, start)


def named(entry: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an entry of metrics.jsonl, under names that say which of them no guarantee covers."""
    return {
        name if name in _COVERED else f"not_covered/{name}": value
        for name, value in entry.items()
        if name not in ("run", "step") and value is not None
    }


def _table(path: Path, label: str, start: int) -> Tracker:
    """A function that appends rows of `_COLUMNS` to a file, without what came after a last checkpoint."""
    # A row that was cut off while it was written is left out.
    kept = [row for row in _rows(path) if len(row) == len(_COLUMNS) and row[1].isdecimal()]
    kept = [row for row in kept if row[0] != label or int(row[1]) <= start]
    text = io.StringIO(newline="")
    csv.writer(text).writerows([_COLUMNS, *kept])
    storage.write_text(path, text.getvalue(), mode=storage.PRIVATE)

    def append(step: int, numbers: Mapping[str, float]) -> None:
        with storage.appending(path) as file:
            csv.writer(file).writerows([label, step, *pair] for pair in numbers.items())

    return append


def _rows(path: Path) -> list[list[str]]:
    """The rows below the header of a table that a log has begun; none where there is no file."""
    if not path.exists():
        return []
    header, *rows = [*csv.reader(io.StringIO(storage.read_text(path)))] or [list(_COLUMNS)]
    if tuple(header) != _COLUMNS:
        raise storage.StorageError(
            f"log={path} must be no file of yours: give the path of a new one"
        )
    return rows
