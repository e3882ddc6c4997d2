"""Two differentially private releases of the Gram matrix XXᵀ: additive noise, and Gaussian sampling."""

import dataclasses
import math
from functools import partial
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpx import _watch, noise
from dpx._numerics import wide_sums
from dpx._validate import check_delta, check_epsilon
from dpx.gram import accounting
from dpx.gram.columns import clipped_gram, leading_rows
from dpx.privacy import (
    PrivacyGuarantee,
    gaussian_noise_multiplier,
)

MECHANISMS = ("gaussian", "sampling")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["matrix"],
    meta_fields=["guarantee", "num_samples", "noise_std"],
)
@dataclasses.dataclass(frozen=True)
class GramRelease:
    """A private estimate of XXᵀ; a pytree with one leaf, the matrix.

    Attributes:
      matrix: (n, n), symmetric.
      guarantee: What the matrix costs.
      num_samples: k of the sampling mechanism, None for additive noise.
      noise_std: Standard deviation of the noise on the diagonal, 1/√2 of it off the diagonal; None for
        sampling, whose error scales with the matrix.
    """

    matrix: jax.Array
    guarantee: PrivacyGuarantee
    num_samples: int | None
    noise_std: float | None


def release(
    key: jax.Array | None,
    X: Any,
    *,
    epsilon: float,
    delta: float,
    column_bound: float,
    max_column_change: float | None = None,
    mechanism: str = "gaussian",
    eta: float | None = None,
    calibration: str = "exact",
    neighboring: str = "replace_one",
    clip: bool = True,
    assume_good: bool = False,
    psd: bool = False,
    secure: bool = False,
) -> GramRelease:
    """Releases XXᵀ with (epsilon, delta)-differential privacy for one column of X.

    *gaussian*: XXᵀ + E, E symmetric with independent N(0, σ²) on the diagonal and N(0, σ²/2) off it.
    In the coordinates (A_ii, √2 A_ij), in which the l2 norm is the Frobenius norm, this is isotropic
    noise, so the Gaussian mechanism with σ = F·m is exact: F the Frobenius sensitivity and m the exact
    multiplier of (epsilon, delta).

    *sampling*: Algorithms 1 and 2 of Gao, Song, Yang, Zhou (arXiv:2305.04701): the mean of k outer
    products of N(0, XXᵀ + ηI) samples, minus ηI. The shift makes every X, not just a "good" one, a
    covariance above ηI, which is what the guarantee rests on; checking XXᵀ ⪰ ηI on the data instead
    would leak. The mean is a Wishart matrix, drawn in O(n³) whatever k is. The relative error is about
    1/√k, on matrices shifted by η, so at equal (ε, δ) additive noise is the more accurate one.

    Formal guarantee: replace_one changes one column, of norm at most `column_bound` (longer ones are
    projected onto that ball), by at most `max_column_change`; add_or_remove_one adds or removes a
    column. n is public, and so is d under replace_one. Sensitivity and accounting are proven in
    `dpx.gram.accounting`. The projection, `psd` and all that is computed from the matrix later are
    post-processing. The guarantee is for real arithmetic (what is left of that in
    floating point is said in `dpx.noise`), with `secure` also for what runs: columns are rounded to integers,
    Δ is the same function of the bounds that rounded columns have, and the rest is `dpx.noise.secure`.

    Args:
      key: A JAX key for this release alone.
      X: (n, d), as in `dpx.gram.columns.clipped_gram`: an array, a sparse matrix, or an iterable of
        column blocks.
      epsilon, delta: The budget; any ε up to 1e8.
      column_bound: α, bound on the l2 norm of a column; a number fixed without looking at X.
      max_column_change: How far a column moves between neighbours, in (0, 2α]; None is 2α, any replacement.
      mechanism: "gaussian" or "sampling".
      eta: η > 0 for sampling: the shift, or with `assume_good` the promised least eigenvalue of XXᵀ.
        It must exceed F for any k to be admissible.
      calibration: "exact", or (sampling only) "paper": Definition 4.5 with 2αβ√n/η.
      neighboring: "replace_one" or "add_or_remove_one".
      clip: False raises where a column exceeds the bound, an error for the holder of the data alone.
      assume_good: Sampling only: take XXᵀ ⪰ ηI as a promise (the paper's) instead of shifting. The
        guarantee then holds only where the promise does, and says so.
      psd: Project the release onto the positive semidefinite matrices (nearest in Frobenius norm).
      secure: Gaussian only: sums integers and draws discrete noise; `key` must then be None.

    Returns:
      A `GramRelease`. It is computed in 64-bit floats, since entries of XXᵀ can exceed the noise by more
      than 32 bits resolve, and returned in JAX's default ones; under a JAX transformation the
      ambient precision is used throughout.

    Raises:
      ValueError: for an argument out of range; where no k ≥ n is admissible, naming the ε, η or β that
        would admit one; where n > d without the shift; for columns over the bound with `clip=False`.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    if mechanism not in MECHANISMS:
        raise ValueError(f"mechanism={mechanism!r} is not known: use one of {MECHANISMS}")
    change = accounting.sensitivity(column_bound, max_column_change, neighboring)
    if secure and mechanism != "gaussian":
        raise ValueError(
            "secure=True is for mechanism='gaussian': sampling has no exact arithmetic"
        )
    noise.secure.check(key, secure)
    if mechanism == "gaussian":
        if eta is not None or assume_good:
            raise ValueError(
                f"eta={eta}, assume_good={assume_good} are for mechanism='sampling': omit"
            )
        if calibration != "exact":
            raise ValueError(
                f"calibration={calibration!r} is not for mechanism='gaussian', whose calibration is exact"
            )
        multiplier = gaussian_noise_multiplier(epsilon, delta)
        num_samples, std = None, change * multiplier
        draw = partial(_perturb, sensitivity=change, multiplier=multiplier)
        event = dp_accounting.GaussianDpEvent(multiplier)
        described = f"XXᵀ + symmetric Gaussian noise, standard deviation {std:.6g} on the diagonal"
    else:
        if eta is None:
            raise ValueError(
                f"eta=None: mechanism='sampling' needs an eta above the sensitivity, {change:.6g}"
            )
        n, X = leading_rows(X)
        terms = {
            "column_bound": column_bound,
            "max_column_change": max_column_change,
            "eta": eta,
            "n": n,
        }
        terms |= {"calibration": calibration, "neighboring": neighboring}
        num_samples = _admissible_samples(epsilon, delta, **terms)
        std, event = None, None
        draw = partial(
            _sample,
            num_samples=num_samples,
            shift=0.0 if assume_good else eta,
            change=change / eta,
        )
        described = f"mean of {num_samples} Gaussian outer products, {calibration} calibration"

    gram, columns = clipped_gram(X, column_bound, clip=clip, whole=secure)
    if assume_good and gram.shape[0] > columns:
        raise ValueError(
            f"X is {gram.shape[0]}×{columns}: with n > d no XXᵀ is ⪰ eta·I, so assume_good=True cannot "
            "hold; leave it out"
        )
    if secure:
        assert std is not None
        multiplier = std / change
        grid = (column_bound / noise.secure.FACTOR_STEPS) ** 2
        change = _whole_sensitivity(len(gram), column_bound, max_column_change, neighboring)
        std = multiplier * change * grid
        draw = partial(_perturb_whole, sensitivity=change, multiplier=multiplier, grid=grid)
    traced = isinstance(key, Tracer) or isinstance(gram, Tracer)
    with wide_sums(key, gram):
        if not isinstance(gram, Tracer) and not secure:
            gram = jnp.asarray(np.asarray(gram), float)
        matrix = draw(key, gram)
        if psd:
            matrix = project_psd(matrix)
    if not traced:
        matrix = noise.check_finite(jnp.asarray(np.asarray(matrix), float), "the Gram matrix")
    return GramRelease(
        matrix=matrix,
        guarantee=PrivacyGuarantee(
            epsilon=epsilon,
            delta=delta,
            neighboring=dp_accounting.NeighboringRelation[neighboring.upper()],
            unit=_unit(column_bound, max_column_change),
            mechanism=described,
            assumptions=_assumptions(column_bound, eta, clip, assume_good, neighboring),
            event=event,
        ),
        num_samples=num_samples,
        noise_std=std,
    )


def _perturb(key, gram, *, sensitivity: float, multiplier: float):
    noisy = noise.release(
        key, gram, sensitivity=sensitivity, noise_multiplier=multiplier, label="Gram matrix"
    )
    # XXᵀ is symmetric: the projection onto such matrices leaves it alone and takes half of the noise away.
    return (noisy + noisy.T) / 2


def _perturb_whole(key, gram, *, sensitivity: float, multiplier: float, grid: float):
    del key
    noisy = noise.secure.release_whole(
        gram, sensitivity=sensitivity, noise_multiplier=multiplier, label="Gram matrix"
    )
    return jnp.asarray((noisy.astype(np.float64) + noisy.T) * (grid / 2))


def _whole_sensitivity(
    n: int, column_bound: float, max_column_change: float | None, neighboring: str
) -> float:
    """F of columns in units of α/2¹⁸: rounding makes them longer and moves two of them apart."""
    steps = noise.secure.FACTOR_STEPS
    longest = noise.secure.norm_bound(steps, n)
    if max_column_change is not None:
        apart = max_column_change / column_bound * steps + 2 * noise.secure.rounding(n)
        max_column_change = min(apart, 2 * longest)
    return accounting.sensitivity(longest, max_column_change, neighboring)


def _sample(key, gram, *, num_samples: int, shift: float, change: float):
    floor = shift * jnp.eye(gram.shape[0], dtype=gram.dtype)
    covariance = gram + floor
    sampled = wishart_mean(key, covariance, num_samples)
    # The second door: what a record may move is the covariance of the samples, relative to itself.
    about = {"label": "Gram matrix, sampled", "change": change}
    (sampled,) = _watch.at_release(about, key, [covariance], [], [sampled], float(num_samples))
    return sampled - floor


def symmetric_gaussian(key: jax.Array, n: int, dtype: Any = float) -> jax.Array:
    """A symmetric (n, n) matrix with density ∝ exp(−‖E‖_F²/2): N(0, 1) on the diagonal, N(0, ½) off it.

    The Gaussian orthogonal ensemble: the standard normal distribution on the symmetric matrices with
    the Frobenius norm.
    """
    draw = noise.normal(key, (n, n), dtype)
    # (G + Gᵀ)/2 has variances 1 and ½.
    return (draw + draw.T) / 2


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
    factor = jnp.linalg.cholesky(covariance) @ (triangle / jnp.sqrt(num_samples))
    return jnp.matmul(factor, factor.T, precision=jax.lax.Precision.HIGHEST)


def project_psd(matrix: jax.Array) -> jax.Array:
    """The positive semidefinite matrix nearest to a symmetric one, (..., n, n), in Frobenius norm."""
    values, vectors = jnp.linalg.eigh(matrix)
    scaled = vectors * jnp.maximum(values, 0)[..., None, :]
    return jnp.matmul(scaled, jnp.swapaxes(vectors, -1, -2), precision=jax.lax.Precision.HIGHEST)


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
    if terms["neighboring"] == "replace_one":
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


def _unit(column_bound: float, max_column_change: float | None) -> str:
    if max_column_change is None or max_column_change >= 2 * column_bound:
        return "column of X"
    return f"column of X, moved by at most max_column_change={max_column_change:g}"


def _assumptions(
    column_bound, eta, clip: bool, assume_good: bool, neighboring: str
) -> tuple[str, ...]:
    public = "number of rows of X is" if neighboring == "add_or_remove_one" else "shape of X is"
    stated = [f"the {public} public"]
    if not clip:
        stated.append(f"data within the declared bounds: columns of norm at most {column_bound:g}")
    if assume_good:
        stated.append(
            f"XXᵀ ⪰ eta·I with eta={eta:g}, for X and for its neighbours; this is not checked"
        )
    return tuple(stated)
