"""Audits of mechanisms whose exact ε is known in closed form."""

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from scipy import stats

from dpx.audit import epsilon_lower_bound
from dpx.audit.bounds import clopper_pearson


def gaussian_samples(shift, trials, seed):
    """Log-likelihood ratios of N(shift, 1) against N(0, 1), under both."""
    rng = np.random.default_rng(seed)
    p, q = rng.normal(shift, 1, trials), rng.normal(0, 1, trials)
    return [shift * x - shift**2 / 2 for x in (p, q)]


def gaussian_epsilon(noise_multiplier, delta):
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_event.GaussianDpEvent(noise_multiplier))
    return accountant.get_epsilon(delta)


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


def test_identical_distributions_refute_nothing_at_the_stated_rate():
    # Valid at confidence 0.8 means a positive bound in at most 20 % of audits: 200 audits, 3σ.
    positive = sum(
        epsilon_lower_bound(p, q, 0.0, confidence=0.8).epsilon > 0
        for seed in range(200)
        for p, q in [np.random.default_rng(seed).normal(size=(2, 2_000))]
    )
    assert positive <= 40 + 3 * np.sqrt(200 * 0.2 * 0.8)


def test_false_claim_is_refuted():
    # Noise for shift 1 while the claim was computed for half of it.
    claim = gaussian_epsilon(2.0, 1e-3)
    assert epsilon_lower_bound(*gaussian_samples(1.0, 200_000, seed=3), 1e-3).epsilon > claim


@pytest.mark.parametrize("hits", [0, 1, 7, 99, 100])
def testclopper_pearson_inverts_the_binomial_tail(hits):
    low, high = clopper_pearson(hits, 100, 0.025)
    if hits > 0:
        assert stats.binom.sf(hits - 1, 100, low) == pytest.approx(0.025)
    else:
        assert low == 0
    if hits < 100:
        assert stats.binom.cdf(hits, 100, high) == pytest.approx(0.025)
    else:
        assert high == 1


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        ((np.zeros(10), np.zeros(10), 1.0), {}, "delta=1.0"),
        ((np.zeros(10), np.zeros(10), 0.1), {"confidence": 1.0}, "confidence=1.0"),
        ((np.zeros((10, 2)), np.zeros(10), 0.1), {}, "statistic has shape"),
        ((np.zeros(100), np.zeros(3), 0.1), {}, "other_statistic has shape"),
        ((np.zeros(100), np.full(100, np.nan), 0.1), {}, "NaN"),
    ],
)
def test_misuse_raises(arguments, options, named):
    with pytest.raises(ValueError, match=named):
        epsilon_lower_bound(*arguments, **options)
