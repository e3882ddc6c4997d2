"""Principal components and a regression from one release of a Gram matrix."""

import jax
import numpy as np
import pytest

from experiments.gram import features

KEY = jax.random.key(0)


def unit_rows(count, dim, seed=0):
    rows = np.random.default_rng(seed).normal(size=(count, dim)) * np.arange(1, dim + 1)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.slow
def test_without_noise_everything_is_exact():
    rows = unit_rows(500, 6)
    labels = np.eye(3)[rows[:, :3].argmax(1)]
    exact, both = rows.T @ rows, np.concatenate([rows, labels], axis=1)
    weights = features.ridge(both.T @ both, 6, 0.0)
    np.testing.assert_allclose(weights, np.linalg.solve(exact + np.eye(6), rows.T @ labels))
    start = np.linalg.qr(np.random.default_rng(1).normal(size=(6, 2)))[0]
    budget = {"epsilon": 1e8, "delta": 1e-5}
    basis, _ = features.power_method(KEY, exact, start, 30, **budget)
    best = features.captured(exact, features.leading(exact, 2))
    assert features.captured(exact, basis) == pytest.approx(best, rel=1e-4)
    assert best == pytest.approx(np.linalg.eigvalsh(exact)[-2:].sum() / np.trace(exact))


def test_the_ridge_without_privacy_is_as_strong_as_training_documents_say():
    """Labels that follow the features take the least ridge, and a few that do not take a strong one."""
    rng, rows = np.random.default_rng(0), unit_rows(600, 6)
    labels = np.eye(3)[rows[:, :3].argmax(1)]
    exact = np.linalg.solve(rows.T @ rows + np.eye(6), rows.T @ labels)
    assert features._best_ridge(rows, labels, 0).shape == exact.shape
    noise = np.eye(3)[np.where(rng.random(600) < 0.9, 0, rng.integers(0, 3, 600))]
    found = {
        penalty: np.linalg.solve(rows.T @ rows + penalty * np.eye(6), rows.T @ noise)
        for penalty in features.PENALTIES
    }
    best = features._best_ridge(rows, noise, 0)
    assert any(np.allclose(best, weights) for weights in found.values())
    order = np.random.default_rng(0).permutation(600)
    asking, rest = order[:60], order[60:]
    scores = {
        penalty: np.mean(
            (
                rows[asking]
                @ np.linalg.solve(
                    rows[rest].T @ rows[rest] + penalty * np.eye(6), rows[rest].T @ noise[rest]
                )
            ).argmax(1)
            == noise[asking].argmax(1)
        )
        for penalty in features.PENALTIES
    }
    np.testing.assert_allclose(best, found[max(scores, key=lambda penalty: scores[penalty])])
