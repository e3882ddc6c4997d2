"""Statistical audits of a privacy claim: lower bounds on ε from samples of a test statistic.

There are three bounds. The first assumes nothing, and the last assumes the most:

- `epsilon_lower_bound` holds for any mechanism. It depends on events of probability about δ, so that even an
  ideal test of DP-SGD at δ = 1e-5 reaches only about half of ε.
- `curve_lower_bound` holds for a mechanism whose trade-off curve is one of `SampledGaussian`, with an unknown
  noise multiplier. The test statistic may be anything; a joint statistic of all steps shows correlated noise.
- `step_lower_bound` holds if the auditor sees all steps, and if these are independent, and Gaussian given
  who was sampled.

A mechanism M is (ε, δ)-differentially private only if, for neighbouring inputs x and x' and every
set S of outputs, in both orders,

    Pr[M(x) ∈ S] ≤ e^ε Pr[M(x') ∈ S] + δ.

So any set S gives the lower bound log((Pr[M(x) ∈ S] − δ) / Pr[M(x') ∈ S]) on ε. By the Neyman–Pearson lemma
the best sets are the upper (and, for the other order, the lower) tails of the likelihood ratio of the two
output distributions. So give its logarithm as the statistic if it is known; the bound is valid for any.

The first bound is that of Jagielski, Ullman and Oprea, "Auditing Differentially Private Machine Learning: How
Private is Private SGD?", arXiv:2006.07709, with exact binomial (Clopper–Pearson) intervals. A claim
below `epsilon` is refuted with the stated confidence. A claim above it is not thereby proven.
"""

import math
from typing import NamedTuple

import numpy as np

from dpx.audit.curves import SampledGaussian
from dpx.audit.intervals import (
    as_floats,
    candidates,
    check_shares,
    rates,
    smallest_refuted,
    split,
)

TAILS = ("upper", "lower")


class Audit(NamedTuple):
    """The outcome of an audit. The rates are the confidence bounds from which `epsilon` follows.

    Attributes:
      epsilon: A lower bound on ε at the given δ, at least 0, valid with probability `confidence`.
      threshold: The value of the statistic at the edge of the rejection region.
      tail: "upper" for {statistic ≥ threshold}, "lower" for {statistic ≤ threshold}.
      true_positive_rate: A lower confidence bound on the region's larger probability.
      false_positive_rate: An upper confidence bound on its smaller probability.
      confidence: The probability, over the samples, with which `epsilon` is a valid bound.
    """

    epsilon: float
    threshold: float
    tail: str
    true_positive_rate: float
    false_positive_rate: float
    confidence: float


def epsilon_lower_bound(
    statistic: np.ndarray,
    other_statistic: np.ndarray,
    delta: float,
    *,
    confidence: float = 0.95,
    selection_fraction: float = 0.2,
) -> Audit:
    """Bounds a mechanism's ε from below at `delta`, from samples under two neighbouring inputs.

    The region, which is a threshold and a tail, is chosen on the first `selection_fraction` of the samples
    and measured on the rest, so that choosing costs no confidence. Each of the two rates has a one-sided
    Clopper–Pearson bound at 1 − (1 − confidence)/2, and a union bound joins them.

    Args:
      statistic: Samples of the test statistic under one input, shape (trials,), independent; large
        values speak for this input (ideally the log-likelihood ratio).
      other_statistic: The same under the neighbouring input, shape (other_trials,).
      delta: The δ of the claim, in [0, 1).
      confidence: The probability with which the bound must hold, in (0, 1).
      selection_fraction: The part of the samples that chooses the region, in (0, 1).

    Returns:
      An `Audit`. Its `epsilon` is 0 if the samples refute no claim.

    Raises:
      ValueError: for samples that are not one-dimensional, too few or NaN, or a parameter out of
        range.
    """
    if not 0.0 <= delta < 1.0:
        raise ValueError(f"delta={delta} must be in [0, 1): use the δ of the claim")
    check_shares(confidence=confidence, selection_fraction=selection_fraction)
    (choose_p, measure_p), (choose_q, measure_q) = (
        tuple(np.sort(part) for part in split(name, values, selection_fraction, axes=1))
        for name, values in (("statistic", statistic), ("other_statistic", other_statistic))
    )
    failure = (1.0 - confidence) / 2
    thresholds = candidates(choose_p, choose_q)

    def score(tail):
        high, low = rates(choose_p, choose_q, thresholds, tail, failure)
        return np.log(np.maximum(high - delta, 0.0) + np.finfo(float).tiny) - np.log(low)

    scores = {tail: score(tail) for tail in TAILS}
    tail = max(scores, key=lambda name: scores[name].max())
    threshold = thresholds[np.argmax(scores[tail])]
    high, low = rates(measure_p, measure_q, threshold, tail, failure)
    epsilon = max(0.0, float(np.log((high - delta) / low))) if high > delta else 0.0
    return Audit(epsilon, float(threshold), tail, float(high), float(low), confidence)


