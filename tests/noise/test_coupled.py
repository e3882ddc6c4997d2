"""Draws that lie close to exact ones: against numbers of 200 bits, at all that their bits can stand for."""

import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy import stats

from dpx.noise import coupled

KEY = jax.random.key(2)


@pytest.fixture(autouse=True)
def exactly():
    with mpmath.workprec(200), jax.enable_x64(True):
        yield


def words(count):
    """First words that are not zero, how many are zero before them, and two more; ends of all ranges too."""
    rng = np.random.default_rng(0)
    half, quarter = count // 2, count // 4
    first = np.append(rng.integers(1, 2**32, half), 2 ** rng.integers(0, 32, half))
    empty = np.concatenate(
        [np.zeros(half), rng.integers(0, 3, quarter), rng.integers(0, 25, quarter)]
    )
    high, low = rng.integers(0, 2**32, (2, count))
    high[:200] = rng.choice([0, 2**32 - 1, 2**31], 200)
    low[:400] = rng.choice([0, 1, 2047, 2048, 2**32 - 1, 2**32 - 2], 400)
    unsigned = (part.astype(np.uint32) for part in (first, high, low))
    first, high, low = unsigned
    return first, empty.astype(np.int32), high, low


def ends(high, low):
    """The two ends of the cell of 2⁻⁵³ that further bits would choose a number from."""
    number = int(high) * 2**21 + (int(low) >> 11)
    return mpmath.mpf(number) / 2**53, mpmath.mpf(number + 1) / 2**53


@jax.jit
def chi(key, freedom):
    normal_key, chi_key = jax.random.split(key)
    normals = coupled.normal(normal_key, (len(freedom), coupled.SUMMED))
    return coupled.chi(chi_key, freedom, normals)


def test_exponential_draws_are_exact_to_2_to_the_minus_50_whatever_bits_follow():
    bits = words(1200)
    found = np.asarray(jax.jit(coupled.exponential_from_bits)(*bits))
    for draw, first, empty, high, low in zip(found, *bits, strict=True):
        zeros = 32 * int(empty) + 32 - int(first).bit_length()
        for end in ends(high, low):
            u = mpmath.mpf(2) ** (-1 - zeros) * (1 + end) / 2
            exact = -mpmath.log(u) if low & 1 else -mpmath.log1p(-u)
            assert abs(mpmath.mpf(float(draw)) / exact - 1) < 2.0**-50
    assert found.max() > 500  # a uniform number of 64 bits ends at 44
    assert found.min() < 1e-200


@pytest.mark.slow
def test_normal_draws_are_exact_to_2_to_the_minus_48_whatever_bits_follow():
    bits = words(1200)
    exponential = coupled.exponential_from_bits(*bits)
    found = np.asarray(jax.jit(coupled.normal_pair)(exponential, *bits[2:]))
    for pair, size, high, low in zip(found.T, exponential, *bits[2:], strict=True):
        radius = mpmath.sqrt(2 * mpmath.mpf(float(size)))
        for end in ends(high, low):
            exact = radius * mpmath.cospi(2 * end), radius * mpmath.sinpi(2 * end)
            for one, other in zip(pair, exact, strict=True):
                # 2⁻⁵¹ is left for what the exponential draw is off by.
                assert abs(float(one) - other) <= (2.0**-48 - 2.0**-51) * radius


def test_the_probability_of_keeping_a_draw_is_computed_without_cancellation():
    rng = np.random.default_rng(0)
    y = np.concatenate(
        [
            np.exp(rng.uniform(-20, 4, 1000)),
            -np.exp(rng.uniform(-20, 0, 1000)),
            np.exp(rng.uniform(-12, 0, 300)) - 1,
            [0.25, -0.25, np.nextafter(0.25, 0), np.nextafter(-0.25, 0)],
        ]
    )
    found = np.asarray(jax.jit(coupled.remainder)(y))
    for here, value in zip(y, found, strict=True):
        exact = mpmath.mpf(float(here))
        exact = exact - exact**2 / 2 + exact**3 / 3 - mpmath.log1p(exact)
        assert abs(mpmath.mpf(float(value)) / exact - 1) < 2.0**-41
    assert coupled.remainder(jnp.array([-1.0, -7.0])).tolist() == [np.inf, np.inf]


