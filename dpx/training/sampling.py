"""How the batches of a training are drawn: by Poisson sampling, or by random allocation.

A sampling is a value, which draws the batches for `dpx.training.fit`, and says how they are accounted.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dpx import _watch
from dpx._validate import check_integer, check_sampling_probability, warn_of_guess
from dpx.noise.stream import Place, Stream
from dpx.privacy.allocation import epoch

Seed = int | np.random.SeedSequence | Stream
Batches = Iterator[tuple[np.ndarray, np.ndarray]]  # indices and masks


def poisson_batches(
    num_examples: int,
    *,
    sampling_probability: float,
    steps: int,
    seed: Seed,
    multiple_of: int = 1,
    max_batch_size: int | None = None,
    groups: int = 1,
    start: int = 0,
) -> Batches:
    """Yields one Poisson sample of the examples per step.

    Each example is in each batch with the given probability, independently of everything else: exactly the
    sampling that `dpx.dpsgd_epsilon` accounts. The batch of step t depends on (seed, t) alone, so that a run
    can be resumed at any step. A large sample yields a longer batch, unless `max_batch_size` is given.

    Privacy amplification holds only while `seed` is as secret as the noise.

    Args:
      num_examples: N, the number of examples.
      sampling_probability: q in (0, 1].
      steps: The number of batches in all.
      seed: A NumPy SeedSequence, such as `np.random.SeedSequence()`, or an int, which must not be guessed; or
        a cryptographic stream (`dpx.noise.stream`).
      multiple_of: The number of which the sizes of padded batches are multiples, so that jit sees few shapes.
      max_batch_size: The size of all batches once they are padded, so that jit sees one shape. Of a larger
        sample a uniformly random part is kept. It costs privacy (`dpx.dpsgd_epsilon` with this argument).
      groups: The number of groups. Each example is in one of them, at random by `seed`, and step t samples
        from group t mod `groups` alone. So the batches of an example are that many steps apart or more
        (`dpx.training.correlated`).
      start: The first step to yield.

    Yields:
      indices (n,) int32 and mask (n,) bool, False where an entry is padding (which has index 0).

    Raises:
      ValueError: for an argument out of range.
    """
    settings = _checked(num_examples, sampling_probability, steps, start, multiple_of)
    if max_batch_size is not None:
        max_batch_size = check_integer(max_batch_size, "max_batch_size")
    groups = check_integer(groups, "groups")
    _watch.check_samples(max_batch_size)
    root = _root(seed)
    return _poisson(root, max_batch_size, groups, *settings)


def allocated_batches(
    num_examples: int,
    *,
    sampling_probability: float,
    steps: int,
    seed: Seed,
    multiple_of: int = 1,
    start: int = 0,
) -> Batches:
    """Yields the batches of random allocation: each record is in one batch of each epoch.

    An epoch has 1 / `sampling_probability` steps, rounded (`dpx.privacy.allocation.epoch`). In each epoch
    every record draws its step anew, uniformly and independently of all others. So the sizes of batches vary,
    as those of Poisson samples do. This is exactly the sampling that `dpx.dpsgd_epsilon` accounts with
    sampling="allocation". It is not a shuffle that is cut into batches of one size, in which a record that
    joins moves others. The batch of step t depends on (seed, t) alone.

    Privacy amplification holds only while `seed` is as secret as the noise.

    The arguments are those of `poisson_batches`; `sampling_probability` is the share of the records that a
    batch is expected to have, in the mean over all steps.

    Yields:
      indices (n,) int32 and mask (n,) bool, False where an entry is padding (which has index 0).

    Raises:
      ValueError: for an argument out of range.
    """
    settings = _checked(num_examples, sampling_probability, steps, start, multiple_of)
    root = _root(seed)
    return _allocated(root, *settings)


@dataclasses.dataclass(frozen=True)
class Poisson:
    """Each record is in each batch with the sampling probability, independently of everything else.

    Attributes:
      max_batch_size: The size at which samples are cut off, at random, so that every step has one shape. It
        costs noise, and the guarantee says how likely a cut is. None cuts nothing off: the step is then
        compiled anew for a sample that is six standard deviations larger than expected.
    """

    max_batch_size: int | None = None
    name: ClassVar[str] = "poisson"

    def __post_init__(self):
        if self.max_batch_size is not None:  # an int of Python, which a folder can keep
            most = check_integer(self.max_batch_size, "max_batch_size")
            object.__setattr__(self, "max_batch_size", most)

    def accounted(self, num_examples: int) -> dict[str, Any]:
        """The arguments of `dpx.dpsgd_epsilon` that say how this many records are sampled."""
        if self.max_batch_size is None:
            return {"sampling": "poisson"}
        return {"num_examples": num_examples, "max_batch_size": self.max_batch_size}

    def batches(self, num_examples: int, **settings: Any) -> Batches:
        """The batches of `poisson_batches` with these settings."""
        return poisson_batches(num_examples, max_batch_size=self.max_batch_size, **settings)

    def room(self, num_examples: int, sampling_probability: float) -> int:
        """The largest number of these records that a batch is expected to have."""
        if self.max_batch_size is not None:
            return self.max_batch_size
        return largest_sample(num_examples, sampling_probability)


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Each record is in one batch of each epoch, chosen at random (`allocated_batches`)."""

    name: ClassVar[str] = "allocation"
    max_batch_size: ClassVar[None] = None  # no bound on ε is known for batches that are cut off

    def accounted(self, num_examples: int) -> dict[str, Any]:
        """The arguments of `dpx.dpsgd_epsilon` that say how this many records are sampled."""
        del num_examples
        return {"sampling": "allocation"}

    def batches(self, num_examples: int, **settings: Any) -> Batches:
        """The batches of `allocated_batches` with these settings."""
        return allocated_batches(num_examples, **settings)

    def room(self, num_examples: int, sampling_probability: float) -> int:
        """The largest number of these records that a batch is expected to have."""
        return largest_sample(num_examples, 1 / math.floor(1 / sampling_probability))


