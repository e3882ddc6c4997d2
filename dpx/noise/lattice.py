"""Gaussian noise on a public grid: whole numbers that are added to a value which was rounded at random.

A float that is drawn, added to a value and rounded has a law that depends on the low bits of the value.
An adversary who knows that law gains a little from every coordinate of every step, and a training has
10¹² of them. Here noise and value never meet in floating point. With g the step of the grid:

1. The value is cut into whole steps and a remainder, f = (k + r)·g with |r| ≤ 0.51, without rounding
   (`cut`).
2. The remainder is rounded at random: J = ⌊r + U₁ + U₂ + U₃⌋ − 1, which is r on average (`uniforms`,
   `add`).
3. A whole number n = round(R·Z), Z from N(0, 1) and R = 128, is drawn: the bits of an integer are
   compared with a table of its distribution function (`whole_normal`). Its law is one for all values,
   on all platforms.
4. (k + J + n)·g is released. It is a function of the whole number k + J + n, whatever floats make of
   it.

**Guarantee.** Consider the Gaussian mechanism, f + R·g·Z with a real normal vector Z, and round what it
releases at random, y/g to ⌊y/g + U₁ + U₂ + U₃ + U₄⌋: post-processing. Steps 1 to 4 release a point of
the grid with the probability that it has there, times a factor 1 + e. With x the noise in standard
deviations,

    |e| ≤ 6e-12·(3 + 2x² + x⁴).

Proof. Let c(t) be the density of R·Z averaged over t ± ½, which is the law of n at whole numbers, and
let b be the density of U₁ + U₂ + U₃ − 1 averaged likewise. The program gives the point m the
probability Σ_n c(n)·b(m − f − n), and the mechanism ∫ c(t)·b(m − f − t) dt. By Poisson summation they
differ by the sum over k ≠ 0 of ∫ c(m − f − u)·b(u)·e^{2πik(m − f − u)} du. Now c is a mixture of normal
densities φ, shifted by at most ½, and φ(t − u) = φ(t)·e^{uy}·E[e^{iuξ}] with t = R·x, y = x/R and ξ
from N(0, R⁻²). So the k-th integral is at most φ(t)·E|M(y + iξ − 2πik)|, with M(s) = ∫ b(u)·e^{su} du.
Up to a phase, M(s) is (e^s − 1)/s times one factor (e^s − 1)/(N·(e^{s/N} − 1)) for each uniform number,
which has N points. As e^{2πik} = 1, each of these four factors is at most |y + iξ|/(2πk) of what it is
without k, if N does not divide k. So the integral is at most E[(y² + ξ²)²]/(2πk)⁴ = (x⁴ + 2x² +
3)/(2πkR)⁴ of the whole. The sum of 2/(2πkR)⁴ over k is 5.2e-12; the rest of the 6e-12 covers the
shifts, and those k that 2⁵ or 2¹⁵, the points of U₃ and U₂, divide: there factors are missing, but k is
large.

**What it costs.** For d coordinates and T steps, the logarithm of a likelihood ratio is that of the
Gaussian mechanism and d·T independent terms log(1 + e) − log(1 + e′), *whatever* the values are. E[e²]
is at most 216·(6e-12)² < 1e-20, which bounds the KL divergence of a coordinate, κ. For d·T = 10¹² the
terms together have a standard deviation of 1.3e-4, and by Bernstein's inequality pass 1e-3 with
probability 1e-13. ε is stated with fewer digits, so nothing is added to it.

**Every rounding on the way.**

a. g is σ/R rounded up to 13 bits, so the noise is up to 2⁻¹² larger than stated, and never smaller.
   Products of g and integers of 11 bits (40 in 64-bit floats) are then exact, and so is `cut`, up to
   2³³ steps (2⁸⁰). Floats above that are four and more standard deviations apart; n·g is added to them,
   and the sum rounded.
b. r is divided by g in floats and rounded to 28 bits, an error of at most 2⁻²³ (2⁻²⁸), which moves the
   value. g pays for it: over d entries the moves of both neighbours have an l2 norm of at most
   2⁻²²·g·√d (2⁻²⁷), and g is larger by that share of the sensitivity (`step_of`).
c. Thresholds of the table have 63 bits and are right to 4e-14 of themselves: to 4e-12 of the
   probability of a point within five standard deviations, the same for all values.
d. Beyond 8.4 standard deviations, where one draw in 10¹⁶ is, the quantile is a 32-bit float. Such a
   draw may add 4e-3 to the logarithm of the ratio; where ε rests on them, above 30, it is right to 4e-6
   of itself.

**Random bits.** A draw has 64 bits of its own, one block of the generator: a sign, 31 bits for |n|, and
12, 15 and 5 for U₁, U₂ and U₃. Sixteen draws share 16 lower bits of U₁ and 32 lower bits of |n|, which
decide once in 2¹² and 2²² draws: two draws of a column depend on each other by less than 1e-13 of a
probability. Beyond 2⁻⁵⁵ further words are drawn for as long as all before them are zero, so that no
tail is cut off at any ε. Bits are those of JAX's generator, or of a cryptographic stream
(`dpx.noise.stream`), and are taken for random. Of a stream there are sixteen further words, so that the tail
ends at 28 standard deviations: that is less than 1e-20 of δ for noise multipliers of 1/18 and more. Less
noise than that, at which ε of one release is above 200, is refused.
"""

