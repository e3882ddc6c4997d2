"""The mean of the features of texts, which is released once for a share of the budget.

States of an encoder have a large part that is the same for all texts. Without it the gradients of a head are
shorter, and what tells texts apart is larger beside the noise.
"""

import jax
import numpy as np

import dpx
from dpx.noise import release
from dpx.privacy import gaussian_noise_multiplier
from experiments import checks, guarantees
from experiments.dp_transformer import training, warm_start

LABEL = "mean of the features"


def check(config) -> None:
    """Raises ValueError for a share of the budget that cannot be spent."""
    why = "the rest pays for training, 0 releases no mean"
    checks.share(config, "center_budget_fraction", budget=True, why=why)


def guarantee(config, unit: str, assumptions: tuple[str, ...]) -> dpx.PrivacyGuarantee | None:
    """What `private` costs; None where nothing is released."""
    if config.center_budget_fraction == 0:
        return None
    spent = warm_start.budget(config, config.center_budget_fraction)
    words = "Gaussian mechanism on the sum of the features"
    return guarantees.gaussian(*spent, words, unit, assumptions=assumptions)


def private(key: jax.Array, config, features: np.ndarray, users: np.ndarray | None) -> np.ndarray:
    """The noisy mean (d,) of features (n, d), each of which is scaled to mean square one.

    A unit is a text or, with `users` (n,), a user, who counts as the mean of the user's texts. Each adds a
    vector of length at most one to a sum. The number of units is public.
    """
    rows = _units(features, users)
    spent = warm_start.budget(config, config.center_budget_fraction)
    total = release(
        key,
        rows.sum(axis=0),
        sensitivity=1 + 1e-6,
        noise_multiplier=gaussian_noise_multiplier(*spent),
        label=LABEL,
    )
    count = training.public_size(len(rows))
    return (np.asarray(total) * np.sqrt(rows.shape[1]) / count).astype(np.float32)


def exact(features: np.ndarray, users: np.ndarray | None) -> np.ndarray:
    """The same without noise, under no guarantee."""
    rows = _units(features, users)
    return (rows.mean(axis=0) * np.sqrt(rows.shape[1])).astype(np.float32)


def _units(features: np.ndarray, users: np.ndarray | None) -> np.ndarray:
    """(units, d) float64 of length at most one."""
    wide = features.astype(np.float64)
    wide = np.where(np.isfinite(wide).all(axis=1, keepdims=True), wide, 0)
    wide /= np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)
    if users is None:
        return wide
    sums = np.zeros((users.max() + 1, wide.shape[1]))
    np.add.at(sums, users, wide)
    return sums / np.bincount(users)[:, None]
