"""The differentially private release of the Gram matrix XXᵀ.

In formulas X is n×d, α is `column_bound`, β is `max_column_change`, η is `eta` and F is the Frobenius
sensitivity of XXᵀ.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting import NeighboringRelation
from jax.core import Tracer

from dpx import noise
from dpx._numerics import is_traced, rounding_assumption, wide_sums
from dpx._validate import (
    check_choice,
    check_delta,
    check_epsilon,
    check_number,
    check_real,
    check_relation,
)
from dpx.gram import mechanisms, wishart
from dpx.gram.accounting import Columns, Sampling
from dpx.gram.columns import clipped_gram, leading_rows, traced_exact_gram, traced_gram
from dpx.privacy import ADD_OR_REMOVE_ONE, PrivacyGuarantee, gaussian_guarantee
from dpx.release import Partial, are_summed, total


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["matrix"],
    meta_fields=["guarantee", "num_samples", "noise_std"],
)
@dataclasses.dataclass(frozen=True)
class GramRelease:
    """A private estimate of XXᵀ. It is a pytree with one leaf, the matrix.

    Attributes:
      matrix: (n, n), symmetric.
      guarantee: The guarantee of the matrix.
      num_samples: The number k of samples of the sampling mechanism; None for additive noise.
      noise_std: The standard deviation of the noise on the diagonal; off the diagonal it is 1/√2 of that.
        None for sampling, whose error scales with the matrix.
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
    neighboring: NeighboringRelation | str = "replace_one",
    clip: bool = True,
    assume_good: bool = False,
    psd: bool = False,
    secure: bool = False,
) -> GramRelease:
    """Releases XXᵀ with (epsilon, delta)-differential privacy for one column of X.

    *gaussian*: XXᵀ + E, where E is symmetric with independent N(0, σ²) on the diagonal and N(0, σ²/2) off it.
    In the coordinates (A_ii, √2 A_ij) the l2 norm is the Frobenius norm and the noise is isotropic, so that
    this is the Gaussian mechanism with σ = F·m, where F is the Frobenius sensitivity and m the exact noise
    multiplier of (epsilon, delta).

    *sampling*: Algorithms 1 and 2 of Gao, Song, Yang, Zhou (arXiv:2305.04701), the mean of k outer products
    of N(0, XXᵀ + ηI) samples, minus ηI. The guarantee needs covariances ⪰ ηI; the shift provides that for
    every X, while checking XXᵀ ⪰ ηI on the data would leak. The mean is a Wishart matrix, drawn in O(n³)
    for any k, and its Cholesky factor lies on a public grid. The relative error is about 1/√k, on matrices
    shifted by η, so that at equal (ε, δ) additive noise is more accurate. The paper's own form is
    `**as_printed()`.

    Formal guarantee: replace_one changes one column by at most β, and add_or_remove_one adds or removes a
    column. Columns longer than α are projected onto the ball of radius α. n is public, and so is d under
    replace_one. Sensitivity and accounting are proven in `dpx.gram.accounting`. The projection, `psd` and all
    that is computed from the matrix later are post-processing. For both mechanisms the sum is exact: columns
    are rounded to integers, and F is computed from the bounds that rounded columns obey. The guarantee of
    sampling holds for the program in 64-bit floats, whose rounding is paid by a smaller k
    (`dpx.gram.wishart`). That of additive noise holds for exact arithmetic (`dpx.noise` says what floating
    point adds), and with `secure` for the program (`dpx.noise.secure`). If X is traced by a JAX
    transformation, the sum is of floats, with the same noise. If X or the key is traced and floats have 32
    bits, the guarantee assumes that sums are exact, and says so.

    Args:
      key: A JAX key that is used for nothing else.
      X: (n, d), as in `dpx.gram.columns.clipped_gram`: an array, a DataFrame, a sparse matrix, or an iterable
        of column blocks. Or `dpx.release.Blocks` of such, or a sum that `statistic` made of them.
      epsilon, delta: The budget; any ε up to 1e8.
      column_bound: α, a bound on the l2 norm of a column, fixed without looking at X.
      max_column_change: β in (0, 2α], a bound on how far a column moves between neighbours; None is 2α, which
        allows any replacement.
      mechanism: "gaussian" or "sampling".
      eta: η > 0 for sampling: the shift, or with `assume_good` the promised least eigenvalue of XXᵀ. A k is
        admissible only if η exceeds F.
      calibration: "exact", or (sampling only) "paper": Definition 4.5 with 2αβ√n/η.
      neighboring: REPLACE_ONE or ADD_OR_REMOVE_ONE, or its lower-case name.
      clip: With False, a column beyond the bound raises an error, for the holder of the data alone.
      assume_good: For sampling: whether XXᵀ ⪰ ηI is taken as a promise, as in the paper, instead of shifting.
        The guarantee then assumes the promise, for rounded columns, and says so.
      psd: Whether the release is projected onto the positive semidefinite matrices (in Frobenius norm).
      secure: For additive noise: sums integers and draws discrete noise; `key` must then be None.

    Returns:
      A `GramRelease`. It is computed in 64-bit floats, since entries of XXᵀ can exceed the noise by more
      than 32 bits resolve, and returned in JAX's default float type. Under a JAX transformation additive
      noise is computed in that type throughout. Gradients through values on a grid are zero.

    Raises:
      ValueError: for an argument out of range; if no k ≥ n is admissible, naming an ε, η or β that admits
        one; for n > d without the shift; for columns beyond the bound with `clip=False`; for sampling under
        `jit` with 64-bit types off.
    """
    check_choice(mechanism, "mechanism", mechanisms.MECHANISMS)
    check_epsilon(epsilon)
    check_delta(delta)
    bounds = Columns(column_bound, max_column_change, neighboring)
    column_bound = bounds.column_bound
    mechanisms.check_options(mechanism, eta, calibration, assume_good, secure, bounds)
    eta = None if eta is None else check_number(eta, "eta")
    noise.secure.check(key, secure)
    sampled, exact = mechanism == "sampling", None
    if are_summed(X):
        if sampled:
            raise ValueError(f"mechanism={mechanism!r} must be 'gaussian' for a sum: pass X itself")
        exact = total(partial(statistic, column_bound=column_bound, clip=clip), X)
        n = exact.check("Gram matrix").options["n"]
    else:
        n, X = leading_rows(X)
    if sampled:
        terms: Any = {"eta": eta, "n": n, "calibration": calibration, **vars(bounds)}
        planned = wishart.plan(epsilon, delta, Sampling(**terms), shifted=not assume_good)
    else:
        planned = mechanisms.gaussian(epsilon, delta, n, bounds)
    if isinstance(X, Tracer) and not secure:
        if not clip:
            raise ValueError(
                "clip=False cannot be checked under a JAX transformation: use clip=True"
            )
        gram = (traced_exact_gram if sampled else traced_gram)(X, column_bound)
        columns = X.shape[1]
    else:
        exact = exact or statistic(X, column_bound=column_bound, clip=clip)
        (gram,) = exact.check("Gram matrix", column_bound=column_bound, clip=clip).sums
        columns = exact.num_records
    if assume_good and n > columns:
        raise ValueError(
            f"X is {n}×{columns}: with n > d no XXᵀ is ⪰ eta·I, so assume_good=True cannot hold; leave it out"
        )
    with wide_sums(key, gram):
        matrix = jnp.asarray(planned.draw(key, gram), float)
        if psd:
            matrix = project_psd(matrix)
    if not is_traced(key, gram):
        matrix = noise.check_finite(jnp.asarray(np.asarray(matrix), float), "the Gram matrix")
    return GramRelease(
        matrix=matrix,
        guarantee=PrivacyGuarantee(
            epsilon=epsilon,
            delta=delta,
            neighboring=check_relation(bounds.neighboring, "neighboring"),
            unit=_unit(bounds),
            mechanism=planned.described,
            assumptions=_assumptions(bounds, eta, clip, assume_good),
            event=planned.event,
        ).assuming(*(() if sampled else rounding_assumption(key, gram))),
        num_samples=planned.num_samples,
        noise_std=planned.noise_std,
    )