@pytest.mark.quick_cases("60.0", "8589934592.0")
@pytest.mark.parametrize("freedom", [17.0, 60.0, 1e4, 2.0**33])
def test_what_is_kept_of_normal_draws_has_the_chi_density_far_into_its_tails(freedom):
    """Normal density times probability of keeping, over the derivative of the draw: ∝ the chi density."""
    depth = freedom / 2 - 1 / 3
    z = np.linspace(-12, 40, 500)
    y = z / np.sqrt(9 * depth)
    z, y = z[y > -1], y[y > -1]
    kept = -0.5 * z**2 - 3 * depth * np.asarray(coupled.remainder(jnp.asarray(y)))
    slope = np.log(1.5 * np.sqrt(1 + y) * np.sqrt(2 * depth / (9 * depth)))
    with mpmath.workprec(200):
        a = mpmath.mpf(freedom) / 2

        def log_chi(y):
            x = mpmath.sqrt(2 * a - mpmath.mpf(2) / 3) * (1 + y) ** 1.5
            return (2 * a - 1) * mpmath.log(x) - x**2 / 2

        root = mpmath.sqrt(9 * a - 3)
        exact = np.array([float(log_chi(mpmath.mpf(v) / root) - log_chi(mpmath.mpf(0))) for v in z])
    middle = np.argmin(abs(z))
    constant = (kept - slope - exact)[middle]
    np.testing.assert_allclose(kept - slope - exact, constant, atol=1e-6)


# Degrees of freedom below, at and above the change of method, and beyond 32 bits.
MANY = [1, 2, 5, 16, 17, 18, 40, 1000, 3 * 10**5, 2**33]
FAST = [5, 17, 2**33]


@pytest.mark.quick_cases("5")
@pytest.mark.parametrize(
    "freedom", [pytest.param(k, marks=() if k in FAST else pytest.mark.slow) for k in MANY]
)
def test_chi_draws_follow_their_law_and_its_tails(freedom):
    count = 100_000
    key = jax.random.fold_in(KEY, MANY.index(freedom))
    squares = np.asarray(chi(key, jnp.full(count, float(freedom)))) ** 2
    assert stats.kstest(squares, stats.chi2(freedom).cdf).pvalue > 1e-3
    for tail in (1e-3, 1e-4):
        for beyond in (
            squares > stats.chi2.isf(tail, freedom),
            squares < stats.chi2.ppf(tail, freedom),
        ):
            assert stats.binomtest(int(beyond.sum()), count, tail).pvalue > 1e-4


@pytest.mark.slow
def test_draws_are_kept_with_their_probability():
    """Without that the fourth Hermite moment of the normal draw behind 17 degrees of freedom is 0."""
    depth, count = 17 / 2 - 1 / 3, 2_000_000

    def hermite(squares):
        z = (np.cbrt(squares / (2 * depth)) - 1) * np.sqrt(9 * depth)
        return z**4 - 6 * z**2 + 3

    found = hermite(np.asarray(chi(KEY, jnp.full(count, 17.0))) ** 2)
    expected = stats.chi2(17).expect(hermite)
    assert abs(expected) > 0.02
    assert abs(found.mean() - expected) < 4 * found.std() / math.sqrt(count) < 0.015


@pytest.mark.slow
def test_normal_draws_are_normal_and_independent():
    z = np.asarray(jax.jit(coupled.normal, static_argnums=1)(KEY, (1001, 201)))
    assert z.dtype == np.float64
    assert stats.kstest(z.ravel(), "norm").pvalue > 1e-3
    halves = z.ravel()[:-1].reshape(2, -1)  # one exponential draw lies behind both
    assert abs(np.corrcoef(halves)[0, 1]) < 0.01
    assert abs(np.corrcoef(halves**2)[0, 1]) < 0.01
    assert coupled.normal(KEY, ()).shape == ()
    assert coupled.normal(KEY, (0, 3)).shape == (0, 3)


@pytest.mark.slow
def test_the_largest_draws_have_no_end(monkeypatch):
    """Where the first words are all zero: normal draws of 64 bits would end at 8.3, those of 32 at 5.4."""
    monkeypatch.setattr(
        coupled.tails, "fill", lambda _, last: (jnp.ones_like(last), jnp.full(last.shape, 9, int))
    )
    z = np.asarray(coupled.normal(KEY, (2, 500)))
    assert 20 < np.hypot(*z).max() < 22  # √(2·320·log 2)


def test_64_bits_are_not_left_to_a_compiler_that_has_32():
    with (
        jax.enable_x64(False),
        pytest.raises(ValueError, match="normal computes in 64 bits"),
    ):
        jax.jit(lambda key: coupled.normal(key, (3,)))(KEY)
