"""Gaussian sampling of a Gram matrix as a program: its draws, and the number of samples that a budget admits.

The notation is that of `dpx.gram.accounting`, which treats exact arithmetic: k samples of N(0, Σ), where
Σ = XXᵀ + ηI ⪰ ηI differs between neighbours by at most F in Frobenius norm. This module treats the program in
64-bit floats, u = 2⁻⁵³.

**The covariance.** Columns are rounded to multiples of α/2¹⁸, so that XXᵀ is an exact sum of integers, with a
trace of at most 2²⁶α². F is the sensitivity for rounded columns. The Cholesky factor L that is computed has
LLᵀ = Σ + Δ, ‖Δ‖_F ≤ D = 2u(n + 8)·tr Σ (twice the bound of Higham, Accuracy and Stability of Numerical
Algorithms, Theorem 10.3, to allow for the rounding of ηI). LLᵀ takes the place of Σ from here on: neighbours
differ by at most F + 2D, and LLᵀ ⪰ (η − D)I.

**The factor.** By Bartlett's decomposition the mean of k outer products is FFᵀ, F = LT/√k, T lower triangular
with independent entries, T_ii ~ chi(k − i) for i = 0…n−1 and T_ij ~ N(0, 1) below the diagonal. F is lower
triangular with a positive diagonal, so it is the Cholesky factor of FFᵀ, and releasing F is as private as
releasing FFᵀ. Therefore F is rounded at random to a public grid of 2⁻⁶·√(η/k) (`dpx.noise.grid`), and
FFᵀ − ηI, with its rounding errors, is post-processing. An entry of F has variance η/k or more, to which the
grid adds at most 4.25·2⁻¹² = 0.1 %.

**The price.** The program rounds F̃ in place of F, computed from draws of `dpx.noise.coupled`. Let s bound
‖F̃ − F‖₁ in steps of the grid, and let e^(±a) bound the relative error of the probability of keeping a draw.
Then all probabilities of the program are within e^(±c) of those of the exact mechanism, c = s + 2na, outside
of an event E of probability at most e^(−x) in both. So if k samples are (ε₀, δ₀)-DP in exact arithmetic, the
program is (ε₀ + 2c, e^c·δ₀ + (1 + e^(ε₀ + c))·e^(−x))-DP. `max_samples` chooses x = ε + log 1/δ + 30, and
ε₀ = ε − 2c, δ₀ = e^(−c)(1 − 1e-12)δ, so that the program is (ε, δ)-DP.

E is the event that a draw is too large, with x' = x + log(n² + 32n): an exponential draw or a 3dR(y) exceeds
x', or a chi draw or the norm of a row of T exceeds the root of its degrees of freedom by more than
w = √(2x') (which has probability e^(−x'), because a norm is 1-Lipschitz in normal draws). Outside of E

- a row of |T̃ − T| sums to at most 32u(2n + (1.5√n + 4)w + w²/16), and a row of |T| to √k + n + (1 + √n)w.
  The rounding error of the product LT is at most (n + 6)u|L||T|. With Σ_ij |L_ij| ≤ n·√tr Σ this gives

      s ≤ n·√(tr Σ/η)·64·(n + 64)u·(√k + 2n + (√n + 4)w + w²/16) + 2un².

- a ≤ 2⁻⁴⁰x' + 2⁻⁴⁷·4x'²·e^(x'/3d + 2)/27d, where d = (m − ⅔)/2 for the fewest degrees of freedom m > 16. The
  first term is the error of computing R. The second is the effect of an error of 2⁻⁴⁷·√(2x') in z, since
  3dR(y) has a slope of at most 3d|y|³/(1 + y), where 1/(1 + y) ≤ e^(x'/3d + 2).

At (1, 1e-6), η = 200α² and n = 16 this is c = 9e-7.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from dpx import _watch
from dpx._numerics import in_float64
from dpx.gram import accounting
from dpx.gram.accounting import Sampling
from dpx.gram.mechanisms import Planned
from dpx.noise import coupled, grid
from dpx.privacy import REPLACE_ONE

_GRID = 2.0**-6  # the step of the grid, in units of √(η/k)
_ULP = 2.0**-53
_SHARES = [2.0 ** -(exponent / 2) for exponent in range(40, 11, -1)]
_TRACE = 2.0**62  # the largest trace of a sum of integer columns: `dpx.noise.secure.check_sum`


def plan(epsilon: float, delta: float, terms: Sampling, *, shifted: bool) -> Planned:
    """The mean of k outer products of N(0, XXᵀ + ηI) samples, minus ηI; see `dpx.gram.release`.

    Without the shift, XXᵀ ⪰ ηI is taken as a promise.

    Raises:
      ValueError: if no k ≥ n is admissible.
    """
    num_samples = _at_least_n(epsilon, delta, terms)
    draw = partial(
        sampled_gram,
        num_samples=num_samples,
        unit=terms.worth,
        eta=terms.eta,
        shift=terms.eta if shifted else 0.0,
        change=_change(terms),
    )
    described = f"mean of {num_samples} Gaussian outer products, {terms.calibration} calibration"
    return Planned(draw, described, event=None, num_samples=num_samples, noise_std=None)


@in_float64
def sampled_gram(
    key, gram, *, num_samples: int, unit: float, eta: float, shift: float, change: float
):
    """The release for a matrix of integers in units of `unit`."""
    floor = shift * jnp.eye(len(gram))
    covariance = gram.astype(floor.dtype) * unit + floor
    step = _GRID * math.sqrt(eta / num_samples)
    sampled = _draw(key, covariance, jnp.asarray(float(num_samples)), step)
    # A release beside `dpx.noise.release`: a record moves the covariance of the noise, not a sum.
    about = {"label": "Gram matrix, sampled", "change": change}
    (sampled,) = _watch.at_release(about, key, [covariance], [], [sampled], float(num_samples))
    return sampled - floor


@in_float64
def wishart_mean(key: jax.Array, covariance: jax.Array, num_samples: int) -> jax.Array:
    """The mean of `num_samples` outer products of N(0, covariance) samples, in O(n³) for any number.

    By itself it is not a private release: `dpx.gram.release` rounds it to a grid.

    Args:
      key: A JAX key.
      covariance: (n, n), positive definite.
      num_samples: k, from n to 2⁵³. A traced k is not checked.

    Returns:
      (n, n) float64.

    Raises:
      ValueError: for a number of samples out of this range; under `jit` with 64-bit types off.
    """
    n = covariance.shape[0]
    if not isinstance(num_samples, Tracer) and not n <= num_samples <= 2**53:
        raise ValueError(
            f"num_samples={num_samples} must be at least n={n}, and at most 2^53, which is what floats "
            "count to: use fewer"
        )
    wide = jnp.asarray(covariance).astype(jnp.float64), jnp.asarray(num_samples).astype(jnp.float64)
    return _mean(key, *wide)


@jax.jit
def _mean(key, covariance, num_samples):
    return _square(_factor(key, covariance, num_samples))


@jax.jit
def _draw(key, covariance, num_samples, step):
    """FFᵀ, where F is rounded to the grid."""
    factor_key, grid_key = jax.random.split(key)
    factor = _factor(factor_key, covariance, num_samples)
    return _square(jnp.tril(grid.onto(grid_key, factor / step)) * step)


def _factor(key, covariance, num_samples):
    """The factor F = LT/√k."""
    n = len(covariance)
    normal_key, chi_key = jax.random.split(key)
    normals = coupled.normal(normal_key, (n, n + coupled.SUMMED))
    diagonal = coupled.chi(chi_key, num_samples - jnp.arange(n), normals[:, n:])
    triangle = jnp.tril(normals[:, :n], -1) + jnp.diag(diagonal)
    return _product(jnp.linalg.cholesky(covariance), triangle / jnp.sqrt(num_samples))


def _square(factor):
    return _product(factor, factor.T)


def _product(left, right):
    return jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST)


# ---------------------------------------------------------------------------------------------------------
# How many samples


def max_samples(epsilon: float, delta: float, **terms: Any) -> int:
    """The number k of samples that `dpx.gram.release` draws for a budget, which is nearly the largest.

    So many samples, drawn by a computer, are (epsilon, delta)-DP. In exact arithmetic a few more would be:
    `dpx.gram.accounting.ideal_samples`.

    Args:
      epsilon, delta: The budget.
      **terms: The fields of `dpx.gram.accounting.Sampling`: column_bound, max_column_change, neighboring,
        eta, n and calibration.

    Returns:
      k as a Python integer, 0 if no k is admissible. A release needs k ≥ n.

    Raises:
      ValueError: for an argument out of range.
    """
    return _samples(epsilon, delta, Sampling(**terms))


def _samples(epsilon: float, delta: float, terms: Sampling) -> int:
    real = min(accounting.ideal_samples(epsilon, delta, terms), 2**53)
    # In 64 bits, since results computed from 16-bit numbers would be rounded to 16 bits.
    epsilon, delta = float(epsilon), float(delta)
    change, x = _change(terms), epsilon - math.log(delta) + 30
    samples, cost = real, 0.0
    for share in _SHARES:  # the share of ε that pays for rounding
        cost = share * epsilon
        left = epsilon - 2 * cost, delta * math.exp(-cost) * (1 - 1e-12)
        samples = min(real, accounting.samples_at(*left, change)) if left[1] > 0 else 0
        if samples < terms.n or price(samples, x, terms) <= cost:
            return samples
    # If rounding costs more than each of these shares, fewer samples are drawn until it does not.
    while samples >= terms.n and price(samples, x, terms) > cost:
        samples = samples * 15 // 16
    return samples


def price(num_samples: int, x: float, terms: Sampling) -> float:
    """The c of the module's docstring: how far the program is from the exact mechanism outside of E."""
    n = terms.n
    x += math.log(n**2 + 32 * n)
    w = math.sqrt(2 * x)
    rows = math.sqrt(num_samples) + 2 * n + (math.sqrt(n) + 4) * w + w**2 / 16
    spread = n * math.sqrt(_trace(terms) / terms.eta) / _GRID * (n + 64) * _ULP * rows
    depth = (max(num_samples - n + 1, coupled.SUMMED + 1) - 2 / 3) / 2
    if x / (3 * depth) > 600:
        return math.inf
    slope = 4 * x**2 * math.exp(x / (3 * depth) + 2) / (27 * depth)
    return spread + n**2 * grid.SHARE + 2 * n * (2.0**-40 * x + 2.0**-47 * slope)


