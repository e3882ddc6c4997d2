"""Audits of mechanisms whose exact ε is known in closed form."""

import functools

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from jax_privacy import auditing
from scipy import stats

import dpx
from dpx.audit import (
    Runs,
    SampledGaussian,
    Training,
    curve_lower_bound,
    epsilon_lower_bound,
    one_run_lower_bound,
    step_lower_bound,
)
from dpx.audit.intervals import clopper_pearson


def gaussian_samples(shift, trials, seed):
    """Log-likelihood ratios of N(shift, 1) against N(0, 1), under both."""
    rng = np.random.default_rng(seed)
    p, q = rng.normal(shift, 1, trials), rng.normal(0, 1, trials)
    return [shift * x - shift**2 / 2 for x in (p, q)]


@functools.cache
def gaussian_epsilon(noise_multiplier, delta):
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_event.GaussianDpEvent(noise_multiplier))
    return accountant.get_epsilon(delta)


@pytest.mark.quick_cases("0.3-0.001")
@pytest.mark.parametrize(("shift", "delta"), [(0.3, 1e-3), (1.0, 1e-3), (1.0, 1e-5), (1.5, 1e-3)])
def test_gaussian_mechanism_is_bounded_from_below_and_closely(shift, delta):
    true = gaussian_epsilon(1 / shift, delta)
    audit = epsilon_lower_bound(*gaussian_samples(shift, 1_000_000, seed=1), delta)
    assert 0.6 * true < audit.epsilon < true


def test_randomized_response_where_pure_epsilon_is_log_odds():
    rng = np.random.default_rng(0)
    truth = np.e / (1 + np.e)
    p, q = (rng.random(400_000) < truth), (rng.random(400_000) < 1 - truth)
    audit = epsilon_lower_bound(p.astype(float), q.astype(float), 0.0)
    assert 0.95 < audit.epsilon < 1.0


def test_lower_tail_is_used_when_only_the_other_order_leaks():
    # Under the second input the statistic is sometimes −5, under the first it never is.
    rng = np.random.default_rng(0)
    p = np.zeros(100_000)
    q = np.where(rng.random(100_000) < 0.1, -5.0, 0.0)
    audit = epsilon_lower_bound(p, q, 1e-3)
    assert audit.tail == "lower"
    assert audit.epsilon > 6.0


@pytest.mark.parametrize("hits", [0, 1, 7, 99, 100])
def test_clopper_pearson_inverts_the_binomial_tail(hits):
    low, high = clopper_pearson(hits, 100, 0.025)
    if hits > 0:
        assert stats.binom.sf(hits - 1, 100, low) == pytest.approx(0.025)
    else:
        assert low == 0
    if hits < 100:
        assert stats.binom.cdf(hits, 100, high) == pytest.approx(0.025)
    else:
        assert high == 1


# ---------------------------------------------------------------------------------------------------------
# Sampled steps


def steps_of(q, noise, steps, trials, rng):
    """Projections of runs with and without the canary, and who was sampled, drawn directly."""
    sampled = rng.random((trials, steps)) < q
    inside, outside = noise * rng.normal(size=(2, trials, steps))
    return inside + sampled, outside, sampled


def log_ratio(x, q, noise):
    return np.logaddexp(np.log1p(-q), np.log(q) + (x - 0.5) / noise**2).sum(axis=1)


def test_curve_of_one_sampled_step_is_the_closed_form():
    q, noise = 0.3, 0.8
    at = np.linspace(0.5, 3.5, 50)  # where a likelihood ratio above 1 begins
    type_one = stats.norm.sf(at, 0, noise)
    type_two = (1 - q) * stats.norm.cdf(at, 0, noise) + q * stats.norm.cdf(at, 1, noise)
    curve = SampledGaussian(q, 1).tradeoff(noise, type_one)
    assert (curve <= type_two + 1e-9).all()
    np.testing.assert_allclose(curve, type_two, atol=1e-3)


@pytest.mark.slow
def test_curve_of_composed_steps_is_that_of_simulated_runs_and_of_gaussians_in_the_limit():
    q, noise, steps = 0.3, 1.0, 8
    inside, outside, _ = steps_of(q, noise, steps, 200_000, np.random.default_rng(0))
    scores = [np.sort(log_ratio(x, q, noise)) for x in (inside, outside)]
    cuts = np.linspace(0.0, 3.0, 20)
    type_two, type_one = (np.searchsorted(s, cuts) / s.size for s in scores)
    # Four standard errors of a frequency.
    curve = SampledGaussian(q, steps).tradeoff(noise, 1 - type_one)
    np.testing.assert_allclose(curve, type_two, atol=4 * 0.5 / np.sqrt(200_000) + 1e-3)
    alpha = np.array([1e-3, 0.1, 0.5, 0.9])
    whole = SampledGaussian(1.0, 4).tradeoff(2.0, alpha)
    np.testing.assert_allclose(whole, stats.norm.cdf(stats.norm.isf(alpha) - 1.0))
    nearly = SampledGaussian(1 - 1e-9, 4).tradeoff(2.0, alpha)
    np.testing.assert_allclose(nearly, whole, atol=1e-3)


