"""Privacy faults to plant in an audited training, each of which costs more than what is claimed."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import optax

import dpx
from dpx.audit import Training
from dpx.training import Poisson
from dpx.training.privatize import PrivatizeState

_MICROBATCHES = 4


def _noise(make: Callable) -> Callable[[Training], Training]:
    return lambda training: dataclasses.replace(training, privatize=make)


def _half_the_variance(*, noise_multiplier, **rest):
    return dpx.privatize(noise_multiplier=noise_multiplier / 2**0.5, **rest)


def _over_batch_size(*, noise_multiplier, expected_batch_size, **rest):
    return dpx.privatize(
        noise_multiplier=noise_multiplier / expected_batch_size,
        expected_batch_size=expected_batch_size,
        **rest,
    )


def _per_microbatch(*, noise_multiplier, key, expected_batch_size, **rest):
    """Noise for every microbatch, whose std is shared out where the variance should be."""
    parts = [
        dpx.privatize(
            noise_multiplier=noise_multiplier / _MICROBATCHES,
            key=own,
            expected_batch_size=1,
            **rest,
        )
        for own in jax.random.split(key, _MICROBATCHES)
    ]
    return optax.chain(*parts, optax.scale(1 / expected_batch_size))


def _same_key(period: int):
    """The key of step t is that of step t mod `period`."""

    def make(**settings):
        inner = dpx.privatize(**settings)

        def update(updates, state, params=None):
            mean, after = inner.update(updates, state, params)
            assert isinstance(after, PrivatizeState)
            return mean, after._replace(count=after.count % period)

        return optax.GradientTransformation(inner.init, update)

    return make


def _first_leaf_without(*, expected_batch_size, **rest):
    inner = dpx.privatize(expected_batch_size=expected_batch_size, **rest)

    def update(updates, state, params=None):
        mean, state = inner.update(updates, state, params)
        leaves, structure = jax.tree.flatten(mean)
        leaves[0] = jax.tree.leaves(updates)[0] / expected_batch_size
        return jax.tree.unflatten(structure, leaves), state

    return optax.GradientTransformation(inner.init, update)


def _clip_doubled(training: Training) -> Training:
    def doubled(loss_fn, *, l2_clip_norm, **rest):
        return dpx.clipped_grad(loss_fn, l2_clip_norm=2 * l2_clip_norm, **rest)

    return dataclasses.replace(training, clipped_grad=doubled)


@dataclasses.dataclass(frozen=True)
class _FixedSize(Poisson):
    """Batches of one size, in which a record that joins takes the place of another."""

    def batches(self, num_examples, *, sampling_probability, steps, seed, multiple_of=1, **_):
        rng = np.random.default_rng(seed)
        size = int(sampling_probability * num_examples)
        padded = -(-size // multiple_of) * multiple_of
        for _step in range(steps):
            indices = np.zeros(padded, np.int32)
            indices[:size] = rng.choice(num_examples, size, replace=False)
            yield indices, np.arange(padded) < size


def _fixed_size(training: Training) -> Training:
    return dataclasses.replace(training, sampling=_FixedSize())


def _twice_the_steps(training: Training) -> Training:
    return dataclasses.replace(training, steps=2 * training.steps)


# Each takes the training as claimed, and returns the one that runs.
FAULTS: dict[str, Callable[[Training], Training]] = {
    "noise_half_the_variance": _noise(_half_the_variance),
    "noise_over_batch_size": _noise(_over_batch_size),
    "noise_per_microbatch": _noise(_per_microbatch),
    "noise_same_key": _noise(_same_key(1)),
    "noise_key_reused_after_3": _noise(_same_key(3)),
    "noise_missing_in_a_leaf": _noise(_first_leaf_without),
    "clip_doubled": _clip_doubled,
    "batches_of_fixed_size": _fixed_size,
    "accounted_half_the_steps": _twice_the_steps,
}
