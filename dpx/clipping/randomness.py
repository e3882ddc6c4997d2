"""Randomness inside the loss, such as dropout, that belongs to a record and not to its place in a batch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


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
    key, indices = step_key(key, step), jnp.asarray(indices)
    if not is_by_record(key.dtype):
        return jax.lax.map(functools.partial(jax.random.fold_in, key), indices)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, indices)


def step_key(key: jax.Array, step: Any) -> jax.Array:
    """The key that those of all records of a step are made from."""
    return jax.random.fold_in(key, step)


def is_by_record(dtype: Any) -> bool:
    """Whether `jax.vmap` draws from each of many keys of this type what it would draw from it alone.

    Of the keys `rbg` and `unsafe_rbg` it takes the first, and draws for all at once, by their places.
    """
    by_record = jax.eval_shape(functools.partial(jax.random.key, impl="threefry2x32"), 0).dtype
    return dtype == by_record or not jnp.issubdtype(dtype, jax.dtypes.prng_key)
