"""Noise keys are secrets: whoever knows one can subtract the noise.

On private data the key of the noise and the randomness of Poisson sampling come from the operating system's
entropy. They lie in one file of their own (0600, in a 0700 folder) while the run is unfinished, so that a
killed run draws the same noise when it resumes, and are deleted when it has finished. Beside them lies a
digest of the training data: the same noise on other data would show the difference between the two.

A `noise_seed` replaces them. It has to stay unknown, and to be used for one run on one data set: two runs
with one seed draw the same noise, which cancels, whether or not anybody knows the seed.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np

_FOLDER = "secret"
# What only a run that has had its keys leaves.
_BEGUN = ("metrics.jsonl", "checkpoints", "model", "privacy.json")


class CannotResumeError(ValueError):
    """An unfinished run cannot go on without spending more than it states."""


@dataclasses.dataclass(frozen=True)
class Keys:
    """The randomness that privacy rests on: a JAX key for noise, a SeedSequence for Poisson sampling."""

    noise: jax.Array
    sampling: np.random.SeedSequence


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
    """
    if synthetic or config.noise_seed is not None:
        seed = config.seed if config.noise_seed is None else config.noise_seed
        noise, sampling = np.random.SeedSequence(seed).spawn(2)
        return Keys(_wrap(noise.generate_state(_key_words(), np.uint32)), sampling)
    path, digest = Path(workdir) / _FOLDER / "keys.json", _digest(data)
    if not path.exists():
        if any((Path(workdir) / name).exists() for name in _BEGUN):
            raise CannotResumeError(
                f"{workdir} holds a run whose noise keys are gone: with new ones it would release twice "
                "and pay once, so use a new --workdir"
            )
        _create(path, digest)
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored.get("data") != digest:
        raise CannotResumeError(
            f"the data changed since the run in {workdir} began: use a new --workdir, or the old data"
        )
    return Keys(
        _wrap(np.frombuffer(bytes.fromhex(stored["noise"]), np.uint32)),
        np.random.SeedSequence(int(stored["sampling"], 16)),
    )


def discard(workdir: Path) -> None:
    """Deletes the keys of a finished run, if it had any, or warns: its result stands."""
    folder = Path(workdir) / _FOLDER
    if not folder.exists():
        return
    try:
        shutil.rmtree(folder)
    except OSError as error:
        warnings.warn(
            f"the noise keys in {folder} could not be deleted ({error}): delete them, since whoever reads "
            "them can subtract the noise",
            stacklevel=2,
        )


def _digest(data: Iterable[np.ndarray]) -> str:
    found = hashlib.sha256()
    for array in data:
        # Without shapes, arrays of one content cut in two places would look the same.
        found.update(f"{array.dtype} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def _key_words() -> int:
    return jax.random.key_data(jax.random.key(0)).size


def _wrap(words: np.ndarray) -> jax.Array:
    return jax.random.wrap_key_data(jax.numpy.asarray(words, jax.numpy.uint32))


def _create(path: Path, digest: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    noise, sampling = os.urandom(4 * _key_words()), os.urandom(32)
    text = json.dumps({"noise": noise.hex(), "sampling": sampling.hex(), "data": digest})
    # Complete under its name or not there at all: half a key would make the run impossible to resume.
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
