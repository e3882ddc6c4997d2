"""Privacy as a value: guarantees, the ledger that composes them, and exact accounting.

Gaussian mechanism. Releasing f(x) + N(0, (mΔ)² I), Δ the l2 sensitivity of f and m the *noise
multiplier*, k times is exactly μ-GDP with μ = √k/m, and its privacy profile is

    δ(ε) = Φ(a) − e^ε Φ(a − μ),   a = μ/2 − ε/μ        (Balle & Wang, arXiv 1805.06530, Theorem 8)

Since e^ε φ(a − μ) = φ(a), the second term is φ(a) M(μ − a) with the Mills ratio M = (1 − Φ)/φ. Nothing
in that form overflows, whatever ε, and its cancellation is benign, so it is what this module uses.

DP-SGD. Poisson subsampling with probability q and Gaussian noise, composed over the steps, is accounted by
dp-accounting, for neighbours that differ by adding or removing one record.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import dp_accounting
import numpy as np
from dp_accounting import DpEvent, NeighboringRelation
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import optimize, special

from dpx import _cache

ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE_ONE = NeighboringRelation.REPLACE_ONE

_MAX_EPSILON = 1e8
_LARGEST_INTERVAL = 300.0  # e^interval must stay a float


def check_epsilon(epsilon: float, name: str = "epsilon") -> float:
    """Returns ε as a float; raises ValueError unless 0 < ε ≤ 1e8."""
    if not 0 < epsilon <= _MAX_EPSILON:
        raise ValueError(f"{name}={epsilon} must be in (0, 1e8]: use a positive privacy budget")
    return float(epsilon)


def check_delta(delta: float, name: str = "delta") -> float:
    """Returns δ as a float; raises ValueError unless 0 < δ < 1."""
    if not 0 < delta < 1:
        raise ValueError(f"{name}={delta} must be in (0, 1): use less than 1 / number of records")
    return float(delta)


def _check_positive_integer(value: int, name: str) -> int:
    if int(value) != value or value < 1:
        raise ValueError(f"{name}={value} must be a positive whole number")
    return int(value)


# ---------------------------------------------------------------------------------------------------------
# Guarantees and their composition


@dataclasses.dataclass(frozen=True)
class PrivacyGuarantee:
    """(ε, δ)-differential privacy, with all that one must know to rely on it.

    Attributes:
      epsilon: ε ≥ 0; infinity where nothing is guaranteed.
      delta: δ in [0, 1).
      neighboring: Which pairs of data sets are neighbours.
      unit: The record by which neighbours differ ("user", "name", "row of (K, V)").
      mechanism: What was released, and how it was accounted, in words.
      assumptions: What must hold for the guarantee to hold, a sentence each.
      event: The mechanism as a DpEvent, so that a `Ledger` can compose it tightly. A `GaussianDpEvent`
        holds std / (l2 sensitivity under *this* guarantee's neighbouring relation).
    """

    epsilon: float
    delta: float
    neighboring: NeighboringRelation
    unit: str
    mechanism: str
    assumptions: tuple[str, ...] = ()
    event: DpEvent | None = None

    def __post_init__(self):
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon={self.epsilon} must be at least 0")
        if not 0 <= self.delta < 1:
            raise ValueError(f"delta={self.delta} must be in [0, 1)")
        if not isinstance(self.neighboring, NeighboringRelation):
            raise ValueError(
                f"neighboring={self.neighboring!r} must be a dp_accounting.NeighboringRelation, "
                "such as dpx.privacy.ADD_OR_REMOVE_ONE"
            )
        if isinstance(self.assumptions, str):
            raise ValueError("assumptions must be a tuple of sentences, not one string")
        object.__setattr__(self, "assumptions", tuple(self.assumptions))

    def assuming(self, *sentences: str) -> "PrivacyGuarantee":
        """The same guarantee with further assumptions (each stated once)."""
        return dataclasses.replace(
            self, assumptions=tuple(dict.fromkeys((*self.assumptions, *sentences)))
        )

    def to_json(self) -> dict:
        """A JSON-ready dict; the neighbouring relation by its lower-case name."""
        return {
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
            "delta": self.delta,
            "neighboring": self.neighboring.name.lower(),
            "unit": self.unit,
            "mechanism": self.mechanism,
            "assumptions": list(self.assumptions),
            "event": None if self.event is None else str(self.event),
        }

    def __str__(self) -> str:
        relation = self.neighboring.name.lower().replace("_", " ")
        return (
            f"({self.epsilon:.4g}, {self.delta:.2g})-DP, {relation} {self.unit}: {self.mechanism}"
        )


class Ledger:
    """What has been spent on one private data set, composed as tightly as the events allow.

    Gaussian events compose exactly (their μ² add up). Gaussians beside Poisson-sampled steps under add or
    remove compose through privacy loss distributions. A guarantee without an event counts as plain
    (ε, δ) and its two numbers add. `guarantee(delta).mechanism` says which of these was used.
    """

    def __init__(self):
        self._entries: list[tuple[str, PrivacyGuarantee | DpEvent]] = []

    def spend(self, spent: PrivacyGuarantee | DpEvent, label: str) -> "Ledger":
        """Adds a release and returns the ledger.

        Args:
          spent: A guarantee, or a bare event, which takes the unit and the relation of the guarantees
            beside it (add or remove one record where there are none).
          label: What was bought, for the mechanism's description.

        Raises:
          ValueError: if the unit or the neighbouring relation differs from what was spent before.
        """
        if isinstance(spent, PrivacyGuarantee):
            for _, before in self._entries:
                if not isinstance(before, PrivacyGuarantee):
                    continue
                for field in ("unit", "neighboring"):
                    old, new = getattr(before, field), getattr(spent, field)
                    if old != new:
                        raise ValueError(
                            f"{label}: {field}={new!r} differs from the ledger's {old!r}; guarantees compose "
                            f"only for one {field}, so keep a ledger for each"
                        )
        elif not isinstance(spent, DpEvent):
            raise ValueError(f"{label}: spend a PrivacyGuarantee or a DpEvent, not {spent!r}")
        self._entries.append((label, spent))
        return self

    @property
    def releases(self) -> dict[str, PrivacyGuarantee | DpEvent]:
        """What was spent, by label, in order."""
        return dict(self._entries)

    def guarantee(self, delta: float) -> PrivacyGuarantee:
        """The composed guarantee at δ.

        Raises:
          ValueError: if plain (ε, δ) guarantees alone use up δ.
        """
        check_delta(delta)
        stated = [spent for _, spent in self._entries if isinstance(spent, PrivacyGuarantee)]
        neighboring = stated[0].neighboring if stated else ADD_OR_REMOVE_ONE
        unit = stated[0].unit if stated else "record"
        events, plain, assumptions = [], [], []
        for _, spent in self._entries:
            if isinstance(spent, DpEvent):
                events.append(spent)
                continue
            assumptions += spent.assumptions
            gaussian = spent.event is not None and _gaussian_mu(spent.event) is not None
            if spent.event is not None and (gaussian or neighboring == ADD_OR_REMOVE_ONE):
                events.append(spent.event)
            else:
                plain.append(spent)
        plain_delta = math.fsum(spent.delta for spent in plain)
        if plain_delta > delta or (events and plain_delta >= delta):
            raise ValueError(
                f"delta={delta} is used up by the plain guarantees, which cost {plain_delta}: raise it"
            )
        epsilon, how = math.fsum(spent.epsilon for spent in plain), []
        event = None
        if events:
            event = events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)
            composed, method = _event_epsilon(event, delta - plain_delta, neighboring)
            epsilon += composed
            how.append(method)
        if plain:
            how.append(f"{len(plain)} plain (ε, δ) added up")
        labels = ", ".join(label for label, _ in self._entries) or "nothing"
        return PrivacyGuarantee(
            epsilon=epsilon,
            delta=delta,
            neighboring=neighboring,
            unit=unit,
            mechanism=f"{labels} (composed: {'; '.join(how) or 'nothing spent'})",
            assumptions=tuple(dict.fromkeys(assumptions)),
            event=None if plain else event,
        )


def _gaussian_mu(event: DpEvent) -> float | None:
    """μ of an event that is made of full-batch Gaussian mechanisms only, otherwise None."""
    if isinstance(event, dp_accounting.NoOpDpEvent):
        return 0.0
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return 1 / event.noise_multiplier if event.noise_multiplier > 0 else math.inf
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        mu = _gaussian_mu(event.event)
        return None if mu is None else mu * math.sqrt(event.count)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        mus = [_gaussian_mu(part) for part in event.events]
        return None if any(mu is None for mu in mus) else math.hypot(*mus)  # type: ignore[arg-type]
    return None


def _event_epsilon(
    event: DpEvent, delta: float, neighboring: NeighboringRelation
) -> tuple[float, str]:
    mu = _gaussian_mu(event)
    if mu is not None:
        epsilon = gaussian_epsilon(1 / mu, delta) if mu > 0 else 0.0
        return epsilon, "Gaussian mechanisms exactly, μ² added up"
    if neighboring != ADD_OR_REMOVE_ONE:
        raise ValueError(
            f"{event} can be composed under add_or_remove_one only, not {neighboring.name.lower()}: "
            "spend its PrivacyGuarantee without the event"
        )
    return _pld_epsilon(event, delta), "privacy loss distributions"


# ---------------------------------------------------------------------------------------------------------
# The Gaussian mechanism, exactly


def _mills(x: float) -> float:
    return math.sqrt(math.pi / 2) * float(special.erfcx(x / math.sqrt(2)))


def _log_delta(a: float, a_minus_mu: float) -> float:
    """log δ in terms of a = μ/2 − ε/μ and a − μ."""
    if a > 0:
        density = math.exp(-(a**2) / 2) / math.sqrt(2 * math.pi)
        delta = float(special.ndtr(a)) - density * _mills(-a_minus_mu)
        return math.log(delta) if delta > 0 else -math.inf
    gap = _mills(-a) - _mills(-a_minus_mu)
    return -(a**2) / 2 - math.log(2 * math.pi) / 2 + math.log(gap) if gap > 0 else -math.inf


def _solve(function, low: float, high: float) -> float:
    return float(optimize.brentq(function, low, high, xtol=1e-14, rtol=4 * np.finfo(float).eps))  # type: ignore[arg-type]


def gaussian_noise_multiplier(epsilon: float, delta: float, *, compositions: int = 1) -> float:
    """Smallest noise std, per unit of l2 sensitivity, for (ε, δ)-DP over all compositions: exact.

    Solved in a = μ/2 − ε/μ, in which μ = a + √(a² + 2ε): relative accuracy in δ is 1e-9 or better for ε in
    [1e-3, 1e8] and δ in [1e-12, 1/2].

    Args:
      epsilon: ε in (0, 1e8].
      delta: δ in (0, 1).
      compositions: How often noise of that size is used, k (adaptively, on the same data).

    Returns:
      m such that k releases with std m·Δ are together (ε, δ)-DP (Balle & Wang, arXiv 1805.06530).

    Raises:
      ValueError: for ε, δ or k out of range.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    compositions = _check_positive_integer(compositions, "compositions")
    target = math.log(delta)

    def excess(a):
        return max(_log_delta(a, -math.sqrt(a * a + 2 * epsilon)), -1e4) - target

    a = _solve(excess, -40.0, 40.0)
    root = math.sqrt(a * a + 2 * epsilon)
    mu = a + root if a >= 0 else 2 * epsilon / (root - a)
    return math.sqrt(compositions) / mu


def gaussian_epsilon(noise_multiplier: float, delta: float, *, compositions: int = 1) -> float:
    """Smallest ε for which k Gaussian releases of that noise multiplier are (ε, δ)-DP: exact.

    The inverse of `gaussian_noise_multiplier`; infinity for a noise multiplier of zero, and 0 where δ alone
    covers the total variation.

    Raises:
      ValueError: for a negative noise multiplier, or δ or k out of range.
    """
    if not noise_multiplier >= 0:
        raise ValueError(f"noise_multiplier={noise_multiplier} must be at least 0")
    check_delta(delta)
    compositions = _check_positive_integer(compositions, "compositions")
    if noise_multiplier == 0:
        return math.inf
    mu = math.sqrt(compositions) / noise_multiplier
    target = math.log(delta)
    if mu == 0 or _log_delta(mu / 2, -mu / 2) <= target:
        return 0.0
    a = _solve(lambda a: max(_log_delta(a, a - mu), -1e4) - target, -40.0, mu / 2)
    return max(0.0, mu * (mu / 2 - a))


# ---------------------------------------------------------------------------------------------------------
# DP-SGD


def dpsgd_event(noise_multiplier: float, *, sampling_probability: float, steps: int) -> DpEvent:
    """`steps` Gaussian mechanisms, each on a Poisson sample with that probability."""
    if not noise_multiplier >= 0:
        raise ValueError(f"noise_multiplier={noise_multiplier} must be at least 0")
    if not 0 < sampling_probability <= 1:
        raise ValueError(
            f"sampling_probability={sampling_probability} must be in (0, 1]: "
            "expected batch size / number of records"
        )
    steps = _check_positive_integer(steps, "steps")
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    if sampling_probability < 1:
        event = dp_accounting.PoissonSampledDpEvent(sampling_probability, event)
    return dp_accounting.SelfComposedDpEvent(event, steps)


def dpsgd_epsilon(
    noise_multiplier: float,
    delta: float,
    *,
    sampling_probability: float,
    steps: int,
    accountant: str = "pld",
) -> float:
    """ε of DP-SGD under adding or removing one record.

    Args:
      noise_multiplier: Noise std on the *sum* of clipped gradients, per unit of clipping norm.
      delta: δ in (0, 1).
      sampling_probability: Each record joins a batch with this probability, independently (Poisson).
      steps: Number of noisy steps.
      accountant: "pld" (privacy loss distributions: an upper bound, tight to about 1e-4 relative) or "rdp".

    Raises:
      ValueError: for an argument out of range.
    """
    event = dpsgd_event(noise_multiplier, sampling_probability=sampling_probability, steps=steps)
    return _accounted(event, delta, accountant)


def _accounted(event: DpEvent, delta: float, accountant: str) -> float:
    """ε of an event under add or remove one."""
    check_delta(delta)
    if accountant == "pld":
        return _event_epsilon(event, delta, ADD_OR_REMOVE_ONE)[0]
    if accountant == "rdp":
        return float(RdpAccountant().compose(event).get_epsilon(delta))
    raise ValueError(f"accountant={accountant!r} is not known: use 'pld' or 'rdp'")


def dpsgd_guarantee(
    noise_multiplier: float,
    delta: float,
    *,
    sampling_probability: float,
    steps: int,
    unit: str,
    accountant: str = "pld",
    assumptions: Sequence[str] = (),
) -> PrivacyGuarantee:
    """The guarantee of a DP-SGD run: `dpsgd_epsilon` with its event, so that a ledger composes it tightly."""
    settings = {"sampling_probability": sampling_probability, "steps": steps}
    return PrivacyGuarantee(
        epsilon=dpsgd_epsilon(noise_multiplier, delta, accountant=accountant, **settings),
        delta=delta,
        neighboring=ADD_OR_REMOVE_ONE,
        unit=unit,
        mechanism=f"DP-SGD, {steps} steps, noise multiplier {noise_multiplier:.6g}, Poisson sampling with "
        f"probability {sampling_probability:.6g}, {accountant.upper()} accounting",
        assumptions=tuple(assumptions),
        event=dpsgd_event(noise_multiplier, **settings),
    )


def calibrate_dpsgd(
    epsilon: float,
    delta: float,
    *,
    sampling_probability: float,
    steps: int,
    accountant: str = "pld",
    beside: DpEvent | None = None,
) -> float:
    """Smallest noise multiplier for which `dpsgd_epsilon` is at most ε (and at least 0.999 ε).

    Calibrations are kept in the user's cache directory, so that a repeated call takes milliseconds.

    Args: as `dpsgd_epsilon`, with the target ε in (0, 1e8], and
      beside: Another release that is paid from the same budget: the two together cost at most ε.

    Raises:
      ValueError: for an argument out of range, or where `beside` alone costs ε or more.
    """
    check_epsilon(epsilon)

    def event(multiplier: float) -> DpEvent:
        run = dpsgd_event(multiplier, sampling_probability=sampling_probability, steps=steps)
        return run if beside is None else dp_accounting.ComposedDpEvent([beside, run])

    event(1.0)  # checks the arguments
    if beside is not None and (already := _accounted(beside, delta, accountant)) >= 0.999 * epsilon:
        raise ValueError(
            f"epsilon={epsilon}: the other release alone costs {already:.4g}; spend less on it"
        )
    key = {
        "calibrate_dpsgd": 1,
        "epsilon": float(epsilon),
        "delta": float(delta),
        "sampling_probability": float(sampling_probability),
        "steps": int(steps),
        "accountant": accountant,
        "beside": str(beside),
    }
    # Sampling only adds privacy, so this is enough noise for the run by itself, if the accountant is exact.
    enough = gaussian_noise_multiplier(epsilon, delta, compositions=steps)
    if sampling_probability == 1 and beside is None and accountant == "pld":
        return enough
    return _cache.remember(
        key, lambda: _calibrate(lambda m: _accounted(event(m), delta, accountant), epsilon, enough)
    )


def _calibrate(spent: Callable[[float], float], epsilon: float, guess: float) -> float:
    """The noise multiplier at which a decreasing ε(m) is just below its target."""

    @functools.cache
    def excess(log_multiplier: float) -> float:
        return math.log(max(spent(math.exp(log_multiplier)), 1e-300) / epsilon) + 4e-4

    high = math.log(guess)
    while excess(high) > 0:
        high += math.log(2)
    low = high - math.log(2)
    while excess(low) <= 0:
        low, high = low - math.log(2), low
    root = float(optimize.brentq(excess, low, high, xtol=1e-6, maxiter=60))  # type: ignore[arg-type]
    while excess(root) > 4e-4:
        root += 1e-5
    return math.exp(root)


def _pld_epsilon(event: DpEvent, delta: float) -> float:
    """ε by privacy loss distributions, discretised as finely as this event needs.

    The estimate is pessimistic at any interval h and its relative error is about (h/s)²/12, s the standard
    deviation of one step's loss, for which ε/(4√steps) stands in: h = ε/(200√steps) wastes under 1e-4.
    """
    steps, noise = _count_steps(event)
    interval = min(1e-2 * max(1.0, noise**-2), _LARGEST_INTERVAL)
    while True:
        accountant = PLDAccountant(value_discretization_interval=interval)
        epsilon = float(accountant.compose(event).get_epsilon(delta))
        finest = min(max(epsilon, 1e-6) / (200 * math.sqrt(steps)), _LARGEST_INTERVAL)
        if interval <= 1.01 * finest or not math.isfinite(epsilon):
            return epsilon
        interval = finest


def _count_steps(event: DpEvent) -> tuple[int, float]:
    """How many mechanisms an event composes, and its smallest noise multiplier."""
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        count, noise = _count_steps(event.event)
        return event.count * count, noise
    if isinstance(event, dp_accounting.ComposedDpEvent):
        parts = [_count_steps(part) for part in event.events]
        return sum(count for count, _ in parts), min(noise for _, noise in parts)
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        return _count_steps(event.event)
    return 1, getattr(event, "noise_multiplier", 1.0)
