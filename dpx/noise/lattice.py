"""Gaussian noise on a public grid: whole numbers that are added to a value which was rounded at random.

A draw of floating-point numbers that is added to a value and rounded has a law that depends on the low bits
of the value. An adversary who knows that law gains a little from every coordinate of every step, and a
training has 10¹² of them. Here noise and value never meet in floating point. With g the step of the grid:

1. The value is cut into whole steps and a remainder, f = (k + r)·g with |r| ≤ ½, without rounding (`cut`).
2. The remainder is rounded at random, J = ⌊r + U₁ + U₂ + U₃⌋ − 1, which is r on average (`round_up`).
3. A whole number n = round(R·Z), Z from N(0, 1) and R = 128, is drawn by comparing the bits of an integer with
   a table of its distribution function (`whole_normal`). Its law is one for all values and on all platforms.
4. (k + J + n)·g is released. It is a function of the integer k + J + n, whatever floats make of it.

**Guarantee.** Release f + R·g·Z, Z a real normal vector: the Gaussian mechanism. Afterwards round y/g to
⌊y/g + U₀ + U₁ + U₂ + U₃⌋ with uniform numbers, and multiply by g: post-processing. What steps 1 to 4 release
has that law, but for a factor 1 + e at each point, where x is the noise there in standard deviations and

    |e| ≤ 6e-12·(3 + 2x² + x⁴).

Proof. Let c be the law of n, which is the density of R·Z averaged over a unit interval, and b that of U₁ + U₂
+ U₃ averaged likewise. The program gives m the probability Σ_n c(n)·b(m − f − n), and the mechanism ∫ c(t)·
b(m − f − t) dt. By Poisson summation they differ by Σ_{k≠0} ∫ c(m − f − u)·b(u)·exp(2πik(m − f − u)) du. c is a
mixture of densities φ of N(v, R²), |v| ≤ ½, for which φ(x·R − u) = φ(x·R)·e^{uy}·E[e^{iuξ}], y = x/R and ξ from
N(0, R⁻²). So the k-th term is at most φ·E|M(y + iξ − 2πik)|, with M(s) = ∫ b(u)·e^{su} du. As e^{−2πik} = 1, M is
(e^s − 1)/s times (e^s − 1)/(N·(e^{s/N} − 1)) for each uniform number on N points, and each of these four factors is
|s + 2πik|/(2πk) at most, if N does not divide k. Hence the term is at most E[(y² + ξ²)²]/(2πk)⁴ of the whole, and the
expectation is (x⁴ + 2x² + 3)/R⁴ (ζ(4) = 1.09; a tenth is left for v). The numbers have N = 2²⁸, 2¹⁵ and 2⁵ points,
and the terms of k that they divide have a factor less and 32 or more times the frequency: together less than a hundredth.

**What it costs.** For d·T coordinates and steps the logarithm of a likelihood ratio is that of the Gaussian
mechanism and a sum of independent terms log(1 + e) − log(1 + e′). Each has a variance of at most 2·E[e²] =
2·216·(6e-12)² < 2e-20, and adds less than 1e-20 to the KL divergence, *whatever* is released. With
d·T = 10¹² that is κ·d·T < 2e-8; the sum has a standard deviation of 1.4e-4 and, by Bernstein's inequality, passes 1.1e-3
with probability 1e-13. That is far below the digits in which ε is stated, so nothing is added to it.

**Every rounding on the way.** (a) g is σ/R rounded up to 13 bits, so that the noise is up to 2⁻¹² larger than
stated, never smaller; products of g and integers of 11 bits (40 in 64-bit floats) are then exact, and so is
`cut`, for values up to 2³³ steps (2⁸⁰). Floats above that are four and more standard deviations apart; n·g is
added to them, and the sum rounded. (b) r is divided by g in floats and rounded to 28 bits, an error of at most
2⁻²³ (2⁻²⁸). It moves the value, and g pays for it: d such moves of both neighbours have an l2 norm of at most
2⁻²²·g·√d (2⁻²⁷), and g is larger by that share of the sensitivity (`step_of`). (c) Thresholds of the table have
63 bits and are right to 4e-14 of themselves, which is 4e-12 of the probability of a point within five standard
deviations, and the same for all values. (d) Beyond 8.4 standard deviations, once in 10¹⁶ draws, the quantile
is a 32-bit float, right to 2e-6 of itself: so is ε, where it rests on such draws (above 30).

**Random bits.** A draw has 64 bits of its own, one block of the generator: a sign, 31 bits for |n|, 12 + 15 + 5
for U₁, U₂ and U₃. Sixteen draws share 16 low bits of U₁ and 32 low bits of |n|, which decide once in 2¹² and 2²² draws: two draws of
one column depend on each other by less than 1e-13 of a probability, which is 1e-26 of KL divergence. Beyond 2⁻⁵⁵
further words are drawn for as long as all before them are zero, so that no tail is cut off at any ε.
Bits are those of JAX's generator, and are taken for random.
"""

