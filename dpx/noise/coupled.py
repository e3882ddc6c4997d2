"""Exponential, normal and chi draws in 64 bits that lie close to the exact law, however far out they are.

A release that is no sum of data and noise cannot be rounded before noise meets it. Its program is compared
with the exact mechanism by a *coupling* instead: both are functions of the same infinitely long random
numbers, of which the program reads the first bits. A bound on how far the two results are apart, which holds
for every value of these numbers, is a bound on privacy once the results are put on a grid by
`dpx.noise.grid`.

**Exponential.** E = −log U, where U or 1 − U, by the toss of a coin, is 2^(−1−g)·μ: g counts the zeros that
come before the first one among fair bits, of which there is no largest number, and μ in (½, 1) has 53 bits.
So the first bit that counts is always followed by 52, near U = 0 as near U = 1, and E is within 2⁻⁵⁰ of its
own size of the exact one.

**Normal.** Two at once: √(2E)·cos 2πV and √(2E)·sin 2πV (Box & Muller 1958), V uniform of 53 bits. The angle
is known to 2⁻⁵⁴ of a turn and rounds by 2⁻⁴⁹·⁴; with sine, root and product both are within 2⁻⁴⁸·√(2E) of
exact N(0, 1) draws.

**Chi**, the root of a chi-square with k degrees of freedom. For k ≤ 16 it is the norm of k normal draws. For
more it is √(2d)·(1 + y)^1.5 with d = k/2 − ⅓ and y = z/√(9d), where a normal draw z is kept with probability
e^(−3d·R(y)), R(y) = y − y²/2 + y³/3 − log(1 + y) ≥ 0, never for y ≤ −1, and drawn again otherwise. This is
the chi law: z²/2 + 3dR(y) = 3d(y + y² + y³/3 − log(1 + y)), so that what is kept has density ∝ (1 +
y)^3d·e^(−d(1 + y)³) in y, and ∝ u^(d − ⅔)·e^(−u) in u = d(1 + y)³: the gamma law of shape d + ⅓ = k/2
(Marsaglia & Tsang, ACM TOMS 2000). Computing R rounds the probability of keeping a draw by a factor within
e^(±2⁻⁴⁰·3dR), and what is kept is within 2⁻⁴⁸·√(2E)·√(1 + y) + 2⁻⁵⁰ of its size of that for the exact z. How
often is drawn again depends on k alone.

Bits are those of JAX's generator, taken as fair and independent.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dpx._numerics import in_float64, promoting
from dpx.noise import tails

SUMMED = 16  # degrees of freedom up to which normal draws are squared and added up
# Of −log(1 − u)/u and of R(y)/y⁴; what is left out at ¼ is less than 2⁻⁵⁶ of them.
_LOGARITHM = [1 / j for j in range(27, 0, -1)]
_REMAINDER = [(-1) ** j / j for j in range(31, 3, -1)]


@in_float64
def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draws from N(0, 1) of that shape, float64."""
    count = math.prod(shape)
    first, empty, *words = _bits(key, 4, -(-count // 2))
    both = normal_pair(exponential_from_bits(first, empty, *words[:2]), *words[2:])
    return both.ravel()[:count].reshape(shape)


@in_float64
def chi(key: jax.Array, freedom: jax.Array, normals: jax.Array) -> jax.Array:
    """Draws of the chi law, float64.

    Args:
      key: A JAX key.
      freedom: (n,) degrees of freedom, whole numbers from 1 to 2⁵³, as floats.
      normals: (n, SUMMED) normal draws that are used for nothing else.
    """
    is_few = freedom <= SUMMED
    is_counted = jnp.arange(SUMMED) < freedom[:, None]
    few = jnp.linalg.norm(jnp.where(is_counted, normals, 0), axis=1)
    depth = jnp.where(is_few, SUMMED, freedom) / 2 - 1 / 3

    def draw(state):
        key, kept, done = state
        key, own = jax.random.split(key)
        first, empty, *words = _bits(own, 4, 2 * len(freedom))
        sizes, others = jnp.split(exponential_from_bits(first, empty, *words[:2]), 2)
        y = normal_pair(sizes, *(word[: len(freedom)] for word in words[2:4]))[0]
        y = y / jnp.sqrt(9 * depth)
        keep = others > 3 * depth * remainder(y)
        return key, jnp.where(done | ~keep, kept, 1 + y), done | keep

    state = key, jnp.ones_like(freedom), is_few
    _, kept, _ = jax.lax.while_loop(lambda state: ~state[2].all(), draw, state)
    return jnp.where(is_few, few, jnp.sqrt(2 * depth) * kept * jnp.sqrt(kept))


def remainder(y: jax.Array) -> jax.Array:
    """R(y) = y − y²/2 + y³/3 − log(1 + y), within 2⁻⁴¹ of itself; infinite for y ≤ −1."""
    near = jnp.square(jnp.square(y)) * _series(_REMAINDER, y)
    far = y * (1 - y * (1 / 2 - y / 3)) - jnp.log(jnp.maximum(1 + y, 0))
    return jnp.where(abs(y) < 0.25, near, far)


def normal_pair(exponential: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
    """Two normal draws each, on a new leading axis, from an exponential draw and two words."""
    angle = 2 * math.pi * _fraction(high, low)
    return jnp.sqrt(2 * exponential) * jnp.stack([jnp.cos(angle), jnp.sin(angle)])


def _series(coefficients: list[float], x: jax.Array) -> jax.Array:
    return jnp.polyval(jnp.array(coefficients), x, unroll=len(coefficients))


def exponential_from_bits(first, empty, high, low) -> jax.Array:
    """Exponential draws, made of the first four arrays that `_bits` returns."""
    zeros = 32 * empty + jax.lax.clz(first).astype(empty.dtype)
    mantissa = 0.5 + _fraction(high, low) / 2
    small = jnp.ldexp(mantissa, -1 - zeros)
    # −log(1 − u), with an error that is a share of itself however small u is; that of XLA's log1p is 2⁻⁴⁵.
    near = jnp.where(small < 0.25, small * _series(_LOGARITHM, small), -jnp.log(1 - small))
    far = (1 + zeros) * math.log(2) - jnp.log(mantissa)
    return jnp.where(low & 1 == 0, near, far)  # a bit that `_fraction` leaves over


@functools.partial(jax.jit, static_argnames="shape")
@promoting
def signed_exponential(
    key: jax.Array, shape: tuple[int, ...], log_smallest: ArrayLike
) -> jax.Array:
    """±E, E exponential with survival probabilities uniform in (s, 1].

    Args:
      key: A JAX key.
      shape: The shape of the draws, which are float64 where 64-bit types are on, as they should be.
      log_smallest: log s < 0, or −∞ to cut nothing off; broadcasts to `shape`.
    """
    first, empty, high, low = _bits(key, 2, math.prod(shape))
    exponential = exponential_from_bits(first, empty, high, low).reshape(shape)
    # log(s + (1 − s)·uniform), both terms of which may underflow where their logarithms do not.
    log_rest = jnp.log(-jnp.expm1(log_smallest))
    survival = jnp.logaddexp(log_smallest, log_rest - exponential)
    sign = 1 - 2.0 * (low >> 1 & 1).reshape(shape)  # another bit that is left over
    return sign * -jnp.minimum(survival, 0)


def _bits(key: jax.Array, rows: int, count: int) -> list[jax.Array]:
    """The first word that is not zero, how many were before it, and `rows` more words, (count,) each."""
    word_key, more = jax.random.split(key)
    # Flat draws: XLA compiles a generator much longer for an array with axes.
    words = jax.random.bits(word_key, ((1 + rows) * count,), jnp.uint32).reshape(1 + rows, count)
    return [*tails.fill(more, words[0]), *words[1:]]


def _fraction(high: jax.Array, low: jax.Array) -> jax.Array:
    """Numbers in the middle of 2⁵³ cells of (0, 1), by 32 bits and the first 21 of 32 more."""
    return 2.0**-32 * (high + 2.0**-21 * ((low >> 11) + 0.5))
