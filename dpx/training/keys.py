"""Noise keys are secrets: whoever knows one can subtract the noise.

On private data the key of the noise and the randomness of Poisson sampling come from the operating system's
entropy. They lie in one file of their own (0600, in a 0700 folder) while the run is unfinished, so that a
killed run draws the same noise when it resumes, and are deleted when it has finished. Beside them lies a
digest of the training data: the same noise on other data would show the difference between the two.

A `noise_seed` replaces them. It has to stay unknown, and to be used for one run on one data set: two runs
with one seed draw the same noise, which cancels, whether or not anybody knows the seed. Records therefore
show only a fingerprint of it (`fingerprint`), which recognises the seed in the folder where it was used.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dpx import _processes, _watch
from dpx import _storage as storage

FOLDER = "secret"
_KEYS, _SALT, _FINISHED = "keys.json", "salt.json", "finished.json"
# What only a run that has had its keys leaves.
_BEGUN = ("metrics.jsonl", "checkpoints", "model", "privacy.json")


class CannotResumeError(ValueError):
    """An unfinished run cannot go on without spending more than it states."""


@dataclasses.dataclass(frozen=True)
class Keys:
    """The randomness that privacy rests on: a JAX key for noise, a SeedSequence for Poisson sampling."""

    noise: jax.Array
    sampling: np.random.SeedSequence


def secret_key() -> jax.Array:
    """A JAX key from the operating system's entropy, which fills every word of it.

    `jax.random.key(seed)` keeps 32 bits of its seed, which can be searched. Whoever knows a key can subtract
    the noise that was drawn with it: keep it out of logs and files.
    """
    return _wrap(np.frombuffer(os.urandom(4 * _key_words()), np.uint32))


def derive(key: jax.Array) -> Keys:
    """The keys of a training that is given one JAX key, one for each purpose."""
    noise, sampling = jax.random.split(_wrap(_words(key)))
    return Keys(noise, np.random.SeedSequence(_words(sampling).tolist()))


def check(key: Any) -> None:
    """Raises ValueError for what is neither one JAX key nor `Keys`."""
    if isinstance(key, Keys):
        return
    try:
        right = _words(key).shape == (_key_words(),)
    except TypeError:
        right = False
    if not right:
        raise ValueError(
            f"key={key!r} must be a JAX key: use dpx.secret_key(), or jax.random.key(0) for a trial on data "
            "that are nobody's"
        )


@contextlib.contextmanager
def of_training(
    key: jax.Array | Keys, workdir: Path | None, *, data: Iterable[np.ndarray], settings: dict
) -> Iterator[Keys]:
    """The keys of a training, which lie in its folder while it runs.

    A training that was killed goes on under the key that it began with, whatever it is given then. One that
    has finished leaves a digest of its data and its settings, but no key.

    Args:
      key: Of a training that begins; a run's `Keys` are kept by whoever opened them.
      workdir: Of the training, where it has one. No other process may work there.
      data, settings: What a training that goes on has to find unchanged; `settings` is JSON.

    Raises:
      CannotResumeError: if they have changed, or if the key or the result of the training is lost.
      storage.StorageError: if another process works in the folder, or the key is damaged or open to others.
    """
    if isinstance(key, Keys):
        yield _of_first(lambda: key)
    elif workdir is None:
        yield _of_first(lambda: derive(key))
    else:
        found = _digest_of_all(data)
        with storage.lock(workdir):
            yield _of_first(lambda: derive(_kept(key, workdir, found, settings)))
            _finish(workdir)


def _of_first(make: Callable[[], Keys]) -> Keys:
    """The keys that `make` returns in the first of several processes: they add one noise to one sum."""

    def words() -> list:
        found = make()
        return [_words(found.noise).tolist(), found.sampling.state]

    if not _processes.several():
        return make()
    noise, sampling = _processes.of_first(words)
    return Keys(_wrap(noise), np.random.SeedSequence(**sampling))


def _kept(key: jax.Array, workdir: Path, data: str, settings: dict) -> jax.Array:
    """The given key, if the training in the folder begins or has finished, or that which it began with."""
    finished = workdir / FOLDER / _FINISHED
    if finished.exists():
        _unchanged(storage.read_private(finished), workdir, data, settings)
        if not (workdir / "checkpoints" / settings["label"] / str(settings["steps"])).exists():
            raise CannotResumeError(
                f"{workdir} holds a finished training whose result is gone: use a new workdir"
            )
        return key
    draw = functools.partial(dict, key=_words(key).tobytes().hex())
    stored = _stored(workdir, data, draw, settings)
    return _wrap(np.frombuffer(bytes.fromhex(stored["key"]), np.uint32))


def _finish(workdir: Path) -> None:
    path = workdir / FOLDER / _KEYS
    if _processes.is_first() and path.exists():
        stored = storage.read_private(path)
        about = {name: stored[name] for name in ("data", "settings")}
        storage.create_private(workdir / FOLDER / _FINISHED, about)
        path.unlink()


def open_keys(
    config, workdir: Path, *, synthetic: bool = False, data: Iterable[np.ndarray] = ()
) -> Keys:
    """The keys of a run: new, or those that it had before it was killed.

    Args:
      config: Has `seed` and `noise_seed`.
      workdir: Of the run.
      synthetic: Nobody's data are used; the keys follow from `seed`, and nothing is stored.
      data: The training arrays, which a run that resumes has to find unchanged.

    Raises:
      CannotResumeError: if the run has lost its keys, or has other data than it began with.
      storage.StorageError: if its keys are damaged, or not its own.
    """

    def opened() -> Keys:
        if synthetic:
            return _from_seed(config.seed if config.noise_seed is None else config.noise_seed)
        if config.noise_seed is not None:
            _stored(Path(workdir), _digest(data), dict)
            return _from_seed(config.noise_seed)
        stored = _stored(Path(workdir), _digest(data), _draw)
        return Keys(
            _wrap(np.frombuffer(bytes.fromhex(stored["noise"]), np.uint32)),
            np.random.SeedSequence(int(stored["sampling"], 16)),
        )

    found = _of_first(opened)
    _watch.key_used(found.noise, "all noise of the run")
    return found


def discard(workdir: Path) -> None:
    """Deletes the keys of a finished run, if it had any, or warns: its result stands."""
    folder = Path(workdir) / FOLDER
    if not folder.exists():
        return
    try:
        if (folder / _SALT).exists():
            (folder / _KEYS).unlink(missing_ok=True)
        else:
            shutil.rmtree(folder)
    except OSError as error:
        warnings.warn(
            f"the noise keys in {folder} could not be deleted ({error}): delete them, since whoever reads "
            "them can subtract the noise",
            stacklevel=2,
        )


def fingerprint(noise_seed: int, workdir: Path, *, new: bool = False) -> str:
    """What a folder's records show of a noise seed.

    A hash alone would not hide one: people choose small numbers, and whoever reads the report could try them
    all. So 32 random bytes of the folder go into it, which stay in its secret folder: without them the
    fingerprint says nothing about the seed, and is another one in every folder. To whoever has the secret
    folder too, each guess costs a scrypt of 16 MiB, about 50 ms, which slows a search and no more: a seed
    that has to stay unknown is drawn at random, from a range of 2⁶⁴ at least.

    Args:
      noise_seed: At least 0.
      workdir: Of the run.
      new: The folder is being claimed, and may get its random bytes now.

    Raises:
      storage.StorageError: if the folder has lost its random bytes, or they are damaged.
    """
    path = Path(workdir) / FOLDER / _SALT
    if new:
        storage.create_private(path, {"salt": os.urandom(32).hex()})
    salt = bytes.fromhex(storage.read_private(path)["salt"])
    hashed = hashlib.scrypt(str(noise_seed).encode(), salt=salt, n=2**14, r=8, p=1, dklen=8)
    return f"scrypt:{hashed.hex()}"


def _stored(
    workdir: Path, data: str, draw: Callable[[], dict], settings: dict | None = None
) -> dict:
    """What lies in the run's file of keys, which is made from `draw` for a run that begins."""
    path = workdir / FOLDER / _KEYS
    if not os.path.lexists(path):
        _not_begun(workdir)
        if storage.create_private(path, {**draw(), "data": data, "settings": settings}):
            try:
                # Between the two looks this process may have slept while another one ran, and finished.
                _not_begun(workdir)
            except CannotResumeError:
                path.unlink()
                raise
    stored = storage.read_private(path)
    _unchanged(stored, workdir, data, settings)
    return stored


