"""Privacy guarantees, and the ledger that composes them."""

import dataclasses
import math

import dp_accounting
from dp_accounting import DpEvent, NeighboringRelation

from dpx._validate import check_delta, check_not_negative, check_number, check_relation
from dpx.privacy.events import accountable, check_event, event_epsilon, gaussian_mu
from dpx.privacy.gaussian import gaussian_noise_multiplier
from dpx.privacy.risk import Risk, of_guarantee

ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE_ONE = NeighboringRelation.REPLACE_ONE


@dataclasses.dataclass(frozen=True)
class PrivacyGuarantee:
    """A guarantee of (ε, δ)-differential privacy, with all that one must know to rely on it.

    Attributes:
      epsilon: ε ≥ 0; infinity if nothing is guaranteed.
      delta: δ in [0, 1).
      neighboring: The relation that says which data sets are neighbours; its lower-case name is taken too.
      unit: The record by which neighbours differ ("user", "name", "row of (K, V)").
      mechanism: What was released, and how it was accounted, in words.
      assumptions: What must be true for the guarantee to hold, one sentence each.
      event: The mechanism as a DpEvent, so that a `Ledger` can compose it tightly. The noise multiplier of a
        `GaussianDpEvent` is std / (l2 sensitivity under the neighbouring relation of *this* guarantee).
    """

    epsilon: float
    delta: float
    neighboring: NeighboringRelation
    unit: str
    mechanism: str
    assumptions: tuple[str, ...] = ()
    event: DpEvent | None = None

    def __post_init__(self):
        # JSON does not accept every scalar of NumPy or JAX as a float.
        object.__setattr__(self, "epsilon", check_not_negative(self.epsilon, "epsilon"))
        object.__setattr__(self, "delta", check_number(self.delta, "delta"))
        if not 0 <= self.delta < 1:
            raise ValueError(f"delta={self.delta} must be in [0, 1)")
        object.__setattr__(self, "neighboring", check_relation(self.neighboring, "neighboring"))
        if isinstance(self.assumptions, str):
            raise ValueError("assumptions must be a tuple of sentences, not one string")
        object.__setattr__(self, "assumptions", tuple(self.assumptions))
        if self.event is not None:
            object.__setattr__(self, "event", check_event(self.event, "event"))

    def assuming(self, *sentences: str) -> "PrivacyGuarantee":
        """The same guarantee with further assumptions; none is stated twice."""
        return dataclasses.replace(
            self, assumptions=tuple(dict.fromkeys((*self.assumptions, *sentences)))
        )

    def risk(self, neighboring: NeighboringRelation | str | None = None) -> Risk:
        """A bound on any membership attack: μ, and the true-positive rate at 1 % false positives.

        It follows from the event if there is one that can be accounted, and from (ε, δ) alone otherwise.

        Args:
          neighboring: The guarantee's own relation if None. A guarantee for adding or removing a record also
            takes "replace_one".

        Raises:
          ValueError: for any other relation.
        """
        asked = self.neighboring
        if neighboring is not None:
            asked = check_relation(neighboring, "neighboring")
        return of_guarantee(self.epsilon, self.delta, self.neighboring, self.event, asked)

    def risks(self) -> dict[str, Risk]:
        """The risk under each relation that the guarantee covers, by the lower-case name of the relation."""
        other = [REPLACE_ONE] if self.neighboring == ADD_OR_REMOVE_ONE else []
        return {each.name.lower(): self.risk(each) for each in (self.neighboring, *other)}

    def to_json(self) -> dict:
        """The guarantee as a dict for JSON, with the neighbouring relation by its lower-case name."""
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


def composes(spent: PrivacyGuarantee) -> bool:
    """Whether a ledger composes a guarantee by its event, and does not add up its ε and δ."""
    event = spent.event
    return event is not None and (
        gaussian_mu(event) is not None
        or (spent.neighboring == ADD_OR_REMOVE_ONE and accountable(event))
    )


class Ledger:
    """The releases from one private data set, composed as tightly as their events allow.

    Gaussian events compose exactly (their μ² add up). Together with Poisson-sampled steps or epochs of random
    allocation they compose by privacy loss distributions, under adding or removing a record. A guarantee
    without an event, or with one that no accountant supports, is composed by adding its ε and δ.
    `guarantee(delta).mechanism` says which of these was used.
    """

    def __init__(self):
        self._entries: list[tuple[str, PrivacyGuarantee | DpEvent]] = []

    def spend(self, spent: PrivacyGuarantee | DpEvent, label: str) -> "Ledger":
        """Adds a release and returns the ledger.

        Args:
          spent: A guarantee, or a bare event, which takes the unit and the relation of the guarantees
            beside it (add or remove one record where there are none).
          label: A name of the release, for the mechanism's description.

        Raises:
          ValueError: if the unit or the neighbouring relation differs from that of earlier releases.
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
        else:
            spent = check_event(spent, label)
        self._entries.append((label, spent))
        return self

    @property
    def releases(self) -> tuple[tuple[str, PrivacyGuarantee | DpEvent], ...]:
        """The releases with their labels, in order; labels may repeat."""
        return tuple(self._entries)

    def guarantee(self, delta: float) -> PrivacyGuarantee:
        """The composed guarantee at δ, which may be 0 where no event is composed.

        Raises:
          ValueError: if guarantees whose δ add up use all of δ, or leave less than privacy loss distributions
            can tell from rounding (1e-15 for each step that they compose, at least 1e-12).
        """
        stated = [spent for _, spent in self._entries if isinstance(spent, PrivacyGuarantee)]
        neighboring = stated[0].neighboring if stated else ADD_OR_REMOVE_ONE
        unit = stated[0].unit if stated else "record"
        events, plain, assumptions = [], [], []
        for _, spent in self._entries:
            if isinstance(spent, DpEvent):
                events.append(spent)
                continue
            assumptions += spent.assumptions
            if composes(spent):
                events.append(spent.event)
            else:
                plain.append(spent)
        delta = check_delta(delta) if events or delta != 0 else 0.0
        plain_delta = math.fsum(spent.delta for spent in plain)
        if plain_delta > delta or (events and plain_delta >= delta):
            raise ValueError(
                f"delta={delta} is used up by the plain guarantees, which cost {plain_delta}: raise it"
            )
        epsilon, how = math.fsum(spent.epsilon for spent in plain), []
        event = None
        if events:
            event = events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)
            composed, method = event_epsilon(event, delta - plain_delta, neighboring)
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


def gaussian_guarantee(
    epsilon: float,
    delta: float,
    *,
    neighboring: NeighboringRelation | str,
    unit: str,
    mechanism: str,
    assumptions: tuple[str, ...] = (),
) -> PrivacyGuarantee:
    """The guarantee of one Gaussian release that costs (ε, δ); its event holds the noise multiplier.

    It follows from public numbers alone, so that it is known before anything is released.

    Raises:
      ValueError: for ε or δ out of range, or another relation.
    """
    return PrivacyGuarantee(
        epsilon=epsilon,
        delta=delta,
        neighboring=check_relation(neighboring, "neighboring"),
        unit=unit,
        mechanism=mechanism,
        assumptions=assumptions,
        event=dp_accounting.GaussianDpEvent(gaussian_noise_multiplier(epsilon, delta)),
    )
