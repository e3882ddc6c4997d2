"""Releases in exact arithmetic: integers of contributions, the noise, and its ε."""

import math
import sys
from functools import partial

import jax
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_mechanism
from scipy import sparse, stats

from dpx import (
    _watch,
    cross_attention,
    gram,
    ngram,
    reattention,
)
from dpx.data.histories import Histories
from dpx.noise import secure
from dpx.privacy import gaussian_epsilon
from dpx.recommend import (
    item_gram,
    popularity,
    transitions,
)

BUDGET = {"epsilon": 1.0, "delta": 1e-6}
RNG = np.random.default_rng(0)
HISTORIES = Histories([RNG.integers(0, 12, RNG.integers(1, 15)) for _ in range(9)], 12)
TOKENS, MASK = RNG.integers(0, 3, (9, 8)), np.arange(8) < RNG.integers(1, 9, (9, 1))
TABLE = {"order": 2, "vocab_size": 3, "start": 0, "unit": "row"}
COLUMNS = RNG.normal(size=(5, 12)) * np.geomspace(1e-3, 1e3, 12)
MEMORY = {"K": RNG.uniform(0, 1, (8, 2)), "V": RNG.uniform(-1, 1, (8, 2))}
MEMORY |= {"key_bound": 1.0, "value_bound": 1.0}
counted = partial(popularity.fit, histories=HISTORIES)
MECHANISMS = {
    "popularity": counted,
    "token probabilities": partial(
        reattention.token_probabilities, histories=HISTORIES, max_tokens=4
    ),
    "n-grams": partial(ngram.fit, tokens=TOKENS, mask=MASK, **TABLE),
    "transitions": partial(transitions.fit, histories=HISTORIES, num_kept=6, rounds=2),
    "item Gram": partial(item_gram.fit, histories=HISTORIES, num_kept=6),
    "Gram": partial(gram.release, X=COLUMNS, column_bound=1.5),
    "sparse Gram": partial(gram.release, X=sparse.csc_array(COLUMNS), column_bound=1.5),
    "sketch": partial(cross_attention.build, **MEMORY),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_where_the_noise_is_small_the_answer_is_the_default_one(name):
    """Their integers, and how far a record moves these, are those of a release with a key."""
    run, budget = MECHANISMS[name], BUDGET | {"epsilon": 1e8}
    found = run(key=None, secure=True, **budget)
    default = run(key=jax.random.key(0), **budget)
    for one, other in zip(*(jax.tree.leaves(fit) for fit in (found, default)), strict=True):
        if isinstance(one, (np.ndarray, jax.Array)) and np.issubdtype(one.dtype, np.floating):
            np.testing.assert_allclose(one, other, atol=5e-3)
    assert found.guarantee.epsilon == default.guarantee.epsilon
    assert found.guarantee.event == default.guarantee.event


def discrete_gaussian(values, std):
    weights = np.exp(-0.5 * np.square(values / std))
    return weights / weights.sum()


@pytest.mark.quick_cases("40.0")
@pytest.mark.parametrize("std", [1.0, 40.0, 2.0**40])
def test_noise_is_a_discrete_gaussian_of_the_declared_size(std):
    count = 20_000
    exact = RNG.integers(-(2**50), 2**50, (4, count // 4))
    noisy = secure.release_whole(exact, sensitivity=4.0, noise_multiplier=std / 4, label="test")
    assert noisy.dtype == np.int64
    draws = (noisy - exact).ravel()
    variance = std**2 + 4
    assert draws.var() == pytest.approx(variance, rel=5 * math.sqrt(2 / count))
    assert abs(draws.mean()) < 5 * math.sqrt(variance / count)
    if std == 1.0:
        values = np.arange(-5, 6)
        want = count * discrete_gaussian(np.arange(-60, 61), math.sqrt(variance))[55:66]
        found = np.array([(draws == value).sum() for value in values])
        rest = [count - found.sum()], [count - want.sum()]
        assert stats.chisquare(*np.concatenate([(found, want), rest], axis=1)).pvalue > 1e-4
    else:
        assert stats.kstest(draws / math.sqrt(variance), "norm").pvalue > 1e-4


@pytest.mark.parametrize(("change", "multiplier"), [(1, 0.3), (3, 0.7), (5, 2.0), (40, 1.0)])
@pytest.mark.parametrize("delta", [1e-3, 1e-9])
def test_epsilon_covers_the_exact_loss_of_discrete_noise(change, multiplier, delta):
    """By privacy loss distributions, rounded down, of one entry that moves by all of the sensitivity."""
    claimed = gaussian_epsilon(multiplier, delta)
    std = math.sqrt((multiplier * change) ** 2 + 4)
    exact = privacy_loss_mechanism.DiscreteGaussianPrivacyLoss(std, sensitivity=change)
    assert exact.get_delta_for_epsilon(claimed) <= delta


@pytest.mark.parametrize("shift", [(3, 4), (0, 5), (-1, 2), (4, 4)])
@pytest.mark.parametrize("multiplier", [0.5, 2.0])
def test_epsilon_covers_changes_in_several_entries(shift, multiplier):
    """δ(ε) of two entries by summation over the plane: discrete noise is not isotropic."""
    change = math.hypot(*shift)
    std = math.sqrt((multiplier * change) ** 2 + 4)
    values = np.arange(-400, 401)
    here = discrete_gaussian(values, std)
    there = [discrete_gaussian(values - moved, std) for moved in shift]
    here, there = np.outer(here, here), np.outer(*there)
    for epsilon in (0.1, 1.0, 3.0):
        delta = np.maximum(here - math.exp(epsilon) * there, 0).sum()
        if delta > 1e-12:
            assert gaussian_epsilon(multiplier, delta * (1 - 1e-9)) >= epsilon


def test_a_contribution_beyond_the_bound_counts_as_zero():
    steps = 2**20
    values = np.array([0.6, 0.8, 0.7, 0.8, 1e300])
    whole = secure.whole(values, np.array([0, 0, 1, 1, 2]), steps, 2)
    np.testing.assert_array_equal(whole, [*np.rint(np.array([0.6, 0.8]) * steps), 0, 0, steps])
    rounded = secure.whole_rows(np.array([[0.6, 0.8], [0.7, 0.8]]), steps)
    np.testing.assert_array_equal(rounded, whole[:4].reshape(2, 2))


def test_products_of_integers_are_exact():
    left = RNG.integers(-(2**18), 2**18, (70_000, 2))
    right = RNG.integers(-(2**18), 2**18, (70_000, 3))
    np.testing.assert_array_equal(
        secure.product(left, right), left.astype(object).T @ right.astype(object)
    )


def test_a_watcher_sees_the_integers_and_may_replace_what_is_released():
    class Watcher:
        def released(self, about, key, exact, unit, noisy, scale):
            self.seen = about["label"], exact[0], float(unit[0]), float(scale)
            return [exact[0] + 7]

    watcher = Watcher()
    exact = np.arange(5) + 2**61
    _watch.watch(watcher)
    try:
        found = secure.release_whole(exact, sensitivity=3, noise_multiplier=2.0, label="sums")
    finally:
        _watch.watch(None)
    np.testing.assert_array_equal(found, exact + 7)
    label, seen, unit, scale = watcher.seen
    np.testing.assert_array_equal(seen, exact)
    assert (label, unit, scale) == ("sums", 3.0, 2.0)


def test_misuse_raises_before_anything_is_spent(monkeypatch):
    with pytest.raises(ValueError, match="key must be None with secure=True"):
        counted(jax.random.key(0), secure=True, **BUDGET)
    with pytest.raises(ValueError, match="key is None: pass a secret JAX key"):
        counted(None, **BUDGET)
    with pytest.raises(ValueError, match="secure=True is for mechanism='gaussian'"):
        MECHANISMS["Gram"](key=None, mechanism="sampling", eta=100.0, secure=True, **BUDGET)
    with pytest.raises(ValueError, match="too many for exact sums"):
        secure.check_sum(2**40, 2**30)
    with pytest.raises(ValueError, match="too large for secure=True"):
        secure.release_whole(
            np.zeros(1, np.int64), sensitivity=2**30, noise_multiplier=1e20, label="test"
        )
    for name in ("opendp", "opendp.prelude"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install -e "\.\[secure\]"'):
        counted(None, secure=True, **BUDGET)


@pytest.mark.parametrize("name", ["sensitivity", "noise_multiplier"])
@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf])
def test_sizes_of_noise_are_finite_and_not_negative(name, wrong):
    """The square of a negative size would pass for that of a positive one."""
    about = {"sensitivity": 1.0, "noise_multiplier": 1.0, "label": "counts", name: wrong}
    with pytest.raises(ValueError, match=f"counts: {name}="):
        secure.release_whole(np.zeros(3, np.int64), **about)


@pytest.mark.parametrize(
    "values",
    [[np.nan], [np.inf, 0.0], [1.0] * 16, [1.0] * 8, [-1.0] * 32, [0.5] * 64],
    ids=str,
)
def test_contributions_whose_squares_leave_64_bits_count_as_zero(values):
    found = secure.whole(np.array(values), np.zeros(len(values), int), secure.STEPS, len(values))
    assert not found.any()
    fits = np.full(4, 0.5)
    assert secure.whole(fits, np.zeros(4, int), secure.STEPS, 4).all()
    rows = np.zeros((3, 2**9))
    rows[0, 0], rows[1, 0], rows[2, 0] = np.nan, np.inf, 1.0
    for steps in (2**10, 2**30):
        found = secure.whole_rows(rows, steps)
        assert not found[0].any()
        assert found[2, 0] == steps
