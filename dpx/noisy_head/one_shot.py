"""The release of second moments at a given noise multiplier, and the ridge solution made of it.

`dpx.noisy_head.moment_sums` calibrates the noise, and sums the moments exactly.
"""

import math

import dp_accounting
import jax
import jax.numpy as jnp
from optax import projections

from dpx._numerics import in_float64
from dpx._validate import check_delta, check_epsilon, check_key, check_positive
from dpx.noise import release, secure
from dpx.noisy_head.prompts import Features, check_features
from dpx.noisy_head.second_moments import one_at_a_time, second_moments
from dpx.noisy_head.sensitivity import HyperParameters, check_hyper, enforce
from dpx.privacy import REPLACE_ONE, PrivacyGuarantee, gaussian_noise_multiplier


def calibrate_one_shot(epsilon: float, delta: float) -> tuple[float, PrivacyGuarantee]:
    """The noise multiplier of `one_shot` for (ε, δ)-DP, per unit of joint sensitivity, and the guarantee.

    Raises:
      ValueError: for ε or δ out of range.
    """
    epsilon, delta = check_epsilon(epsilon), check_delta(delta)
    multiplier = gaussian_noise_multiplier(epsilon, delta)
    return multiplier, PrivacyGuarantee(
        epsilon=epsilon,
        delta=delta,
        neighboring=REPLACE_ONE,
        unit="prompt",
        mechanism=f"second moments released once, noise multiplier {multiplier:.6g} on their joint "
        "sensitivity, then ridge",
        assumptions=("the number of prompts is public",),
        event=dp_accounting.GaussianDpEvent(multiplier),
    )


@in_float64
def one_shot(
    key: jax.Array,
    features: Features,
    hyper: HyperParameters,
    *,
    regularization: float,
    noise_multiplier: float | jax.Array,
) -> jax.Array:
    """The Γ (D, D) of `fit_one_shot` at a given noise multiplier, which may be traced.

    Here the sums are of 64-bit floats.
    """
    check_key(key)
    check_positive(regularization, "regularization")
    hyper = check_hyper(hyper)
    features = check_features(features)
    stds = joint_noise(rounded_bounds(hyper, features.query.shape[1]))
    return _one_shot(key, features, hyper, regularization, noise_multiplier, stds)


def joint_noise(hyper: HyperParameters) -> tuple[float, float]:
    """The standard deviations of the noise on N·H and on N·h, per unit of noise multiplier."""
    C, G, _ = hyper
    return 2 * math.sqrt(2) * G**2, 2 * C * G


def rounded_bounds(hyper: HyperParameters, dim: int) -> HyperParameters:
    """The bounds that hold after the entries of features were rounded to multiples of 2⁻¹⁸·G.

    The noise is calibrated for these, whether features are rounded or not.
    """
    steps = secure.FACTOR_STEPS
    longest = secure.norm_bound(steps, dim * dim) / steps
    return hyper._replace(feature_radius=hyper.feature_radius * longest)


@jax.jit
def _one_shot(key, features, hyper, regularization, noise_multiplier, stds):
    exact = second_moments(enforce(features, hyper))
    count = len(features.target)
    return ridge_of(key, exact, count, hyper, regularization, noise_multiplier, stds)


@jax.jit
def ridge_of(key, exact, num_prompts, hyper, regularization, noise_multiplier, stds):
    """Releases the means (H, h) of the second moments, and returns the Γ (D, D) that follows from them."""
    std_H, std_h = stds
    dim = exact[1].shape[0]
    H, h = release(
        key,
        exact,
        sensitivity=(std_H / num_prompts, std_h / num_prompts),
        noise_multiplier=noise_multiplier,
        label="second moments",
    )
    values, vectors = _eigh(pair_symmetric(H.reshape((dim,) * 4)))
    floor = dim * std_H * noise_multiplier / num_prompts
    values = jnp.maximum(values, floor) + regularization
    gamma = vectors @ ((vectors.T @ h.reshape(-1)) / values)
    return projections.projection_l2_ball(gamma.reshape(dim, dim), hyper.parameter_radius)


@one_at_a_time
def _eigh(symmetric):
    return tuple(jnp.linalg.eigh(symmetric))


def pair_symmetric(moments: jax.Array) -> jax.Array:
    """The array (D, D, D, D), indexed [i, k, j, l], made symmetric in i, j and in k, l, as (D², D²)."""
    dim = moments.shape[0]
    moments = (moments + moments.transpose(2, 1, 0, 3)) / 2
    moments = (moments + moments.transpose(0, 3, 2, 1)) / 2
    return moments.reshape(dim * dim, dim * dim)
