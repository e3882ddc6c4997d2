"""Calibration: the noise that a DP-SGD run needs for its privacy budget."""

import functools
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import dp_accounting
from dp_accounting import DpEvent
from scipy import optimize

from dpx import _storage
from dpx._validate import check_delta, check_epsilon
from dpx.privacy import _cache
from dpx.privacy.allocation import epoch
from dpx.privacy.dpsgd import accounted, check_accountant, dpsgd_event
from dpx.privacy.events import check_event, count_steps, gaussian_mu, pld_interval
from dpx.privacy.gaussian import gaussian_noise_multiplier

_COARSE = 8  # the first search of a calibration by allocation uses a grid so many times coarser
_PATIENCE = 10  # seconds after which a calibration warns that it takes longer


def calibrate_dpsgd(
    epsilon: float,
    delta: float,
    *,
    sampling_probability: float,
    steps: int,
    num_examples: int | None = None,
    max_batch_size: int | None = None,
    accountant: str = "pld",
    sampling: str = "poisson",
    beside: DpEvent | None = None,
) -> float:
    """The smallest noise multiplier for which `dpsgd_epsilon` is at most ε (and at least 0.999 ε).

    Results are kept in the user's cache directory. A result that is read there is checked by computing its ε
    once, where a calibration takes about twenty evaluations. Repeating a call in a process takes none.

    Args: as `dpsgd_epsilon`, with the target ε in (0, 1e8], and
      beside: Another release that is paid from the same budget: the two together cost at most ε.

    Raises:
      ValueError: for an argument out of range, or if `beside` alone costs ε or more.
    """
    epsilon, delta = check_epsilon(epsilon), check_delta(delta)
    settings: dict[str, Any] = {
        "sampling_probability": sampling_probability,
        "steps": steps,
        "num_examples": num_examples,
        "max_batch_size": max_batch_size,
        "sampling": sampling,
    }
    if beside is not None:
        beside = check_event(beside, "beside")

    def event(multiplier: float) -> DpEvent:
        run = dpsgd_event(multiplier, **settings)
        return run if beside is None else dp_accounting.ComposedDpEvent([beside, run])

    described = event(1.0)  # checks the arguments
    sampling_probability, steps = float(sampling_probability), int(steps)
    check_accountant(accountant, max_batch_size, sampling)
    uses, sampled = steps, 1.0  # the most uses of a record, and the probability that there is one
    if sampling == "allocation":
        number, _, length = epoch(steps - 1, sampling_probability)
        uses, sampled = number + 1, 1.0 if number else steps / length
    elif sampling_probability < 1:
        sampled = -math.expm1(steps * math.log1p(-sampling_probability))
    if delta >= sampled:
        raise ValueError(
            f"delta={delta} covers all that a run can cost: a record is sampled at all with probability "
            f"{sampled:.4g}: use less than 1 / number of records"
        )
    if beside is not None and (already := accounted(beside, delta, accountant)) >= 0.999 * epsilon:
        raise ValueError(
            f"epsilon={epsilon}: the other release alone costs {already:.4g}; spend less on it"
        )
    # Sampling only adds privacy, so this is enough noise for the run by itself, if the accountant is exact.
    enough = gaussian_noise_multiplier(epsilon, delta, compositions=uses)
    if gaussian_mu(described) is not None and beside is None and accountant == "pld":
        return enough
    # ε has to be exact only near its target, so that one interval serves the whole search.
    interval = pld_interval(epsilon, count_steps(described)[0])
    if accountant == "pld" and 9 / enough > 1e5 * interval:
        raise ValueError(
            f"delta={delta} must be less than 20 times the larger of epsilon={epsilon} and 1e-3, or "
            "calibration takes hours: use less than 1 / number of records"
        )

    began, patience = time.monotonic(), _PATIENCE

    def spent(multiplier: float, grid: float = interval) -> float:
        nonlocal patience
        if time.monotonic() - began > patience:
            patience = math.inf
            warnings.warn(
                f"calibrating {steps} steps with sampling probability {sampling_probability:g} takes more "
                f"than {_PATIENCE} s; what is found is kept for the next time in {_storage.user_cache()}, "
                "and accountant='rdp' (with Poisson sampling) takes less time, and more noise",
                stacklevel=2,
            )
        return accounted(event(multiplier), delta, accountant, grid)

    def calibrated() -> float:
        if sampling == "poisson":
            return _calibrate(spent, epsilon, enough)
        # An epoch's distribution is slow on a fine grid; a search on a coarse one leaves little to do there.
        coarse = min(_COARSE * interval, max(interval, 1.0))
        guess = _calibrate(functools.partial(spent, grid=coarse), epsilon, enough)
        return _calibrate(spent, epsilon, guess, width=5e-3, accuracy=1e-4)

    return _cache.remember(
        {"event": str(described), "epsilon": epsilon, "delta": delta, "accountant": accountant},
        calibrated,
        lambda stored: 0.99 * epsilon <= spent(stored) <= epsilon,
    )


def _calibrate(
    spent: Callable[[float], float],
    epsilon: float,
    guess: float,
    width: float = math.log(2),
    accuracy: float = 1e-6,
) -> float:
    """The noise multiplier m at which the decreasing function ε(m) is just below its target.

    Args:
      spent: The function ε(m).
      epsilon: The target.
      guess: The m at which the search begins.
      width: The size of the first steps of the search, in log m.
      accuracy: The accuracy of the result, in log m.
    """

    @functools.cache
    def excess(log_multiplier: float) -> float:
        ratio = spent(math.exp(log_multiplier)) / epsilon
        return math.log(min(max(ratio, 1e-3), 1e3)) + 4e-4

    high = math.log(guess)
    while excess(high) > 0:
        high += width
    low = high - width
    while excess(low) <= 0:
        low, high = low - width, low
    root = float(optimize.brentq(excess, low, high, xtol=accuracy, maxiter=60))  # type: ignore[arg-type]
    while excess(root) > 4e-4:
        root += 1e-5
    return math.exp(root)
