"""Noise that is correlated between steps, so that it partly cancels: banded matrix factorisation.

With x_t the sum of clipped gradients of step t, in units of the clipping norm, independent noise releases
x + z·Z. Instead C·x + z·Z is released, with C lower triangular, Toeplitz and banded: C_{t,t−j} = c_j for
j < b, ‖c‖₂ = 1. What the optimizer sees is C⁻¹ of it, x + z·C⁻¹Z, in which noise that was added at one step
is taken back at the next ones (Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta and Xu,
arXiv:2306.08153).

Sampling is cyclic: each record is in one of b groups, drawn for itself, and step t samples from group
t mod b, with probability b·B/N. So a record takes part in steps that are b or more apart, whose columns of C
have no row in common. Each block of b steps is then one Gaussian mechanism on a Poisson sample: its
sensitivity is that of one column, at most 1, and all steps cost what ⌈steps/b⌉ compositions cost (there,
Section 4), whatever the groups of the others are.

In floating point. Let x̂ be what the optimizer has seen. Step t releases

    y_t = c_0·x_t + Σ_{j≥1} c_j·(x_{t−j} − x̂_{t−j}) + z·Z_t,      x̂_t = y_t / c_0,

which is (C·x)_t + z·Z_t minus what is known already: rounding of x̂ is post-processing, and nothing rests on
C⁻¹ being exact. The state x − x̂ is the noise that is still in the parameters. It is as secret as the key, and
is never written: a training that was killed starts again, with the same noise.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpx.training.privatize import PrivatizeState, privatize


class BandedState(NamedTuple):
    """The state of `banded`. Keep all of it but the count out of checkpoints and logs.

    Attributes:
      key: The noise of step t is drawn from fold_in(key, t); None where words are given to each step.
      count: The number of steps so far.
      left: x − x̂ of the last b − 1 steps, the last one first: trees like the parameters with a leading axis.
    """

    key: Any
    count: jax.Array
    left: Any


def coefficients(steps: int, bands: int) -> tuple[float, ...]:
    """The coefficients c, of norm 1, with the least error of the sums of the first t gradients.

    The error is the mean square over all t.

    Raises:
      ModuleNotFoundError: without jax-privacy, which optimises them.
    """
    if bands == 1:
        return (1.0,)
    try:
        from jax_privacy.matrix_factorization import toeplitz
    except ImportError:
        raise ModuleNotFoundError(
            'noise="banded" needs jax-privacy: in the clone of dpx, pip install -e ".[correlated]"',
            name="jax_privacy",
        ) from None
    best = np.asarray(toeplitz.optimize_banded_toeplitz(steps, bands), np.float64)
    return tuple((best / np.linalg.norm(best)).tolist())


def banded(
    *,
    coefficients: tuple[float, ...],
    sensitivity: float,
    noise_multiplier: float,
    expected_batch_size: float,
    key: jax.Array | None,
    label: str = "gradients",
) -> optax.GradientTransformation:
    """Turns sums of clipped gradients into private estimates of means: `dpx.privatize` with banded noise.

    Guarantee: that of ⌈steps / b⌉ Gaussian mechanisms with that noise multiplier on Poisson samples of
    probability b·B/N, if the examples of step t are such a sample of group t mod b (module docstring).

    Args:
      coefficients: c, of norm 1 at most.
      sensitivity: How far one example moves the sum of a step, in l2.
      noise_multiplier, expected_batch_size, key, label: As in `dpx.privatize`.
    """
    first, *rest = coefficients
    noise = privatize(
        l2_clip_norm=sensitivity,
        noise_multiplier=noise_multiplier,
        expected_batch_size=first,
        key=key,
        label=label,
    )

    def init(params: Any) -> BandedState:
        left = jax.tree.map(lambda p: jnp.zeros((len(rest), *p.shape), p.dtype), params)
        return BandedState(key, jnp.zeros([], jnp.int32), left)

    def update(updates: Any, state: Any, params: Any = None, *, bits: Any = None, **_: Any):
        del params

        def exact(x: jax.Array, left: jax.Array) -> jax.Array:
            # At a lower precision, one record would move what is left by more than itself.
            highest = jax.lax.Precision.HIGHEST
            before = jnp.tensordot(jnp.asarray(rest, x.dtype), left, 1, precision=highest)
            return first * x + before

        sums = jax.tree.map(exact, updates, state.left)
        drawn = PrivatizeState(state.key, state.count)
        seen = noise.update(sums, drawn, bits=bits)[0]
        left = jax.tree.map(
            lambda x, y, old: jnp.concatenate([(x - y)[None], old])[: len(rest)],
            updates,
            seen,
            state.left,
        )
        mean = jax.tree.map(lambda y: y / expected_batch_size, seen)
        return mean, BandedState(state.key, state.count + 1, left)

    return optax.GradientTransformationExtraArgs(init, update)
