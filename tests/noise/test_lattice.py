"""The law of normal noise on a grid, against slow arithmetic: integers, fractions and sums over draws."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy import stats

import dpx
from dpx import noise
from dpx.noise import lattice
from dpx.noise.stream import Stream
from experiments.bench._noise_law import ideal, law

R = lattice.RESOLUTION
pytestmark = pytest.mark.optimized


def words(value, rounding=0, low_rounding=0, sign=0):
    """The words of a draw whose uniform number of 63 bits is `value`."""
    value = np.array(value, object)
    size = np.array([(int(v) >> 32) << 1 | sign for v in value], np.uint32)
    low = np.array([int(v) % 2**32 for v in value], np.uint32)
    full = (np.full(size.shape, x, np.uint32) for x in (rounding, low_rounding))
    rounding, low_rounding = full
    return lattice.Words(size, rounding, low, low_rounding)


def thresholds():
    """2⁶³·P(|R·Z| ≥ a − ½) for a = 1, 2, ..., in 40 digits."""
    with mpmath.workdps(40):
        return [
            2**63 * mpmath.erfc((a - mpmath.mpf(1) / 2) / (R * mpmath.sqrt(2)))
            for a in range(1, 1250)
        ]


@pytest.mark.slow
def test_a_whole_number_is_the_count_of_thresholds_above_its_bits():
    """At every threshold, and at numbers of every size."""
    exact = thresholds()
    near = [int(t + s * (1 + t * mpmath.mpf("4e-14"))) for t in exact for s in (-1, 1)]
    rng = np.random.default_rng(0)
    value = [v for v in near if 256 < v < 2**63]
    value += [int(rng.integers(2**k, 2 ** (k + 1))) for k in range(8, 63) for _ in range(40)]
    value += [2**63 - 1, 2**62, 256]
    value += [m << e for e in range(1, 55) for m in range(128, 256)]  # the ends of cells
    value += [(m << e) - 1 for e in range(2, 56) for m in range(128, 256)]
    found = np.asarray(jax.jit(lattice.whole_normal)(words(value)))
    decreasing = [float(int(t)) for t in exact]  # in 63 bits
    expected = len(exact) - np.searchsorted(decreasing[::-1], [float(v) for v in value], "right")
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(lattice.whole_normal(words(value, sign=1)), -found)
    assert found.max() > 8.4 * R
    assert not lattice.is_far(words(value)).any()


@pytest.mark.slow
def test_beyond_the_table_further_bits_decide():
    """Down to probabilities that no float holds; the table's end and what comes after it agree."""
    for low, fresh, empty in [
        (63, 5, 0),
        (1, 2**31, 0),
        (0, 2**31, 0),
        (0, 1, 0),
        (0, 7, 3),
        (0, 1, 10**6),
    ]:
        known = words([low])
        assert lattice.is_far(known).all()
        more = np.array([fresh], np.uint32), np.array([empty], np.int32)
        size = lattice.far_size(known, *more)
        found = int(lattice.whole_normal(known, size)[0])
        with mpmath.workdps(30):
            log = mpmath.log(low + (fresh + mpmath.mpf(0.5)) * mpmath.mpf(2) ** (-32 * (empty + 1)))
            log -= 63 * mpmath.log(2)

            def survival(a):
                return float(mpmath.log(mpmath.erfc((a - mpmath.mpf(0.5)) / (R * mpmath.sqrt(2)))))

            slack = 1 + found // 500_000  # a float32 has 24 bits
            assert survival(found - slack + 1) > log > survival(found + slack), (low, fresh, empty)
    near = lattice.whole_normal(words([2, 63, 2**40]))
    np.testing.assert_array_equal(lattice.may_be_far(near), [True, True, False])


def fraction(x):
    return Fraction(float(x))


