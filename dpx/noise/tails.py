"""Tails of draws that have no end: further random words, and quantiles far out.

An output that only one of two neighbours can reach, because the draws of the other end before it, counts
towards δ whatever ε is. At noise multiplier m a normal sampler that ends at r standard deviations adds
Φ(1/m − r) to δ, which is more than all of δ where ε is large. A uniform number of b bits ends at
r ≈ √(2b·log 2), 5.4 for a float32. So further bits are drawn for as long as all before them are zero, and
probabilities are kept as logarithms where they would underflow: nothing is cut off at any ε.
"""

import math

import jax
import jax.numpy as jnp


def fill(key: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws words of zero again until none is left; returns the words, and how often each was drawn anew."""

    def draw(state):
        key, last, empty = state
        key, own = jax.random.split(key)
        fresh = jax.random.bits(own, last.shape, jnp.uint32)
        return key, jnp.where(last == 0, fresh, last), empty + (last == 0)

    state = key, last, jnp.zeros(last.shape, jnp.int32)
    return jax.lax.while_loop(lambda state: (state[1] == 0).any(), draw, state)[1:]


def far_quantile(exponent: jax.Array) -> jax.Array:
    """x with survival probability e^(−exponent) under N(0, 1), within 1e-8 for exponents above 45.

    Q(x) = φ(x)/x·(1 − x⁻² + 3x⁻⁴ − 15x⁻⁶ + …), solved for the x of φ: a contraction by x⁻².
    """

    def contract(_, x: jax.Array) -> jax.Array:
        inverse = 1 / jnp.square(x)
        series = inverse * (1 - inverse * (3 - inverse * (15 - inverse * (105 - 945 * inverse))))
        rest = exponent - jnp.log(x) - 0.5 * math.log(2 * math.pi) + jnp.log1p(-series)
        return jnp.sqrt(2 * rest)

    # A loop, which is quick to compile: most programs never get here.
    return jax.lax.fori_loop(0, 8, contract, jnp.sqrt(2 * exponent))