import bisect
import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from scipy import special

from dpx.noise.tails import far_quantile

RESOLUTION = 128  # R, steps of the grid in a standard deviation
SHARING = 16  # draws that share words
_STEP_BITS = 13  # of g
_POINTS = 28  # bits of U₁ and of r
_CELLS = 7  # bits after the first one that choose a cell of the table
_FAR = 256  # where the table ends: cells of fewer numbers may hold several thresholds


class Words(NamedTuple):
    """Random words of 32 bits: two of each draw's own, and two that the draws of a column share."""

    size: jax.Array
    rounding: jax.Array
    low_size: jax.Array
    low_rounding: jax.Array


def moved(dtype) -> float:
    """How far rounding moves both neighbours in an entry together, in steps of the grid."""
    mantissa = jnp.finfo(dtype).nmant + 1
    return 2.0 ** -(mantissa - 2 if mantissa < _POINTS else _POINTS - 1)


@functools.partial(jax.jit, static_argnames="dtype")
def step_of(std: ArrayLike, dtype, *, multiplier_norm: ArrayLike) -> jax.Array:
    """The step g of the grid on which noise of this standard deviation lies.

    Args:
      std: The standard deviation, of any shape; 0 gives 0.
      dtype: float32 or float64.
      multiplier_norm: The l2 norm, over all entries of a release, of its noise per unit of sensitivity.
    """
    dtype = jnp.dtype(dtype)
    mantissa = jnp.finfo(dtype).nmant + 1
    paid = RESOLUTION - moved(dtype) * jnp.asarray(multiplier_norm, dtype)
    # Where moves are as large as the noise, no noise would do: `release` refuses it, or makes NaN of this.
    least = jnp.where(paid > 0, jnp.asarray(std, dtype) * (1 + 2.0**-20) / paid, jnp.nan)
    words, dropped = f"uint{8 * dtype.itemsize}", mantissa - _STEP_BITS
    bits = jax.lax.bitcast_convert_type(least, words)
    mask = np.array(2**dropped - 1, words)
    return jax.lax.bitcast_convert_type((bits + mask) & ~mask, dtype)


@jax.jit  # not a program for each of its operations
def add(exact: jax.Array, step: jax.Array, normal: jax.Array, uniform: jax.Array) -> jax.Array:
    """The value with noise, on the grid: (k + J + n)·g, of the shape and type of `exact`.

    Args:
      exact: f.
      step: g, from `step_of`; where it is 0, f is returned.
      normal: n, from `whole_normal`.
      uniform: U₁ + U₂ + U₃, from `uniforms`.
    """
    coarse, fine, rest = cut(exact, step)
    fixed = jnp.round(rest * 2.0**_POINTS).astype(jnp.int32)
    whole = (fixed + uniform >> _POINTS) - 1 + normal
    # The sum of two whole numbers is rounded at most once: a function of the whole number that it is.
    noisy = (coarse + (fine + whole.astype(exact.dtype))) * step
    # Of larger values floats hold none that is nearer than four standard deviations.
    room, turns = _room(exact.dtype)
    small = jnp.abs(exact) < step * 2.0 ** (room * (turns + 1))
    noisy = jnp.where(small, noisy, exact + normal.astype(exact.dtype) * step)
    return jnp.where(step == 0, exact, noisy)


