"""Private ridge regression from one release of second moments, of prompts or of blocks of prompts."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from optax import projections

from dpx._numerics import in_float64, is_traced
from dpx._validate import check_key, check_positive
from dpx.noise import release, secure
from dpx.noisy_head.descent import Fit
from dpx.noisy_head.prompts import Features, check_features
from dpx.noisy_head.second_moments import one_at_a_time, second_moments
from dpx.noisy_head.sensitivity import HyperParameters, check_hyper, enforce
from dpx.privacy import (
    REPLACE_ONE,
    PrivacyGuarantee,
    gaussian_guarantee,
    gaussian_noise_multiplier,
)
from dpx.release import Blocks, Partial, total

__all__ = ["fit_one_shot", "statistic"]

_MOST_ROWS = 2**16  # multiplied at a time


def fit_one_shot(
    key: jax.Array,
    features: Features | Blocks | Partial,
    hyper: HyperParameters,
    *,
    regularization: float,
    epsilon: float,
    delta: float,
) -> Fit:
    """The ridge solution (2.7) from one Gaussian release of H = N⁻¹ Σ vec(Z)vec(Z)ᵀ and h = N⁻¹ Σ tZ.

    Guarantee: (ε, δ)-DP for replacing one prompt by any other. N is public, the bounds of `hyper` are
    enforced here, and all that follows the release is post-processing. The noise does not depend on λ.

    Sensitivity. H and b·h, b = √2 G/C, are released together. For neighbours, with p = ⟨Z, Z'⟩,
    N²‖ΔH‖² = ‖Z‖⁴ + ‖Z'‖⁴ − 2p² and N²‖Δh‖² = ‖tZ − t'Z'‖² ≤ C²(‖Z‖² + ‖Z'‖² + 2|p|). The first plus b² times
    the second increases in both norms, so that both are G at the maximum, where the total is
    2G⁴ − 2p² + 4G²(G² + |p|). This increases up to |p| = G². Hence the joint sensitivity is 2√2 G²/N, which
    is 2CG/N in units of h, as it would be for h alone: H costs nothing. Its noise has std 2√2 G²/N times the
    multiplier.

    H is symmetric in each of its two pairs of indices, and the noise is projected onto that subspace, where
    its operator norm is about D times its std. Eigenvalues of H below that are mostly noise, so they are
    raised to it; this bounds the inverse of H, and has no effect for large N or ε. The solution is projected
    onto the ball of radius R.

    The sums are of integers: the entries of Z and t are rounded to multiples of 2⁻¹⁸·G and 2⁻¹⁸·C. Rounded
    features obey a slightly larger G, for which the noise is calibrated. Under `jit` or `vmap` nothing is
    rounded, and the noise is the same.

    This fit beat `fit` in every setting measured with D ≤ 8. For high dimension use `fit`, which needs O(ND)
    memory and no D²×D² eigenvectors.

    Args:
      key: A JAX key, which must stay secret from everybody who sees Γ.
      features: query (N, D), context (N, D), target (N,); or `dpx.release.Blocks` of them, or a sum that
        `moment_sums.statistic` made of them. Memory is O(D⁴), time O(ND⁴ + D⁶).
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
    if is_traced(key, features):
        assert isinstance(features, Features)
        gamma = one_shot(
            key, features, hyper, regularization=regularization, noise_multiplier=multiplier
        )
        return Fit(gamma, guarantee, multiplier)
    secure.check(key, False)
    check_positive(regularization, "regularization")
    hyper = check_hyper(hyper)
    sums = total(functools.partial(statistic, hyper=hyper), features)
    sums.check("second moments of prompts", hyper=tuple(hyper))
    return Fit(_gamma(key, sums, hyper, regularization, multiplier), guarantee, multiplier)


def calibrate_one_shot(epsilon: float, delta: float) -> tuple[float, PrivacyGuarantee]:
    """The noise multiplier of `one_shot` for (ε, δ)-DP, per unit of joint sensitivity, and the guarantee.

    Raises:
      ValueError: for ε or δ out of range.
    """
    multiplier = gaussian_noise_multiplier(epsilon, delta)
    return multiplier, gaussian_guarantee(
        epsilon,
        delta,
        neighboring=REPLACE_ONE,
        unit="prompt",
        mechanism=f"second moments released once, noise multiplier {multiplier:.6g} on their joint "
        "sensitivity, then ridge",
        assumptions=("the number of prompts is public",),
    )


@in_float64
def statistic(block: Features, *, hyper: HyperParameters) -> Partial:
    """The exact second moments of the prompts of a block, which are private data.

    Args:
      block: query (n, D), context (n, D), target (n,); blocks may have different n.
      hyper: The bounds, as in `fit_one_shot`.
    """
    hyper = check_hyper(hyper)
    block = check_features(block)
    query, context, target = (np.asarray(part) for part in enforce(block, hyper))
    steps, dim = secure.FACTOR_STEPS, query.shape[1]
    H, h = np.zeros((dim**2, dim**2), np.int64), np.zeros((1, dim**2), np.int64)
    for start in range(0, len(target), _MOST_ROWS):
        q, s, t = (part[start : start + _MOST_ROWS] for part in (query, context, target))
        outer = (q[:, :, None] * s[:, None, :]).reshape(-1, dim**2)
        rows = secure.whole_rows(outer / hyper.feature_radius, steps)
        labels = np.rint(np.clip(t / hyper.response_clip, -1, 1) * steps)
        H += secure.product(rows, rows)
        h += secure.product(labels[:, None], rows)
    longest = secure.norm_bound(steps, dim**2)
    largest = math.ceil(math.hypot(longest**2, steps * longest))
    options = {"hyper": tuple(hyper), "dim": dim}
    return Partial("second moments of prompts", options, (H, h), len(target), largest)


@in_float64
def _gamma(key, sums: Partial, hyper: HyperParameters, regularization: float, multiplier: float):
    (H, h), dim, (C, G, _) = sums.sums, sums.options["dim"], hyper
    worth = secure.FACTOR_STEPS**2 * sums.num_records
    exact = jnp.asarray(H * (G**2 / worth)), jnp.asarray(h.reshape(dim, dim) * (C * G / worth))
    stds = joint_noise(rounded_bounds(hyper, dim))
    return ridge_of(key, exact, sums.num_records, hyper, regularization, multiplier, stds)


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
