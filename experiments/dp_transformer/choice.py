"""Which model a run serves: the one that was trained, or the release that it started from.

Training can make a model worse, and only data that it was not trained on tell. They are private: to look at
them costs a share of the budget, whatever they say. What is released is one number, the sum over users of how
much better the trained model ranks the held-out item, with noise; its sign decides.
"""

import math

import dp_accounting
import jax
import numpy as np

from dpx import noise, privacy
from experiments import checks
from experiments.dp_transformer import ranking


def guarantee(
    config, prior: privacy.PrivacyGuarantee | None, unit: str, assumptions: tuple[str, ...]
) -> privacy.PrivacyGuarantee | None:
    """What a choice costs, out of the budget; None without a prior, or without a share to choose with."""
    if prior is None or not config.choice_budget_fraction:
        return None
    multiplier = noise_std(config)
    epsilon, delta = privacy.gaussian_budget(multiplier, config.delta)
    return privacy.PrivacyGuarantee(
        epsilon=epsilon,
        delta=delta,
        neighboring=privacy.ADD_OR_REMOVE_ONE,
        unit=unit,
        mechanism=f"Gaussian mechanism on which model ranks better, noise multiplier {multiplier:.6g}",
        assumptions=(*assumptions, ranking.ASSUMPTION),
        event=dp_accounting.GaussianDpEvent(multiplier),
    )


def noise_std(config) -> float:
    """In users, each of whom counts at most 1: of the sum that is released."""
    multiplier = privacy.gaussian_noise_multiplier(config.epsilon, config.delta)
    return multiplier / math.sqrt(config.choice_budget_fraction)


def lead(key: jax.Array, config, trained: np.ndarray, start: np.ndarray) -> float:
    """The noisy sum over users of how much better the trained model is than its start.

    Guarantee: `guarantee`. A user's two values lie in [0, 1] and depend on that user and on the two models,
    which are released before. One who comes or goes moves the exact sum of differences by at most 1, plus
    what 32 bits rounded the values by.

    Args:
      key: Of the noise.
      config: With the budget and the choice's share of μ².
      trained, start: (U,), of each user.
    """
    (noisy,) = noise.release(
        key,
        np.array([math.fsum((trained - start).tolist())]),
        sensitivity=1 + 2**-20,
        noise_multiplier=noise_std(config),
        label="lead of the trained model",
    )
    return float(noisy)


def words(config, lead: float) -> str:
    """What was chosen, and what choosing cost."""
    served = "the trained model" if lead > 0 else "the release that training started from"
    return (
        f"`dpx recommend` serves {served}. The NDCG of the trained model, summed over users, leads by "
        f"{lead:.3g}, with noise of {noise_std(config):.3g}; asking took {config.choice_budget_fraction:g} "
        "of μ²."
    )


def check(config) -> None:
    """Raises ValueError for a share that cannot be used."""
    why = "0 serves the trained model, whatever it is worth"
    checks.share(config, "choice_budget_fraction", budget=True, why=why)
