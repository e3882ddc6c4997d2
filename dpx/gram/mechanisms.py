"""The two mechanisms that release a Gram matrix: additive noise, and Gaussian sampling.

Each is planned from public numbers alone and then draws. In mathematics X is n×d, α is `column_bound`, β is
`max_column_change`, η is `eta`, F is the Frobenius sensitivity of XXᵀ and k the number of samples.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting import DpEvent, NeighboringRelation
from jax.core import Tracer

from dpx import _watch, noise
from dpx._validate import check_number, check_relation
from dpx.gram import accounting
from dpx.privacy import REPLACE_ONE, gaussian_noise_multiplier

MECHANISMS = ("gaussian", "sampling")


class Planned(NamedTuple):
    """A mechanism that is ready to draw.

    `draw` maps a key and the Gram matrix of projected columns to the release. The other fields are those of
    `GramRelease` and of its guarantee; `described` is the mechanism in words.
    """

    draw: Callable[[Any, Any], jax.Array]
    described: str
    event: DpEvent | None
    num_samples: int | None
    noise_std: float | None


def check_options(mechanism, eta, calibration, assume_good: bool, secure: bool, **bounds) -> None:
    """Raises ValueError for bounds out of range and for options that the mechanism does not have."""
    change = accounting.sensitivity(**bounds)
    if mechanism == "sampling":
        if secure:
            raise ValueError(
                "secure=True is for mechanism='gaussian': sampling has no exact arithmetic"
            )
        if eta is None:
            raise ValueError(
                f"eta=None: mechanism='sampling' needs an eta above the sensitivity, {change:.6g}"
            )
    elif eta is not None or assume_good:
        raise ValueError(f"eta={eta}, assume_good={assume_good} are for mechanism='sampling': omit")
    elif calibration != "exact":
        raise ValueError(
            f"calibration={calibration!r} is not for mechanism='gaussian', whose calibration is exact"
        )


# ---------------------------------------------------------------------------------------------------------
# Additive noise


def gaussian(
    epsilon: float,
    delta: float,
    *,
    n: int,
    column_bound: float,
    max_column_change: float | None,
    neighboring: NeighboringRelation,
) -> Planned:
    """XXᵀ + symmetric Gaussian noise of standard deviation F·m on the diagonal; see `dpx.gram.release`.

    F is that of columns that were rounded to integers. A sum of floats, which is what there is under a JAX
    transformation, gets the same noise, so that a release says the same of itself.
    """
    multiplier = gaussian_noise_multiplier(epsilon, delta)
    grid = (column_bound / noise.secure.FACTOR_STEPS) ** 2
    change = _whole_sensitivity(n, column_bound, max_column_change, neighboring)
    std = change * grid * multiplier
    draw = partial(_perturb, sensitivity=change, multiplier=multiplier, grid=grid)
    return Planned(
        draw,
        described=f"XXᵀ + symmetric Gaussian noise, standard deviation {std:.6g} on the diagonal",
        event=dp_accounting.GaussianDpEvent(multiplier),
        num_samples=None,
        noise_std=std,
    )


def _perturb(key, gram, *, sensitivity: float, multiplier: float, grid: float):
    about = {"noise_multiplier": multiplier, "label": "Gram matrix"}
    if jnp.issubdtype(gram.dtype, jnp.integer):
        noisy = noise.release_integers(key, gram, sensitivity=sensitivity, unit=grid, **about)
    else:
        noisy = noise.release(key, gram, sensitivity=sensitivity * grid, **about)
    # XXᵀ is symmetric: the projection onto such matrices leaves it alone and takes half of the noise away.
    noisy = jnp.asarray(noisy)
    return (noisy + noisy.T) / 2


def rounded_sensitivity(
    n: int,
    column_bound: float,
    max_column_change: float | None,
    neighboring: NeighboringRelation | str,
) -> float:
    """F of columns of n entries that were rounded: what the noise is for; F·m is its standard deviation."""
    column_bound = check_number(column_bound, "column_bound")
    if max_column_change is not None:
        max_column_change = check_number(max_column_change, "max_column_change")
    bounds = column_bound, max_column_change, check_relation(neighboring, "neighboring")
    grid = (column_bound / noise.secure.FACTOR_STEPS) ** 2
    return _whole_sensitivity(n, *bounds) * grid


def _whole_sensitivity(
    n: int, column_bound: float, max_column_change: float | None, neighboring: NeighboringRelation
) -> float:
    """F of columns in units of α/2¹⁸: rounding makes them longer and moves two of them apart."""
    steps = noise.secure.FACTOR_STEPS
    longest = noise.secure.norm_bound(steps, n)
    if max_column_change is not None:
        apart = max_column_change / column_bound * steps + 2 * noise.secure.rounding(n)
        max_column_change = min(apart, 2 * longest)
    return accounting.sensitivity(longest, max_column_change, neighboring)


def symmetric_gaussian(key: jax.Array, n: int, dtype: Any = float) -> jax.Array:
    """A symmetric (n, n) matrix with density ∝ exp(−‖E‖_F²/2): N(0, 1) on the diagonal, N(0, ½) off it.

    The Gaussian orthogonal ensemble: the standard normal distribution on the symmetric matrices with
    the Frobenius norm.
    """
    draw = noise.normal(key, (n, n), dtype)
    # (G + Gᵀ)/2 has variances 1 and ½.
    return (draw + draw.T) / 2


# ---------------------------------------------------------------------------------------------------------
# Sampling


def sampling(
    epsilon: float,
    delta: float,
    *,
    n: int,
    column_bound: float,
    max_column_change: float | None,
    neighboring: NeighboringRelation,
    eta: float,
    calibration: str,
    shifted: bool,
) -> Planned:
    """The mean of k outer products of N(0, XXᵀ + ηI) samples, minus ηI; see `dpx.gram.release`.

    Raises:
      ValueError: where no k ≥ n is admissible.
    """
    terms = {
        "column_bound": column_bound,
        "max_column_change": max_column_change,
        "eta": eta,
        "n": n,
        "calibration": calibration,
        "neighboring": neighboring,
    }
    num_samples = _admissible_samples(epsilon, delta, **terms)
    draw = partial(
        _sample,
        num_samples=num_samples,
        shift=eta if shifted else 0.0,
        change=accounting.sensitivity(column_bound, max_column_change, neighboring) / eta,
    )
    described = f"mean of {num_samples} Gaussian outer products, {calibration} calibration"
    return Planned(draw, described, event=None, num_samples=num_samples, noise_std=None)


def _sample(key, gram, *, num_samples: int, shift: float, change: float):
    floor = shift * jnp.eye(gram.shape[0], dtype=gram.dtype)
    covariance = gram + floor
    sampled = wishart_mean(key, covariance, num_samples)
    # The second door: what a record may move is the covariance of the samples, relative to itself.
    about = {"label": "Gram matrix, sampled", "change": change}
    (sampled,) = _watch.at_release(about, key, [covariance], [], [sampled], float(num_samples))
    return sampled - floor


def wishart_mean(key: jax.Array, covariance: jax.Array, num_samples: int) -> jax.Array:
    """The mean of `num_samples` outer products of N(0, covariance) samples, in O(n³) for any number.

    Bartlett's decomposition: with LLᵀ = covariance the sum is LT(LT)ᵀ, T lower triangular and
    independent, T_ii² ~ χ²(k − i) for i = 0…n−1 and T_ij ~ N(0, 1) below the diagonal.

    Args:
      key: A JAX key.
      covariance: (n, n), positive definite.
      num_samples: k ≥ n, and at most 2^22 unless the covariance is 64-bit. A traced k is not checked.

    Raises:
      ValueError: for a number of samples out of this range.
    """
    n, dtype = covariance.shape[0], covariance.dtype
    largest = math.inf if dtype == np.float64 else 2**22
    if not isinstance(num_samples, Tracer) and not n <= num_samples <= largest:
        raise ValueError(
            f"num_samples={num_samples} must be at least n={n}, and at most 2^22 in {dtype}, which "
            "cannot resolve the sampling error of more: use 64-bit floats"
        )
    count = num_samples if isinstance(num_samples, Tracer) else float(num_samples)  # beyond int64
    return _bartlett(key, covariance, jnp.asarray(count, dtype))


@jax.jit
def _bartlett(key, covariance, num_samples):
    n, dtype = covariance.shape[0], covariance.dtype
    normal_key, chi_key = jax.random.split(key)
    freedom = num_samples - jnp.arange(n, dtype=dtype)
    diagonal = jnp.sqrt(jax.random.chisquare(chi_key, freedom, dtype=dtype))
    triangle = jnp.tril(noise.normal(normal_key, (n, n), dtype), -1) + jnp.diag(diagonal)
    product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    factor = product(jnp.linalg.cholesky(covariance), triangle / jnp.sqrt(num_samples))
    return product(factor, factor.T)


def _admissible_samples(epsilon: float, delta: float, **terms) -> int:
    """`max_samples`, or an error that names the ε, η and β at which n samples become admissible."""
    samples = accounting.max_samples(epsilon, delta, **terms)
    n, eta, max_column_change = terms["n"], terms["eta"], terms["max_column_change"]
    if samples >= n:
        return samples

    def admits(**changed) -> bool:
        return accounting.max_samples(epsilon, delta, **(terms | changed)) >= n

    remedies = [f"eta ≥ {_boundary(lambda value: admits(eta=value), eta):.4g}"]
    needed = accounting.sampling_epsilon(n, delta, **terms)
    if math.isfinite(needed):
        remedies.append(f"epsilon ≥ {needed:.4g}")
    if terms["neighboring"] is REPLACE_ONE:
        start = 2 * terms["column_bound"] if max_column_change is None else max_column_change
        smallest = _boundary(lambda value: admits(max_column_change=start**2 / value), start)
        remedies.append(f"max_column_change ≤ {start**2 / smallest:.4g}")
    raise ValueError(
        f"no admissible number of samples: epsilon={epsilon}, delta={delta}, eta={eta}, "
        f"max_column_change={max_column_change}, "
        f"column_bound={terms['column_bound']} allow {samples}, and n={n} are needed for a matrix of full "
        f"rank; use {' or '.join(remedies)}, or mechanism='gaussian'"
    )


def _boundary(admits, start: float) -> float:
    """The least value ≥ start (to 1e-4, rounded to the safe side) at which a monotone test passes."""
    low, high = start, 2 * start
    while not admits(high):
        low, high = high, 2 * high
    while high / low > 1 + 1e-4:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if admits(middle) else (middle, high)
    return high * (1 + 1e-3)  # survives being printed with four digits
