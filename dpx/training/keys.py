"""Noise keys are secrets: whoever knows one can subtract the noise.

On private data the key of the noise and the randomness of Poisson sampling come from the operating system's
entropy. They lie in one file of their own (0600, in a 0700 folder) while the run is unfinished, so that a
killed run draws the same noise when it resumes, and are deleted when it has finished. Beside them lies what
the run began with (`dpx.training.resuming`).

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
from typing import Any, NamedTuple

import jax
import numpy as np

from dpx import _processes, _watch
from dpx import _storage as storage
from dpx._validate import warn_of_guess, wrong_key
from dpx.training import resuming
from dpx.training.resuming import FINISHED, FOLDER, KEYS, CannotResumeError

__all__ = [
    "FOLDER",
    "CannotResumeError",
    "Keys",
    "Opened",
    "check",
    "derive",
    "discard",
    "fingerprint",
    "generator",
    "of_training",
    "open_keys",
    "secret_key",
]

_SALT = "salt.json"


@dataclasses.dataclass(frozen=True)
class Keys:
    """The randomness that privacy rests on: a JAX key for noise, a SeedSequence for Poisson sampling."""

    noise: jax.Array
    sampling: np.random.SeedSequence


class Opened(NamedTuple):
    """The keys of a training, and whether it has finished: then nothing more may be drawn with them."""

    keys: Keys
    finished: bool


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
        shape = _words(key).shape
    except TypeError:
        shape = None
    if shape == (_key_words(),):
        warn_of_guess(int(_words(key)[0]) == 0, "key")
        return
    if jax.numpy.issubdtype(getattr(key, "dtype", int), jax.dtypes.prng_key) and not key.ndim:
        raise ValueError(
            f"key of the generator {jax.random.key_impl(key)} must be one of the default generator: set "
            "jax_default_prng_impl to that, or use dpx.secret_key()"
        )
    raise wrong_key(key)


# Digests of the keys that trainings of this process have used, and the folders of these.
_used: dict[bytes, Path | None] = {}


def _warn_if_used(key: jax.Array, workdir: Path | None) -> None:
    """Warns of a key that another training has used: in one folder it may be that training, which goes on."""
    folder = None if workdir is None else Path(workdir).resolve()
    digest = hashlib.sha256(_words(key).tobytes()).digest()
    again = digest in _used and (folder is None or _used[digest] != folder)
    _used[digest] = folder
    if again and not _watch.watching():
        warnings.warn(
            "key has been used by another training in this process: both draw the same noise, which whoever "
            "sees both results can take out of their difference: use a new dpx.secret_key() for each",
            stacklevel=2,
        )


@contextlib.contextmanager
def of_training(
    key: jax.Array | Keys, workdir: Path | None, *, data: Iterable[np.ndarray], settings: dict
) -> Iterator[Opened]:
    """The keys of a training; a JAX key lies in its folder while it runs.

    A training that was killed goes on under the key that it began with, whatever it is given then. One that
    has finished leaves a digest of its data and its settings, but no key. A run's `Keys` are kept by whoever
    opened them, who also keeps others out of the folder: one training of each label may work there.

    Args:
      key: Of a training that begins, or `Keys`.
      workdir: Of the training, where it has one.
      data, settings: What a training that goes on has to find unchanged; `settings` is JSON.

    Raises:
      CannotResumeError: if they have changed, or if the key of the training is lost.
      storage.StorageError: if another process works in the folder, or the key is damaged or open to others.
    """
    if not isinstance(key, Keys):
        _warn_if_used(key, workdir)
    if workdir is None:
        yield Opened(_of_first(lambda: key if isinstance(key, Keys) else derive(key)), False)
        return
    found = resuming.digest_of_all(data)
    if isinstance(key, Keys):
        with storage.lock(workdir / "checkpoints" / settings["label"]):
            _processes.of_first(lambda: resuming.check_training(workdir, found, settings))
            yield Opened(_of_first(lambda: key), False)
    else:
        with storage.lock(workdir):
            finished = _processes.of_first((workdir / FOLDER / FINISHED).exists)
            yield Opened(_of_first(lambda: derive(_kept(key, workdir, found, settings))), finished)
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
    finished = workdir / FOLDER / FINISHED
    if finished.exists():
        resuming.unchanged(storage.read_private(finished), workdir, data, settings)
        return key
    draw = functools.partial(dict, key=_words(key).tobytes().hex())
    stored = resuming.stored(workdir, data, draw, settings)
    return _wrap(np.frombuffer(bytes.fromhex(stored["key"]), np.uint32))


def _finish(workdir: Path) -> None:
    path = workdir / FOLDER / KEYS
    if _processes.is_first() and path.exists():
        stored = storage.read_private(path)
        about = {name: stored[name] for name in ("data", "settings")}
        storage.create_private(workdir / FOLDER / FINISHED, about)
        path.unlink()


def open_keys(
    config, workdir: Path, *, synthetic: bool = False, data: Iterable[np.ndarray] = ()
) -> Keys:
    """The keys of a run: new, or those that it had before it was killed.

    Args:
      config: Has `seed` and `noise_seed`.
      workdir: Of the run.
      synthetic: Nobody's data are used; the keys follow from `seed`, and nothing is stored.
      data: What the releases of the run are computed from, whole in every process: a run that resumes has to
        find it unchanged.

    Raises:
      CannotResumeError: if the run has lost its keys, or has other data than it began with, or than another
        of its processes.
      storage.StorageError: if its keys are damaged, or not its own.
    """
    workdir = Path(workdir)
    same = "" if synthetic else resuming.digest_of_each(data)

    def opened() -> Keys:
        if synthetic:
            return _from_seed(config.seed if config.noise_seed is None else config.noise_seed)
        if config.noise_seed is not None:
            resuming.stored(workdir, same, dict)
            return _from_seed(config.noise_seed)
        stored = resuming.stored(workdir, same, _draw)
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


def _draw() -> dict[str, str]:
    return {"noise": _words(secret_key()).tobytes().hex(), "sampling": os.urandom(32).hex()}


def _from_seed(seed: int) -> Keys:
    noise, sampling = np.random.SeedSequence(seed).spawn(2)
    return Keys(_wrap(noise.generate_state(_key_words(), np.uint32)), sampling)


def generator() -> str:
    """How JAX makes random numbers of a key: with another generator the same key gives other noise."""
    name = str(jax.random.key_impl(jax.random.key(0)))
    config: Any = jax.config
    whole = name == "threefry2x32" and not config.jax_threefry_partitionable
    return f"{name}, not partitionable" if whole else name


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
