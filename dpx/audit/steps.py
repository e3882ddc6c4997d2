"""A lower bound on ε for an auditor who sees all steps of a training, if the steps are independent."""

import math
from typing import NamedTuple

import numpy as np
from scipy import stats

from dpx._validate import check_real
from dpx.audit.intervals import LARGEST, SMALLEST, as_floats, check_shares, clopper_pearson
from dpx.privacy.dpsgd import dpsgd_epsilon


class StepAudit(NamedTuple):
    """The outcome of an audit of single steps.

    Attributes:
      epsilon: A lower bound on ε at the given δ, at least 0, if the model of independent steps holds.
      noise_multiplier: An upper bound on the noise multiplier of a step.
      sampling_probability: A lower bound on the rate at which the canary was sampled.
      independence: The p-value of the model, which is the probability that independent steps look as
        correlated as these, in their noise or in who was sampled. If it is small, use `curve_lower_bound`
        with a joint statistic.
      confidence: The probability, over the samples, with which the bounds are valid.
    """

    epsilon: float
    noise_multiplier: float
    sampling_probability: float
    independence: float
    confidence: float


def step_lower_bound(
    projections: np.ndarray, sampled: np.ndarray, delta: float, *, confidence: float = 0.95
) -> StepAudit:
    """Bounds ε from below, given all noisy steps along the canary's gradient and when it was sampled.

    The bound is valid if projections are independent with law N(shift · sampled, std²), with one shift and
    one std for all steps. That is the model of DP-SGD on Poisson samples with a canary whose direction no
    other record uses. The shift and the sampling rate get lower bounds (Student's t, Clopper–Pearson) and std
    an upper bound (χ²), each with a third of the failure probability. ε follows by accounting for this number
    of steps at the noise multiplier std / shift. The adversary of the claim does not know who was sampled.
    The auditor may use it, since it only serves to estimate the mechanism's parameters.

    Args:
      projections: (runs, steps), of independent runs with the canary.
      sampled: (runs, steps) bool, whether the canary was in the batch.
      delta: The δ of the claim, in (0, 1).
      confidence: The probability with which the bound must hold, in (0, 1).

    Raises:
      ValueError: for arrays of other shapes, projections that are not finite, a canary that was never or
        always sampled, or a parameter out of range.
    """
    check_shares(delta=delta, confidence=confidence)
    x = as_floats(projections, "projections")
    check_real(sampled, "sampled")
    b = np.asarray(sampled, bool)
    if x.ndim != 2 or x.shape != b.shape or not np.isfinite(x).all():
        raise ValueError(
            f"projections has shape {x.shape} and sampled {b.shape}: both must be (runs, steps), and finite"
        )
    if not 1 < b.sum() < b.size - 1:
        raise ValueError(
            f"sampled holds {b.sum()} of {b.size}: the shift is the difference between steps with the "
            "canary and steps without; use more runs, or a sampling probability within (0, 1)"
        )
    failure, degrees = (1.0 - confidence) / 3, b.size - 2
    means = np.array([x[~b].mean(), x[b].mean()])
    residuals = x - means[b.astype(int)]
    std = math.sqrt((residuals**2).sum() / degrees)
    error = std * math.sqrt(1 / b.sum() + 1 / (~b).sum())
    shift = means[1] - means[0] - stats.t.isf(failure, degrees) * error
    largest_std = std * math.sqrt(degrees / stats.chi2.ppf(failure, degrees))
    rate = float(clopper_pearson(b.sum(), b.size, failure)[0])
    multiplier = max(largest_std, math.exp(SMALLEST) * shift) / shift if shift > 0 else math.inf
    epsilon = 0.0
    if multiplier < math.exp(LARGEST):
        epsilon = dpsgd_epsilon(multiplier, delta, sampling_probability=rate, steps=x.shape[1])
    independence = min(1.0, 2 * min(_uncorrelated(residuals), _uncorrelated(b - rate)))
    return StepAudit(epsilon, multiplier, rate, independence, confidence)


def _uncorrelated(values: np.ndarray) -> float:
    """The p-value of independent columns: n Σ r² over pairs is χ² for many rows n (Steiger 1980)."""
    runs, steps = values.shape
    if steps == 1:
        return 1.0
    values = values - values.mean(axis=0)
    norms = np.sqrt((values**2).sum(axis=0))
    correlations = (values.T @ values) / np.maximum(np.outer(norms, norms), np.finfo(float).tiny)
    pairs = correlations[np.triu_indices(steps, 1)]
    return float(stats.chi2.sf(runs * (pairs**2).sum(), pairs.size))
