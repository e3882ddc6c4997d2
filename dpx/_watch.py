"""The hooks by which `dpx.audit.replay` observes a program: its noise, its sampling, and its public values.

Programs call these functions wherever privacy rests on randomness or on a number that is declared public.
While nobody watches they cost nothing: `at_release` leaves no trace in a compiled program, and the others
return what they are given.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import io_callback


class Watcher(Protocol):
    """The methods that a replay implements; `_dispatch` calls them."""

    def released(self, about: dict, key, exact, unit, noisy, scale) -> list[np.ndarray]: ...

    def key(self, purpose: str, words: np.ndarray) -> None: ...

    def sampled(self, how: Any) -> None: ...

    def public(self, value: Any, what: str) -> Any: ...

    def record_ids(self, count: int) -> np.ndarray: ...


# Words in a key of JAX's default generator; a seed in place of a key is shown as so many words.
KEY_WORDS = 2

_watcher: Watcher | None = None


def watch(watcher: Watcher | None) -> None:
    """Installs a watcher, or removes it. Clear JAX's caches afterwards: compiled programs do not notice."""
    global _watcher
    _watcher = watcher


def watching() -> bool:
    return _watcher is not None


def public(value: Any, what: str | None) -> Any:
    """Returns a value that is computed from the data but declared to be public knowledge.

    Every guarantee of a program that uses the value has to name it among its assumptions.

    Args:
      value: The value, for example the number of records, or a catalogue.
      what: Its name, in the words of the assumption. A program has one value for each name. None declares
        nothing: then no guarantee covers what follows from the value.
    """
    return value if _watcher is None or what is None else _watcher.public(value, what)


def record_ids(count: int) -> np.ndarray:
    """A number for each record, (count,) int32, that does not depend on the other records.

    The numbers are 0, 1, ... while nobody watches. A replay without one record keeps the numbers of the
    others, so that the randomness of a record (whether it is sampled, its dropout mask) stays with it.
    """
    return np.arange(count, dtype=np.int32) if _watcher is None else _watcher.record_ids(count)


def check_samples(max_batch_size: int | None) -> None:
    """Raises ValueError in a replay if samples are truncated to a largest size."""
    if _watcher is not None and max_batch_size is not None:
        raise ValueError(
            f"max_batch_size={max_batch_size} must be None in a replay, which prices whole Poisson "
            "samples only: replay the program without it"
        )


def sampled(how: float | tuple[tuple[int, ...], int, int]) -> None:
    """Notes how the batch that is handed out next was sampled.

    Args:
      how: For a Poisson sample, its probability. For random allocation, the words of its seed, the number of
        the epoch and its length in batches; a record is in one of these.
    """
    if _watcher is not None:
        _watcher.sampled(how)


def key_used(key: jax.Array | Sequence[int] | np.ndarray, purpose: str) -> None:
    """Notes that a secret key is used for something other than noise."""
    if _watcher is None:
        return
    words = _words(key)
    if isinstance(words, Tracer):
        io_callback(lambda words: _dispatch("key", purpose, np.asarray(words)), None, words)
    else:
        _dispatch_now("key", purpose, np.asarray(words))


def at_release(
    about: dict, key: jax.Array | np.ndarray, exact: list, unit: list, noisy: list, scale: Any
) -> list[jax.Array]:
    """Shows a release to the watcher, and returns the values that the program goes on with, normally `noisy`.

    Args:
      about: The label and the declared sensitivity; both are static.
      key: The key of the noise; empty where the noise is not drawn by JAX.
      exact, unit, noisy: The leaves before noise, the units in which their change is measured (their
        sensitivities), and the leaves after noise.
      scale: The noise multiplier, or the parameters of the law of the noise.
    """
    if _watcher is None:
        return noisy
    parts = exact, unit, noisy, scale
    dtypes = jax.tree.map(lambda leaf: np.dtype(jnp.result_type(leaf)), parts)
    if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((key, parts))):
        seen = jax.tree.map(np.array, parts, dtypes)
        found = _dispatch_now("released", about, np.asarray(_words(key)), *seen)
        return [jnp.asarray(leaf) for leaf in (noisy if found is None else found)]
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), list(map(_pack, noisy))
    )

    def call(words, packed):
        seen = jax.tree.map(lambda leaf, dtype: np.array(leaf).view(dtype), packed, dtypes)
        seen = jax.tree.map(
            lambda leaf, dtype: leaf[..., 0] if _is_wide(dtype) else leaf, seen, dtypes
        )
        replaced = _dispatch("released", about, np.asarray(words), *seen)
        return [
            np.ravel(leaf).view(np.uint32).reshape(s.shape) if s.dtype == np.uint32 else leaf
            for leaf, s in zip(seen[2] if replaced is None else replaced, shapes, strict=True)
        ]

    packed = jax.tree.map(_pack, parts)
    results = io_callback(call, shapes, _words(key), packed)
    return [
        jax.lax.bitcast_convert_type(result, leaf.dtype) if _is_wide(leaf.dtype) else result
        for result, leaf in zip(results, noisy, strict=True)
    ]


def _is_wide(dtype) -> bool:
    return np.dtype(dtype).itemsize == 8


def _pack(leaf: Any) -> jax.Array:
    """Packs a 64-bit number as two words: a callback runs outside the 64-bit scope and would round it."""
    leaf = jnp.asarray(leaf)
    return jax.lax.bitcast_convert_type(leaf, jnp.uint32) if _is_wide(leaf.dtype) else leaf


def _dispatch(method: str, *arguments):
    # A compiled program outlives a watcher, so it asks when it runs which one is installed.
    return None if _watcher is None else getattr(_watcher, method)(*arguments)


def _dispatch_now(method: str, *arguments):
    """Without a callback, which is compiled for each shape; after those of programs that still run."""
    jax.effects_barrier()
    return _dispatch(method, *arguments)


def _words(key) -> jax.Array:
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(key)
    return jnp.asarray(key, jnp.uint32)
