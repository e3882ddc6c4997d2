"""Noise keys are secrets: whoever knows one can subtract the noise.

On private data a run has three secrets from the operating system's entropy: one for noise, which is a JAX key
of 64 bits, one for samples, and one of 256 bits for the streams of secure trainings (`dpx.noise.stream`).
All its randomness follows from them and from the names of what it is for (`Keys`): two releases share a key
only where they share a name, which is refused. The secrets lie in one file of their own (0600, in a 0700
folder) while the run is unfinished, so that a killed run draws the same noise when it resumes, and are
deleted when it has finished. Beside them lies what the run began with (`dpx.training.resuming`).

A `noise_seed` replaces them. It has to stay unknown, and to be used for one run on one data set: two runs
with one seed draw the same noise, which cancels, whether or not anybody knows the seed. Records therefore
show only a fingerprint of it (`fingerprint`), which recognises the seed in the folder where it was used.
"""

import contextlib
import contextvars
import hashlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dpx import _processes, _watch
from dpx import _storage as storage
from dpx._context import within
from dpx.noise.stream import SECRET_BYTES, Stream
from dpx.training import resuming
from dpx.training.purposes import (
    Keys,
    TrainingKeys,
    derive,
    from_seed,
    of_words,
    secret_key,
    words_of,
)
from dpx.training.resuming import FINISHED, FOLDER, KEYS, CannotResumeError

_SALT = "salt.json"
_PLANNED: contextvars.ContextVar[str | None] = contextvars.ContextVar("planned", default=None)


class Opened(NamedTuple):
    """The keys of a training, and whether it has finished, after which nothing more may be drawn."""

    keys: TrainingKeys
    finished: bool


# Digests of the keys and labels that trainings of this process have used, and the folders of these.
_used: dict[bytes, Path | None] = {}


def _warn_if_used(key: jax.Array, label: str, workdir: Path | None) -> None:
    """Warns of a key that has served a training of this label, unless that may go on in this folder."""
    folder = None if workdir is None else Path(workdir).resolve()
    digest = hashlib.sha256(words_of(key).tobytes() + label.encode()).digest()
    again = digest in _used and (folder is None or _used[digest] != folder)
    _used[digest] = folder
    if again and not _watch.watching():
        warnings.warn(
            "key has been used by another training of this label in this process: both draw the same noise, "
            "which whoever sees both results can take out of their difference: use a new dpx.secret_key() "
            "for each",
            stacklevel=2,
        )


@contextlib.contextmanager
def of_training(
    key: jax.Array | Keys | None,
    workdir: Path | None,
    *,
    data: Iterable[np.ndarray],
    settings: dict,
) -> Iterator[Opened]:
    """The keys of a training, which follow from its label; a JAX key lies in its folder while it runs.

    A training that was killed goes on under the key that it began with, whatever it is given then. One that
    has finished leaves a digest of its data and its settings, but no key. A run's `Keys` are kept by whoever
    opened them, who also keeps others out of the folder: one training of each label may work there.

    Args:
      key: The JAX key of a training that begins, or a run's `Keys`; None for secrets from the operating
        system's entropy.
      workdir: The folder of the training, if it has one.
      data, settings: What a training that goes on has to find unchanged. `settings` can be written as JSON,
        has the label, and says whether the training is `secure`.

    Raises:
      CannotResumeError: if they have changed, or if the key of the training is lost.
      ValueError: for `Keys` that another training of this label was given.
      storage.StorageError: if another process works in the folder, or the key is damaged or open to others.
    """
    label, secure = settings["label"], bool(settings.get("secure"))
    if key is not None and not isinstance(key, Keys):
        _warn_if_used(key, label, workdir)

    def of_label(keys: Keys, begun: Any = None) -> TrainingKeys:
        return keys.training(label, begun, secure=secure)

    if workdir is None:
        keys = key if isinstance(key, Keys) else _of_stored(_draw(key))
        yield Opened(_of_first(lambda: of_label(keys)), False)
        return
    same = resuming.digest_of_all(data)
    if isinstance(key, Keys):
        with storage.lock(workdir / "checkpoints" / label):
            under = key.shown()
            _processes.of_first(lambda: resuming.check_training(workdir, same, settings, under))
            yield Opened(_of_first(lambda: of_label(key, (same, settings))), False)
    else:
        with storage.lock(workdir):
            finished = _processes.of_first((workdir / FOLDER / FINISHED).exists)
            yield Opened(_of_first(lambda: of_label(_kept(key, workdir, same, settings))), finished)
            _finish(workdir)


def _of_first(make: Callable[[], TrainingKeys]) -> TrainingKeys:
    """The keys that `make` returns in the first process, for all processes: together they add one noise."""

    def told(secret: Any) -> Any:
        if isinstance(secret, Stream):
            return secret.secret.hex()
        seed = isinstance(secret, np.random.SeedSequence)
        return secret.state if seed else words_of(secret).tolist()

    def heard(text: Any) -> Any:
        if isinstance(text, str):
            return Stream(bytes.fromhex(text))
        return np.random.SeedSequence(**text) if isinstance(text, dict) else of_words(text)

    if not _processes.several():
        return make()
    return TrainingKeys(*map(heard, _processes.of_first(lambda: [*map(told, make())])))