@pytest.mark.quick_cases("4.0")
@pytest.mark.parametrize("epsilon", [2.0, 4.0, 8.0])
def test_bounds_of_sampled_steps_reach_four_fifths_and_see_too_little_noise(epsilon):
    q, steps, delta = 0.5, 10, 1e-5
    noise = dpx.calibrate_dpsgd(epsilon, delta, sampling_probability=q, steps=steps)
    model = SampledGaussian(q, steps)
    for real, lowest, highest in ((noise, 0.8, 1.0), (noise / 2**0.5, 1.2, 2.0)):
        rng = np.random.default_rng(1)
        inside, outside, sampled = steps_of(q, real, steps, 20_000, rng)
        scores = [log_ratio(x, q, noise) for x in (inside, outside)]
        curve = curve_lower_bound(*scores, delta, model=model, selection_fraction=0.1)
        assert lowest < curve.epsilon / epsilon < highest
        step = step_lower_bound(inside, sampled, delta)
        assert max(lowest, 0.9) < step.epsilon / epsilon < highest
        assert step.independence > 1e-3


@pytest.mark.parametrize("shared", ["noise", "sampling"])
def test_steps_that_depend_on_each_other_are_reported(shared):
    rng = np.random.default_rng(0)
    inside, outside, sampled = steps_of(0.5, 1.5, 6, 2_000, rng)
    if shared == "noise":
        inside[:, 4] += outside[:, 1] - (inside - sampled)[:, 4]
        inside[:, 1] = sampled[:, 1] + outside[:, 1]
    else:
        inside[:, 4] += sampled[:, 1].astype(float) - sampled[:, 4]
        sampled[:, 4] = sampled[:, 1]
    assert step_lower_bound(inside, sampled, 1e-3).independence < 1e-6


@pytest.mark.slow
def test_the_statistic_that_shows_most_is_chosen():
    rng = np.random.default_rng(0)
    statistics = rng.normal(size=(2, 5_000, 3))
    statistics[0, :, 1] += 2.0
    found = curve_lower_bound(*statistics, 1e-3, model=SampledGaussian())
    assert found.statistic == 1
    assert 0.8 * gaussian_epsilon(0.5, 1e-3) < found.epsilon < gaussian_epsilon(0.5, 1e-3)
    nothing = curve_lower_bound(*statistics[:, :, 2], 1e-3, model=SampledGaussian())
    assert nothing.epsilon < 0.3


# ---------------------------------------------------------------------------------------------------------
# One run


def canaries_of(shift, number, rng):
    included = rng.random(number) < 0.5
    return rng.normal(size=number) + shift * included, included


@pytest.mark.quick_cases("3.0-20", "0.5-20", "1.5-20")
@pytest.mark.parametrize("guesses", [20, 100, 700])
@pytest.mark.parametrize("shift", [0.5, 1.5, 3.0])
def test_one_run_bounds_are_those_of_jax_privacy(shift, guesses):
    scores, included = canaries_of(shift, 2_000, np.random.default_rng(4))
    oracle = auditing.CanaryScoreAuditor(scores[included], scores[~included])
    explicit = {"threshold_strategy": auditing.Explicit(np.sort(scores)[-guesses])}
    ours = one_run_lower_bound(scores, included, 1e-4, guesses=guesses).epsilon
    assert ours == pytest.approx(oracle.epsilon_one_run(0.05, 1e-4, **explicit), abs=1e-4)
    model = SampledGaussian()
    ours = one_run_lower_bound(scores, included, 1e-4, guesses=guesses, model=model).epsilon
    theirs = oracle.epsilon_one_run_fdp(0.05, 1e-4, **explicit)
    # Ours is on a grid of noise multipliers, and never above.
    assert 0.985 * theirs <= ours <= theirs + 1e-4


MODEL = SampledGaussian(0.5, 3)
TRUE = functools.cache(MODEL.epsilon)


def wrong_for_equal_laws(rng, confidence):
    same = rng.normal(size=(2, 2_000))
    return epsilon_lower_bound(*same, 0.0, confidence=confidence).epsilon > 0


def wrong_by_curve(rng, confidence):
    inside, outside, _ = steps_of(0.5, 1.5, 3, 600, rng)
    scores = [log_ratio(x, 0.5, 1.5) for x in (inside, outside)]
    found = curve_lower_bound(*scores, 1e-3, model=MODEL, confidence=confidence)
    return found.noise_multiplier < 1.5


def wrong_by_steps(rng, confidence):
    inside, _, sampled = steps_of(0.5, 1.5, 3, 600, rng)
    found = step_lower_bound(inside, sampled, 1e-3, confidence=confidence)
    return found.epsilon > TRUE(1.5, 1e-3)


