"""Lower bounds on ε from one run with many canaries, each of which is in the data if a fair coin says so.

The auditor guesses that some canaries are in the data, and abstains on the others. For an (ε, δ)-DP mechanism
the number of right guesses is bounded by a binomial law (Steinke, Nasr and Jagielski, arXiv:2305.08846). For
a mechanism with a known trade-off curve it is bounded by a recursion over the order of the guesses
(Mahloujifar, Melis and Chaudhuri, arXiv:2410.22235). jax-privacy implements both, the second for μ-GDP only;
the curves of sampled steps are not of that form. In the tests of dpx it is the oracle.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import optimize, special, stats

from dpx._validate import check_integer, check_real
from dpx.audit.curves import SampledGaussian
from dpx.audit.intervals import as_floats, check_shares, smallest_refuted


class OneRunAudit(NamedTuple):
    """The outcome of an audit of one run.

    Attributes:
      epsilon: A lower bound on ε at the given δ, at least 0, valid with probability `confidence`.
      guesses: The number of canaries that were guessed to be in the data; they have the largest scores.
      correct: The number of guesses that were right.
      confidence: The probability, over the coins and the run, with which `epsilon` is a valid bound.
    """

    epsilon: float
    guesses: int
    correct: int
    confidence: float


def one_run_lower_bound(
    scores: np.ndarray,
    included: np.ndarray,
    delta: float,
    *,
    model: SampledGaussian | None = None,
    guesses: int | None = None,
    confidence: float = 0.95,
) -> OneRunAudit:
    """Bounds ε from below at `delta` from one run.

    Without a model the bound is valid for every mechanism (Theorem 5.2 of arXiv:2305.08846). With a model it
    is valid if the mechanism's trade-off curve is one of the model's (Algorithm 3 of arXiv:2410.22235). A
    claim that was computed from such a curve is refuted if the bound exceeds it.

    Args:
      scores: (canaries,), large for canaries that seem to be in; a function of the run's output alone.
      included: (canaries,) bool, which canaries are in; decided by independent fair coins.
      delta: The δ of the claim, in (0, 1).
      model: The trade-off curves, given by how the mechanism samples and by its number of steps.
      guesses: The number of canaries to guess on, chosen before the scores are seen. The default is one in
        32, which is nearly optimal for DP-SGD at ε from 2 to 8 with thousands of canaries.
      confidence: The probability with which the bound must hold, in (0, 1).

    Raises:
      ValueError: for arrays that do not fit, NaN, or a parameter out of range.
    """
    scores = as_floats(scores, "scores")
    check_real(included, "included")
    included = np.asarray(included)
    if scores.ndim != 1 or scores.shape != included.shape or included.dtype != bool:
        raise ValueError(
            f"scores has shape {scores.shape} and included {included.shape}, {included.dtype}: "
            "give one number and one bool for each canary"
        )
    if np.isnan(scores).any():
        raise ValueError("scores holds NaN: every canary must have a number or ±inf")
    check_shares(delta=delta, confidence=confidence)
    canaries = scores.size
    guesses = check_integer(max(1, canaries // 32) if guesses is None else guesses, "guesses")
    if guesses > canaries:
        raise ValueError(f"guesses={guesses} must be at most the number of canaries, {canaries}")
    # Ties are broken by position, which is independent of the coins.
    correct = int(included[np.argsort(-scores, kind="stable")[:guesses]].sum())
    if model is None:
        epsilon = _by_binomial(canaries, guesses, correct, 1.0 - confidence, delta)
    else:
        epsilon = _by_curve(canaries, guesses, correct, 1.0 - confidence, delta, model)
    return OneRunAudit(epsilon, guesses, correct, confidence)


def _by_binomial(canaries, guesses, correct, failure, delta) -> float:
    """The largest ε at which so many right guesses have probability below `failure`."""

    def excess(epsilon):
        rate = special.expit(epsilon)
        tail = stats.binom.sf(correct - 1, guesses, rate)
        fewer = np.arange(1, correct + 1)
        gain = (stats.binom.sf(correct - fewer - 1, guesses, rate) - tail) / fewer
        return tail + 2 * canaries * delta * np.max(gain, initial=0.0) - failure

    if excess(0.0) >= 0:
        return 0.0
    high = 1.0
    while excess(high) < 0:
        high *= 2
    return float(optimize.brentq(excess, 0.0, high, xtol=1e-6))  # type: ignore[arg-type]


def _by_curve(canaries, guesses, correct, failure, delta, model) -> float:
    """ε of the smallest noise multiplier at which so many right guesses have probability below `failure`."""

    def refutes(noise_multiplier):
        right = failure * correct / canaries
        wrong = failure * (guesses - correct) / canaries
        for i in range(correct - 1, -1, -1):
            least = float(model.tradeoff(noise_multiplier, 1 - right))
            if least <= wrong:
                break  # neither can change any more
            right = min(1.0, right + i / (guesses - i) * (least - wrong))
            wrong = least
        return right + wrong > guesses / canaries

    bound = smallest_refuted(refutes)
    return model.epsilon(bound, delta) if math.isfinite(bound) else 0.0