def cut(exact: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits values into whole steps and a remainder: exact = (coarse + fine + rest)·step, |rest| ≤ 0.51.

    coarse and fine are whole numbers, and only rest is rounded. A product of the step and an integer of the
    other bits of a float is exact. So is a difference of two floats of which neither is more than twice the
    other (Sterbenz). Quotients are taken a little too small, so that this always holds.
    """
    less = 1 - 2.0 ** (4 - jnp.finfo(exact.dtype).nmant)
    inverse, coarse = less / step, jnp.zeros_like(exact)
    room, turns = _room(exact.dtype)
    for turn in range(turns, 0, -1):
        power = 2.0 ** (turn * room)
        whole = jnp.round(exact * (inverse / power))
        exact = exact - whole * (power * step)
        coarse = coarse + whole * power
    fine = jnp.round(exact * inverse)
    return coarse, fine, (exact - fine * step) / step


def _room(dtype) -> tuple[int, int]:
    """The bits of an integer whose product with a step is exact, and how many such integers a float holds."""
    mantissa = jnp.finfo(dtype).nmant + 1
    return mantissa - _STEP_BITS, mantissa // (mantissa - _STEP_BITS)


def uniforms(words: Words) -> jax.Array:
    """U₁ + U₂ + U₃ in units of 2⁻²⁸, int32."""
    first = words.rounding >> 20 << 16 | words.low_rounding & 0xFFFF
    second = (words.rounding >> 5 & 0x7FFF) << 13
    third = (words.rounding & 31) << 23
    # Uniform numbers on N points are less than 1/2 by 1/2N on average.
    return (first + second + third).astype(jnp.int32) + (2**22 + 2**12)


def whole_normal(words: Words, far: jax.Array | None = None) -> jax.Array:
    """n = round(R·Z), int32, Z from N(0, 1).

    |n| is the number of thresholds T_a = 2⁶³·P(|R·Z| ≥ a − ½) that exceed a uniform number V of 63 bits, of
    which the first 31 are the draw's own. The first bits of V choose a cell of the table. A cell holds one
    threshold at most, with which V is compared.

    Args:
      words: The lowest bit of `size` is the sign.
      far: |n| where `is_far`, if known.
    """
    size, low = words.size >> 1, words.low_size
    near, rare = size >= 2**11, size > 0
    # 31 bits of V from its first one on, or some bits before it.
    window = jnp.where(near, size, jnp.where(rare, size << 20 | low >> 12, low >> 1))
    place = jnp.where(near, 32, jnp.where(rare, 12, 1))
    window = jnp.where(window >= 2**24, window & 0x7FFFFF80, window)  # exact in float32
    bits = jax.lax.bitcast_convert_type(window.astype(jnp.float32), jnp.int32)
    first = int(math.log2(_FAR))
    cell = (bits >> 23 - _CELLS) + (place - 127 - first << _CELLS)
    count, high, rest = (jnp.asarray(column) for column in _table())
    cell = jnp.clip(cell, 0, len(count) - 1)
    high, rest = high[cell], rest[cell]
    above = (size < high) | ((size == high) & (low < rest))
    magnitude = count[cell] + above
    if far is not None:
        magnitude = jnp.where(is_far(words), far, magnitude)
    return jnp.where(words.size & 1, -magnitude, magnitude)


def is_far(words: Words) -> jax.Array:
    """Whether V < 256, once in 2⁵⁵ draws: the table ends there, at 8.4 standard deviations."""
    return (words.size >> 1 == 0) & (words.low_size < _FAR)


def may_be_far(normal: jax.Array) -> jax.Array:
    """Whether n, drawn without further bits, is as large as where `is_far` holds."""
    return jnp.abs(normal) >= _table()[0][0]


def far_size(words: Words, fresh: jax.Array, empty: jax.Array) -> jax.Array:
    """|n| where `is_far`, from V and further bits: `empty` words of zeros, and the word `fresh`."""
    more = (fresh.astype(jnp.float32) + 0.5) * 2.0**-32
    known = words.low_size.astype(jnp.float32)
    log = jnp.where(known > 0, jnp.log(known + more), jnp.log(more) - empty * (32 * math.log(2)))
    quantile = far_quantile((63 + 1) * math.log(2) - log)  # of Z: half the probability of |Z|
    return jnp.floor(RESOLUTION * quantile + 0.5).astype(jnp.int32)


@functools.cache
def _table() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each cell the number of thresholds above it, and the 31 and 32 bits of the one in it, or 0."""
    edges = (np.arange(1, math.ceil(9.3 * RESOLUTION)) - 0.5) / RESOLUTION
    thresholds = sorted(int(p * 2.0**63) for p in special.erfc(edges / math.sqrt(2)))
    thresholds = [t for t in thresholds if t >= _FAR]
    starts = [m << e >> _CELLS for e in range(int(math.log2(_FAR)), 63) for m in range(128, 256)]
    places = [bisect.bisect_right(thresholds, start) for start in [*starts, 2**63]]
    count = len(thresholds) - np.array(places[1:])
    inside = [thresholds[place] if place < end else 0 for place, end in itertools.pairwise(places)]
    assert np.diff(places).max() == 1, "a cell holds two thresholds"
    inside = np.array(inside, np.uint64)
    high, low = inside >> np.uint64(32), inside & np.uint64(2**32 - 1)
    return count.astype(np.int32), high.astype(np.uint32), low.astype(np.uint32)
