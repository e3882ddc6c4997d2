"""Exact sums of integers, and their releases with discrete Gaussian noise, with no caveat about rounding.

Each record's contribution, a vector of norm at most 1, is multiplied by 2^k and rounded to integers. Integers
are summed exactly, in 64 bits, and OpenDP (https://docs.opendp.org) adds noise from the discrete
Gaussian distribution, which it samples exactly (Canonne, Kamath, Steinke, arXiv 2004.00010), of bits that are
taken for fair: those of OpenSSL's generator, which the operating system seeds. A noisy sum that overflows 64
bits is cut off, which is post-processing.

**Sensitivity.** Rounding moves each of the c entries of a contribution by at most 0.51: half a unit, and the
error of the 64-bit arithmetic before it. So the norm is at most 2^k + 0.51·√c. This does not rest on analysis
alone: a record whose integers, squared and summed exactly, exceed that bound counts as zero.

**Guarantee.** With l2 sensitivity Δ and variance σ² = (mΔ)² + 4 in units of the grid the release is as
private as the Gaussian mechanism with noise multiplier m, within a factor of 1 ± 1e-25 on all probabilities.
Proof (Peikert, CRYPTO 2010, Theorem 3.1): release Y = f + N(0, (mΔ)²) by that mechanism, and round each entry
at random, to the integer n with probability ∝ e^{−(n − Y)²/8}. By Poisson summation the constant of this
distribution is √(8π)·(1 ± η) whatever Y is, with η = 2.1·e^{−8π²} < 2e-34. So n has the probability of
∫ φ_{mΔ}(y − f) φ_2(n − y) dy = φ_σ(n − f), within a factor of 1 ± η, and so has the discrete Gaussian
around f. With up to 1e8 entries the two distributions differ by a factor within 1 ± 1e-25, and rounding is
post-processing. Hence the exact ε of a Gaussian mechanism holds (Balle & Wang, arXiv 1805.06530), and so does
its composition. The factor is far below the accuracy to which m itself is computed.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpx import _watch
from dpx._numerics import wide_sums
from dpx._validate import check_key, check_positive
from dpx.noise.release import release

_ROUNDING = 0.51  # of a unit, that an entry may move by
_EXTRA_VARIANCE = 4.0
STEPS = 2**30  # the norm of a contribution, in units of the grid
FACTOR_STEPS = 2**18  # of each factor, where contributions are products: `product` is exact then
_CHUNK = 2**16  # draws in about a second, between which Ctrl-C is heard


def check(key, secure: bool) -> None:
    """Checks that a key is given where JAX draws, and none where OpenDP does.

    Raises:
      ValueError: if it is not so.
      ModuleNotFoundError: where OpenDP draws, if it is not installed.
    """
    if secure:
        _opendp()
        if key is not None:
            raise ValueError(
                "key must be None with secure=True: OpenDP draws the noise, and the system seeds it"
            )
    elif key is None:
        raise ValueError("key is None: pass a secret JAX key, or secure=True for OpenDP's noise")
    else:
        check_key(key)


def split(key: jax.Array | None, secure: bool, count: int = 2) -> list[Any]:
    """`check`, and then `count` keys, which are None where OpenDP draws."""
    check(key, secure)
    return [None] * count if key is None else list(jax.random.split(key, count))


def norm_bound(steps: int, entries: int) -> int:
    """The largest norm of a rounded contribution with that many entries, in units of the grid.

    `steps` is 2^k, the norm of an unrounded contribution.
    """
    return steps + math.ceil(rounding(entries))


def rounding(entries: int) -> float:
    """How far rounding moves a contribution with that many entries, in units of the grid."""
    return _ROUNDING * math.sqrt(entries)


def whole(values: np.ndarray, owners: np.ndarray, steps: int, entries: int) -> np.ndarray:
    """Rounds contributions to integers, and sets to zero those beyond `norm_bound`.

    Args:
      values: (T,) entries of contributions, each of which has norm at most 1.
      owners: (T,) the record that each entry belongs to, counted from 0.
      steps: 2^k, at most 2^30.
      entries: The largest number of entries of a contribution that are not always zero.

    Returns:
      (T,) int64.
    """
    known = np.isfinite(values)
    rounded = np.rint(np.clip(np.where(known, values, 0), -1, 1) * steps).astype(np.int64)
    squares = np.zeros(int(owners.max(initial=-1)) + 1, np.int64)
    np.add.at(squares, owners, rounded**2)
    # Floats show which sums of squares would overflow 64 bits.
    rough = np.bincount(
        owners, np.where(known, np.square(rounded, dtype=float), np.inf), len(squares)
    )
    right = (squares <= norm_bound(steps, entries) ** 2) & (rough < 2**62)
    return np.where(right[owners], rounded, 0)


def whole_rows(rows, steps: int, xp: Any = np):
    """`whole` for dense contributions (N, entries). The integers are floats, as `product` takes them.

    `xp` is the module that computes: numpy, or jax.numpy with 64 bits.
    """
    rounded = xp.rint(xp.clip(rows, -1, 1) * steps)
    # Sums of squares are exact in floats up to 2⁵³.
    few = rows.shape[1] * steps**2 <= 2**53
    rough = squares = xp.square(rounded).sum(axis=1)
    if not few:
        whole = xp.where((rough < 2**62)[:, None], rounded, 0).astype(np.int64)
        squares = xp.square(whole).sum(axis=1)
    right = (squares <= norm_bound(steps, rows.shape[1]) ** 2) & (rough < 2**62)
    return xp.where(right[:, None], rounded, 0)


def sum_sparse(
    values: np.ndarray, owners: np.ndarray, cells: np.ndarray, size: int, *, l2_clip_norm: float
) -> tuple[np.ndarray, int]:
    """Sums sparse vectors, one of l2 norm at most `l2_clip_norm` for each record, exactly.

    Entries are rounded to integers in units of `l2_clip_norm / STEPS`, so that the sum does not depend on the
    order of the records, nor on how they are cut into blocks.

    Args:
      values: (T,) the entries of all vectors.
      owners: (T,) the record that each entry belongs to, counted from 0.
      cells: (T,) the place of each entry in the sum; no record has two entries in one place.
      size: The length of the sum.
      l2_clip_norm: The largest norm of a record's vector.

    Returns:
      (size,) int64, and the largest norm of a record's integers, which is the sum's sensitivity.
    """
    l2_clip_norm = check_positive(l2_clip_norm, "l2_clip_norm")
    total = np.zeros(size, np.int64)
    np.add.at(total, cells, whole(values / l2_clip_norm, owners, STEPS, size))
    return total, norm_bound(STEPS, size)


def check_sum(records: int, bound: int) -> None:
    """Raises ValueError where the sum of `records` contributions of norm `bound` could overflow 64 bits."""
    if records * bound >= 2**62:
        raise ValueError(
            f"{records} records are too many for exact sums: {2**62 // bound} fit into 64 bits"
        )


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The exact product leftᵀ·right of integers from `whole_rows`, (N, a) and (N, b) -> (a, b) int64.

    Sums of up to 2¹⁶ products of numbers up to 2¹⁸ are below 2⁵³, up to which 64-bit floats hold integers.
    """
    total = np.zeros((left.shape[1], right.shape[1]), np.int64)
    for start in range(0, len(left), 2**16):
        first, second = (
            np.asarray(rows[start : start + 2**16], np.float64) for rows in (left, right)
        )
        total += (first.T @ second).astype(np.int64)
    return total


