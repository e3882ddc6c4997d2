"""What a run or a training began with: it goes on with the same data and settings, or not at all.

The same noise on other data, or on another statistic of them, would show the difference between the two, and
a checkpoint of other settings has another guarantee. So the folder's `secret` holds a digest of the data, and
the settings, beside the keys.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from dpx import _processes
from dpx import _storage as storage

FOLDER, KEYS, FINISHED = "secret", "keys.json", "finished.json"
# What lies in a run's folder before it has keys. All else may follow from keys that are gone.
_BEFORE = (FOLDER, "config.json", "environment.json", "log.txt")
# What a training leaves in a folder that may hold anything else of its caller.
_TRAINED = ("metrics.jsonl", "checkpoints", "model", "privacy.json")

# Raised by one whenever the same keys draw other noise or samples: a run that went on would release twice.
_RANDOMNESS = 2


class CannotResumeError(ValueError):
    """An unfinished run cannot go on without spending more than it states."""


def stored(
    workdir: Path, data: str, draw: Callable[[], dict], settings: dict | None = None
) -> dict:
    """The content of a run's file of keys, which is written with what `draw` returns if the run begins."""
    path = workdir / FOLDER / KEYS
    if not os.path.lexists(path):
        not_begun(workdir, settings)
        if storage.create_private(path, {**draw(), **_begun(data, settings)}):
            try:
                # Between the two looks this process may have slept while another one ran, and finished.
                not_begun(workdir, settings)
            except CannotResumeError:
                path.unlink()
                raise
    return _goes_on(path, workdir, data, settings)


def check_training(workdir: Path, data: str, settings: dict, under: str) -> None:
    """Notes what a training under a run's keys begins with, or checks that it goes on with the same.

    Args:
      workdir, data, settings: As in `dpx.training.keys.of_training`; the data are their digest.
      under: The name of the keys. Samples of others could take a record twice in an epoch.

    Raises:
      CannotResumeError: if it goes on with something else, or if others have trained where it would.
    """
    path = workdir / FOLDER / f"training_{settings['label']}.json"
    if not os.path.lexists(path):
        _no_other_training(workdir, workdir / "checkpoints" / settings["label"])
        storage.create_private(path, {**_begun(data, settings), "under": under})
    # A training that began under an older version has no name of its keys.
    if _goes_on(path, workdir, data, settings).get("under", under) != under:
        raise CannotResumeError(
            f"the keys changed since the training in {workdir} began: use a new workdir, or the old Keys"
        )


def _no_other_training(workdir: Path, checkpoints: Path) -> None:
    """Raises CannotResumeError for checkpoints of unknown origin, and a training with a key of its own."""
    keys, finished = (workdir / FOLDER / name for name in (KEYS, FINISHED))
    others = any(not storage.of_lock(path.name) for path in checkpoints.iterdir())
    if not others and os.path.lexists(keys):
        others = storage.read_private(keys).get("settings") is not None
    if others or os.path.lexists(finished):
        raise CannotResumeError(
            f"{workdir} holds a training that did not begin with these keys: use a new workdir"
        )


def not_begun(workdir: Path, settings: dict | None) -> None:
    """Raises CannotResumeError for files that a run, or with settings a training, has left in its folder."""
    names = {path.name for path in workdir.iterdir()} if workdir.exists() else set()
    names = {n for n in names if not (storage.of_lock(n) or n.endswith(".partial"))}
    left = sorted(names.difference(_BEFORE) if settings is None else names.intersection(_TRAINED))
    if left:
        raise CannotResumeError(
            f"{workdir / FOLDER / KEYS} is missing, but not {', '.join(left[:3])}, which a run may have left "
            "whose noise keys are gone: with new ones it would release twice and pay once, so use a new "
            "workdir, and keep other files out of it"
        )


def _begun(data: str, settings: dict | None) -> dict:
    return {"data": data, "settings": settings, "randomness": _RANDOMNESS}


def _goes_on(path: Path, workdir: Path, data: str, settings: dict | None) -> dict:
    """What an unfinished run began with. Raises CannotResumeError where that was something else."""
    before = storage.read_private(path)
    if before.get("randomness") != _RANDOMNESS:
        raise CannotResumeError(
            f"the run in {workdir} began under a version of dpx that draws other noise from its keys: go on "
            "with that version, or use a new workdir"
        )
    unchanged(before, workdir, data, settings)
    return before


def unchanged(stored: dict, workdir: Path, data: str, settings: dict | None) -> None:
    """Raises CannotResumeError where data or settings are not those that were stored."""
    if stored.get("data") != data:
        what = "data" if settings is None else "data or the initial parameters"
        raise CannotResumeError(
            f"the {what} changed since the run in {workdir} began: use a new workdir, or the old ones"
        )
    before, now = stored.get("settings") or {}, settings or {}
    changed = sorted(name for name in before | now if before.get(name) != now.get(name))
    if changed:
        raise CannotResumeError(
            f"{', '.join(changed)} changed since the training in {workdir} began: use a new workdir, or the "
            "old arguments, and for an old loss_fn and optimizer the version of JAX that traced them"
        )


def digest(data: Iterable[np.ndarray]) -> str:
    """The digest of arrays, in their order."""
    hashed = hashlib.sha256()
    for array in data:
        # Without shapes, arrays of one content cut in two places would look the same.
        hashed.update(f"{array.dtype} {array.shape} ".encode())
        # As bytes: bfloat16 is no type that buffers know.
        hashed.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return hashed.hexdigest()


def digest_of_all(data: Iterable[np.ndarray]) -> str:
    """The digest of the records of all processes, each of which has its own."""
    own = np.frombuffer(bytes.fromhex(digest(data)), np.uint8)
    digests = _processes.of_all(own).astype(np.uint8)
    return digest([digests]) if len(digests) > 1 else own.tobytes().hex()


def digest_of_each(data: Iterable[np.ndarray]) -> str:
    """The digest of data that every process has whole.

    Raises:
      CannotResumeError: in all processes, if their data differ.
    """
    own = digest(data)
    if any(other != own for other in _processes.of_each(own)):
        raise CannotResumeError(
            "the data are not the same in all processes: give each of them the same files"
        )
    return own
