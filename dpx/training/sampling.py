"""Poisson subsampling with shapes that jit can reuse."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpx import _watch
from dpx._validate import check_integer, check_number, warn_of_guess


def poisson_batches(
    num_examples: int,
    *,
    sampling_probability: float,
    steps: int,
    seed: int | np.random.SeedSequence,
    multiple_of: int = 1,
    max_batch_size: int | None = None,
    groups: int = 1,
    start: int = 0,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields one Poisson sample of the examples per step.

    Each example is in each batch with the given probability, independently of everything else: exactly the
    sampling that `dpx.dpsgd_epsilon` accounts. The batch of step t depends on (seed, t) alone, so that a run
    can be resumed at any step. A large sample yields a longer batch, unless `max_batch_size` is given.

    Privacy amplification holds only while `seed` is as secret as the noise.

    Args:
      num_examples: N.
      sampling_probability: q in (0, 1].
      steps: Number of batches in all.
      seed: A NumPy SeedSequence, such as `np.random.SeedSequence()`, or an int, which must not be guessed.
      multiple_of: Batches are padded to a multiple of this, at least one, so that jit sees few shapes.
      max_batch_size: Of a larger sample a uniformly random part of this size is kept, and all batches are
        padded to it: jit sees one shape. It costs privacy (`dpx.dpsgd_epsilon` with the same argument).
      groups: Each record is in one of so many groups, drawn for itself from `seed`, and step t samples from
        group t mod `groups` alone: a record is in batches that are so far apart (`dpx.training.correlated`).
      start: The first step to yield.

    Yields:
      indices (n,) int32 and mask (n,) bool, False where an entry is padding (which has index 0).

    Raises:
      ValueError: for an argument out of range.
    """
    num_examples = check_integer(num_examples, "num_examples")
    multiple_of = check_integer(multiple_of, "multiple_of")
    if max_batch_size is not None:
        max_batch_size = check_integer(max_batch_size, "max_batch_size")
    groups = check_integer(groups, "groups")
    steps, start = check_integer(steps, "steps", 0), check_integer(start, "start", 0)
    if not 0 < check_number(sampling_probability, "sampling_probability") <= 1:
        raise ValueError(
            f"sampling_probability={sampling_probability} must be in (0, 1]: "
            "expected batch size / number of records"
        )
    root = seed
    if not isinstance(root, np.random.SeedSequence):
        given: Any = seed
        if np.ndim(given) or jnp.issubdtype(getattr(given, "dtype", int), jax.dtypes.prng_key):
            # A key may be secret: it is not shown.
            raise ValueError(
                f"seed of type {type(seed).__name__} must be an int or a NumPy SeedSequence: use "
                "np.random.SeedSequence(), which the operating system's entropy fills"
            )
        number = check_integer(seed, "seed", 0)
        warn_of_guess(number < 2**32, "seed")
        root = np.random.SeedSequence(number)
    _watch.check_samples(max_batch_size)
    _watch.key_used(root.generate_state(_watch.KEY_WORDS), "sampling")
    return _batches(
        num_examples,
        sampling_probability,
        range(start, steps),
        root,
        multiple_of,
        max_batch_size,
        groups,
    )


def _batches(num_examples, sampling_probability, steps, root, multiple_of, most, groups):
    ids = _watch.record_ids(num_examples)

    def generator(*purpose: int) -> np.random.Generator:
        spawned = (*root.spawn_key, *purpose)
        child = np.random.SeedSequence(root.entropy, spawn_key=spawned, pool_size=root.pool_size)
        return np.random.default_rng(child)

    group = generator(0, 1).integers(groups, size=ids.max() + 1)[ids]
    for step in steps:
        draws = generator(step).random(ids.max() + 1)[ids]
        chosen = np.flatnonzero(draws < sampling_probability)
        chosen = chosen[group[chosen] == step % groups]
        if most is not None and len(chosen) > most:
            # Draws below the probability are uniform there, so that those of the smallest are a random part.
            chosen = np.sort(chosen[np.argpartition(draws[chosen], most)[:most]])
        wanted = len(chosen) if most is None else most
        size = max(1, math.ceil(wanted / multiple_of)) * multiple_of
        indices = np.zeros(size, np.int32)
        indices[: len(chosen)] = chosen
        _watch.sampled(sampling_probability)
        yield indices, np.arange(size) < len(chosen)
