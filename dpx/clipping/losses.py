"""The loss of one example: how it is called, what it must return, and the keys that it is given."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from dpx.clipping.params import Parameters


@contextlib.contextmanager
def without_named_axes() -> Iterator[None]:
    """Turns JAX's error for the name of an unbound axis into one that names the remedy.

    JAX's own remedy, to bind the axis, would mix examples.
    """
    try:
        yield
    except NameError as error:
        if (axis := re.search(r"unbound axis name:? *([^\s.]+)", str(error))) is None:
            raise
        raise ValueError(
            f"loss_fn asks for the axis {axis[1]!r}, as a BatchNorm(axis_name=...) or jax.lax.pmean does, "
            "to read other examples, and it is the loss of one: use GroupNorm or LayerNorm, or frozen "
            "statistics (of Equinox eqx.nn.inference_mode), and no collectives"
        ) from None


def is_vectorised(batch: Any) -> bool:
    """Whether a batch is so large that `jax.vmap` is used: of one example some primitives need no rule."""
    return jax.tree.leaves(batch)[0].shape[0] > 1


def functions(
    loss_fn: Callable, has_aux: bool, parameters: Parameters
) -> tuple[Callable[..., jax.Array], Callable[..., Any]]:
    """A user's loss as two checked functions of (arrays to differentiate, one example): loss, and aux.

    Aux is None without `has_aux`. Both take, as `frozen`, values that replace some of the parameters'
    constants, by their number. The setting of `jax.numpy_rank_promotion` that holds now will hold within.
    """
    setting = jax.numpy_rank_promotion.value

    def call(leaves: Any, example: tuple, frozen: dict[int, jax.Array] | None) -> Any:
        held = parameters.holding(frozen or {})
        with jax.numpy_rank_promotion(setting), without_named_axes():
            value = loss_fn(held.rebuild(leaves, held.constants), *example)
        if has_aux and (not isinstance(value, tuple) or len(value) != 2):
            raise ValueError(
                f"loss_fn returned a {type(value).__name__}; with has_aux=True it must return a pair "
                "(loss, aux)"
            )
        return value if has_aux else (value, None)

    def loss(leaves: Any, example: tuple, frozen: Any = None) -> jax.Array:
        return scalar(call(leaves, example, frozen)[0])

    def aux(leaves: Any, example: tuple, frozen: Any = None) -> Any:
        return _arrays(call(leaves, example, frozen)[1]) if has_aux else None

    return loss, aux


def scalar(value: Any) -> jax.Array:
    """Returns a loss; raises ValueError for anything else."""
    if value is None or isinstance(value, tuple | list | dict):
        raise ValueError(
            f"loss_fn returned a {type(value).__name__}; it must return the scalar loss alone, or, with "
            "has_aux=True, a pair (loss, aux)."
        )
    shape, dtype = jnp.shape(value), jnp.result_type(value)
    if shape != () or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"loss_fn returned an array of shape {shape} and dtype {dtype}; it must return "
            "the floating-point scalar loss of one example."
        )
    return value


def _arrays(aux: Any) -> Any:
    """The aux of a loss, as arrays; raises ValueError for anything else."""
    aux = jax.tree.map(jnp.asarray, aux)
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool):
            raise ValueError(
                f"loss_fn returned aux{jax.tree_util.keystr(path)} of dtype {leaf.dtype}: it must be an "
                "array of numbers or bools; of a key, return jax.random.key_data"
            )
    return aux


def record_keys(key: jax.Array, step: Any, indices: Any) -> jax.Array:
    """A key for each record of a batch, to be passed to the loss as a part of the batch.

        keys = dpx.clipping.record_keys(secret_key, step, indices)
        clipped = gradient(params, inputs[indices], targets[indices], keys, mask=mask)

    A record has the same key wherever it stands in the batch, and another one in every step. With keys that
    are split over the places of a batch, a record that joins or leaves would change the masks of all that
    stand after it, and the sum by many times the clipping norm.

    Args:
      key: one JAX key, which is secret. Removing a record may rename those after it and so change their
        masks, which is no matter only while nobody knows the masks.
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
    key = jax.random.fold_in(key, step)
    return for_each(functools.partial(jax.random.fold_in, key), key.dtype, jnp.asarray(indices))


def for_each(function: Callable[..., Any], dtype: Any, *rows: Any) -> Any:
    """`function` of each row of arrays: from keys of this type it draws what it would for that row alone."""
    if is_by_record(dtype):
        return jax.vmap(function)(*rows)
    return jax.lax.map(lambda row: function(*row), rows)


def is_by_record(dtype: Any) -> bool:
    """Whether `jax.vmap` draws from each of many keys of this type what it would draw from that key alone.

    From keys of type `rbg` and `unsafe_rbg` it draws for all at once, from the first key, by their places.
    """
    by_record = jax.eval_shape(functools.partial(jax.random.key, impl="threefry2x32"), 0).dtype
    return dtype == by_record or not jnp.issubdtype(dtype, jax.dtypes.prng_key)
