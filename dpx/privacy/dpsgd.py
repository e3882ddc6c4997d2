"""The accounting of DP-SGD: Gaussian noise on random batches, composed by privacy loss distributions.

Neighbours differ by adding or removing one record. Batches are drawn either by Poisson sampling, where each
record is in each batch with the sampling probability q, or by random allocation, where each record is in one
batch of each epoch of 1 / q steps (`dpx.privacy.allocation`).
"""

import math
from collections.abc import Sequence
from typing import Any

import dp_accounting
from dp_accounting import DpEvent
from dp_accounting.rdp import RdpAccountant
from scipy import stats

from dpx._validate import (
    check_choice,
    check_delta,
    check_integer,
    check_not_negative,
    check_sampling_probability,
)
from dpx.privacy.allocation import allocation_event
from dpx.privacy.events import coarse_interval, event_epsilon, gaussian_mu, pld_bound
from dpx.privacy.ledger import ADD_OR_REMOVE_ONE, PrivacyGuarantee

SAMPLINGS = ("poisson", "allocation")


def dpsgd_event(
    noise_multiplier: float,
    *,
    sampling_probability: float,
    steps: int,
    num_examples: int | None = None,
    max_batch_size: int | None = None,
    sampling: str = "poisson",
) -> DpEvent:
    """The event of `steps` Gaussian mechanisms, each on a batch that a record is in with that probability.

    With `max_batch_size`, a sample that is larger is truncated: a uniformly random part of that size is kept.
    A record that joins such a sample may replace another one, and so change the sum by twice the clipping
    norm (Ganesh et al., arXiv:2508.15089). How often this happens depends on `num_examples`, to which a
    neighbour may add one.
    """
    noise_multiplier = check_not_negative(noise_multiplier, "noise_multiplier")
    sampling_probability = check_sampling_probability(sampling_probability)
    steps = check_integer(steps, "steps")
    check_choice(sampling, "sampling", SAMPLINGS)
    if (num_examples is None) != (max_batch_size is None):
        raise ValueError(
            f"max_batch_size={max_batch_size} must come with num_examples, which is {num_examples}: "
            "give both, or neither"
        )
    if sampling == "allocation":
        if max_batch_size is not None:
            raise ValueError(
                f"max_batch_size={max_batch_size} must be None with sampling='allocation': no bound is known "
                "for batches of an allocation that are cut off"
            )
        return allocation_event(
            noise_multiplier, sampling_probability=sampling_probability, steps=steps
        )
    if max_batch_size is not None and num_examples is not None:
        event = dp_accounting.TruncatedSubsampledGaussianDpEvent(
            dataset_size=check_integer(num_examples, "num_examples") + 1,
            sampling_probability=sampling_probability,
            truncated_batch_size=check_integer(max_batch_size, "max_batch_size"),
            noise_multiplier=noise_multiplier,
        )
        return dp_accounting.SelfComposedDpEvent(event, steps)
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    if sampling_probability < 1:
        event = dp_accounting.PoissonSampledDpEvent(sampling_probability, event)
    return dp_accounting.SelfComposedDpEvent(event, steps)


def truncation_probability(
    num_examples: int, *, sampling_probability: float, max_batch_size: int
) -> float:
    """The probability that a Poisson sample of N records has more than `max_batch_size` of them.

    Raises:
      ValueError: for an argument out of range.
    """
    check_integer(num_examples, "num_examples")
    check_integer(max_batch_size, "max_batch_size")
    check_sampling_probability(sampling_probability)
    return float(stats.binom.sf(max_batch_size, num_examples, sampling_probability))


