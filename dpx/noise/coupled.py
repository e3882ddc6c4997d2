"""Normal and chi draws in 64 bits that lie close to draws of the exact law, however far out they are.

A release that is no sum of data and noise cannot be rounded before noise meets it. Its program is compared
with the exact mechanism by a *coupling* instead: both are functions of the same infinitely long random
numbers, of which the program reads the first bits. A bound on how far the two results are apart, which holds
for every value of these numbers, is a bound on privacy once the results are put on a grid by `dpx.noise.grid`.

**Exponential.** E = −log U, where U or 1 − U, by the toss of a coin, is 2^(−1−g)·μ: g counts the zeros that
come before the first one among fair bits, of which there is no largest number, and μ in (½, 1) has 53 bits. So
the first bit that counts is always followed by 52, near U = 0 as near U = 1, and E is within 2⁻⁵⁰ of its own
size of the exact one.

**Normal.** Two at once: √(2E)·cos 2πV and √(2E)·sin 2πV (Box & Muller 1958), V uniform of 53 bits. The angle
is known to 2⁻⁵⁴ of a turn and rounds by 2⁻⁴⁹·⁴; with sine, root and product both are within 2⁻⁴⁸·√(2E) of exact
N(0, 1) draws.

**Chi**, the root of a chi-square with k degrees of freedom. For k ≤ 16 it is the norm of k normal draws. For
more it is √(2d)·(1 + y)^1.5 with d = k/2 − ⅓, y = z/√(9d) and z a normal draw that is drawn again with
probability 1 − e^(−3d·R(y)), R(y) = y − y²/2 + y³/3 − log(1 + y) ≥ 0, and always where y ≤ −1. This is the
chi law: the density of z that is kept is ∝ (1 + y)^3d·e^(−d(1 + y)³) = (1 + y)^(3d)·e^(−3d(y + y² + y³/3) − d),
and that of u = d(1 + y)³ hence ∝ u^(d − ⅔)·e^(−u), a gamma law of shape d + ⅓ = k/2 (Marsaglia & Tsang, ACM
TOMS 2000). Computing R rounds the probability of keeping a draw by a factor within 1 ± 2⁻⁴⁰·3dR; a chi draw
is within 2⁻⁴⁸·√(2E)·√(1 + y) + 2⁻⁵⁰·chi of that of the exact z. How often is drawn again depends on k alone.

Bits are those of JAX's generator, taken as fair and independent.
"""

import functools
import math

import jax
import jax.numpy as jnp

from dpx._numerics import in_float64
from dpx.noise import tails

SUMMED = 16  # degrees of freedom up to which normal draws are squared and added up
# Of −log(1 − u)/u and of R(y)/y⁴; what is left out at ¼ is less than 2⁻⁵⁶ of them.
_LOGARITHM = [1 / j for j in range(27, 0, -1)]
_REMAINDER = [(-1) ** j / j for j in range(31, 3, -1)]


@in_float64
def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """N(0, 1) draws of that shape, float64."""
    count = math.prod(shape)
    exponential_key, angle_key = jax.random.split(key)
    pairs = -(-count // 2)
    both = normal_pair(exponential(exponential_key, pairs), *_words(angle_key, 2, pairs))
    return both.ravel()[:count].reshape(shape)


@in_float64
def chi(key: jax.Array, freedom: jax.Array) -> jax.Array:
    """Draws of the chi law, float64, for each of (n,) degrees of freedom, whole numbers from 1 to 2⁵³."""
    few_key, many_key = jax.random.split(key)
    is_few = freedom <= SUMMED

    def few() -> jax.Array:
        draws = normal(few_key, (*freedom.shape, SUMMED))
        return jnp.linalg.norm(
            jnp.where(jnp.arange(SUMMED) < freedom[..., None], draws, 0), axis=-1
        )

    summed = jax.lax.cond(is_few.any(), few, lambda: jnp.zeros_like(freedom))
    return jnp.where(is_few, summed, _chi_of_many(many_key, freedom, is_few))


def _chi_of_many(key: jax.Array, freedom: jax.Array, is_few: jax.Array) -> jax.Array:
    """Chi draws for many degrees of freedom, and something finite where `is_few`."""
    depth = jnp.where(is_few, SUMMED, freedom) / 2 - 1 / 3

    def draw(state):
        key, kept, found = state
        key, normal_key, exponential_key = jax.random.split(key, 3)
        y = normal(normal_key, freedom.shape) / jnp.sqrt(9 * depth)
        limit = 3 * depth * remainder(y)
        keep = exponential(exponential_key, math.prod(freedom.shape)).reshape(freedom.shape) > limit
        return key, jnp.where(found | ~keep, kept, 1 + y), found | keep

    state = key, jnp.ones_like(freedom), is_few
    _, kept, _ = jax.lax.while_loop(lambda state: ~state[2].all(), draw, state)
    return jnp.sqrt(2 * depth) * kept * jnp.sqrt(kept)


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


def exponential(key: jax.Array, count: int) -> jax.Array:
    """(count,) exponential draws, float64, each with 52 bits of its own after the first that counts."""
    word_key, more = jax.random.split(key)
    first, *others = _words(word_key, 3, count)
    return exponential_from_bits(*tails.fill(more, first), *others)


def exponential_from_bits(first, empty, high, low) -> jax.Array:
    """Exponential draws from the first word that is not zero, the number of those before it, and two words."""
    zeros = 32 * empty + jax.lax.clz(first).astype(empty.dtype)
    mantissa = 0.5 + _fraction(high, low) / 2
    small = jnp.ldexp(mantissa, -1 - zeros)
    # −log(1 − u), with an error that is a share of itself however small u is; that of XLA's log1p is 2⁻⁴⁵.
    near = jnp.where(small < 0.25, small * _series(_LOGARITHM, small), -jnp.log(1 - small))
    far = (1 + zeros) * math.log(2) - jnp.log(mantissa)
    return jnp.where(low & 1 == 0, near, far)  # a bit that `_fraction` leaves over


@functools.partial(jax.jit, static_argnames=("rows", "count"))
def _words(key: jax.Array, rows: int, count: int) -> list[jax.Array]:
    # Flat draws: XLA compiles a generator much longer for an array with axes.
    return list(jax.random.bits(key, (rows * count,), jnp.uint32).reshape(rows, count))


def _fraction(high: jax.Array, low: jax.Array) -> jax.Array:
    """Numbers in the middle of 2⁵³ cells of (0, 1), by 32 bits and the first 21 of 32 more."""
    return 2.0**-32 * (high + 2.0**-21 * ((low >> 11) + 0.5))
