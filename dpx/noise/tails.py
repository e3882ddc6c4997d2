"""Draws whose tails have no end: uniform numbers of as many bits as they need, and normal draws from them.

An output that one neighbour can reach and the other cannot, because its draws end before, counts towards δ
whatever ε is. At noise multiplier m a normal sampler that ends at r standard deviations adds Φ(1/m − r) to δ,
which is more than all of δ where ε is large. A uniform number of b bits ends at r ≈ √(2b·log 2), 5.4 for a
float32. Here further bits are drawn for as long as all before them are zero, and probabilities are kept as
logarithms where they would underflow. So nothing is cut off at any ε, in 32 bits as in 64.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from dpx._numerics import promoting

_SHARING = {4: 16, 8: 1}  # by bytes of a number, the draws that share the last word
_LOG_WORD = 32 * math.log(2)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
@promoting
def normal(
    key: jax.Array, shape: tuple[int, ...] = (), dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """N(0, 1) draws, by the inverse CDF at uniform numbers without a smallest one.

    Args:
      key: A JAX key.
      shape: The shape of the draws.
      dtype: float32 or float64.
    """
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    return _shaped(normal_from_bits(*_bits(key, shape, dtype), dtype), shape)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
@promoting
def signed_exponential(
    key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike, log_smallest: ArrayLike
) -> jax.Array:
    """±E, E exponential with survival probabilities uniform in (s, 1].

    Args:
      key: A JAX key.
      shape: The shape of the draws.
      dtype: float32 or float64.
      log_smallest: log s < 0, or −∞ to cut nothing off; broadcasts to `shape`.
    """
    bits = _bits(key, shape, dtype)
    exponential = _shaped(exponential_from_bits(*bits, dtype), shape)
    log_smallest = jnp.asarray(log_smallest, dtype)
    # log(s + (1 − s)·uniform), both terms of which may underflow where their logarithms do not.
    log_rest = jnp.log(-jnp.expm1(log_smallest))
    survival = jnp.logaddexp(log_smallest, log_rest - exponential)
    return _shaped(_sign(bits[0], dtype), shape) * -jnp.minimum(survival, 0)


def normal_from_bits(words, last, empty, dtype: DTypeLike) -> jax.Array:
    """(sharing, columns) normal draws from bits as in `uniform_from_bits`, a word's lowest the sign."""
    args = near(words, last, empty, dtype), words, last, empty
    # A last word is empty once in 2³²; the logarithm is not worth its time before that.
    return jax.lax.cond(
        (empty > 0).any(), lambda *args: far(*args, dtype=dtype), lambda near, *bits: near, *args
    )


def near(words, last, empty, dtype: DTypeLike) -> jax.Array:
    """Normal draws from bits of which no last word is empty."""
    uniform, _ = uniform_from_bits(words, last, empty, dtype)
    return -_sign(words, dtype) * jax.scipy.special.ndtri(uniform / 2)


def far(near, words, last, empty, dtype: DTypeLike) -> jax.Array:
    """`near`, with draws from the far tail where a last word is empty."""
    _, missing = uniform_from_bits(words, last, empty, dtype)
    exponent = exponential_from_bits(words, last, empty, dtype) + math.log(2)
    return jnp.where(missing > 0, _sign(words, dtype) * far_quantile(exponent), near)


def exponential_from_bits(words, last, empty, dtype: DTypeLike) -> jax.Array:
    """(sharing, columns) exponential draws: minus the logarithm of `uniform_from_bits`."""
    uniform, missing = uniform_from_bits(words, last, empty, dtype)
    return missing * _LOG_WORD - jnp.log(uniform)


def uniform_from_bits(words, last, empty, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Uniform numbers u·2^(−32·missing) in (0, 1]: 31 bits of a word, `empty` words of zeros, 32 bits.

    In 32 bits the 16 draws of a column share the bits that come after their own 31. On the grid of
    `dpx.noise.release`, 2⁻¹² of a standard deviation, these show only in a draw whose first 21 bits are zero,
    and two draws of one column show them once in 2³⁵ columns. In 64 bits, where the grid is finer, nothing
    is shared.

    Args:
      words: (sharing, columns) uint32; the lowest bit is left out.
      last: (1, columns) uint32, not zero.
      empty: (1, columns) int32, the number of words of zeros before `last`.
      dtype: The type of u.

    Returns:
      u, and how many words of zeros are missing in it, both (sharing, columns).
    """
    missing = jnp.where(words >> 1 == 0, empty, 0)
    # Beside other bits, `last` after words of zeros is less than 2⁻³² of the smallest.
    fine = jnp.where(missing == empty, 2.0**-32 * (last.astype(dtype) + 0.5), 0)
    return 2.0**-31 * ((words >> 1).astype(dtype) + fine), missing


def far_quantile(exponent: jax.Array) -> jax.Array:
    """x with survival probability e^(−exponent) under N(0, 1), within 1e-8 for exponents above 45.

    Q(x) = φ(x)/x·(1 − x⁻² + 3x⁻⁴ − 15x⁻⁶ + …), solved for the x of φ: a contraction by x⁻².
    """

    def contract(_, x: jax.Array) -> jax.Array:
        inverse = 1 / jnp.square(x)
        series = inverse * (1 - inverse * (3 - inverse * (15 - inverse * (105 - 945 * inverse))))
        rest = exponent - jnp.log(x) - 0.5 * math.log(2 * math.pi) + jnp.log1p(-series)
        return jnp.sqrt(2 * rest)

    # A loop, because programs are compiled that never get here.
    return jax.lax.fori_loop(0, 8, contract, jnp.sqrt(2 * exponent))


def _bits(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[Any, Any, Any]:
    """The arguments of `uniform_from_bits` for that many draws."""
    sharing, columns = _SHARING[jnp.dtype(dtype).itemsize], count_columns(math.prod(shape), dtype)
    word_key, last_key, more = jax.random.split(key, 3)
    # Flat draws: XLA compiles a generator much longer for an array with axes.
    words = jax.random.bits(word_key, (sharing * columns,), jnp.uint32).reshape(sharing, columns)
    last = jax.random.bits(last_key, (columns,), jnp.uint32).reshape(1, columns)
    return words, *fill(more, last)


def count_columns(draws: int, dtype: DTypeLike) -> int:
    """The number of columns, each with a last word, that so many draws fill row by row."""
    return -(-draws // _SHARING[jnp.dtype(dtype).itemsize])


def fill(key: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws words that are zero again until none is, and counts how often."""

    def draw(state):
        key, last, empty = state
        key, own = jax.random.split(key)
        fresh = jax.random.bits(own, last.shape, jnp.uint32)
        return key, jnp.where(last == 0, fresh, last), empty + (last == 0)

    state = key, last, jnp.zeros(last.shape, jnp.int32)
    return jax.lax.while_loop(lambda state: (state[1] == 0).any(), draw, state)[1:]


def _sign(words: jax.Array, dtype: DTypeLike) -> jax.Array:
    return 1 - 2 * (words & 1).astype(dtype)


def _shaped(draws: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return draws.ravel()[: math.prod(shape)].reshape(shape)
