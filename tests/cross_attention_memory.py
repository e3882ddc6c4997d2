"""Memories of keys and values for the tests of private cross-attention."""

import jax
import numpy as np

BOX = {"key_bound": 1.0, "value_bound": 1.0}
EXACT = {"epsilon": 1e8, "delta": 1e-6}
BUDGET = {"epsilon": 1.0, "delta": 1e-6}
KEY = jax.random.key(0)


def memory(n, d, seed=0, m=50):
    """Keys, values and queries in the unit box."""
    rng = np.random.default_rng(seed)
    K = rng.random((n, d)).astype(np.float32)
    return K, 2 * K - 1, rng.random((m, d)).astype(np.float32)