def _kept(key: jax.Array | None, workdir: Path, data: str, settings: dict) -> Keys:
    """The keys of a training in a folder: of `key` if it begins or has finished, else those it began with."""
    finished = workdir / FOLDER / FINISHED
    if finished.exists():
        resuming.unchanged(storage.read_private(finished), workdir, data, settings)
        return _of_stored(_draw(key))
    return _of_stored(resuming.stored(workdir, data, lambda: _draw(key), settings))


def _of_stored(stored: dict[str, str]) -> Keys:
    """The keys that follow from what `_draw` made and a file has kept."""
    if "key" in stored:
        return derive(of_words(np.frombuffer(bytes.fromhex(stored["key"]), np.uint32)))
    return Keys(
        of_words(np.frombuffer(bytes.fromhex(stored["noise"]), np.uint32)),
        np.random.SeedSequence(int(stored["sampling"], 16)),
        # A run that began under an older version has none.
        bytes.fromhex(stored["streams"]) if "streams" in stored else None,
    )


def _finish(workdir: Path) -> None:
    """Puts a digest of the data and the settings of a finished training in the place of its keys."""
    path = workdir / FOLDER / KEYS
    if _processes.is_first() and path.exists():
        stored = storage.read_private(path)
        about = {name: stored[name] for name in ("data", "settings")}
        storage.create_private(workdir / FOLDER / FINISHED, about)
        storage.delete_private(path)


def only_of(data: str | None) -> contextlib.AbstractContextManager[None]:
    """A context in which a run opens its keys on data of this digest alone; None for any."""
    return within(_PLANNED, data)


def open_keys(
    config, workdir: Path, *, synthetic: bool = False, data: Iterable[np.ndarray] = ()
) -> Keys:
    """The keys of a run: new, or those that it had before it was killed.

    Args:
      config: A config with `seed` and `noise_seed`.
      workdir: The folder of the run.
      synthetic: Whether the run uses nobody's data. The keys then follow from `seed`, and nothing is stored.
      data: The arrays from which releases are computed, whole in every process. A run that resumes has to
        find them unchanged.

    Raises:
      CannotResumeError: if the run has lost its keys, or has other data than it began with, than another of
        its processes, or than its selection was planned for.
      storage.StorageError: if its keys are damaged, or not its own.
    """
    if synthetic:
        return from_seed(config.seed if config.noise_seed is None else config.noise_seed)
    workdir, same = Path(workdir), resuming.digest_of_each(data)
    if _PLANNED.get() not in (None, same):
        raise CannotResumeError(
            f"the data changed since the selection of {workdir} began: use a new --workdir, or the old data"
        )
    draw = _draw if config.noise_seed is None else dict
    stored = _processes.of_first(lambda: resuming.stored(workdir, same, draw))
    if config.noise_seed is not None:
        return from_seed(config.noise_seed)
    return _of_stored(stored)


def discard(workdir: Path) -> None:
    """Deletes the keys of a finished run, if it has any. It warns where it cannot: the result stands."""
    folder = Path(workdir) / FOLDER
    if not folder.exists():
        return
    try:
        if (folder / _SALT).exists():
            for path in folder.iterdir():
                if path.name != _SALT:
                    path.unlink()
        else:
            shutil.rmtree(folder)
    except OSError as error:
        warnings.warn(
            f"the noise keys in {folder} could not be deleted ({error}): delete them, since whoever reads "
            "them can subtract the noise",
            stacklevel=2,
        )


def discard_unused(workdir: Path) -> None:
    """Deletes the keys of a run that ends without anything that may follow from them."""
    with contextlib.suppress(CannotResumeError):
        resuming.not_begun(Path(workdir), None)
        discard(workdir)


def fingerprint(noise_seed: int, workdir: Path, *, new: bool = False) -> str:
    """The fingerprint of a noise seed, which the records of a folder show in place of the seed.

    A hash alone would not hide a seed: people choose small numbers, and whoever reads the report could try
    them all. So 32 random bytes go into the fingerprint, which stay in the folder's secret folder. Without
    them it says nothing about the seed, and is another one in every folder. With them each guess costs a
    scrypt of 16 MiB, about 50 ms. That slows a search and no more: a seed that has to stay unknown is drawn
    at random, from a range of 2⁶⁴ at least.

    Args:
      noise_seed: The seed, at least 0.
      workdir: The folder of the run.
      new: Whether the folder is being claimed, and gets its random bytes now.

    Raises:
      storage.StorageError: if the folder has lost its random bytes, or they are damaged.
    """
    path = Path(workdir) / FOLDER / _SALT
    if new:
        storage.create_private(path, {"salt": os.urandom(32).hex()})
    salt = bytes.fromhex(storage.read_private(path)["salt"])
    hashed = hashlib.scrypt(str(noise_seed).encode(), salt=salt, n=2**14, r=8, p=1, dklen=8)
    return f"scrypt:{hashed.hex()}"


def _draw(key: jax.Array | None = None) -> dict[str, str]:
    """What a file of keys keeps: the given key, or new secrets from the operating system's entropy."""
    if key is not None:
        return {"key": words_of(key).tobytes().hex()}
    return {
        "noise": words_of(secret_key()).tobytes().hex(),
        "sampling": os.urandom(32).hex(),
        "streams": os.urandom(SECRET_BYTES).hex(),
    }
