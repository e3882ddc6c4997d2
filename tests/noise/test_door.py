"""What may pass the door: shapes, types and sizes of noise that would leave something exact are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx import noise
from dpx.noise import Laplace, TruncatedLaplace


@pytest.mark.parametrize(
    "size",
    [
        lambda s: {"noise_multiplier": 1.0, "sensitivity": s},
        lambda s: {"noise_multiplier": s, "sensitivity": np.float32(1e-3)},
        lambda s: {"noise_multiplier": s, "sensitivity": s},
        lambda s: {"law": Laplace(s), "sensitivity": 1.0},
        lambda s: {"law": TruncatedLaplace(s, s), "sensitivity": 1.0},
    ],
)
def test_noise_of_a_traced_size_that_floats_would_flush_makes_nan(size):
    def released(s):
        return noise.release(jax.random.key(0), jnp.ones(3), label="sums", **size(s))

    for small in (1e-36, 1e-40, 1e-45):
        assert np.isnan(jax.jit(released)(np.float32(small))).all()
    assert np.isfinite(jax.jit(released)(np.float32(1e-15))).all()


def test_entries_of_a_release_have_no_draws_in_common():
    """A sensitivity of more entries would release each of the statistic's several times, with one draw."""
    sizes = [
        {"noise_multiplier": 1.0, "sensitivity": np.ones((3, 2))},
        {"noise_multiplier": np.ones((3, 1)), "sensitivity": 1.0},
        {"noise_multiplier": 1.0, "sensitivity": np.ones(3)},
        {"law": Laplace(np.ones((3, 2))), "sensitivity": 1.0},
    ]
    for size in sizes:
        with pytest.raises(ValueError, match=r"sums: a size of the noise has shape \(3"):
            noise.release(jax.random.key(0), np.zeros(2), label="sums", **size)


def test_complex_numbers_are_refused_and_nothing_is_released_as_nothing():
    about = {"sensitivity": 1.0, "noise_multiplier": 1.0, "label": "sums"}
    with pytest.raises(ValueError, match="sums has dtype complex128, which must be real"):
        noise.release(jax.random.key(0), np.array([1 + 1j]), **about)
    assert noise.release(jax.random.key(0), {}, **about) == {}
