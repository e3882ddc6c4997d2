"""Private ridge from second moments that are released once."""

import math

import dp_accounting
import jax
import jax.numpy as jnp
from optax import projections

from dpx._numerics import in_float64
from dpx._validate import check_delta, check_epsilon, check_positive
from dpx.noise import release
from dpx.noisy_head.bounds import HyperParameters, check_hyper, enforce
from dpx.noisy_head.descent import Fit
from dpx.noisy_head.moments import one_at_a_time, second_moments
from dpx.noisy_head.prompts import Features, check_features
from dpx.privacy import REPLACE_ONE, PrivacyGuarantee, gaussian_noise_multiplier


@in_float64
def fit_one_shot(
    key: jax.Array,
    features: Features,
    hyper: HyperParameters,
    *,
    regularization: float,
    epsilon: float,
    delta: float,
) -> Fit:
    """Ridge (2.7) from one Gaussian release of H = N⁻¹ Σ vec(Z)vec(Z)ᵀ and h = N⁻¹ Σ tZ.

    Guarantee: (ε, δ)-DP for replacing one prompt by any other; N is public, the bounds of `hyper` are
    enforced here, and all that follows the release is post-processing. The same noise serves any λ.

    Sensitivity. H and b·h, b = √2 G/C, are released together. For neighbours, with p = ⟨Z, Z'⟩,
    N²‖ΔH‖² = ‖Z‖⁴ + ‖Z'‖⁴ − 2p² and N²‖Δh‖² = ‖tZ − t'Z'‖² ≤ C²(‖Z‖² + ‖Z'‖² + 2|p|). The first plus b² times
    the second increases in both norms, so they are G, and becomes 2G⁴ − 2p² + 4G²(G² + |p|), which
    increases up to |p| = G². Hence the joint sensitivity is 2√2 G²/N, that is 2CG/N in h's units: what
    h alone would cost. H comes free, with noise of std 2√2 G²/N times the multiplier.

    H is symmetric in each of its two pairs of indices, and the noise is projected onto that subspace. Its
    operator norm is then about D times its std, and eigenvalues of H below that are noise: they are
    raised to it, which keeps their inverses from exploding and vanishes as N or ε grows. The solution
    is projected onto the ball of radius R.

    It beat `fit` in every setting measured with D ≤ 8. `fit` needs O(ND) memory and no D²×D² eigenvectors,
    so it is the one for high dimension.

    Args:
      key: A JAX key that nobody learns who sees Γ.
      features: query (N, D), context (N, D), target (N,). Memory is O(D⁴), time O(ND⁴ + D⁶).
      hyper: The bounds C, G and R, chosen without looking at the prompts.
      regularization: λ > 0.
      epsilon: ε in (0, 1e8].
      delta: δ in (0, 1).

    Returns:
      Fit(gamma (D, D), guarantee, noise_multiplier), the last in units of the joint sensitivity.

    Raises:
      ValueError: for λ, ε, δ or a bound out of range, shapes that do not fit or values that are not finite.
    """
    multiplier, guarantee = calibrate_one_shot(epsilon, delta)
    gamma = one_shot(
        key, features, hyper, regularization=regularization, noise_multiplier=multiplier
    )
    return Fit(gamma, guarantee, multiplier)


def calibrate_one_shot(epsilon: float, delta: float) -> tuple[float, PrivacyGuarantee]:
    """The noise multiplier of `one_shot` for (ε, δ)-DP, in units of the joint sensitivity, and the guarantee.

    Raises:
      ValueError: for ε or δ out of range.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    multiplier = gaussian_noise_multiplier(epsilon, delta)
    return multiplier, PrivacyGuarantee(
        epsilon=float(epsilon),
        delta=float(delta),
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
    """The release of `fit_one_shot` at a given noise multiplier, which may be traced: Γ (D, D)."""
    check_positive(regularization, "regularization")
    hyper = check_hyper(hyper)
    features = check_features(features)
    return _one_shot(key, features, hyper, regularization, noise_multiplier, *joint_noise(hyper))


def joint_noise(hyper: HyperParameters) -> tuple[float, float]:
    """The standard deviations of the noise on N·H and on N·h, per unit of noise multiplier."""
    C, G, _ = hyper
    return 2 * math.sqrt(2) * G**2, 2 * C * G


@jax.jit
def _one_shot(key, features, hyper, regularization, noise_multiplier, std_H, std_h):
    num_prompts, dim = features.query.shape
    exact = second_moments(enforce(features, hyper))
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
    """Projects (D, D, D, D), indexed [i, k, j, l], onto symmetry in i, j and in k, l: (D², D²)."""
    dim = moments.shape[0]
    moments = (moments + moments.transpose(2, 1, 0, 3)) / 2
    moments = (moments + moments.transpose(0, 3, 2, 1)) / 2
    return moments.reshape(dim * dim, dim * dim)
