"""Each law's density, sampler and guarantee, against integrals of the density."""

import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from dpx import audit, noise
from dpx.noise import Gaussian, Laplace, TruncatedLaplace, coupled, tails
from dpx.privacy import REPLACE_ONE

pytestmark = pytest.mark.optimized

LAWS = [
    Gaussian(1.7),
    Laplace(0.6),
    TruncatedLaplace.calibrate(2.0, 0.5, 1e-3),
    TruncatedLaplace.calibrate(1.0, 3.0, 0.5),
]
WHERE = {"neighboring": REPLACE_ONE, "unit": "record"}


def reach(law):
    return law.bound if isinstance(law, TruncatedLaplace) else 40 * np.sqrt(law.variance)


@pytest.mark.parametrize("law", LAWS)
def test_density_integrates_to_one_and_has_the_stated_variance(law):
    z = np.linspace(-reach(law), reach(law), 400_001)
    density = np.asarray(law.density(z), np.float64)
    assert integrate.trapezoid(density, z) == pytest.approx(1, abs=2e-4)
    assert integrate.trapezoid(density * z**2, z) == pytest.approx(law.variance, rel=5e-4)


@pytest.mark.quick_cases("law2")
@pytest.mark.parametrize("law", LAWS[1:])
def test_sampler_follows_the_density(law):
    draws = np.asarray(law.sample(jax.random.key(0), (200_000,)), np.float64)
    assert abs(draws).max() <= reach(law)
    assert draws.var() == pytest.approx(law.variance, rel=0.03)
    grid = np.linspace(-reach(law), reach(law), 100_001)
    cdf = integrate.cumulative_trapezoid(np.asarray(law.density(grid), float), grid, initial=0)
    # At 1 % a true sampler fails the Kolmogorov–Smirnov test for one seed in a hundred; this is one seed.
    assert stats.kstest(draws, lambda z: np.interp(z, grid, cdf)).pvalue > 0.01


def test_variance_is_that_of_the_paper():
    """Fact 3.5 of Ke et al., for several (Δ, ε, δ)."""
    for sensitivity, epsilon, delta in [
        (1, 1, 1e-6),
        (2, 0.1, 1e-3),
        (0.5, 5, 0.3),
        (1, 0.01, 0.5),
    ]:
        log = np.log1p((np.exp(epsilon) - 1) / (2 * delta))
        cut = delta * (log**2 + 2 * log) / (np.exp(epsilon) - 1)
        want = 2 * (sensitivity / epsilon) ** 2 * (1 - cut)
        law = TruncatedLaplace.calibrate(sensitivity, epsilon, delta)
        assert law.variance == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("ratio", [1e-12, 1e-6, 1e-3, 9.99e-3, 1.01e-2, 0.3])
def test_variance_of_a_narrow_law_does_not_cancel(ratio):
    """Towards a uniform law: at a support of 1e-9 scales the difference from 2 was negative."""
    z, weights = np.polynomial.legendre.leggauss(20)
    density = weights * np.exp(-ratio * (z + 1) / 2)
    want = (density * ((z + 1) / 2) ** 2).sum() / density.sum()
    assert TruncatedLaplace(scale=1 / ratio, bound=1.0).variance == pytest.approx(want, rel=1e-10)


@pytest.mark.parametrize("empty", [1, 3])
def test_words_of_zeros_are_drawn_again_and_counted(monkeypatch, empty):
    drawn = iter(range(100))
    monkeypatch.setattr(
        jax.random,
        "bits",
        lambda key, shape, dtype: jnp.full(shape, next(drawn) >= empty - 1, dtype) * 7,
    )
    with jax.disable_jit():
        last, count = tails.fill(jax.random.key(0), jnp.array([[0, 5]], jnp.uint32))
    np.testing.assert_array_equal(last, [[7, 5]])
    np.testing.assert_array_equal(count, [[empty, 0]])


