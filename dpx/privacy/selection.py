"""The price of a selection: the best of a random number of private trials (Papernot and Steinke, ICLR 2022).

A trial draws one of several candidates, runs it with fresh randomness, and scores it with noise. After a
random number of trials, the trial with the highest score is released, and all else is kept secret. This costs
a small multiple of one trial, however many trials there were. The bound does not hold for a fixed number of
trials, for a grid that is run once from end to end, or for scores without noise.
"""

import dataclasses
import decimal
import math
from collections.abc import Sequence
from typing import NamedTuple

import dp_accounting
import numpy as np
from dp_accounting import DpEvent, dp_event
from dp_accounting.privacy_accountant import UnsupportedEventError
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from dp_accounting.rdp.rdp_privacy_accountant import (
    _compute_rdp_repeat_and_select,  # pyright: ignore[reportPrivateUsage]
)

from dpx._validate import check_choice, check_number, check_positive
from dpx.privacy.events import check_event, gaussian_mu
from dpx.privacy.ledger import ADD_OR_REMOVE_ONE, PrivacyGuarantee

LAWS = ("geometric", "poisson")


@dataclasses.dataclass(frozen=True)
class Trials:
    """The law of the number of trials of a selection.

    Attributes:
      law: "geometric" (at least one trial) or "poisson" (with probability e^(-mean) there is no trial, and
        nothing is selected). A Poisson number varies less, so that few trials are rare if many are expected.
        Which law costs less depends on the candidates and the mean.
      mean: The mean number of trials, at least 1.
    """

    law: str
    mean: float

    def __post_init__(self):
        check_choice(self.law, "law", LAWS)
        if not 1 <= check_number(self.mean, "mean") < math.inf:
            raise ValueError(
                f"mean={self.mean} must be finite and at least 1: give the number of trials to expect"
            )

    @property
    def shape(self) -> float:
        """The law's parameter in dp-accounting: a truncated negative binomial law, or its Poisson limit."""
        return 1.0 if self.law == "geometric" else math.inf

    def draw(self, generator: np.random.Generator) -> int:
        """Draws a number of trials, which has to stay secret for the price to hold.

        Its probabilities are exact to 2⁻²⁵⁵, while NumPy's laws have no probabilities below 2⁻⁵³ or e^(−44).
        """
        with decimal.localcontext(prec=100, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX):
            left = decimal.Decimal(int.from_bytes(generator.bytes(32), "big")) / 2**256
            mean = decimal.Decimal(float(self.mean))
            count = int(self.law == "geometric")
            mass = 1 / mean if self.law == "geometric" else (-mean).exp()
            while left >= mass:
                left -= mass
                count += 1
                mass *= 1 - 1 / mean if self.law == "geometric" else mean / count
            return count


class Price(NamedTuple):
    """The cost of a selection, and two costs to compare it with, all by Rényi divergences at one δ.

    Attributes:
      guarantee: The guarantee of the selection.
      trial: ε of one trial: the most expensive candidate, with its score.
      composed: ε of releasing as many trials as are expected, rounded up.
    """

    guarantee: PrivacyGuarantee
    trial: float
    composed: float