@pytest.mark.quick_cases("float32")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_are_cut_without_rounding(dtype):
    """In rational arithmetic, for values of all sizes and steps of all mantissas, next to ties too."""
    rng = np.random.default_rng(0)
    top = 33 if dtype == np.float32 else 80
    with jax.enable_x64(dtype == np.float64):
        stds = np.concatenate(
            [2.0 ** rng.uniform(-20, 20, 60), [1, 2 - 2**-11, 2 - 2**-12, 1 + 2**-12]]
        )
        steps = np.asarray(lattice.step_of(stds, dtype, multiplier_norm=1.0), dtype)
        for step, std in zip(steps, stds, strict=True):
            exact = fraction(std) / R
            assert exact <= fraction(step) <= exact * (1 + Fraction(1, 4000))
            mantissa, _ = math.frexp(step)
            assert (mantissa * 2**13).is_integer()
        sizes = 2.0 ** rng.uniform(-30, top - 0.1, (64, 200))
        halves = rng.integers(0, 2**10, (64, 100)) + 0.5
        values = np.concatenate([sizes, halves, halves * 2**11, halves * 2**12, halves * 2**22], 1)
        values = (values * rng.choice([-1, 1], values.shape) * steps[:, None]).astype(dtype)
        values = np.concatenate(
            [values, np.nextafter(values, dtype(0)), np.zeros((64, 1), dtype)], 1
        )
        values = values[:, np.abs(values / steps[:, None]).max(0) < 2.0**top * 0.99]
        parts = jax.jit(lattice.cut)(values, steps[:, None])
    for value, step, *cut in zip(
        values.ravel(),
        np.repeat(steps, values.shape[1]),
        *(np.ravel(x) for x in parts),
        strict=True,
    ):
        coarse, fine, rest = map(fraction, cut)
        assert coarse.denominator == fine.denominator == 1
        error = fraction(value) / fraction(step) - (coarse + fine) - rest
        assert abs(rest) <= Fraction(51, 100)
        assert abs(error) <= (Fraction(1, 2**23) if dtype == np.float32 else Fraction(1, 2**52))


def test_remainders_are_rounded_by_three_uniform_numbers():
    """Bit fields are what the proof says, and the whole is unbiased."""
    rng = np.random.default_rng(0)
    rounding = rng.integers(0, 2**32, 4000, dtype=np.uint64).astype(np.uint32)
    low = rng.integers(0, 2**32, 4000, dtype=np.uint64).astype(np.uint32)
    found = lattice.uniforms(lattice.Words(rounding, rounding, low, low))
    for word, shared, total in zip(rounding.tolist(), low.tolist(), found.tolist(), strict=True):
        first = Fraction((word >> 20) * 2**16 + shared % 2**16, 2**28)
        second = Fraction((word >> 5) % 2**15, 2**15)
        third = Fraction(word % 32, 32)
        # On average 3/2, but for half of 2⁻²⁸.
        assert Fraction(total, 2**28) == first + second + third + Fraction(1, 64) + Fraction(
            1, 2**16
        )
    step = jnp.float32(2.0)
    for value in (0.0, 0.3, -0.9, 1.7):
        noisy = lattice.add(
            jnp.full(4000, value, jnp.float32), step, jnp.zeros(4000, jnp.int32), found
        )
        assert set(np.asarray(noisy / step).tolist()) <= {-2.0, -1.0, 0.0, 1.0, 2.0}
        assert float(noisy.mean()) == pytest.approx(value, abs=4 * 2 * 0.5 / 4000**0.5)


def bound(x):
    return 6e-12 * (3 + 2 * x**2 + x**4)


def test_what_is_released_is_the_rounded_gaussian_mechanism():
    """The theorem of `lattice`, at all distances up to eight standard deviations."""
    m = np.arange(-8 * R, 8 * R, 37).astype(float)
    for rest in (0.0, 0.25, 0.3, 0.5, 0.77):
        error = np.abs(law(m, rest) / ideal(m, rest) - 1)
        assert (error <= bound((m - rest) / R) + 1e-12).all()  # and what doubles round
    # The bound is no wider than it has to be: at one place it is reached to a quarter.
    far = np.arange(7 * R, 8 * R).astype(float)
    assert np.abs(law(far, 0.0) / ideal(far, 0.0) - 1).max() > bound(7.5) / 4
    # With one uniform number less it would not be.
    m = np.arange(5 * R, 6 * R).astype(float)
    for points in ({"third": 1}, {"second": 1}):
        assert np.abs(law(m, 0.0, **points) / ideal(m, 0.0) - 1).max() > 30 * bound(6.0)