@pytest.mark.slow
def test_exponential_draws_end_at_the_bound_and_nowhere_before_it(monkeypatch):
    """A tree at ε = 20 and δ = 1e-9 needs 40 scales: a uniform number of 47 bits ends at 33."""
    law = TruncatedLaplace.calibrate(1.0, 20.0, 1e-9)
    # Five words of zeros, a one, and words that say that this is far out, half of them below zero.
    low = jnp.where(jnp.arange(16) < 8, 1, 3).astype(jnp.uint32)
    bits = [jnp.ones(16, jnp.uint32), jnp.full(16, 5), jnp.zeros(16, jnp.uint32), low]
    monkeypatch.setattr(coupled, "_bits", lambda *_: bits)
    with jax.enable_x64(True):
        ends = [
            np.asarray(coupled.signed_exponential.__wrapped__(None, (16,), -ratio))
            for ratio in (law.bound / law.scale, 1e-6, np.inf)
        ]
    signs = np.where(np.arange(16) < 8, 1, -1)
    np.testing.assert_allclose(ends[0], signs * law.bound / law.scale, rtol=1e-12)
    np.testing.assert_allclose(ends[1], signs * 1e-6, rtol=1e-9)
    # A tail of 2^-(1 + 5·32 + 31), and the first bit that counts.
    np.testing.assert_allclose(ends[2], signs * 193 * math.log(2), rtol=1e-12)


@pytest.mark.slow
def test_signs_are_fair_and_say_nothing_of_sizes():
    draws = np.asarray(Laplace(1.0).sample(jax.random.key(2), (100_000,)))
    assert draws.dtype == np.float64
    assert abs((draws > 0).mean() - 0.5) < 0.006
    assert stats.ks_2samp(draws[draws > 0], -draws[draws < 0]).pvalue > 1e-3


@pytest.mark.quick_cases("law1")
@pytest.mark.parametrize("law", [Laplace(0.3), TruncatedLaplace(0.3, 2.0)])
def test_laplace_noise_is_added_in_64_bits(law):
    """In 32 the low bits of a value would decide to which of two points of the grid it goes."""
    key, exact = jax.random.key(4), np.random.default_rng(0).uniform(0, 0.1, 4000)
    exact = exact.astype(np.float32)
    about = {"sensitivity": 1.0, "law": law, "label": "sum"}
    released = jax.jit(lambda exact: noise.release(key, exact, **about))(exact)
    step = 2.0 ** math.floor(math.log2(0.3 * 2**-20))
    wide = exact.astype(float) + np.asarray(law.sample(key, exact.shape))
    np.testing.assert_array_equal(released, (np.round(wide / step) * step).astype(np.float32))


@pytest.mark.slow
def test_narrow_laws_fill_their_support():
    """At a support of 1e-9 scales survival probabilities themselves would have 24 bits left."""
    draws = np.asarray(TruncatedLaplace(1e9, 1.0).sample(jax.random.key(5), (20_000,)))
    assert len(np.unique(draws)) == 20_000
    assert stats.kstest(draws, "uniform", args=(-1, 2)).pvalue > 1e-3


@pytest.mark.slow
def test_tails_reach_beyond_float32_uniforms():
    """A float32 uniform ends at 2^-23, 16 scales out; in 2^24 draws some must lie farther."""
    law = Laplace(1.0)
    draw = jax.jit(lambda key: abs(law.sample(key, (2**20,))).max())
    largest = max(float(draw(key)) for key in jax.random.split(jax.random.key(3), 32))
    assert 16.0 < largest < 33.0


def lattice_score(released, candidate):
    """The share of coordinates in which released − candidate is a float32 number, as float32 noise is."""
    residue = released - candidate
    return (residue == residue.astype(np.float32)).mean()


