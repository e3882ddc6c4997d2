"""Random rounding to a public grid, by which a small error of what is rounded costs next to no privacy.

**What it does.** A number x, in steps of the grid, becomes the whole number ⌊x⌋ + b + g − g'. Here b is 1
with probability x − ⌊x⌋ and 0 otherwise, and g and g' count the zeros before the first one among fair bits,
of which there is no largest number. The expectation is x, and the variance is at most 4.25 steps squared.

**What it is worth.** g − g' = m has probability 2^(−|m|)/3. So whole number y comes from x with probability
((1 − r)·2^(−|y − ⌊x⌋|) + r·2^(−|y − ⌊x⌋ − 1|))/3, r = x − ⌊x⌋, a continuous function of x whose logarithm has
a slope of at most 1: its two powers differ by a factor of 2, so that their difference is at most the smaller.
Let x and x* be vectors with ‖x − x*‖₁ ≤ s, however they depend on each other. Then what is put on the grid
from x has every probability within a factor of e^(±s) of that from x*: **what is computed is as private as
what should have been computed, at a price of 2s in ε and nothing in δ**, which is s for each neighbour.

Whole numbers are drawn from bits without any rounding. That r is compared with 53 bits, and that x − ⌊x⌋ may
round, adds at most 2⁻⁵² to s for each entry. Sums beyond 2⁵³ round to floats, which is post-processing.
"""

import jax
import jax.numpy as jnp

from dpx._numerics import in_float64
from dpx.noise import tails

SHARE = 2.0**-52  # of a step, for each entry: what is added to s


@in_float64
def onto(key: jax.Array, x: jax.Array) -> jax.Array:
    """Rounds x, in steps of the grid, to whole numbers at random; they are float64, of the shape of x."""
    bits_key, fill_key = jax.random.split(key)
    # Flat draws: XLA compiles a generator much longer for an array with axes.
    words = jax.random.bits(bits_key, (4 * x.size,), jnp.uint32).reshape(4, *x.shape)
    last, empty = tails.fill(fill_key, words[2:].ravel())
    zeros = (32 * empty + jax.lax.clz(last).astype(empty.dtype)).reshape(2, *x.shape)
    below = jnp.floor(x)
    uniform = 2.0**-27 * ((words[0] >> 5) + 2.0**-26 * (words[1] >> 6))
    # Small numbers first: their sum is exact.
    return below + ((uniform < x - below).astype(zeros.dtype) + zeros[0] - zeros[1])