def release_whole(
    exact: np.ndarray,
    *,
    sensitivity: float,
    noise_multiplier: float,
    label: str,
) -> np.ndarray:
    """Releases integers with discrete Gaussian noise, int64 like `exact`: `release_integers` without a key.

    Raises:
      ValueError: for a sensitivity or a noise multiplier that is negative or not finite, or for noise that 64
        bits do not hold.
    """
    sensitivity = check_positive(sensitivity, f"{label}: sensitivity", zero=True)
    noise_multiplier = check_positive(noise_multiplier, f"{label}: noise_multiplier", zero=True)
    if noise_multiplier * sensitivity > 2.0**57:
        raise ValueError(
            f"noise multiplier {noise_multiplier:.3g} is too large for secure=True: raise epsilon or delta"
        )
    dp, no_key = _opendp(), np.zeros(0, np.uint32)
    # Rounded up, so that rounding of the square root cannot cost the 4.
    std = math.hypot(noise_multiplier * sensitivity, math.sqrt(_EXTRA_VARIANCE)) * (1 + 2.0**-40)
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T=float)
    draw = dp.m.make_gaussian(*space, scale=std)
    flat = exact.ravel()
    noisy = np.zeros(flat.shape, np.int64)
    for start in range(0, len(flat), _CHUNK):
        noisy[start : start + _CHUNK] = draw(flat[start : start + _CHUNK])
    about = {"label": label, "norm": 2, "axis": None, "parts": 1}
    with wide_sums():
        leaves = [jnp.asarray(exact)], [jnp.asarray(float(sensitivity))]
        seen = [jnp.asarray(noisy.reshape(exact.shape))]
        seen = _watch.at_release(about, no_key, *leaves, seen, noise_multiplier)
        return np.asarray(seen[0])


def release_integers(
    key: jax.Array | None,
    exact: np.ndarray,
    *,
    sensitivity: float,
    unit: float,
    noise_multiplier: float,
    label: str,
) -> Any:
    """Releases an exact sum of integers that count multiples of `unit`.

    Guarantee: that of a Gaussian mechanism with this noise multiplier, if `exact` differs between neighbours
    by a vector of l2 norm at most `sensitivity`. Without a key the arithmetic is exact (module docstring).
    With a key it is `dpx.noise.release` of floats of 64 bits, to which integers above 2⁵³ are rounded.

    Args:
      key: A secret key that is used for this release alone; None for noise from OpenDP.
      exact: int64, of any shape.
      sensitivity: The bound, in the units of `exact`.
      unit: The worth of one of these units.
      noise_multiplier: The standard deviation of the noise per unit of sensitivity.
      label: What is released; the same in every run.

    Returns:
      64-bit floats like `exact`, in JAX's default type where the key is traced.

    Raises:
      ValueError: for a result that is not finite.
      ModuleNotFoundError: without a key and without OpenDP.
    """
    about: dict[str, Any] = {"noise_multiplier": noise_multiplier, "label": label}
    # In 64 bits: their product in 16 could be less than the two of them.
    sensitivity = check_positive(sensitivity, f"{label}: sensitivity", zero=True)
    unit = check_positive(unit, f"{label}: unit")
    if key is None:
        return release_whole(exact, sensitivity=sensitivity, **about) * unit
    return release(key, exact * unit, sensitivity=sensitivity * unit, **about)


def _opendp() -> Any:
    try:
        import opendp.prelude as prelude
    except ImportError:
        raise ModuleNotFoundError(
            'secure=True needs OpenDP: in the clone of dpx, pip install -e ".[secure]"',
            name="opendp",
        ) from None
    dp: Any = prelude
    dp.enable_features("contrib")
    return dp
