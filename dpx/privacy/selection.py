"""The price of a selection: the best of a random number of private trials (Papernot and Steinke, ICLR 2022).

A trial draws one of several candidates, runs it with fresh randomness, and scores it with noise. After a
number of trials that is itself random, the trial of the highest score is given away, and all else is kept.
This costs a small multiple of one trial, however many trials there were, and nothing holds for a fixed
number of trials, for a grid that is run once from end to end, or for scores without noise.
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
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

from dpx._validate import check_choice, check_number, check_positive
from dpx.privacy.events import check_event, gaussian_mu
from dpx.privacy.ledger import ADD_OR_REMOVE_ONE, PrivacyGuarantee

LAWS = ("geometric", "poisson")


@dataclasses.dataclass(frozen=True)
class Trials:
    """The law of the number of trials of a selection.

    Attributes:
      law: "geometric" (at least one trial) or "poisson" (there may be none, with probability e^(-mean), and
        then nothing is selected). Poisson varies less, so that few trials are rare where many are
        expected; which of them costs less depends on the candidates and the mean.
      mean: Of the number of trials, at least 1.
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
        """What dp-accounting calls the law: a negative binomial that is never 0, or its limit."""
        return 1.0 if self.law == "geometric" else math.inf

    def draw(self, generator: np.random.Generator) -> int:
        """A number of trials, which has to stay secret: the price holds while nobody sees it.

        Its probabilities are right to 2⁻²⁵⁵ of 1, where those of NumPy's laws end at 2⁻⁵³ or e^(−44).
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
    """What a selection costs, and what it is to be compared with; all by Rényi divergences, at one δ.

    Attributes:
      guarantee: Of the selection.
      trial: ε of one trial, the dearest candidate with its score.
      composed: ε of giving away the expected number of trials, rounded up.
    """

    guarantee: PrivacyGuarantee
    trial: float
    composed: float


def selected_guarantee(
    candidates: Sequence[PrivacyGuarantee], trials: Trials, *, score_noise_multiplier: float
) -> Price:
    """The guarantee of the best of a random number of trials, with its score.

    Every trial draws a candidate uniformly, or by any other public probabilities, with replacement, runs it
    with randomness of its own, and adds Gaussian noise to the score of what came out. A trial is therefore
    a mixture over candidates whose weights are public. Its Rényi divergence at each order is at most the
    largest over the candidates, with their scores: the function λ → exp((λ - 1) D_λ) is jointly convex. Only
    then is the bound for selections applied, and only after that the Rényi divergences become (ε, δ). The
    largest of the candidates' own ε would not do: which candidate is the dearest depends on the order.

    Args:
      candidates: What each candidate run costs, for all of it that is given away and that its score was
        computed from; with events, under one relation, for one unit and at one δ.
      trials: The law of their number.
      score_noise_multiplier: Standard deviation of the score's noise, in units of what one record can change
        of the score of a fixed output.

    Returns:
      The guarantee and what to compare it with. Its event is there where one candidate is the dearest at
      all orders.

    Raises:
      ValueError: for candidates without events, or that differ in more than those.
    """
    score_noise_multiplier = check_positive(score_noise_multiplier, "score_noise_multiplier")
    first = _alike(candidates)
    score = dp_accounting.GaussianDpEvent(score_noise_multiplier)
    scored = [dp_accounting.ComposedDpEvent([_event(c, first), score]) for c in candidates]
    orders = RdpAccountant()._orders  # pyright: ignore[reportPrivateUsage]
    # Candidates at one price, such as those that differ in the learning rate, are computed once.
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
    """Rényi divergences of a selection from those of one trial (arXiv:2110.03620).

    With ε(λ) those of one trial and m the mean number of trials, at every order λ > 1:

    geometric, Theorem 2 with η = 1 and γ = 1/m: for any λ' ≥ 1,
      ε(λ) + 2 (1 - 1/λ') ε(λ') + 2 log(m) / λ' + log(m) / (λ - 1)
    poisson, Theorem 6: where one trial is (log(λ / (λ - 1)), δ')-differentially private,
      ε(λ) + m δ' + log(m) / (λ - 1)

    Args:
      orders: (J,) increasing, above 1.
      rdp: (J,) of one trial, in both directions.
      trials: The law of their number.

    Returns:
      (J,)
    """
    least = np.log(trials.mean) / (orders - 1)
    if trials.law == "geometric":
        found = rdp + least + 2 * np.min((1 - 1 / orders) * rdp + math.log(trials.mean) / orders)
    else:
        listed = orders.tolist()
        deltas = [compute_delta(listed, rdp.tolist(), math.log1p(1 / (o - 1)))[0] for o in listed]
        found = rdp + least + trials.mean * np.array(deltas)
    # Rényi divergences grow with their order, so that those of higher orders bound those of lower ones.
    return np.minimum.accumulate(found[::-1])[::-1]


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
