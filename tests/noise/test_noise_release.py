"""What `noise.release` refuses: shapes, types and sizes of noise that would leave something exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dpx import noise
from dpx.noise import Laplace, TruncatedLaplace


@pytest.mark.quick_cases("<lambda>4")
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
    assert np.isfinite(jax.jit(released)(np.float32(1e-12))).all()


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


def test_every_leaf_of_a_release_has_to_be_finite():
    for leaves in ([np.zeros(2), np.array([0.0, np.nan])], [np.array([np.inf]), np.zeros(1)]):
        with pytest.raises(ValueError, match="sums is not finite"):
            noise.check_finite(leaves, "sums")
    with pytest.raises(ValueError, match="sums has dtype complex"):
        noise.release(
            jax.random.key(0),
            [np.zeros(1), np.ones(1) * 1j],
            sensitivity=1.0,
            noise_multiplier=1.0,
            label="sums",
        )


def test_the_grid_of_truncated_noise_follows_the_narrower_of_its_sizes():
    """Noise that is cut off far below its scale is uniform, and lies within its bound."""
    for scale, bound, width in ((1.0, 0.1, 0.1), (0.1, 1.0, 0.1)):
        assert float(TruncatedLaplace(scale, bound).width) == pytest.approx(width, rel=1e-6)
    assert (Laplace(3.0).width, noise.Gaussian(2.0).width) == (3.0, 2.0)


def test_two_entries_of_one_cell_are_added():
    found, largest = noise.sum_sparse(
        np.array([1.0, 0.5, 0.25]), np.arange(3), np.array([1, 1, 0]), 2, l2_clip_norm=1.0
    )
    assert (found / noise.secure.STEPS).tolist() == [0.25, 1.5]
    assert largest == noise.secure.STEPS + 1


@pytest.mark.parametrize(("entries", "moved"), [(1, 1), (4, 2), (100, 6), (10**6, 510)])
def test_rounding_makes_a_record_longer_by_half_a_unit_for_each_entry(entries, moved):
    assert noise.secure.norm_bound(2**18, entries) == 2**18 + moved


def test_noise_that_devices_would_share_is_refused():
    """On a mesh of one device, whose types say what several would have in common."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def release(sums):
        return noise.release(
            jax.random.key(0), sums, sensitivity=1.0, noise_multiplier=1.0, label="sums"
        )

    each = jax.shard_map(release, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(ValueError, match="sums differ between devices along the mesh axes"):
        each(jnp.zeros(4))
    whole = jax.shard_map(
        lambda sums: release(jax.lax.psum(sums, "data")),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
    )
    jax.eval_shape(whole, jnp.zeros(4))


@pytest.mark.quick_cases("uint8", "longdouble")
@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", np.longdouble, np.uint8])
def test_numbers_of_numpys_are_released_as_what_they_are(dtype):
    exact = np.arange(6.0).astype(dtype)
    about = {"sensitivity": 1.0, "noise_multiplier": 1.0, "label": "x"}
    native = float if dtype is np.longdouble else exact.dtype.newbyteorder("=")
    expected = noise.release(jax.random.key(0), exact.astype(native), **about)
    found = noise.release(jax.random.key(0), exact, **about)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
