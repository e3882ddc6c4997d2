"""Checks of arguments. Each raises ValueError with the argument's name, its value and what to do."""

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting import NeighboringRelation
from jax.core import Tracer

from dpx import _watch

_MAX_EPSILON = 1e8


def check_number(value, name: str) -> float:
    """Returns the value as a float; raises ValueError unless it is a real number.

    Strings and booleans are refused, although `float` takes them. So are None, complex numbers and arrays of
    several numbers.
    """
    try:
        kind = np.dtype(getattr(value, "dtype", float)).kind
        if isinstance(value, (bool, complex, str, bytes)) or kind in "bc" or np.ndim(value):
            raise TypeError
        return float(value)
    except (TypeError, OverflowError):
        static = ", static under jit" if isinstance(value, Tracer) else ""
        raise ValueError(f"{name}={value!r} must be a number{static}") from None


def check_positive(value, name: str, *, zero: bool = False) -> float:
    """Returns the value as a float; raises ValueError unless it is finite and positive (zero if allowed)."""
    number = check_number(value, name)
    if not (math.isfinite(number) and (number > 0 or (zero and number == 0))):
        raise ValueError(
            f"{name}={value} must be finite and {'at least 0' if zero else 'positive'}"
        )
    return number


def check_not_negative(value, name: str) -> float:
    """Returns the value as a float; raises ValueError unless it is at least 0. It may be infinite."""
    number = check_number(value, name)
    if not number >= 0:
        raise ValueError(f"{name}={number} must be at least 0")
    return number


def check_integer(value, name: str, least: int = 1) -> int:
    """Returns the value as an int; raises ValueError unless it is a whole number of at least `least`."""
    number = check_number(value, name)
    if not number.is_integer() or number < least:
        raise ValueError(f"{name}={value} must be a whole number, at least {least}")
    return int(value)


def check_clip_of_counts(l2_clip_norm) -> float:
    """Returns the clipping norm of counts; raises ValueError unless it is positive and at most 1e100.

    Up to that, sums and noise stay finite.
    """
    l2_clip_norm = check_positive(l2_clip_norm, "l2_clip_norm")
    if l2_clip_norm > 1e100:
        raise ValueError(
            f"l2_clip_norm={l2_clip_norm} must be at most 1e+100: count in other units"
        )
    return l2_clip_norm


def check_decay(value, name: str, remedy: str = "") -> float:
    """Returns the value as a float; raises ValueError unless it is a number in (0, 1]."""
    if not 0 < check_number(value, name) <= 1:
        raise ValueError(f"{name}={value} must be in (0, 1]{remedy}")
    return float(value)


def check_sampling_probability(value) -> float:
    """`check_decay` of a sampling probability."""
    return check_decay(
        value, "sampling_probability", ": use expected batch size / number of records"
    )


def check_epsilon(epsilon: float, name: str = "epsilon") -> float:
    """Returns ε as a float; raises ValueError unless 0 < ε ≤ 1e8."""
    if not 0 < check_number(epsilon, name) <= _MAX_EPSILON:
        raise ValueError(f"{name}={epsilon} must be in (0, 1e8]: use a positive privacy budget")
    return float(epsilon)


def check_delta(delta: float, name: str = "delta") -> float:
    """Returns δ as a float; raises ValueError unless 0 < δ < 1."""
    if not 0 < check_number(delta, name) < 1:
        raise ValueError(f"{name}={delta} must be in (0, 1): use less than 1 / number of records")
    return float(delta)


def check_key(key) -> None:
    """Raises ValueError unless `key` is one JAX key. The error states the type, never the key's secret words.

    Warns of a key that can be guessed, unless the key is traced.
    """
    try:
        dtype = jnp.result_type(key)
        typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        if typed:
            right = np.ndim(key) == 0
        else:  # the words of one, of which JAX says how many there are
            right = dtype == np.uint32 and jax.eval_shape(jax.random.wrap_key_data, key).shape == ()
    except TypeError:
        right = False
    if not right:
        raise wrong_key(key)
    if not isinstance(key, Tracer) and getattr(key, "is_fully_addressable", True):
        with jax.ensure_compile_time_eval():  # for a key that a program under `jit` closes over
            words = jax.random.key_data(key) if typed else key
        if not isinstance(words, Tracer):  # as inside `shard_map`
            warn_of_guess(int(np.ravel(words)[0]) == 0, "key")


def warn_of_guess(small: bool, name: str) -> None:
    """Warns of randomness that follows from a small number, such as `jax.random.key(0)`.

    The first word of such a key is zero, as it is in one of 2³² secret keys. A replay gives no warning: it
    draws the same noise twice on purpose, and its keys protect nobody.
    """
    if small and not _watch.watching():
        warnings.warn(
            f"{name} can be guessed, since it follows from a number below 2**32: whoever tries them all can "
            "subtract the noise, or tell who was sampled; on private data use dpx.secret_key(), or "
            "np.random.SeedSequence() for samples",
            stacklevel=3,
        )


def wrong_key(key) -> ValueError:
    """The error that `check_key` raises."""
    shape = f" and shape {key.shape}" if hasattr(key, "shape") else ""
    return ValueError(
        f"key of type {type(key).__name__}{shape} must be one JAX key: use dpx.secret_key(), or "
        "jax.random.key(0) for a trial on data that are nobody's"
    )


def check_choice(value: str, name: str, known: tuple[str, ...]) -> None:
    """Raises ValueError unless the value is among the known ones."""
    if value not in known:
        raise ValueError(f"{name}={value!r} is not known: use one of {', '.join(known)}")


def check_relation(value: NeighboringRelation | str, name: str) -> NeighboringRelation:
    """Returns a neighbouring relation that is given as itself or by its lower-case name, or ValueError."""
    if isinstance(value, NeighboringRelation):
        return value
    known = {relation.name.lower(): relation for relation in NeighboringRelation}
    if not isinstance(value, str) or value not in known:
        raise ValueError(
            f"{name}={value!r} must be a dp_accounting.NeighboringRelation or its lower-case name: "
            f"use one of {', '.join(known)}"
        )
    return known[value]


def check_unmasked(array, name: str) -> None:
    """Raises ValueError for a masked array, or a list of them: values under the mask would count."""
    parts = (array, *array) if isinstance(array, list | tuple) else (array,)
    if any(isinstance(part, np.ma.MaskedArray) for part in parts):
        raise ValueError(
            f"{name} is a masked array, which must have no mask, since what is under it would count: fill "
            "it, or leave out its rows"
        )


def check_real(array, name: str) -> None:
    """Raises ValueError unless NumPy makes an array of real numbers of it.

    Complex numbers are refused, since they would lose their imaginary parts.
    """
    check_unmasked(array, name)
    try:
        known = array if isinstance(array, np.ndarray | jax.Array) else np.asarray(array)
    except ValueError as error:
        raise ValueError(f"{name} must be an array, with rows of one length: {error}") from None
    dtype = known.dtype
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    if not any(jnp.issubdtype(dtype, kind) for kind in kinds) or dtype.kind == "m":
        raise ValueError(
            f"{name} has dtype {dtype}, which must be real: pass real numbers, as of np.asarray(x, float)"
        )


def check_finite(array, name: str, remedy: str) -> None:
    """Raises ValueError for a concrete array with a value that is not finite; a traced array passes."""
    if not isinstance(array, Tracer) and not np.all(np.isfinite(np.asarray(array))):
        raise ValueError(f"{name} holds values that are not finite: {remedy}")