import bisect
import functools
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


def step_of(std: ArrayLike, dtype, *, multiplier_norm: ArrayLike) -> jax.Array:
    """The step g of the grid on which noise of this standard deviation lies.

    Args:
      std: Of the noise, of any shape; 0 gives 0.
      dtype: float32 or float64.
      multiplier_norm: The l2 norm, over all entries of a release, of its noise per unit of sensitivity.
    """
    dtype = jnp.dtype(dtype)
    mantissa = jnp.finfo(dtype).nmant + 1
    moved = 2.0 ** -(mantissa - 2 if mantissa < _POINTS else _POINTS - 1)  # by both neighbours
    paid = RESOLUTION - moved * jnp.asarray(multiplier_norm, dtype)
    # Where moves are as large as the noise, no noise would do; `release` makes NaN of this.
    least = jnp.where(paid > 0, jnp.asarray(std, dtype) * (1 + 2.0**-20) / paid, jnp.nan)
    words, dropped = f"uint{8 * dtype.itemsize}", mantissa - _STEP_BITS
    bits = jax.lax.bitcast_convert_type(least, words)
    mask = np.array(2**dropped - 1, words)
    return jax.lax.bitcast_convert_type((bits + mask) & ~mask, dtype)


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
    # The sum of two whole numbers is rounded once if at all: a function of the whole number that it stands for.
    noisy = (coarse + (fine + whole.astype(exact.dtype))) * step
    # Of larger values floats hold none that is nearer than four standard deviations.
    room, turns = _room(exact.dtype)
    small = jnp.abs(exact) < step * 2.0 ** (room * (turns + 1))
    noisy = jnp.where(small, noisy, exact + normal.astype(exact.dtype) * step)
    return jnp.where(step == 0, exact, noisy)


def cut(exact: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits values into whole steps and a remainder: exact = (coarse + fine + rest)·step, |rest| ≤ 0.51.

    coarse and fine are whole numbers, and rest alone is rounded. A product of the step and a number that has
    the other bits of a float is exact; so is the difference of two floats of which none is more than twice the
    other (Sterbenz). That a value is subtracted from something less than half of it, the factor prevents.
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
    found = count[cell] + above
    if far is not None:
        found = jnp.where(is_far(words), far, found)
    return jnp.where(words.size & 1, -found, found)


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
    log = jnp.where(
        known > 0, jnp.log(known + more), jnp.log(more) - empty * (32 * math.log(2))
    )
    quantile = far_quantile((63 + 1) * math.log(2) - log)  # of Z: half the probability of |Z|
    return jnp.floor(RESOLUTION * quantile + 0.5).astype(jnp.int32)


@functools.cache
def _table() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each cell the thresholds above it, and the one in it, 31 and 32 bits, or 0."""
    edges = (np.arange(1, math.ceil(9.3 * RESOLUTION)) - 0.5) / RESOLUTION
    thresholds = sorted(int(p * 2.0**63) for p in special.erfc(edges / math.sqrt(2)))
    thresholds = [t for t in thresholds if t >= _FAR]
    starts = [m << e >> _CELLS for e in range(int(math.log2(_FAR)), 63) for m in range(128, 256)]
    places = [bisect.bisect_right(thresholds, start) for start in [*starts, 2**63]]
    count = len(thresholds) - np.array(places[1:])
    inside = [
        thresholds[place] if place < end else 0
        for place, end in zip(places[:-1], places[1:], strict=True)
    ]
    assert np.diff(places).max() == 1, "a cell holds two thresholds"
    inside = np.array(inside, np.uint64)
    high, low = inside >> np.uint64(32), inside & np.uint64(2**32 - 1)
    return count.astype(np.int32), high.astype(np.uint32), low.astype(np.uint32)
