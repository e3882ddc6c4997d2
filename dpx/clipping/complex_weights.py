"""Real parameters that a loss combines into complex weights, as Fourier operators do.

Where a loss multiplies x by W = sum over parameters p of c·p, with numbers c such as 1 and i, and y is the
cotangent of the product, the gradient of one of them is

    Re(c · x ⊗ y) = Re(c·x) ⊗ Re(y) − Im(c·x) ⊗ Im(y):

real factors with twice as many positions, of which the second is the same for all parameters of a weight. It
is the longer one to compute: a cotangent may come out of transforms, which would be compiled once for each c.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from dpx.clipping.rounding import settled
from dpx.clipping.views import Axes

# What the axis of real and imaginary part stands for: a position that no rule and no loop has.
PARTS = (-500,)


def real_factors(
    left: Callable,
    right: Callable,
    gain: complex,
    axes: tuple[Axes, Axes],
    indexed: tuple[int, ...] | None,
) -> tuple[Callable, Callable, Axes, Axes]:
    """The real factors of a use of a complex weight, and what their axes stand for.

    Args:
      left, right: As in `dpx.clipping.uses.Use`, with complex results; a left factor of indices stays one.
      gain: c.
      axes: What the axes of the results stand for.
      indexed: As in `Use`.
    """
    if indexed is not None:
        return left, functools.partial(_real, right, gain), *axes
    return (
        functools.partial(_both, left, gain, 1.0),
        functools.partial(_both, right, 1.0, -1.0),
        (PARTS, *axes[0]),
        (PARTS, *axes[1]),
    )


def _real(function: Callable, gain: complex, argument: jax.Array) -> jax.Array:
    return settled(jnp.real(function(argument) * gain))


def _both(
    function: Callable, gain: complex, sign: float, argument: jax.Array | Sequence[jax.Array]
) -> jax.Array:
    found = function(argument) * gain
    return settled(jnp.stack([jnp.real(found), sign * jnp.imag(found)]))