@pytest.mark.slow
def test_low_bits_do_not_tell_neighbours_apart():
    rng = np.random.default_rng(0)
    here = rng.uniform(0, 2, 4000)
    there = here + rng.uniform(0, 1, 4000) / math.sqrt(4000)
    key = jax.random.key(1)
    before = here + np.asarray(jax.random.normal(key, (4000,)), np.float64)
    assert (
        lattice_score(before, here) > 0.8
    )  # the attack: without candidate `here` nothing is on the lattice
    assert lattice_score(before, there) < 0.05
    about = {"sensitivity": 1.0, "noise_multiplier": 1.0, "label": "sum"}
    after = np.asarray(noise.release(key, here, **about))
    assert after.dtype == np.float64
    assert abs(lattice_score(after, here) - lattice_score(after, there)) < 0.01


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

    def released(exact, multiplier):
        about = {"law": law} if law else {"noise_multiplier": multiplier}
        return noise.release(jax.random.key(0), exact, sensitivity=3.0, label="sum", **about)

    found = np.asarray((jax.jit(released) if traced else released)(exact, 0.7), np.float64)
    np.testing.assert_array_equal(found, np.round(found / step) * step)
    assert (found != np.round(found / (2 * step)) * 2 * step).any()
    assert abs(found - exact).max() > 0.1 * width


@pytest.mark.quick_cases("False")
@pytest.mark.parametrize("traced", [False, True])
def test_without_noise_nothing_is_rounded(traced):
    exact = np.random.default_rng(0).uniform(0, 1, (50,)).astype(np.float32)

    def released(exact, multiplier):
        about = {"noise_multiplier": multiplier, "label": "sum"}
        return noise.release(jax.random.key(0), exact, sensitivity=3.0, **about)

    found = (jax.jit(released) if traced else released)(exact, 0.0)
    np.testing.assert_array_equal(found, exact)


@pytest.mark.slow
def test_what_is_not_finite_is_not_released():
    about = {"noise_multiplier": 1.0, "label": "sum of squares"}
    for exact, sensitivity in (([1.0, np.inf], 1.0), ([1.0, np.nan], 1.0), ([1.0], np.inf)):
        with pytest.raises(ValueError, match=r"sum of squares(: a size of inf| is not finite)"):
            noise.release(jax.random.key(0), np.array(exact), sensitivity=sensitivity, **about)


@pytest.mark.quick_cases("1.0-1.0-0.001", "0.2-4.0-0.5", "0.5-0.2-0.1")
@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-3), (0.2, 0.1), (4.0, 0.5)])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.2])
def test_truncated_laplace_covers_a_change_split_over_two_entries(epsilon, delta, share):
    """The hockey-stick divergence of two shifted entries, integrated on a grid, is at most δ."""
    law = TruncatedLaplace.calibrate(1.0, epsilon, delta)
    span, step = np.linspace(-law.bound, law.bound + 1, 3001, retstep=True)

    def mass(shift):
        """Exact probabilities of the cells, by the distribution function."""
        edges = np.clip(np.append(span, span[-1] + step) - shift, -law.bound, law.bound)
        tail = np.exp(-np.abs(edges) / law.scale) - np.exp(-law.bound / law.scale)
        half = 0.5 * tail / -np.expm1(-law.bound / law.scale)
        return np.diff(np.where(edges > 0, 1 - half, half))

    here, there = mass(0.0), [mass(share), mass(1 - share)]
    joint, moved = np.outer(here, here), np.outer(*there)
    excess = np.maximum(moved - np.exp(epsilon) * joint, 0).sum()
    assert excess <= delta * (1 + 1e-9)
    if share == 1.0:  # the whole change in one entry uses up δ
        assert excess == pytest.approx(delta, rel=0.02)


def test_guarantees():
    assert Gaussian(2.0).guarantee(0.5, 1e-5, **WHERE).event == dp_accounting.GaussianDpEvent(4.0)
    laplace = Laplace(2.0).guarantee(1.0, **WHERE)
    assert (laplace.epsilon, laplace.delta) == (0.5, 0.0)
    law = TruncatedLaplace.calibrate(3.0, 0.7, 1e-4)
    same = law.guarantee(3.0, **WHERE)
    assert (same.epsilon, same.delta) == (pytest.approx(0.7), pytest.approx(1e-4))
    less = law.guarantee(1.0, **WHERE)
    assert less.epsilon < 0.7
    assert less.delta < 1e-4


@pytest.mark.parametrize("epsilon", [1e-3, 29.9, 30.1, 300.0])
def test_truncated_laplace_has_the_guarantee_that_it_was_calibrated_to(epsilon):
    found = TruncatedLaplace.calibrate(2.0, epsilon, 1e-9).guarantee(2.0, **WHERE)
    assert (found.epsilon, found.delta) == (pytest.approx(epsilon), pytest.approx(1e-9, rel=1e-6))