def _trace(terms: Sampling) -> float:
    """The largest trace of a covariance, with a margin for rounding."""
    return (_TRACE * terms.worth + terms.n * terms.eta) * (1 + 2.0**-20)


def _change(terms: Sampling) -> float:
    """The bound on the relative change of LLᵀ, which is infinite unless η − D is positive."""
    off = 2 * _ULP * (terms.n + 8) * _trace(terms)
    if off >= terms.eta:
        return math.inf
    change = terms.rounded(terms.n).sensitivity * terms.worth
    return (change + 2 * off) / (terms.eta - off)


def _at_least_n(epsilon: float, delta: float, terms: Sampling) -> int:
    """`max_samples`, or, if they are fewer than n, an error that names an ε, η and β that admit n."""
    samples = _samples(epsilon, delta, terms)
    if samples >= terms.n:
        return samples

    def admits(spent=epsilon, **changed) -> bool:
        return _samples(spent, delta, dataclasses.replace(terms, **changed)) >= terms.n

    remedies = [f"eta ≥ {_boundary(lambda value: admits(eta=value), terms.eta):.4g}"]
    if admits(1e8):
        remedies.append(f"epsilon ≥ {_boundary(admits, epsilon):.4g}")
    if terms.neighboring is REPLACE_ONE:
        start = terms.largest_change
        smallest = _boundary(lambda value: admits(max_column_change=start**2 / value), start)
        remedies.append(f"max_column_change ≤ {start**2 / smallest:.4g}")
    raise ValueError(
        f"no admissible number of samples: epsilon={epsilon}, delta={delta}, eta={terms.eta}, "
        f"max_column_change={terms.max_column_change}, column_bound={terms.column_bound} allow {samples}, "
        f"and n={terms.n} are needed for a matrix of full rank; use {' or '.join(remedies)}, or "
        "mechanism='gaussian'"
    )


def _boundary(admits, start: float) -> float:
    """The least value ≥ start at which a monotone test passes, to 1e-4 and never too small."""
    low, high = start, 2 * start
    while not admits(high):
        low, high = high, 2 * high
    while high / low > 1 + 1e-4:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if admits(middle) else (middle, high)
    return high * (1 + 1e-3)  # so that the value still passes when it is printed with four digits
