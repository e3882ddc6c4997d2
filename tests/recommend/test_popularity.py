import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.data import Histories, leave_last_out, load_movielens_small
from dpx.noise import secure
from dpx.privacy import ADD_OR_REMOVE_ONE
from dpx.recommend import item_gram, metrics, popularity, transitions

HISTORIES = Histories(tuple(np.array(h, int) for h in ([0, 0, 1], [2], [0, 3, 1, 2], [])), 5)


def noiseless(histories, l2_clip_norm=1.0):
    return popularity.fit(
        jax.random.key(0), histories, epsilon=1e8, delta=1e-5, l2_clip_norm=l2_clip_norm
    ).counts


@pytest.mark.slow
def test_counts_users_not_events():
    assert popularity.count(HISTORIES).tolist() == [2, 2, 2, 1, 0]
    np.testing.assert_allclose(noiseless(HISTORIES, 10.0), [2, 2, 2, 1, 0], atol=1e-2)


def test_noise_is_for_the_largest_norm_after_rounding(monkeypatch):
    declared = []

    def recording(key, counts, *, sensitivity, **about):
        declared.append(sensitivity)
        return counts

    monkeypatch.setattr(popularity, "release_integers", recording)
    noiseless(HISTORIES, 10.0)
    assert declared == [secure.norm_bound(secure.STEPS, 5)]
    assert declared[0] > secure.STEPS


@pytest.mark.parametrize("l2_clip_norm", [1.0, 10.0])
def test_what_users_come_to_late_counts_more(l2_clip_norm):
    found = popularity.statistic(HISTORIES, l2_clip_norm=l2_clip_norm, age_decay=0.5)
    expected = np.zeros(5)
    # [0, 0, 1], [2], [0, 3, 1, 2] and []: what follows the last occurrence of an item counts.
    for vector in ([0.5, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0.125, 0.5, 1, 0.25, 0]):
        expected += np.array(vector) * min(1, l2_clip_norm / np.linalg.norm(vector))
    np.testing.assert_allclose(found.sums[0] / secure.STEPS * l2_clip_norm, expected, atol=1e-6)


def leading(**options):
    return popularity.leading(jax.random.key(0), HISTORIES, **options)


def test_the_items_that_lead_and_the_rest_share_a_noise_multiplier():
    fitted = leading(noise_multiplier=1e-6, budget_fraction=0.2, num_kept=3)
    assert fitted.items[0] == 2  # of a user with one item and one with four
    assert set(fitted.items.tolist()) == {0, 1, 2}
    assert 1 / fitted.noise_multiplier**2 == pytest.approx(0.8 * 1e12)
    popular = popularity.fit(jax.random.key(0), HISTORIES, epsilon=1.0, delta=1e-5)
    multiplier = popular.noise_std * np.sqrt(0.2)
    same = leading(noise_multiplier=multiplier, budget_fraction=0.2, num_kept=3)
    np.testing.assert_allclose(same.log_popularity, popular.log_probabilities(), rtol=1e-6)


def test_the_number_of_items_follows_from_noise_and_sizes_alone():
    """Not from what is summed: users without an item count as those with many."""
    asked = []

    def rule(*sizes):
        asked.append(sizes)
        return 2

    for histories in (HISTORIES, Histories((np.zeros(0, int),) * 4, 5)):
        made = popularity.leading(
            jax.random.key(0), histories, noise_multiplier=1.0, budget_fraction=0.19, rule=rule
        )
        assert len(made.items) == 2
    assert asked == [(pytest.approx(1 / 0.9), 4, 5)] * 2


def test_noise_and_probabilities():
    many = Histories(HISTORIES.items, 20_000)
    fitted = popularity.fit(jax.random.key(1), many, epsilon=1.0, delta=1e-5)
    assert np.std(fitted.counts) == pytest.approx(fitted.noise_std, rel=0.03)
    assert fitted.guarantee.event.noise_multiplier == fitted.noise_std
    log_probabilities = fitted.log_probabilities()
    assert np.exp(log_probabilities).sum() == pytest.approx(1)
    assert np.argmax(log_probabilities) == np.argmax(fitted.counts)
    longer = popularity.fit(jax.random.key(1), many, epsilon=1.0, delta=1e-5, l2_clip_norm=3.0)
    assert longer.noise_std == 3 * fitted.noise_std
    assert np.std(longer.counts) == pytest.approx(longer.noise_std, rel=0.03)


def test_what_is_public_is_an_assumption():
    fitted = popularity.fit(jax.random.key(1), HISTORIES, epsilon=1.0, delta=1e-5)
    assert fitted.guarantee.assumptions == ("the catalogue of items is public",)
    both = popularity.guarantee(1.0, 1e-5, "test")
    assert both.assumptions == (
        "the catalogue of items is public",
        "the number of users is public",
    )
    assert both.neighboring is fitted.guarantee.neighboring is ADD_OR_REMOVE_ONE


def test_items_that_lead_have_the_noise_at_least():
    """What is divided by a count of noise alone would be anything."""
    for seed in range(4):
        found = popularity.leading(
            jax.random.key(seed), HISTORIES, noise_multiplier=8.0, budget_fraction=0.25, num_kept=5
        )
        assert found.counts.min() >= 16.0


@pytest.mark.quick_cases("False-expected1")
@pytest.mark.parametrize(
    ("exclude", "expected"), [(True, (0.0204, 0.0447)), (False, (0.0121, 0.0253))]
)
def test_popularity_on_movielens_ranks_as_an_independent_implementation_does(exclude, expected):
    split = leave_last_out(load_movielens_small())
    known = split.train_and_validation
    seen = np.zeros((len(split.users), known.num_items), bool)
    for row, user in enumerate(split.users):
        seen[row, known.items[user]] = True
    counts = jnp.asarray(popularity.count(known))
    scores = jnp.broadcast_to(counts, (len(split.users), known.num_items))
    # The published numbers let the target win its ties; `target_ranks` breaks them at random.
    scores = scores.at[jnp.arange(len(split.test)), split.test].add(0.5)
    ranks = metrics.target_ranks(
        scores, jnp.asarray(split.test), exclude=jnp.asarray(seen) if exclude else None
    )
    found = float(metrics.ndcg(ranks, 10)), float(metrics.hit_rate(ranks, 10))
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("options", [{"age_decay": 2.0}, {"l2_clip_norm": -1.0}])
def test_a_statistic_by_itself_checks_its_arguments(options):
    with pytest.raises(ValueError, match="must be"):
        popularity.statistic(HISTORIES, **options)


@pytest.mark.parametrize("module", [popularity, item_gram, transitions])
def test_lists_are_no_histories(module):
    with pytest.raises(ValueError, match="histories of type list must be"):
        module.fit(jax.random.key(0), [[0, 1]], epsilon=1.0, delta=1e-5)