def test_any_epsilon_up_to_1e8_works_and_the_noise_vanishes():
    for epsilon in (1e-6, 1.0, 29.9, 30.1, 1e3, 1e8):
        law = TruncatedLaplace.calibrate(1.0, epsilon, 1e-9)
        draws = np.asarray(law.sample(jax.random.key(0), (1000,)))
        assert np.isfinite(draws).all()
        assert np.std(draws) == pytest.approx(np.sqrt(law.variance), rel=0.2)
    assert law.bound == pytest.approx(1.0, rel=1e-6)
    assert law.variance < 1e-15


def test_misuse_raises():
    with pytest.raises(ValueError, match=r"delta=0\.6"):
        TruncatedLaplace.calibrate(1.0, 1.0, 0.6)
    with pytest.raises(ValueError, match="epsilon=0"):
        TruncatedLaplace.calibrate(1.0, 0.0, 0.1)
    with pytest.raises(ValueError, match="sensitivity=-1"):
        TruncatedLaplace.calibrate(-1.0, 1.0, 0.1)
    with pytest.raises(ValueError, match="std=0"):
        Gaussian(0.0)
    law = TruncatedLaplace.calibrate(1.0, 1.0, 0.5)
    with pytest.raises(ValueError, match=r"sensitivity=1\.5 must be at most"):
        law.guarantee(1.5, **WHERE)


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
def test_every_entry_that_is_released_has_noise_of_its_own_of_the_stated_std(dtype):
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
    ("scale", "law"),
    [(2e-38, None), (1e-45, None), (None, Laplace(1e-310)), (None, Gaussian(1e-38))],
)
def test_noise_that_floats_would_flush_is_refused(scale, law):
    """Without this the exact value was released under a finite ε."""
    size = {"law": law, "sensitivity": 1.0}
    if scale is not None:
        size = {"noise_multiplier": 0.5, "sensitivity": scale}
    exact = np.full(3, 1e-37, np.float32)
    with pytest.raises(ValueError, match="less than floats hold"):
        noise.release(jax.random.key(0), exact, label="sums", **size)
    with pytest.raises(ValueError, match="less than floats hold"):
        jax.jit(lambda x: noise.release(jax.random.key(0), x, label="sums", **size))(exact)


def test_no_noise_at_all_may_be_asked_for():
    found = noise.release(
        jax.random.key(0), np.ones(3), sensitivity=1.0, noise_multiplier=0.0, label="sums"
    )
    np.testing.assert_array_equal(found, 1)


def test_a_law_draws_for_one_array():
    """Two would get the same noise, and their difference be released exactly."""
    both = {"a": np.zeros(3), "b": np.zeros(3)}
    with pytest.raises(ValueError, match="one array, and not for 2"):
        noise.release(jax.random.key(0), both, sensitivity=1.0, law=Laplace(1.0), label="sums")


@pytest.mark.parametrize("given", [{}, {"noise_multiplier": 1.0, "law": Laplace(1.0)}])
def test_noise_has_one_size(given):
    with pytest.raises(ValueError, match="must be one or the other"):
        noise.release(jax.random.key(0), np.zeros(3), sensitivity=1.0, label="sums", **given)


@pytest.mark.parametrize("law", [Laplace, Gaussian])
@pytest.mark.parametrize("scale", [np.array([1.0, 0.0]), np.array([-1.0]), jnp.zeros(())])
def test_every_scale_of_a_law_is_positive(law, scale):
    with pytest.raises(ValueError, match="must be finite and positive"):
        law(scale)


@pytest.mark.slow
def test_a_recorded_release_is_the_same():
    def release(x):
        return noise.release(
            jax.random.key(3), x.sum(0), sensitivity=1.0, noise_multiplier=2.0, label="sum"
        )

    recorded = audit.record(release, np.eye(4))
    assert [each.label for each in recorded.releases] == ["sum"]
    np.testing.assert_array_equal(recorded.left["result"], np.asarray(release(np.eye(4))))
