"""The prediction error of a matrix Γ: exact under the paper's model of prompts, or estimated on prompts."""

import jax
import jax.numpy as jnp
from jax.core import Tracer

from dpx._numerics import as_float64, in_float64
from dpx._validate import check_integer, check_positive, check_real
from dpx.noisy_head.prompts import Features, predict


@in_float64
def population_risk(
    gamma: jax.Array,
    length: int,
    *,
    reference: jax.Array | None = None,
    noise_std: float = 0.0,
) -> jax.Array:
    """The exact expected squared error on a fresh prompt of the paper's model, without clipping.

    With x uniform on the sphere and y = wᵀx + τε, w ~ N(0, I), the context s has
    E‖s‖² = v = (1 + τ²)/L + (1 − 1/L)/D and, by rotation invariance, E ssᵀ = (v/D) I and E[s | w] = w/D. So

        E⟨Γ − Γ', Z⟩² = ‖Γ − Γ'‖_F² v/D²,
        E(y − ⟨Γ, Z⟩)² = 1 + τ² − 2 tr(Γ)/D² + ‖Γ‖_F² v/D².

    Args:
      gamma: Γ (..., D, D).
      length: L, the number of labelled tokens of the fresh prompt.
      reference: Γ' (..., D, D). If given, the excess over Γ' is returned, otherwise the mean squared error.
      noise_std: τ ≥ 0.

    Returns:
      The risks, shape (...).

    Raises:
      ValueError: for L < 1, τ < 0, a Γ that is not square, or a Γ' that does not fit it.
    """
    check_integer(length, "length")
    if not isinstance(noise_std, Tracer):
        check_positive(noise_std, "noise_std", zero=True)
    check_real(gamma, "gamma")
    gamma = as_float64(gamma)
    if gamma.ndim < 2 or gamma.shape[-1] != gamma.shape[-2]:
        raise ValueError(f"gamma has shape {gamma.shape}: it must be (..., D, D)")
    dim = gamma.shape[-1]
    power = (1 + noise_std**2) / length + (1 - 1 / length) / dim
    if reference is not None:
        gap = gamma - _reference(reference, gamma.shape)
        return jnp.sum(gap**2, axis=(-2, -1)) * power / dim**2
    trace = jnp.trace(gamma, axis1=-2, axis2=-1)
    size = jnp.sum(gamma**2, axis=(-2, -1))
    return 1 + noise_std**2 - 2 * trace / dim**2 + size * power / dim**2


@in_float64
def empirical_risk(
    gamma: jax.Array, features: Features, *, reference: jax.Array | None = None
) -> jax.Array:
    """The same two risks, estimated on test prompts: the mean of (t − ⟨Γ, Z⟩)², or of ⟨Γ − Γ', Z⟩².

    The estimate is computed without noise and is not private.

    Args:
      gamma: Γ (..., D, D).
      features: Test prompts, query (N, D), context (N, D), target (N,).
      reference: Γ' (..., D, D), for the excess over it.

    Returns:
      The risks, shape (...).
    """
    if reference is None:
        error = predict(gamma, features) - as_float64(features.target)
    else:
        error = predict(as_float64(gamma) - _reference(reference, jnp.shape(gamma)), features)
    return jnp.mean(error**2, axis=-1)


def _reference(reference, shape: tuple[int, ...]) -> jax.Array:
    """Γ' in float64, after a check that its matrices have the size of Γ's and leading axes broadcast."""
    given = jnp.shape(reference)
    try:
        fits = given[-2:] == shape[-2:] and jnp.broadcast_shapes(given, shape)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"reference has shape {given}: it does not fit gamma of shape {shape}")
    return as_float64(reference)
