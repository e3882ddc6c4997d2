"""`noise.release`: the noise that each entry gets, the grid it lies on, and what is refused."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from scipy import stats

from dpx import noise
from dpx.noise import Gaussian, Laplace, TruncatedLaplace

pytestmark = pytest.mark.optimized
KEY = jax.random.key(0)


def released(exact, sensitivity=1.0, **size):
    size = size or {"noise_multiplier": 1.0}
    return noise.release(KEY, exact, sensitivity=sensitivity, label="sums", **size)


@pytest.mark.quick_cases("law1")
@pytest.mark.parametrize("law", [Laplace(0.3), TruncatedLaplace(0.3, 2.0)])
def test_laplace_noise_is_added_in_64_bits(law):
    """In 32 the low bits of a value would decide to which of two points of the grid it goes."""
    exact = np.random.default_rng(0).uniform(0, 0.1, 4000).astype(np.float32)
    found = jax.jit(lambda exact: released(exact, law=law))(exact)
    step = 2.0 ** math.floor(math.log2(0.3 * 2**-20))
    wide = exact.astype(float) + np.asarray(law.sample(KEY, exact.shape))
    np.testing.assert_array_equal(found, (np.round(wide / step) * step).astype(np.float32))


@pytest.mark.quick_cases("True-law1")
@pytest.mark.parametrize("law", [None, Gaussian(3.0), Laplace(0.3), TruncatedLaplace(5.0, 0.02)])
@pytest.mark.parametrize("traced", [False, True])
def test_releases_lie_on_the_grid_of_their_noise(law, traced):
    exact = np.random.default_rng(0).uniform(0, 0.1, (50,))
    width = {None: 0.7 * 3.0}.get(law) or float(law.width)
    step = 2.0 ** math.floor(math.log2(width * 2**-20))
    if law is None or isinstance(law, Gaussian):  # in each type rounded up to 13 bits
        step = math.ceil(width / 128 * 2**18 * (1 + 2**-20)) / 2**18
        assert step in (0.016407012939453125, 0.023441314697265625)

    def program(exact, multiplier):
        return released(exact, 3.0, **({"law": law} if law else {"noise_multiplier": multiplier}))

    found = np.asarray((jax.jit(program) if traced else program)(exact, 0.7), np.float64)
    np.testing.assert_array_equal(found, np.round(found / step) * step)
    assert (found != np.round(found / (2 * step)) * 2 * step).any()
    assert abs(found - exact).max() > 0.1 * width


@pytest.mark.quick_cases("False")
@pytest.mark.parametrize("traced", [False, True])
def test_without_noise_nothing_is_rounded(traced):
    exact = np.random.default_rng(0).uniform(0, 1, (50,)).astype(np.float32)

    def program(exact, multiplier):
        return released(exact, noise_multiplier=multiplier)

    found = (jax.jit(program) if traced else program)(exact, 0.0)
    np.testing.assert_array_equal(found, exact)


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
def test_every_entry_has_noise_of_its_own_of_the_stated_std(dtype):
    """One tree of two leaves, one with a sensitivity for each column."""
    columns = np.linspace(0.5, 2, 40)
    exact = {"a": np.ones((1000, 40), dtype), "b": (np.full(40_000, -1, dtype),)}
    draws = []
    for seed in (0, 1):
        noisy = noise.release(
            jax.random.key(seed),
            exact,
            sensitivity={"a": columns, "b": 3.0},
            noise_multiplier=1.7,
            label="two leaves",
        )
        assert noisy["a"].dtype == noisy["b"][0].dtype == dtype
        units = {"a": columns, "b": (3.0,)}
        z = jax.tree.map(
            lambda n, e, u: np.ravel((np.asarray(n) - e) / (1.7 * u)), noisy, exact, units
        )
        draws += [z["a"], z["b"][0]]
        assert np.std(z["a"].reshape(1000, 40), axis=0) == pytest.approx(np.ones(40), rel=0.15)
    for z in draws:
        assert stats.kstest(z, "norm").pvalue > 1e-3
    entries = np.stack([*draws, np.roll(draws[0], 1), np.roll(draws[0], 40)])
    assert np.abs(np.corrcoef(entries) - np.eye(6)).max() < 0.025


@pytest.mark.parametrize(
    "size",
    [
        {"noise_multiplier": 0.5, "sensitivity": 2e-38},
        {"noise_multiplier": 0.5, "sensitivity": 1e-45},
        {"law": Laplace(1e-310)},
        {"law": Gaussian(1e-38)},
    ],
)
def test_noise_that_floats_would_flush_is_refused(size):
    """Without this the exact value was released under a finite ε."""
    exact = np.full(3, 1e-37, np.float32)
    for call in (lambda x: released(x, **size), jax.jit(lambda x: released(x, **size))):
        with pytest.raises(ValueError, match="less than floats hold"):
            call(exact)


@pytest.mark.quick_cases("<lambda>4")
@pytest.mark.parametrize(
    "size",
    [
        lambda s: {"noise_multiplier": 1.0, "sensitivity": s},
        lambda s: {"noise_multiplier": s, "sensitivity": np.float32(1e-3)},
        lambda s: {"noise_multiplier": s, "sensitivity": s},
        lambda s: {"law": Laplace(s)},
        lambda s: {"law": TruncatedLaplace(s, s)},
    ],
)
def test_noise_of_a_traced_size_that_floats_would_flush_makes_nan(size):
    program = jax.jit(lambda s: released(jnp.ones(3), **size(s)))
    for small in (1e-36, 1e-40, 1e-45):
        assert np.isnan(program(np.float32(small))).all()
    assert np.isfinite(program(np.float32(1e-12))).all()


NONE = np.zeros(2)
SHAPE = r"sums: a size of the noise has shape \(3"


@pytest.mark.parametrize(
    ("exact", "size", "named"),
    [
        pytest.param(
            {"a": NONE, "b": NONE}, {"law": Laplace(1.0)}, "one array, and not for 2", id="two"
        ),
        (NONE, {"noise_multiplier": 1e11}, r"noise of 1.41e\+11 .*: raise epsilon or delta"),
        (NONE, {"noise_multiplier": None}, "must be one or the other"),
        (NONE, {"noise_multiplier": 1.0, "law": Laplace(1.0)}, "must be one or the other"),
        pytest.param(NONE, {"sensitivity": np.ones((3, 2))}, SHAPE, id="rows"),
        (NONE, {"noise_multiplier": np.ones((3, 1))}, SHAPE),
        (NONE, {"sensitivity": np.ones(3)}, SHAPE),
        (NONE, {"law": Laplace(np.ones((3, 2)))}, SHAPE),
        (np.array([1.0, np.inf]), {}, "sums is not finite"),
        pytest.param([NONE, np.array([0.0, np.nan])], {}, "sums is not finite", id="leaf"),
        (NONE, {"sensitivity": np.inf}, "sums: a size of inf"),
        (np.ones(2) * 1j, {}, "sums has dtype complex128, which must be real"),
        ([NONE, np.ones(1) * 1j], {}, "sums has dtype complex"),
    ],
)
def test_what_would_share_draws_or_guarantee_nothing_is_refused(exact, size, named):
    if "sensitivity" in size:
        size = {"noise_multiplier": 1.0, **size}
    with pytest.raises(ValueError, match=named):
        released(exact, **size)


def test_nothing_is_released_as_nothing():
    assert released({}) == {}


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
    each = jax.shard_map(released, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(ValueError, match="sums differ between devices along the mesh axes"):
        each(jnp.zeros(4))
    whole = jax.shard_map(
        lambda sums: released(jax.lax.psum(sums, "data")),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
    )
    jax.eval_shape(whole, jnp.zeros(4))


@pytest.mark.quick_cases("uint8", "longdouble")
@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", np.longdouble, np.uint8])
def test_numbers_of_numpys_are_released_as_what_they_are(dtype):
    exact = np.arange(6.0).astype(dtype)
    native = float if dtype is np.longdouble else exact.dtype.newbyteorder("=")
    expected, found = released(exact.astype(native)), released(exact)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
