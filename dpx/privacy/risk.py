"""Bounds on membership attacks: two figures beside ε and δ, computed from the whole privacy profile.

An attacker sees the release, knows all other records and everything but the noise, and has to tell whether a
record took part. The trade-off function f(α) is the least false-negative rate of such an attacker at a
false-positive rate α (Dong, Roth and Su, arXiv:1905.02383). It follows from the privacy profile δ(ε), ε ≥ 0:

    f(α) = sup over ε of max(1 − δ(ε) − e^ε·α, e^(−ε)·(1 − δ(ε) − α)).

For the Gaussian mechanism with μ = sensitivity / std it is Φ(Φ⁻¹(1 − α) − μ), which μ determines.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from dp_accounting import DpEvent, NeighboringRelation
from scipy import optimize, special

from dpx.privacy import composition
from dpx.privacy.events import count_steps, gaussian_mu, pld_interval
from dpx.privacy.gaussian import gaussian_noise_multiplier

FALSE_POSITIVES = 0.01
_ADD_OR_REMOVE, _REPLACE = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE
_GRID = 65

Profile = Callable[[float], float]


class Risk(NamedTuple):
    """The most that a membership attack on a release can achieve, under one neighbouring relation.

    Attributes:
      mu: The smallest μ such that the Gaussian mechanism with that μ is no more private: its δ(ε) is at least
        that of the release at every ε from 0 to the ε of the guarantee, which means for every δ from that of
        the guarantee upwards. For Gaussian mechanisms μ is exact, and holds for all δ. For other mechanisms,
        sampled ones included, perhaps no finite μ holds below the δ of the guarantee.
      tpr_at_1_percent: The largest share of those who took part that any attack identifies while it is wrong
        about 1 % of those who did not (or the other way round).
    """

    mu: float
    tpr_at_1_percent: float

    def __str__(self) -> str:
        return f"μ = {self.mu:.3g}, true positives at 1 % false positives ≤ {self.tpr_at_1_percent:.1%}"


def of_guarantee(
    epsilon: float,
    delta: float,
    stated: NeighboringRelation,
    event: DpEvent | None,
    asked: NeighboringRelation,
) -> Risk:
    """The risk under the relation `asked`, of a guarantee that is stated under the relation `stated`.

    Raises:
      ValueError: if the guarantee says nothing about the relation `asked`.
    """
    if asked != stated and (stated, asked) != (_ADD_OR_REMOVE, _REPLACE):
        raise ValueError(
            f"neighboring={asked.name.lower()!r} must be {stated.name.lower()!r}, of which the guarantee "
            "speaks: leave it out"
        )
    if math.isinf(epsilon):
        return Risk(math.inf, 1.0)
    mu = None if event is None else gaussian_mu(event)
    if mu is not None:
        # Replacing a record removes one and adds another, at worst in the opposite direction.
        mu *= 1 if asked == stated else 2
        return Risk(mu, float(special.ndtr(special.ndtri(FALSE_POSITIVES) + mu)))
    if event is not None and stated == _ADD_OR_REMOVE:
        key = repr(event), epsilon, delta, asked
        if key not in _known:
            _known[key] = _by_losses(event, epsilon, delta, asked)
        if (risk := _known[key]) is not None:
            return risk
    if asked != stated:
        epsilon, delta = 2 * epsilon, min(1.0, delta * (1 + math.exp(min(epsilon, 700))))
    profile = functools.partial(_plain_profile, epsilon, delta)
    return Risk(_plain_mu(epsilon, delta), _true_positives(profile, epsilon))


# The risks that this process has computed; None for an event that no accountant supports.
_known: dict[tuple, Risk | None] = {}


def _by_losses(
    event: DpEvent, epsilon: float, delta: float, asked: NeighboringRelation
) -> Risk | None:
    """The risk by privacy loss distributions, which are upper bounds; None if the event has none."""
    steps, noise = count_steps(event)
    if noise == 0:
        return Risk(math.inf, 1.0)
    if not composition.known(event, asked):
        return None
    planned = composition.plan(event, pld_interval(epsilon, steps))
    if planned.steps > composition.MOST_STEPS:
        return None
    losses = composition.composed(planned, asked)
    last = epsilon if asked == _ADD_OR_REMOVE else float(losses.get_epsilon_for_delta(delta))
    if math.isinf(last):
        return Risk(math.inf, 1.0)

    @functools.lru_cache
    def profile(at: float) -> float:
        return min(1.0, float(losses.get_delta_for_epsilon(at)) + planned.rounding)

    return Risk(_largest_mu(profile, last), _true_positives(profile, last))


def _plain_mu(epsilon: float, delta: float) -> float:
    """The μ of a guarantee of which only (ε, δ) is known.

    The trade-off function of (ε, δ) has a corner at f(v) = v, v = (1 − δ)/(1 + e^ε): its supporting lines of
    slopes between −e^ε and −e^(−ε) all pass through that corner. At μ = −2·Φ⁻¹(v) the trade-off function of
    the Gaussian mechanism passes through the corner too, where its slope is −1.
    """
    if delta >= 1:
        return math.inf
    corner = math.log1p(-delta) - epsilon - math.log1p(math.exp(-epsilon))
    return max(0.0, -2 * float(special.ndtri_exp(corner)))


def _plain_profile(epsilon: float, delta: float, at: float) -> float:
    """δ(at) of the least private mechanism that is (ε, δ)-DP: randomised response that fails with δ."""
    if at >= epsilon:
        return delta
    return delta + (1 - delta) * -math.expm1(at - epsilon) / (1 + math.exp(-epsilon))


def _largest_mu(profile: Profile, last: float) -> float:
    """The largest μ over ε in [0, last], where μ is that of the Gaussian mechanism with the same δ at ε."""

    def mu(epsilon: float) -> float:
        delta = profile(epsilon)
        if delta >= 1:
            return math.inf
        if delta <= 0:
            return 0.0
        if epsilon < 1e-9:
            return 2 * float(special.ndtri((1 + delta) / 2))
        return 1 / gaussian_noise_multiplier(epsilon, delta)

    return -_least(lambda epsilon: -mu(epsilon), last)


def _true_positives(profile: Profile, last: float) -> float:
    """1 − f(α) at α = 1 %: the least of the bounds that the profile gives at each ε."""

    def outright(epsilon: float) -> float:
        return profile(epsilon) + math.exp(epsilon) * FALSE_POSITIVES

    def missed(epsilon: float) -> float:
        return 1 - math.exp(-epsilon) * (1 - profile(epsilon) - FALSE_POSITIVES)

    # Beyond log(1 / α) the first bound is more than 1.
    most = -math.log(FALSE_POSITIVES)
    return min(_least(outright, most, min(last, most)), _least(missed, last), 1.0)


def _least(function: Callable[[float], float], last: float, *also: float) -> float:
    """The least value of a function on [0, last], searched on a grid with the points `also`, then locally."""
    points = np.union1d(np.linspace(0.0, last, _GRID), also)
    values = [function(float(point)) for point in points]
    best = int(np.argmin(values))
    ends = points[max(best - 1, 0)], points[min(best + 1, len(points) - 1)]
    if last == 0 or math.isinf(values[best]):
        return values[best]
    near: Any = optimize.minimize_scalar(
        lambda epsilon: function(float(epsilon)), bounds=ends, method="bounded"
    )
    return min(values[best], float(near.fun))
