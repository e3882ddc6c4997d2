"""Randomness inside the loss, such as dropout, that belongs to a record and not to its place in a batch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpx.clipping import jaxprs

_DRAWS = (
    "random_bits", "random_gamma", "random_unwrap", "threefry2x32", "rng_bit_generator", "rng_uniform",
)  # fmt: skip

# Primitives of which `jax.vmap` treats many keys at once.
_BY_KEY = ("random_bits", "random_fold_in", "random_gamma", "random_split", "rng_bit_generator")


def record_keys(key: jax.Array, step: Any, indices: Any) -> jax.Array:
    """A key for each record of a batch, to be passed to the loss as a part of the batch.

        keys = dpx.clipping.record_keys(secret_key, step, indices)
        clipped = gradient(params, inputs[indices], targets[indices], keys, mask=mask)

    A record has the same key wherever it stands in the batch and whoever else is in it, and another one in
    every step. With keys that are split over the places of a batch, a record that joins or leaves would
    change the masks of all that stand after it, and the sum by many times the clipping norm.

    Args:
      key: one JAX key. It is secret: under masks that are known, the record that is removed is not the only
        one whose gradient changes.
      step: the number of the step.
      indices: (B,) integers that name the records, such as their rows in the data set.

    Returns:
      (B,) keys.

    Raises:
      ValueError: `key` is not one key, or `indices` are not integers along one axis.
    """
    shape, dtype = jnp.shape(indices), jnp.result_type(indices)
    if len(shape) != 1 or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"indices of shape {shape} and dtype {dtype} must be (B,) integers: give the row of each record "
            "in the data set"
        )
    key = step_key(key, step)
    return for_each(functools.partial(jax.random.fold_in, key), key.dtype, jnp.asarray(indices))


def step_key(key: jax.Array, step: Any) -> jax.Array:
    """The key that those of all records of a step are made from."""
    return jax.random.fold_in(key, step)


def _is_by_record(dtype: Any) -> bool:
    """Whether `jax.vmap` draws from each of many keys of this type what it would draw from it alone.

    Of the keys `rbg` and `unsafe_rbg` it takes the first, and draws for all at once, by their places.
    """
    by_record = jax.eval_shape(functools.partial(jax.random.key, impl="threefry2x32"), 0).dtype
    return dtype == by_record or not jnp.issubdtype(dtype, jax.dtypes.prng_key)


def for_each(function: Callable[..., Any], dtype: Any, *rows: Any) -> Any:
    """A function of each row of arrays, which draws from keys of that type what it would for one row."""
    if _is_by_record(dtype):
        return jax.vmap(function)(*rows)
    return jax.lax.map(lambda row: function(*row), rows)


class Draws:
    """How programs of (parameters, one example) draw random numbers.

    Attributes:
      alike: whether some come from nothing of the example's own.
      by_place: the type of keys, if they are the example's own and drawn from by its place in the batch.
    """

    def __init__(self, count: int, *programs: Any):
        self.alike, self.by_place = False, ""
        for jaxpr in programs:
            own = [i >= count for i in range(len(jaxpr.invars))]
            jaxprs.follow(jaxpr, own, self._visit)

    def _visit(self, eqn: Any, given: Sequence[bool]) -> None:
        name = eqn.primitive.name
        if name in _DRAWS:
            self.alike |= not any(given)
        if name in _BY_KEY and any(given):
            kind = eqn.invars[0].aval.dtype
            if name == "rng_bit_generator" or not _is_by_record(kind):
                self.by_place = str(kind)
