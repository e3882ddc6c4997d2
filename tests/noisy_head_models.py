"""The setting of Section 6.1 at N = 1000, shared by the tests of dpx.noisy_head's private fits."""

import jax
import numpy as np

from dpx import noisy_head

KEY = jax.random.key(0)
PAPER = noisy_head.as_printed()
SETTINGS = {"regularization": 5.0, "step_size": 0.0738207, "steps": 38, "delta": 1e-5}
HYPER = noisy_head.hyperparameters(1000, 31, 5, regularization=5.0, rule="paper")


def features_of(num_prompts=300, length=31, dim=5, seed=0):
    features = noisy_head.sample_features(jax.random.key(seed), num_prompts, length, dim)
    return noisy_head.Features(*map(np.array, features))


def calibrate(hyper, *, epsilon, delta, **options):
    return noisy_head.Descent(hyper, **options).calibrate(epsilon, delta)


def descend(features, hyper, key=KEY, *, init=None, trajectory=False, **options):
    """A descent without noise."""
    described = noisy_head.Descent(hyper, **options)
    run = {"noise_multiplier": 0.0, "init": init, "trajectory": trajectory}
    return noisy_head.noisy_descent(key, features, described, **run)