def wrong_of_one_run(rng, confidence):
    scores = canaries_of(2.0, 4_000, rng)
    options = {"model": SampledGaussian(), "guesses": 500, "confidence": confidence}
    return one_run_lower_bound(*scores, 1e-3, **options).epsilon > gaussian_epsilon(0.5, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong", [wrong_for_equal_laws, wrong_by_curve, wrong_by_steps, wrong_of_one_run]
)
def test_bounds_hold_at_the_stated_rate(wrong):
    """At confidence 0.8 a fifth may fail, plus 3σ."""
    audits = 60
    failed = sum(wrong(np.random.default_rng(seed), 0.8) for seed in range(audits))
    assert failed <= 0.2 * audits + 3 * np.sqrt(audits * 0.2 * 0.8)
    # A bound that is never wrong would be one that says nothing.
    assert failed or wrong is not wrong_by_steps


FIFTY = np.zeros((2, 50))
PAIRS, NEVER = np.zeros((5, 2)), np.zeros((5, 2), bool)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: epsilon_lower_bound(*FIFTY, 1.0), "delta=1.0"),
        (lambda: epsilon_lower_bound(*FIFTY, 0.1, confidence=1.0), "confidence=1.0"),
        (lambda: epsilon_lower_bound(PAIRS, FIFTY[0], 0.1), "statistic has shape"),
        (lambda: epsilon_lower_bound(FIFTY[0], np.zeros(3), 0.1), "other_statistic has shape"),
        (lambda: epsilon_lower_bound(FIFTY[0], FIFTY[0] * np.nan, 0.1), "NaN"),
        (lambda: SampledGaussian(0.0, 3), "sampling_probability=0.0"),
        (lambda: SampledGaussian(0.5, 0), "steps=0"),
        (lambda: curve_lower_bound(*FIFTY, 0.0, model=SampledGaussian()), "delta=0.0"),
        (
            lambda: curve_lower_bound(FIFTY.T, np.zeros((50, 3)), 0.1, model=SampledGaussian()),
            "other_statistic has shape",
        ),
        (lambda: step_lower_bound(PAIRS, NEVER, 0.1), "sampled holds 0"),
        (lambda: step_lower_bound(PAIRS, NEVER[:, 0], 0.1), "projections has"),
        (lambda: one_run_lower_bound(PAIRS[:, 0], PAIRS[:, 0], 0.1), "one bool for each"),
        (lambda: one_run_lower_bound(PAIRS[:, 0], ~NEVER[:, 0], 0.1, guesses=6), "guesses=6"),
        (lambda: one_run_lower_bound(PAIRS[:, 0] * np.nan, ~NEVER[:, 0], 0.1), "NaN"),
    ],
)
def test_misuse_raises(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_each_of_several_bounds_has_its_share_of_the_failures():
    """Of samples that a threshold tells apart: 40 of 50 measure it."""
    p, q = np.linspace(1, 2, 50), np.linspace(-2, -1, 50)
    least = 0.025 ** (1 / 40)  # 40 of 40, by Clopper and Pearson
    found = epsilon_lower_bound(p, q, 1e-3)
    assert found.true_positive_rate == pytest.approx(least)
    assert found.false_positive_rate == pytest.approx(1 - least)
    curve = curve_lower_bound(p, q, 1e-3, model=SampledGaussian())
    assert (curve.type_one, curve.type_two) == pytest.approx((1 - least, 1 - least))
    sampled = np.arange(40).reshape(20, 2) % 3 == 0
    x = sampled + np.sin(np.arange(40)).reshape(20, 2)
    steps = step_lower_bound(x, sampled, 1e-3)
    assert steps.sampling_probability == float(clopper_pearson(14, 40, 0.05 / 3)[0])
    shift = stats.ttest_ind(x[sampled], x[~sampled]).confidence_interval(1 - 2 * 0.05 / 3).low
    squares = 13 * x[sampled].var(ddof=1) + 25 * x[~sampled].var(ddof=1)
    std = np.sqrt(squares / stats.chi2.ppf(0.05 / 3, 38))
    assert steps.noise_multiplier == pytest.approx(std / shift)


def test_ties_between_scores_are_broken_by_what_coins_do_not_know():
    included = np.arange(64) >= 32
    for coins, correct in ((included, 0), (~included, 32)):
        assert one_run_lower_bound(np.zeros(64), coins, 1e-3, guesses=32).correct == correct


def test_runs_that_a_statistic_is_learned_from_are_left_out():
    """They would look more alike than they are."""
    training = Training(lambda *_: 0.0, 1.0, 1.0, 1.0, 2, 1.0)  # type: ignore[arg-type]
    draws = np.random.default_rng(0).normal(size=(2, 100, 2))
    runs = Runs(*draws, np.ones((100, 2), bool), np.zeros(100), np.zeros(100))
    inside, outside = runs.statistics(training)
    assert (len(inside), len(outside)) == (100, 90)
    np.testing.assert_allclose(outside[:, 0], (draws[1, 10:] - 0.5).sum(1))
