"""Noise keys are secrets: whoever knows one can subtract the noise.

On private data the key of the noise and the randomness of Poisson sampling come from the operating system's
entropy. They lie in one file of their own (0600, in a 0700 folder) while the run is unfinished, so that a
killed run draws the same noise when it resumes, and are deleted when it has finished.
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np

_FOLDER = "secret"


@dataclasses.dataclass(frozen=True)
class Keys:
    """The randomness that privacy rests on: a JAX key for noise, a SeedSequence for Poisson sampling."""

    noise: jax.Array
    sampling: np.random.SeedSequence


def open_keys(config, workdir: Path, *, synthetic: bool = False) -> Keys:
    """The keys of a run: new, or those that it had before it was killed.

    Args:
      config: Has `seed` and `noise_seed`.
      workdir: Of the run.
      synthetic: Nobody's data are used; the keys follow from `seed`, and nothing is stored.
    """
    if synthetic or config.noise_seed is not None:
        seed = config.seed if config.noise_seed is None else config.noise_seed
        noise, sampling = np.random.SeedSequence(seed).spawn(2)
        return Keys(_wrap(noise.generate_state(_key_words(), np.uint32)), sampling)
    path = Path(workdir) / _FOLDER / "keys.json"
    if not path.exists():
        _create(path)
    stored = json.loads(path.read_text(encoding="utf-8"))
    return Keys(
        _wrap(np.frombuffer(bytes.fromhex(stored["noise"]), np.uint32)),
        np.random.SeedSequence(int(stored["sampling"], 16)),
    )


def discard(workdir: Path) -> None:
    """Deletes the keys of a finished run, if it had any."""
    shutil.rmtree(Path(workdir) / _FOLDER, ignore_errors=True)


def _key_words() -> int:
    return jax.random.key_data(jax.random.key(0)).size


def _wrap(words: np.ndarray) -> jax.Array:
    return jax.random.wrap_key_data(jax.numpy.asarray(words, jax.numpy.uint32))


def _create(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    text = json.dumps(
        {"noise": os.urandom(4 * _key_words()).hex(), "sampling": os.urandom(32).hex()}
    )
    # Complete under its name or not there at all: half a key would make the run impossible to resume.
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
