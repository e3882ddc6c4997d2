"""Each law's sampler and guarantee, against SciPy's laws and integrals."""

import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dpx.noise import Gaussian, Laplace, TruncatedLaplace, coupled, tails
from dpx.privacy import REPLACE_ONE

WHERE = {"neighboring": REPLACE_ONE, "unit": "record"}


def distribution(law, z):
    """The probability of at most z, where both ends of the support hold none."""
    bound = getattr(law, "bound", np.inf)
    z, end = np.clip(z, -bound, bound), -np.expm1(-bound / law.scale)
    return 0.5 - 0.5 * np.sign(z) * np.expm1(-np.abs(z) / law.scale) / end


@pytest.mark.quick_cases("law1")
@pytest.mark.parametrize(
    "law",
    [
        Laplace(0.6),
        TruncatedLaplace.calibrate(2.0, 0.5, 1e-3),
        TruncatedLaplace.calibrate(1.0, 3.0, 0.5),
        TruncatedLaplace(1e9, 1.0),  # of which survival probabilities themselves have 24 bits left
    ],
)
def test_sampler_follows_its_law(law):
    draws = np.asarray(law.sample(jax.random.key(0), (200_000,)))
    assert draws.dtype == np.float64
    assert len(np.unique(draws)) > 199_900
    assert abs(draws).max() <= getattr(law, "bound", np.inf)
    # At 1 % a true sampler fails the Kolmogorov–Smirnov test for one seed in a hundred; this is one seed.
    assert stats.kstest(draws, lambda z: distribution(law, z)).pvalue > 0.01


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
    # Without a bound, a tail of 2^-(1 + 5·32 + 31), and the first bit that counts.
    bounds = {law.bound / law.scale: law.bound / law.scale, 1e-6: 1e-6, np.inf: 193 * math.log(2)}
    for ratio, end in bounds.items():
        with jax.enable_x64(True):
            found = coupled.signed_exponential.__wrapped__(None, (16,), -ratio)
        signs = np.where(np.arange(16) < 8, 1, -1)
        np.testing.assert_allclose(found, signs * end, rtol=1e-9)


@pytest.mark.slow
def test_signs_are_fair_and_say_nothing_of_sizes():
    draws = np.asarray(Laplace(1.0).sample(jax.random.key(2), (100_000,)))
    assert draws.dtype == np.float64
    assert abs((draws > 0).mean() - 0.5) < 0.006
    assert stats.ks_2samp(draws[draws > 0], -draws[draws < 0]).pvalue > 1e-3


@pytest.mark.quick_cases("1.0-1.0-0.001", "0.2-4.0-0.5", "0.5-0.2-0.1")
@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-3), (0.2, 0.1), (4.0, 0.5)])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.2])
def test_truncated_laplace_covers_a_change_split_over_two_entries(epsilon, delta, share):
    """The hockey-stick divergence of two shifted entries, integrated on a grid, is at most δ."""
    law = TruncatedLaplace.calibrate(1.0, epsilon, delta)
    span, step = np.linspace(-law.bound, law.bound + 1, 3001, retstep=True)
    edges = np.append(span, span[-1] + step)
    here, *there = (np.diff(distribution(law, edges - s)) for s in (0.0, share, 1 - share))
    excess = np.maximum(np.outer(*there) - np.exp(epsilon) * np.outer(here, here), 0).sum()
    assert excess <= delta * (1 + 1e-9)
    if share == 1.0:  # the whole change in one entry uses up δ
        assert excess == pytest.approx(delta, rel=0.02)


def test_guarantees():
    assert Gaussian(2.0).guarantee(0.5, 1e-5, **WHERE).event == dp_accounting.GaussianDpEvent(4.0)
    laplace = Laplace(2.0).guarantee(1.0, **WHERE)
    assert (laplace.epsilon, laplace.delta) == (0.5, 0.0)
    for epsilon in (1e-3, 0.7, 29.9, 30.1, 300.0):
        law = TruncatedLaplace.calibrate(3.0, epsilon, 1e-9)
        same, less = (law.guarantee(moved, **WHERE) for moved in (3.0, 1.0))
        assert (same.epsilon, same.delta) == (
            pytest.approx(epsilon),
            pytest.approx(1e-9, rel=1e-6),
        )
        assert less.epsilon < same.epsilon
        assert less.delta < same.delta


def test_any_epsilon_up_to_1e8_works_and_the_noise_vanishes():
    for epsilon in (1e-6, 1.0, 29.9, 30.1, 1e3, 1e8):
        law = TruncatedLaplace.calibrate(1.0, epsilon, 1e-9)
        draws = np.asarray(law.sample(jax.random.key(0), (1000,)))
        assert stats.kstest(draws, lambda z, law=law: distribution(law, z)).pvalue > 1e-3
    assert law.bound == pytest.approx(1.0, rel=1e-6)
    assert abs(draws).max() < 1e-6


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: TruncatedLaplace.calibrate(1.0, 1.0, 0.6), r"delta=0\.6"),
        (lambda: TruncatedLaplace.calibrate(1.0, 0.0, 0.1), "epsilon=0"),
        (lambda: TruncatedLaplace.calibrate(-1.0, 1.0, 0.1), "sensitivity=-1"),
        (
            lambda: TruncatedLaplace.calibrate(1.0, 1.0, 0.5).guarantee(1.5, **WHERE),
            r"sensitivity=1\.5 must be at most",
        ),
        (lambda: Gaussian(np.array([1.0, 0.0])), "must be finite and positive"),
        (lambda: Laplace(np.array([-1.0])), "must be finite and positive"),
        (lambda: Laplace(jnp.zeros(())), "must be finite and positive"),
        (lambda: Gaussian([0.0]), "std=0.0 must be finite and positive"),
        (lambda: TruncatedLaplace(1.0, ((1.0, -1.0),)), "bound=-1.0 must"),
    ],
)
def test_misuse_raises(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_the_grid_of_truncated_noise_follows_the_narrower_of_its_sizes():
    """Noise that is cut off far below its scale is uniform, and lies within its bound."""
    for scale, bound, width in ((1.0, 0.1, 0.1), (0.1, 1.0, 0.1)):
        assert float(TruncatedLaplace(scale, bound).width) == pytest.approx(width, rel=1e-6)
    assert (Laplace(3.0).width, Gaussian(2.0).width) == (3.0, 2.0)