class CurveAudit(NamedTuple):
    """The outcome of an audit against trade-off curves.

    Attributes:
      epsilon: A lower bound on ε at the given δ, at least 0, valid with probability `confidence`.
      noise_multiplier: An upper bound on the noise multiplier; infinite if nothing is refuted.
      statistic: The index of the statistic that was chosen.
      threshold, tail: The edge of the rejection region, as in `Audit`.
      type_one: An upper confidence bound on the region's probability under the input that it rejects.
      type_two: An upper confidence bound on the complement's probability under the other input.
      confidence: The probability, over the samples, with which the bounds are valid.
    """

    epsilon: float
    noise_multiplier: float
    statistic: int
    threshold: float
    tail: str
    type_one: float
    type_two: float
    confidence: float


def curve_lower_bound(
    statistic: np.ndarray,
    other_statistic: np.ndarray,
    delta: float,
    *,
    model: SampledGaussian,
    confidence: float = 0.95,
    selection_fraction: float = 0.2,
) -> CurveAudit:
    """Bounds ε from below at `delta` for a mechanism on one of the model's trade-off curves.

    If the errors of a test, each at its Clopper–Pearson bound, lie below the curve of noise multiplier m, the
    test refutes the claim of that curve or any better one. The smallest refuted m is an upper bound on the
    noise multiplier, and ε follows from it by accounting.

    The bound is valid if the mechanism's curve is one of the model's. A claim that was computed from such a
    curve, as for DP-SGD, is refuted if the bound exceeds it, whatever the mechanism really is. The statistic
    need not be a likelihood ratio. This is the audit of Nasr et al., "Tight Auditing of Differentially
    Private Machine Learning", arXiv:2302.07956, Section 4, with the exact curve of sampled steps in place of
    an approximation by μ-GDP.

    Args:
      statistic: Samples under one input, shape (trials,), or (trials, k) for k statistics to choose from.
        Trials are independent, and large values speak for this input.
      other_statistic: The same under the neighbouring input, shape (other_trials,) or (other_trials, k).
      delta: The δ of the claim, in (0, 1).
      model: How the mechanism samples and how many steps it takes.
      confidence, selection_fraction: As in `epsilon_lower_bound`; a part chooses the statistic too.

    Raises:
      ValueError: as `epsilon_lower_bound`.
    """
    check_shares(delta=delta, confidence=confidence, selection_fraction=selection_fraction)
    (choose_p, measure_p), (choose_q, measure_q) = (
        split(name, values[:, None] if values.ndim == 1 else values, selection_fraction, axes=2)
        for name, values in (
            ("statistic", as_floats(statistic, "statistic")),
            ("other_statistic", as_floats(other_statistic, "other_statistic")),
        )
    )
    if choose_p.shape[1] != choose_q.shape[1]:
        raise ValueError(
            f"other_statistic has shape {np.shape(other_statistic)}: give as many statistics "
            f"as statistic has, {np.shape(statistic)}"
        )
    failure = (1.0 - confidence) / 2

    def errors(p, q, cuts, tail):
        """Upper bounds on the type I and the type II error."""
        high, low = rates(np.sort(p), np.sort(q), cuts, tail, failure)
        return low, 1 - high

    tests = []  # (statistic, tail, thresholds, type I errors, type II errors)
    for index, (p, q) in enumerate(zip(choose_p.T, choose_q.T, strict=True)):
        cuts = candidates(p, q)
        tests += [(index, tail, cuts, *errors(p, q, cuts, tail)) for tail in TAILS]

    def margin(test, noise_multiplier):
        return model.tradeoff(noise_multiplier, test[3]) - test[4]

    chosen = smallest_refuted(lambda m: any((margin(test, m) > 0).any() for test in tests))
    at = chosen if math.isfinite(chosen) else 1.0
    index, tail, cuts, *_ = best = max(tests, key=lambda test: margin(test, at).max())
    threshold = cuts[np.argmax(margin(best, at))]
    type_one, type_two = errors(measure_p[:, index], measure_q[:, index], threshold, tail)
    bound = smallest_refuted(lambda m: bool(model.tradeoff(m, type_one) > type_two))
    epsilon = model.epsilon(bound, delta) if math.isfinite(bound) else 0.0
    region = index, float(threshold), tail
    return CurveAudit(epsilon, bound, *region, float(type_one), float(type_two), confidence)
