"""`dpx.training.fit` as a whole with canaries: Poisson samples, random allocation, and users.

A training holds thousands of canaries, each with an entry of the parameters of its own, of which a coin says
whether it is in the data. Whoever is shown the parameters after each step sees of each entry what many runs
with one canary would show: samples are drawn for each record or user by itself, and so is the noise of each
entry. So the entries of canaries that are in the data, and of those that are not, are independent samples of
the two neighbours. A curve bounds both orders of these, adding and removing.

Unlike the bounds of one run, this takes the entries to be independent. A fault that makes them depend on each
other, such as noise that two of them share, is left to the other audits.
"""

from typing import Any

import numpy as np
import optax

import dpx
from dpx import audit
from dpx.privacy import PrivacyGuarantee
from dpx.training import Allocation, Keys, Poisson
from experiments.audit import regression

CLIP = 1.0
# Row: how batches are drawn, whether users are the unit, and whether randomness is of a stream.
ROWS: dict[str, tuple[Any, bool, bool]] = {
    "fit_poisson": (Poisson(), False, False),
    "fit_allocation": (Allocation(), False, False),
    "fit_users": (Poisson(), True, False),
    "fit_users_allocation": (Allocation(), True, False),
    "fit_secure": (Allocation(), True, True),
}


def audited(config, keys: Keys) -> tuple[PrivacyGuarantee, dict[str, float]]:
    """The guarantee that is claimed, and a bound on ε for each training."""
    return regression.guarantee(config), {row: bound(config, keys, row) for row in ROWS}


def bound(config, keys: Keys, row: str) -> float:
    """A lower bound on the ε of a training, which claims that of the config at most."""
    claim, inside, outside = run(config, keys, row)
    return audit.curve_lower_bound(
        claim.log_likelihood_ratio(inside),
        claim.log_likelihood_ratio(outside),
        config.delta,
        model=claim.model,
        confidence=config.confidence,
        selection_fraction=regression.SELECTION,
    ).epsilon


def run(config, keys: Keys, row: str) -> tuple[audit.Training, np.ndarray, np.ndarray]:
    """A training with canaries: what it claims to be, and all noisy steps of each canary.

    Returns:
      The claim, and the noisy sums along the canaries in the data and along the others, in clipping norms,
      (canaries, steps) each.
    """
    sampling, by_user, secure = ROWS[row]
    start = regression.regression()
    dirac = audit.dirac(
        regression.squared_error,
        start.params,
        start.data,
        canaries=config.canaries,
        seed=regression.seed(keys, f"canaries of {row}"),
    )
    units = len(dirac.data[0])
    data, about = dirac.data, {}
    if by_user:
        # From one record to three times what a step takes of a user.
        counts = 1 + np.arange(units) % (3 * config.records_per_user)
        data = tuple(np.repeat(x, counts, axis=0) for x in data)
        about = {
            "users": np.repeat(np.arange(units), counts),
            "records_per_user": config.records_per_user,
        }
    batch_size, seen = config.sampling_probability * units, [np.zeros(config.canaries, np.float32)]

    def show(params: Any) -> dict[str, float]:
        seen.append(np.array(params["canaries"]))
        return {}

    dpx.training.fit(
        dirac.loss_fn,
        dirac.params,
        data,
        epsilon=config.epsilon,
        delta=config.delta,
        batch_size=batch_size,
        steps=config.steps,
        optimizer=optax.sgd(1.0),  # a step is the noisy mean
        l2_clip_norm=CLIP,
        microbatch_size=config.microbatch_size,
        sampling=sampling,
        key=keys,
        label=row,
        secure=secure,
        evaluate=show,
        evaluate_every=1,
        progress=False,
        **about,
    )
    about = {"sampling_probability": config.sampling_probability, "steps": config.steps}
    claim = audit.Training(
        dirac.loss_fn,
        l2_clip_norm=CLIP,
        noise_multiplier=dpx.calibrate_dpsgd(
            config.epsilon, config.delta, sampling=sampling.name, **about
        ),
        expected_batch_size=batch_size,
        sampling=sampling,
        **about,
    )
    sums = np.diff(np.stack(seen), axis=0).T * batch_size / CLIP
    return claim, sums[dirac.included], sums[~dirac.included]