def _not_begun(workdir: Path) -> None:
    if any((workdir / name).exists() for name in _BEGUN):
        raise CannotResumeError(
            f"{workdir / FOLDER / _KEYS} is missing, and {workdir} holds a run whose noise keys are gone: "
            "with new ones it would release twice and pay once, so use a new --workdir"
        )


def _unchanged(stored: dict, workdir: Path, data: str, settings: dict | None) -> None:
    if stored.get("data") != data:
        raise CannotResumeError(
            f"the data changed since the run in {workdir} began: use a new --workdir, or the old data"
        )
    before, now = stored.get("settings") or {}, settings or {}
    changed = sorted(name for name in before | now if before.get(name) != now.get(name))
    if changed:
        raise CannotResumeError(
            f"{', '.join(changed)} changed since the training in {workdir} began: use a new workdir, or the "
            "old arguments"
        )


def _draw() -> dict[str, str]:
    return {"noise": _words(secret_key()).tobytes().hex(), "sampling": os.urandom(32).hex()}


def _from_seed(seed: int) -> Keys:
    noise, sampling = np.random.SeedSequence(seed).spawn(2)
    return Keys(_wrap(noise.generate_state(_key_words(), np.uint32)), sampling)


def _digest(data: Iterable[np.ndarray]) -> str:
    found = hashlib.sha256()
    for array in data:
        # Without shapes, arrays of one content cut in two places would look the same.
        found.update(f"{array.dtype} {array.shape} ".encode())
        # As bytes: bfloat16 is no type that buffers know.
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _digest_of_all(data: Iterable[np.ndarray]) -> str:
    """Of the records of all processes, each of which has its own."""
    own = np.frombuffer(bytes.fromhex(_digest(data)), np.uint8)
    found = _processes.of_all(own).astype(np.uint8)
    return _digest([found]) if len(found) > 1 else own.tobytes().hex()


def _key_words() -> int:
    return jax.random.key_data(jax.random.key(0)).size


def _words(key: jax.Array) -> np.ndarray:
    """Of a typed key, or of one that is an array of words already."""
    if jax.numpy.issubdtype(jax.numpy.result_type(key), jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    elif jax.numpy.result_type(key) != np.uint32:
        raise TypeError("a key is made of words of 32 bits")
    return np.asarray(key, np.uint32)


def _wrap(words: np.ndarray) -> jax.Array:
    return jax.random.wrap_key_data(jax.numpy.asarray(words, jax.numpy.uint32))
