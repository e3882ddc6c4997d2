"""A statistical audit of a privacy claim: a lower bound on ε from samples of a test statistic.

A mechanism M is (ε, δ)-differentially private only if, for neighbouring inputs x and x' and every
set S of outputs, in both orders,

    Pr[M(x) ∈ S] ≤ e^ε Pr[M(x') ∈ S] + δ.

So any set whose two probabilities are measured well enough bounds ε from below by
log((Pr[M(x) ∈ S] − δ) / Pr[M(x') ∈ S]). By the Neyman–Pearson lemma the best sets are the upper
(and, for the other order, the lower) tails of the likelihood ratio of the two output
distributions, so give its logarithm as the statistic where it is known; any statistic is sound.

The bound is of Jagielski, Ullman, Oprea, "Auditing Differentially Private Machine Learning: How
Private is Private SGD?", arXiv:2006.07709, with exact binomial (Clopper–Pearson) intervals. A claim
below `epsilon` is refuted with the stated confidence; a claim above it is not thereby proven.
"""

from typing import NamedTuple

import numpy as np
from scipy import special

_CANDIDATES = 512


class Audit(NamedTuple):
    """The outcome of an audit; the rates are the bounds that went into `epsilon`.

    Attributes:
      epsilon: Lower bound on ε at the given δ, at least 0, true with probability `confidence`.
      threshold: The statistic's value that bounds the rejection region.
      tail: "upper" for {statistic ≥ threshold}, "lower" for {statistic ≤ threshold}.
      true_positive_rate: Lower confidence bound of the region's larger probability.
      false_positive_rate: Upper confidence bound of its smaller probability.
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

    The region (a threshold, and which of the two inputs makes it likelier) is chosen on the first
    `selection_fraction` of the samples and measured on the rest, so that choosing costs no
    confidence. Each of the two rates has a one-sided Clopper–Pearson bound at
    1 − (1 − confidence)/2, and a union bound joins them.

    Args:
      statistic: Samples of the test statistic under one input, shape (trials,), independent; large
        values speak for this input (ideally the log-likelihood ratio).
      other_statistic: The same under the neighbouring input, shape (other_trials,).
      delta: The δ of the claim, in [0, 1).
      confidence: The probability with which the bound must hold, in (0, 1).
      selection_fraction: The part of the samples that chooses the region, in (0, 1).

    Returns:
      An `Audit`. Its `epsilon` is 0 where the samples refute nothing.

    Raises:
      ValueError: for samples that are not one-dimensional, too few or NaN, or a parameter out of
        range.
    """
    if not 0.0 <= delta < 1.0:
        raise ValueError(f"delta={delta} must be in [0, 1)")
    for name, value in (("confidence", confidence), ("selection_fraction", selection_fraction)):
        if not 0.0 < value < 1.0:
            raise ValueError(f"{name}={value} must be strictly between 0 and 1")
    halves = []
    for name, values in (("statistic", statistic), ("other_statistic", other_statistic)):
        values = np.asarray(values, np.float64)
        cut = int(selection_fraction * values.size)
        if values.ndim != 1 or min(cut, values.size - cut) < 2:
            raise ValueError(
                f"{name} has shape {values.shape}: give a one-dimensional array of independent "
                f"samples, enough that both parts of the split at {selection_fraction} hold two"
            )
        if np.isnan(values).any():
            raise ValueError(f"{name} holds NaN: every trial must yield a number or ±inf")
        halves.append((np.sort(values[:cut]), np.sort(values[cut:])))
    (choose_p, measure_p), (choose_q, measure_q) = halves
    failure = (1.0 - confidence) / 2

    pooled = np.concatenate([choose_p, choose_q])
    # Quantiles alone would miss the far tails, where a small δ puts the best region.
    tails = np.geomspace(1.0 / pooled.size, 0.5, _CANDIDATES // 2)
    thresholds = np.quantile(pooled, np.concatenate([tails, 1.0 - tails]), method="nearest")

    def rates(p, q, cuts, tail):
        """Bounds on the likelier and the less likely input's probability of the region."""
        likelier, other = (p, q) if tail == "upper" else (q, p)
        return (
            _clopper_pearson(_count(likelier, cuts, tail), likelier.size, failure)[0],
            _clopper_pearson(_count(other, cuts, tail), other.size, failure)[1],
        )

    def bound(p, q, cuts, tail):
        high, low = rates(p, q, cuts, tail)
        return np.log(np.maximum(high - delta, 0.0) + np.finfo(float).tiny) - np.log(low)

    scores = {tail: bound(choose_p, choose_q, thresholds, tail) for tail in ("upper", "lower")}
    tail = max(scores, key=lambda name: scores[name].max())
    threshold = thresholds[np.argmax(scores[tail])]
    high, low = rates(measure_p, measure_q, threshold, tail)
    epsilon = max(0.0, float(np.log((high - delta) / low))) if high > delta else 0.0
    return Audit(epsilon, float(threshold), tail, float(high), float(low), confidence)


def _count(ordered: np.ndarray, cuts, tail: str):
    """How many of the sorted samples fall into each cut's region."""
    if tail == "upper":
        return ordered.size - np.searchsorted(ordered, cuts, side="left")
    return np.searchsorted(ordered, cuts, side="right")


def _clopper_pearson(hits, trials: int, failure: float):
    """One-sided exact bounds of a binomial rate, each wrong with probability at most `failure`."""
    hits = np.asarray(hits, np.float64)
    # betaincinv wants positive parameters; the ends of the range have closed forms anyway.
    low = special.betaincinv(np.maximum(hits, 1), trials - hits + 1, failure)
    high = special.betaincinv(hits + 1, np.maximum(trials - hits, 1), 1 - failure)
    return np.where(hits == 0, 0.0, low), np.where(hits == trials, 1.0, high)