@pytest.mark.slow
def test_noise_is_as_large_as_the_roundings_of_many_remainders_ask_for():
    """Both neighbours' remainders move by 2⁻²³ of a step in each of d entries at most, which g pays for."""
    for norm in (1.0, 1e4, 1e8):
        step = float(lattice.step_of(1.0, np.float32, multiplier_norm=norm))
        moved = 2.0**-22 * step * norm
        assert R * step >= 1 + moved > R * step * (1 - 2.0**-11)
    assert np.isnan(lattice.step_of(1.0, np.float32, multiplier_norm=1e10))
    about = {"sensitivity": 1.0, "noise_multiplier": 1e9, "label": "sums"}
    with pytest.raises(ValueError, match=r"sums: noise of 3.16e\+10 .* raise epsilon or delta"):
        noise.release(jax.random.key(0), np.zeros(1000, np.float32), **about)


@pytest.mark.quick_cases("float32-10000000.0")
@pytest.mark.parametrize("size", [1e4, 1e7, 1e9, 1e30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_values_have_their_noise(size, dtype):
    """As far as floats show it: what is as large as their spacing is neither lost nor made larger."""
    size = float(dtype(size))
    exact = np.full(20_000, size, dtype)
    with jax.enable_x64(dtype == np.float64):
        about = {"sensitivity": 1.0, "noise_multiplier": 1.0, "label": "sums"}
        released = jax.jit(lambda x: noise.release(jax.random.key(1), x, **about))(exact)
    moved = np.asarray(released, np.float64) - size
    spacing = float(np.spacing(dtype(size)))
    if spacing < 0.1:
        assert (
            stats.kstest(
                moved + np.random.default_rng(0).uniform(-1, 1, 20_000) / 256, "norm"
            ).pvalue
            > 1e-3
        )
    else:
        expected = (2 * stats.norm.sf(spacing / 2)) if spacing < 8 else 0
        assert (moved != 0).mean() == pytest.approx(expected, abs=0.02)
        np.testing.assert_allclose(moved / spacing, np.round(moved / spacing))


STD, WITHOUT = 7.6, 1.4848


@pytest.mark.slow
@pytest.mark.parametrize("secret", [None, bytes(32)], ids=["threefry", "ChaCha20"])
def test_outputs_of_privatize_are_spread_as_the_law_says(secret):
    """2²⁹ outputs at one exact value, counted at each point of the grid."""
    optimizer = dpx.privatize(
        l2_clip_norm=1.0,
        noise_multiplier=STD,
        expected_batch_size=1.0,
        key=jax.random.key(7) if secret is None else None,
    )
    step = float(lattice.step_of(STD, np.float32, multiplier_norm=STD * 2**11))
    low = math.floor(WITHOUT / step) - 6 * R

    @jax.jit
    def count(state, words):
        noisy, state = optimizer.update(jnp.full(2**22, WITHOUT, jnp.float32), state, **words)
        index = jnp.round(noisy / step).astype(jnp.int32) - low
        return jnp.zeros(12 * R, jnp.int32).at[jnp.clip(index, 0, 12 * R - 1)].add(1), state

    state, counts = optimizer.init(jnp.zeros(2**22)), np.zeros(12 * R, np.int64)
    for turn in range(2**7):
        words = {} if secret is None else {"bits": Stream(secret).bits(turn, ((2**22,),))}
        found, state = count(state, words)
        counts += np.asarray(found, np.int64)
    value = float(np.float32(WITHOUT)) / step
    index = np.arange(12 * R) + low
    expected = 2**29 * ideal(index, value)
    kept = (expected > 50) & (index > low) & (index < low + 12 * R - 1)
    chi = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert stats.chi2.sf(chi, kept.sum()) > 1e-3
    assert chi < kept.sum() + 5 * math.sqrt(2 * kept.sum())