def dpsgd_epsilon(
    noise_multiplier: float,
    delta: float,
    *,
    sampling_probability: float,
    steps: int,
    num_examples: int | None = None,
    max_batch_size: int | None = None,
    accountant: str = "pld",
    sampling: str = "poisson",
) -> float:
    """ε of DP-SGD under adding or removing one record.

    Args:
      noise_multiplier: The standard deviation of the noise on the *sum* of clipped gradients, over the
        clipping norm.
      delta: δ in (0, 1). With "pld" and sampling it must be at least 1e-12, and at least 1e-15 for each step.
      sampling_probability: The probability with which a record is in a batch, which is the expected batch
        size over the number of records.
      steps: The number of noisy steps, with "pld" and sampling at most 10⁷.
      num_examples, max_batch_size: For samples that are truncated; see `dpsgd_event`.
      accountant: "pld" or "rdp". Privacy loss distributions give an upper bound; because their composition
        rounds, a tenth of the least δ is set aside. It is tight to about 1e-4 relative if δ is a hundred
        times the least, unless ε < 1e-3 at δ > 1e-3. "rdp" supports neither truncated samples nor random
        allocation.
      sampling: "poisson" or "allocation"; see `dpsgd_event`. Shuffling the records and cutting them into
        batches of one size is neither of these, and has no guarantee here.

    Raises:
      ValueError: for an argument out of range; with "pld" also if there is so little noise that ε would
        exceed 1e8, or if the distributions do not fit into memory.
    """
    event = dpsgd_event(
        noise_multiplier,
        sampling_probability=sampling_probability,
        steps=steps,
        num_examples=num_examples,
        max_batch_size=max_batch_size,
        sampling=sampling,
    )
    delta = check_delta(delta)
    noise_multiplier, sampling_probability = float(noise_multiplier), float(sampling_probability)
    check_accountant(accountant, max_batch_size, sampling)
    if noise_multiplier == 0:
        return math.inf
    if accountant == "pld" and delta > 1e-3:
        # If δ alone almost suffices, ε tends to 0, and an accuracy relative to ε would take minutes.
        interval = coarse_interval(sampling_probability / 10, noise_multiplier)
        bound = accounted(event, delta, accountant, interval)
        if bound < 1e-3:
            return bound
    return accounted(event, delta, accountant)


def check_accountant(accountant: str, max_batch_size: int | None, sampling: str) -> None:
    if accountant == "rdp" and sampling == "allocation":
        raise ValueError(
            "accountant='rdp' must be 'pld' with sampling='allocation', whose Rényi divergences are not "
            "computed here"
        )
    if accountant == "rdp" and max_batch_size is not None:
        raise ValueError(
            f"accountant='rdp' must be 'pld' with max_batch_size={max_batch_size}: no Rényi bound is known "
            "for samples that are cut off"
        )


def accounted(
    event: DpEvent, delta: float, accountant: str, interval: float | None = None
) -> float:
    """ε of an event under adding or removing one record, on a grid of losses of that interval, if given."""
    delta = check_delta(delta)
    if accountant == "rdp":
        return float(RdpAccountant().compose(event).get_epsilon(delta))
    if accountant != "pld":
        raise ValueError(f"accountant={accountant!r} is not known: use 'pld' or 'rdp'")
    if gaussian_mu(event) is None and interval is not None:
        return pld_bound(event, delta, interval)
    return event_epsilon(event, delta, ADD_OR_REMOVE_ONE)[0]


def dpsgd_guarantee(
    noise_multiplier: float,
    delta: float,
    *,
    sampling_probability: float,
    steps: int,
    unit: str,
    num_examples: int | None = None,
    max_batch_size: int | None = None,
    accountant: str = "pld",
    sampling: str = "poisson",
    assumptions: Sequence[str] = (),
) -> PrivacyGuarantee:
    """The guarantee of a DP-SGD run. It holds the event, so that a ledger composes it tightly."""
    if isinstance(assumptions, str):
        raise ValueError(
            f"assumptions={assumptions!r} must be a tuple of sentences, not one string"
        )
    settings: dict[str, Any] = {
        "sampling_probability": sampling_probability,
        "steps": steps,
        "num_examples": num_examples,
        "max_batch_size": max_batch_size,
        "sampling": sampling,
    }
    event = dpsgd_event(noise_multiplier, **settings)
    units = "records" if " " in unit else f"{unit}s"
    how = f"Poisson sampling with probability {sampling_probability:.6g}"
    if sampling == "allocation":
        length = f"{1 / sampling_probability:.6g} steps"
        mean = " in the mean" if "." in length else ""  # epochs then differ by one step
        how = f"random allocation to one batch in each epoch of {length}{mean}"
    cut = ""
    if max_batch_size is not None and num_examples is not None:
        chance = truncation_probability(
            num_examples, sampling_probability=sampling_probability, max_batch_size=max_batch_size
        )
        cut = f" cut off at {max_batch_size} {units} (with probability {chance:.2g} a step)"
    return PrivacyGuarantee(
        epsilon=dpsgd_epsilon(noise_multiplier, delta, accountant=accountant, **settings),
        delta=delta,
        neighboring=ADD_OR_REMOVE_ONE,
        unit=unit,
        mechanism=f"DP-SGD, {steps} steps, noise multiplier {noise_multiplier:.6g}, {how}{cut}, "
        f"{accountant.upper()} accounting",
        assumptions=(
            f"the number of {units} is public, and with it the sampling probability",
            f"which {units} are sampled stays as secret as the noise",
            *assumptions,
        ),
        event=event,
    )