Sampling = Poisson | Allocation
NAMES = ("auto", Poisson.name, Allocation.name)


def largest_sample(num_examples: int, probability: float) -> int:
    """A size that samples hardly ever exceed: six standard deviations above the mean."""
    spread = math.sqrt(num_examples * probability * (1 - probability))
    return min(num_examples, math.ceil(num_examples * probability + 6 * spread) + 1)


def _checked(
    num_examples: int, sampling_probability: float, steps: int, start: int, multiple_of: int
) -> tuple[int, float, range, int]:
    num_examples = check_integer(num_examples, "num_examples")
    multiple_of = check_integer(multiple_of, "multiple_of")
    steps, start = check_integer(steps, "steps", 0), check_integer(start, "start", 0)
    check_sampling_probability(sampling_probability)
    return num_examples, sampling_probability, range(start, steps), multiple_of


def _root(seed: Seed) -> np.random.SeedSequence | Stream:
    """The source of all draws of a seed; raises ValueError for anything else."""
    root = seed
    if not isinstance(root, np.random.SeedSequence | Stream):
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
    _watch.key_used(_shown(root), "sampling")
    return root


def _shown(root: np.random.SeedSequence | Stream) -> tuple[int, ...]:
    """The words by which a replay recognises a seed."""
    if isinstance(root, Stream):
        return root.shown(_watch.KEY_WORDS)
    return tuple(root.generate_state(_watch.KEY_WORDS).tolist())


def _generator(root: np.random.SeedSequence | Stream, *purpose: int) -> np.random.Generator | Place:
    """The generator of the draws for one purpose, which follows from the source and the purpose alone."""
    if isinstance(root, Stream):
        return root.at(*purpose)
    spawned = (*root.spawn_key, *purpose)
    child = np.random.SeedSequence(root.entropy, spawn_key=spawned, pool_size=root.pool_size)
    return np.random.default_rng(child)


def _poisson(root, most, groups, num_examples, sampling_probability, steps, multiple_of):
    ids = _watch.record_ids(num_examples)
    group = _generator(root, 0, 1).integers(groups, size=ids.max() + 1)[ids]
    for step in steps:
        draws = _generator(root, step).random(ids.max() + 1)[ids]
        chosen = np.flatnonzero(draws < sampling_probability)
        chosen = chosen[group[chosen] == step % groups]
        if most is not None and len(chosen) > most:
            # Draws below the probability are uniform, so that the smallest ones are a random part.
            chosen = np.sort(chosen[np.argpartition(draws[chosen], most)[:most]])
        _watch.sampled(sampling_probability)
        yield _padded(chosen, len(chosen) if most is None else most, multiple_of)


def _allocated(root, num_examples, sampling_probability, steps, multiple_of):
    ids = _watch.record_ids(num_examples)
    drawn, own = None, ids
    for step in steps:
        number, begin, length = epoch(step, sampling_probability)
        if number != drawn:
            # A purpose of its own, apart from the draws of Poisson samples
            own = _generator(root, number, 2).integers(length, size=ids.max() + 1)[ids]
            drawn = number
        chosen = np.flatnonzero(own == step - begin)
        _watch.sampled((_shown(root), number, length))
        yield _padded(chosen, len(chosen), multiple_of)


def _padded(chosen: np.ndarray, size: int, multiple_of: int) -> tuple[np.ndarray, np.ndarray]:
    size = max(1, math.ceil(size / multiple_of)) * multiple_of
    indices = np.zeros(size, np.int32)
    indices[: len(chosen)] = chosen
    return indices, np.arange(size) < len(chosen)