def selected_guarantee(
    candidates: Sequence[PrivacyGuarantee], trials: Trials, *, score_noise_multiplier: float
) -> Price:
    """The guarantee of the best of a random number of trials, released with its score.

    Every trial draws a candidate with replacement, by public probabilities, runs it with fresh randomness,
    and adds Gaussian noise to the score of the result. A trial is therefore a mixture of candidates with
    public weights. Its Rényi divergence at each order is at most the largest over the candidates with their
    scores, since exp((λ - 1) D_λ) is jointly convex. To that maximum the bound for selections is applied, and
    only then are Rényi divergences converted to (ε, δ). The largest ε of the candidates would not be enough:
    which candidate costs most depends on the order.

    Args:
      candidates: The guarantee of each candidate, which covers all that is released of it and all that its
        score is computed from. They have events, one relation, one unit and one δ.
      trials: The law of the number of trials.
      score_noise_multiplier: The standard deviation of the score's noise over the sensitivity of the score of
        a fixed output.

    Returns:
      The guarantee and what to compare it with. The guarantee has an event only if one candidate costs most
      at all orders.

    Raises:
      ValueError: for candidates without events, or with different relations, units or δ.
    """
    score_noise_multiplier = check_positive(score_noise_multiplier, "score_noise_multiplier")
    first = _alike(candidates)
    score = dp_accounting.GaussianDpEvent(score_noise_multiplier)
    scored = [dp_accounting.ComposedDpEvent([_event(c, first), score]) for c in candidates]
    orders = RdpAccountant()._orders  # pyright: ignore[reportPrivateUsage]
    # Candidates of one cost, such as those that differ in the learning rate only, are computed once.
    curves = {text: _rdp(event) for text, event in {str(e): e for e in scored}.items()}
    worst = np.max(list(curves.values()), axis=0)
    whole = selected_rdp(orders, worst, trials)
    dearest = [event for event in scored if (curves[str(event)] >= worst).all()]
    event = None
    if dearest:
        event = dp_event.RepeatAndSelectDpEvent(dearest[0], trials.mean, trials.shape)

    def epsilon(rdp: np.ndarray) -> float:
        return float(compute_epsilon(orders.tolist(), rdp.tolist(), first.delta)[0])

    plural = "s" * (len(candidates) > 1)
    guarantee = PrivacyGuarantee(
        epsilon=epsilon(whole),
        delta=first.delta,
        neighboring=first.neighboring,
        unit=first.unit,
        mechanism=f"best of a random number of trials, {trials.law} with mean {trials.mean:g}, over "
        f"{len(candidates)} candidate{plural}, and its score with noise multiplier "
        f"{score_noise_multiplier:.6g}, RDP accounting",
        assumptions=(
            *dict.fromkeys(words for spent in candidates for words in spent.assumptions),
            "the candidates and the law of the number of trials were fixed without a look at the data",
            "all but the selected trial stays secret: the other trials, how many there were, scores without "
            "noise, and how long it took",
        ),
        event=event,
    )
    return Price(guarantee, epsilon(worst), epsilon(math.ceil(trials.mean) * worst))


def selected_rdp(orders: np.ndarray, rdp: np.ndarray, trials: Trials) -> np.ndarray:
    """Rényi divergences (J,) of a selection, from those of one trial (arXiv:2110.03620, Theorems 2 and 6).

    Args:
      orders: (J,) orders, increasing, above 1.
      rdp: (J,) divergences of one trial, bounds for both directions.
      trials: The law of the number of trials.
    """
    one = orders.tolist(), rdp.tolist()
    whole = np.array(_compute_rdp_repeat_and_select(*one, trials.mean, trials.shape))
    # Rényi divergences increase with their order, so that those of higher orders bound those of lower ones.
    return np.minimum.accumulate(whole[::-1])[::-1]


def _alike(candidates: Sequence[PrivacyGuarantee]) -> PrivacyGuarantee:
    if not candidates:
        raise ValueError("candidates=[] must hold a guarantee at least: give those of the grid")
    first = candidates[0]
    for spent in candidates:
        for field in ("unit", "neighboring", "delta"):
            old, new = getattr(first, field), getattr(spent, field)
            if old != new:
                raise ValueError(
                    f"candidates: {field}={new!r} differs from {old!r} of another one: select among runs "
                    f"of one {field}"
                )
    return first


def _event(spent: PrivacyGuarantee, first: PrivacyGuarantee) -> DpEvent:
    event = spent.event
    if event is None:
        raise ValueError(
            f"candidates: event=None of {spent.mechanism!r} must be a DpEvent: (ε, δ) alone says too little "
            "about a selection, so select among Gaussian releases and DP-SGD"
        )
    check_event(event, "candidates")
    if first.neighboring != ADD_OR_REMOVE_ONE and gaussian_mu(event) is None:
        raise ValueError(
            f"candidates: neighboring={first.neighboring.name.lower()} must be add_or_remove_one for "
            f"{event}: state the guarantee under that relation"
        )
    return event


def _rdp(event: DpEvent) -> np.ndarray:
    accountant = RdpAccountant()
    try:
        accountant.compose(event)
    except UnsupportedEventError as error:
        raise ValueError(
            f"candidates: event={event} must have Rényi divergences that dp-accounting knows ({error}): "
            "select among Gaussian releases and DP-SGD with Poisson sampling"
        ) from None
    return accountant._rdp  # pyright: ignore[reportPrivateUsage]