def statistic(X: Any, *, column_bound: float, clip: bool = True) -> Partial:
    """XXᵀ of some columns as a sum that merges exactly. It is private data, and `release` takes it for X.

    Args:
      X, column_bound, clip: As in `release`. Columns are rounded to multiples of α/2¹⁸, entry by entry, and
        the noise covers that (`dpx.gram.mechanisms`).
    """
    column_bound = check_number(column_bound, "column_bound")
    n, X = leading_rows(X)
    if isinstance(X, Tracer):
        raise ValueError("a sum of integers cannot be traced: call it outside jit and vmap")
    matrix, columns = clipped_gram(X, column_bound, clip=clip)
    options = {"column_bound": column_bound, "clip": clip, "n": n}
    longest = noise.secure.norm_bound(noise.secure.FACTOR_STEPS, n)
    return Partial("Gram matrix", options, (matrix,), columns, longest**2)


def as_printed() -> dict[str, Any]:
    """The options of `release` that give the mechanism as the paper prints it.

    η has to be given beside them: `gram.release(key, X, ..., eta=eta, **gram.as_printed())`.
    """
    return {"mechanism": "sampling", "calibration": "paper"}


def project_psd(matrix: jax.Array) -> jax.Array:
    """The positive semidefinite matrix nearest to a symmetric one, (..., n, n), in Frobenius norm."""
    check_real(matrix, "matrix")
    values, vectors = jnp.linalg.eigh(jnp.asarray(matrix))
    scaled = vectors * jnp.maximum(values, 0)[..., None, :]
    return jnp.matmul(scaled, jnp.swapaxes(vectors, -1, -2), precision=jax.lax.Precision.HIGHEST)


def planned_guarantee(
    epsilon: float,
    delta: float,
    column_bound: float,
    max_column_change: float | None,
    neighboring: NeighboringRelation | str,
) -> PrivacyGuarantee:
    """The guarantee of a release with additive noise, before it is made and without its assumptions."""
    return gaussian_guarantee(
        epsilon,
        delta,
        neighboring=neighboring,
        unit=_unit(Columns(column_bound, max_column_change, neighboring)),
        mechanism="XXᵀ + symmetric Gaussian noise",
    )


def _unit(bounds: Columns) -> str:
    change = bounds.max_column_change
    if change is None or change >= 2 * bounds.column_bound:
        return "column of X"
    return f"column of X, moved by at most max_column_change={change:g}"


def _assumptions(bounds: Columns, eta, clip: bool, assume_good: bool) -> tuple[str, ...]:
    comes_or_goes = bounds.neighboring is ADD_OR_REMOVE_ONE
    stated = [f"the {'number of rows' if comes_or_goes else 'shape'} of X is public"]
    if not clip:
        stated.append(
            f"data within the declared bounds: columns of norm at most {bounds.column_bound:g}"
        )
    if assume_good:
        stated.append(
            f"XXᵀ ⪰ eta·I with eta={eta:g}, for X and for its neighbours once columns are rounded; this is "
            "not checked"
        )
    return tuple(stated)
