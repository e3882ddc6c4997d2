"""The private transitions against slow code, their sensitivity under attack, their budget and misuse."""

import jax
import numpy as np
import pytest

import dpx
from dpx.data import Histories, synthetic_histories
from dpx.partial import in_memory
from dpx.recommend import rounds, transitions

KEY = jax.random.key(3)
NUM_ITEMS = 12


@pytest.fixture(scope="module")
def histories():
    return synthetic_histories(300, 6, NUM_ITEMS, predictability=0.7, seed=1)


def user_matrix(items, gap_decay, max_gap, age_decay, backward):
    """One user's matrix over the whole catalogue, pair by pair."""
    matrix = np.zeros((NUM_ITEMS, NUM_ITEMS))
    for second in range(len(items)):
        for first in range(max(0, second - max_gap), second):
            if items[first] != items[second]:
                weight = gap_decay ** (second - first - 1) * age_decay ** (len(items) - 1 - second)
                matrix[items[first], items[second]] += weight
                matrix[items[second], items[first]] += backward * weight
    return matrix


def in_catalogue_order(made, array):
    order = np.argsort(made.items)
    return array[np.ix_(order, order)]


def fit_all(users, **options):
    made = transitions.fit(
        KEY,
        Histories(tuple(np.asarray(items, np.int32) for items in users), NUM_ITEMS),
        epsilon=1e8,
        delta=1e-5,
        num_kept=NUM_ITEMS,
        **options,
    )
    return in_catalogue_order(made, made.estimate)


WEIGHTS = {"gap_decay": 0.8, "max_gap": 3, "age_decay": 0.9, "backward": 0.4}


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 4])
def test_huge_epsilon_is_the_sum_of_normalized_matrices(histories, rounds):
    rng = np.random.default_rng(0)
    users = [*histories.items, rng.integers(0, NUM_ITEMS, 30), [4, 4, 4], [4, 5, 4, 5], [7], []]
    expected = np.zeros((NUM_ITEMS, NUM_ITEMS))
    for items in users:
        matrix = user_matrix(items, **WEIGHTS)
        expected += matrix / max(np.linalg.norm(matrix), 1e-30)
    made = fit_all(users, rounds=rounds, **WEIGHTS)
    np.testing.assert_allclose(made, expected, atol=5e-3)


@pytest.mark.slow
def test_either_order_is_the_sum_of_normalized_triangles(histories):
    users = [*histories.items[:30], [4, 5, 4, 5, 4], [7], []]
    made = fit_all(users, rounds=1, ordered=False)
    # Which of two items counts as the first one is a matter of their popularity, and does not matter.
    expected = np.zeros((NUM_ITEMS, NUM_ITEMS))
    for items in users:
        matrix = user_matrix(items, gap_decay=0.9, max_gap=20, age_decay=0.95, backward=1.0)
        expected += matrix / max(np.linalg.norm(np.triu(matrix)), 1e-30)
    np.testing.assert_allclose(made, expected, atol=5e-3)


def test_order_counts_where_there_are_users_enough():
    assert transitions.default_ordered(1.0, 20_000)
    assert not transitions.default_ordered(1.0, 19_999)
    assert transitions.default_num_kept(1.0, 30_000, 10**6) == 1000
    assert transitions.default_num_kept(2.0, 30_000, 10**6) == 1000
    assert transitions.default_num_kept(2.0, 30_000, 10**6, ordered=True) == 500


@pytest.mark.parametrize("backward", [0.0, 0.3, 1.0, "either order"])
@pytest.mark.parametrize(
    "worst",
    [
        [],
        [3],
        [3, 3, 3, 3],
        [3, 4],
        [3, 4] * 200,
        [0, 1, 2, 1, 0] * 50,
        list(range(NUM_ITEMS)) * 30,
        np.random.default_rng(1).integers(0, NUM_ITEMS, 1000),
    ],
    ids=lambda worst: f"{len(worst)} items",
)
def test_a_user_changes_the_sum_by_norm_one_or_nothing(histories, worst, backward):
    before = list(histories.items[:40])
    either = {"ordered": False} if isinstance(backward, str) else {"backward": backward}
    options = {"rounds": 1, "max_gap": 50, **either}
    change = fit_all([*before, worst], **options) - fit_all(before, **options)
    change = np.triu(change) if isinstance(backward, str) else change  # what was released
    expected = 1.0 if len(set(np.asarray(worst).tolist())) > 1 else 0.0
    assert np.linalg.norm(change) == pytest.approx(expected, abs=5e-3)


def first_round(num_items):
    everything = np.ones((num_items, num_items), bool)
    return rounds.Round(np.arange(num_items), everything, 0.9, 20, 0.95, 0.3)


def test_squares_of_tiny_weights_do_not_vanish_from_the_norm():
    """After 7,298 repeats of an item the weights before them are 1e-162."""
    tail = np.zeros(7298, np.int32)
    history = np.concatenate([np.arange(1, 201, dtype=np.int32), tail])
    first = first_round(201)
    estimate, _ = in_memory(rounds.release_rounds(KEY, first, 0.0, 1), Histories((history,), 201))
    assert np.linalg.norm(estimate.astype(np.float64)) == pytest.approx(1, rel=1e-6)


def test_later_rounds_have_the_same_sensitivity(monkeypatch, histories):
    # The sums of every round, before noise: what is left out is forced, as by one common earlier output.
    released = []
    worst = np.random.default_rng(1).integers(0, NUM_ITEMS, 100)
    noise = np.random.default_rng(2).normal(size=(3, NUM_ITEMS**2)) * 1e4
    calls = iter([*noise, *noise])

    def recording(key, exact, *, unit, **_):
        released.append(exact * unit)
        return released[-1] + next(calls)

    monkeypatch.setattr("dpx.noise.release_integers", recording)
    for users in (list(histories.items), [*histories.items, worst]):
        records = Histories(tuple(users), NUM_ITEMS)
        in_memory(rounds.release_rounds(KEY, first_round(NUM_ITEMS), 1.0, 3), records)
    for without, with_worst in zip(released[:3], released[3:], strict=True):
        assert np.linalg.norm(with_worst - without) == pytest.approx(1.0, abs=1e-8)
    left = [np.count_nonzero(sums) for sums in released[:3]]
    assert left[0] > left[1] > left[2]


def test_a_block_is_summed_in_pieces_of_users_to_the_last_bit(monkeypatch, histories):
    whole = first_round(NUM_ITEMS)(histories)
    monkeypatch.setattr(rounds, "_PIECE_EVENTS", 37)
    cut = list(rounds._pieces(histories))
    assert len(cut) > 10
    assert [walk for users in cut for walk in histories.items[users]] == list(histories.items)
    found = first_round(NUM_ITEMS)(histories)
    np.testing.assert_array_equal(found.sums[0], whole.sums[0])
    assert (found.num_records, found.largest) == (whole.num_records, whole.largest)
    assert not found.blocks
    assert first_round(NUM_ITEMS)(Histories((), NUM_ITEMS)).num_records == 0


def test_noise_has_the_standard_error_it_states():
    empty = Histories(tuple(np.zeros(0, np.int32) for _ in range(50)), 60)
    options = {"num_kept": 60, "rounds": 1, "ordered": True}
    made = transitions.fit(KEY, empty, epsilon=1.0, delta=1e-5, **options)
    multiplier = dpx.gaussian_noise_multiplier(1.0, 1e-5) / np.sqrt(0.95)
    np.testing.assert_allclose(made.standard_error, multiplier, rtol=1e-5)
    assert np.std(made.estimate) == pytest.approx(multiplier, rel=0.05)  # 3600 entries: 1.2 % each
    assert abs(np.mean(made.estimate)) < 4 * multiplier / 60


def test_the_rounds_keep_the_pairs_that_are_there(histories):
    many = synthetic_histories(20_000, 6, NUM_ITEMS, predictability=0.7, seed=1)
    options = {"num_kept": NUM_ITEMS, "ordered": True}
    made = transitions.fit(KEY, many, epsilon=5.0, delta=1e-5, **options)
    follows = np.zeros((NUM_ITEMS, NUM_ITEMS))
    for items in many.items:
        np.add.at(follows, (items[:-1], items[1:]), 1)
    np.fill_diagonal(follows, 0)
    found = in_catalogue_order(made, made.estimate)
    assert (found.argmax(axis=1) == follows.argmax(axis=1)).all()


def test_popularity_and_rounds_compose_to_exactly_the_budget(histories):
    made = transitions.fit(KEY, histories, epsilon=1.3, delta=1e-4, num_kept=5, rounds=3)
    assert made.guarantee.epsilon == 1.3
    assert made.guarantee.unit == "user"
    assert "the catalogue of items is public" in made.guarantee.assumptions
    alone = dpx.Ledger().spend(made.guarantee, "transitions")
    assert alone.guarantee(1e-4).epsilon == pytest.approx(1.3, rel=1e-6)
    # By parts: the popularity, and three rounds whose first standard error is that of one round.
    std = float(made.standard_error.max())
    parts = 1 / (dpx.gaussian_noise_multiplier(1.3, 1e-4) / np.sqrt(0.05)) ** 2 + 3 / std**2
    assert dpx.gaussian_epsilon(1 / np.sqrt(parts), 1e-4) == pytest.approx(1.3, rel=1e-5)
    twice = alone.spend(made.guarantee, "again")
    expected = dpx.gaussian_epsilon(dpx.gaussian_noise_multiplier(1.3, 1e-4), 1e-4, compositions=2)
    assert twice.guarantee(1e-4).epsilon == pytest.approx(expected, rel=1e-6)


def test_attention_weights_cut_noise_off_and_take_a_second_step():
    estimate = np.random.default_rng(0).normal(size=(7, 7)).astype(np.float32)
    error = np.full((7, 7), 0.3, np.float32)
    kept = np.zeros((7, 7))
    for i in range(7):
        for j in range(7):
            kept[i, j] = max(estimate[i, j] - 2 * 0.3, 0) if i != j else 0
    expected = kept.copy()
    for i in range(7):
        for j in range(7):
            if i != j and kept[i].sum() > 0:
                expected[i, j] += (
                    0.5 * sum(kept[i, k] * kept[k, j] for k in range(7)) / kept[i].sum()
                )
    made = transitions.attention_weights(estimate, error, second_step=0.5)
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-6)
    plain = transitions.attention_weights(estimate, error, second_step=0)
    np.testing.assert_allclose(plain, kept, rtol=1e-5, atol=1e-6)


def test_scores_are_one_linear_head_over_the_history(histories):
    made = transitions.fit(KEY, histories, epsilon=5.0, delta=1e-4, num_kept=8, ordered=True)
    users = [[0, 3, 5, 3], [11], [], list(range(NUM_ITEMS))]
    scored = made.scores([np.asarray(items, np.int32) for items in users], recency=0.6)
    place = {item: k for k, item in enumerate(made.items.tolist())}
    for user, items in enumerate(users):
        expected = 0.03 * made.log_popularity
        for k, item in enumerate(reversed(items)):
            if item in place:
                expected[made.items] += 0.6**k * made.weights[place[item]]
        np.testing.assert_allclose(scored[user], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("epsilon", [1e-6, 1e-2, 1e8])
def test_any_budget_works(histories, epsilon):
    made = transitions.fit(KEY, histories, epsilon=epsilon, delta=1e-5)
    assert np.isfinite(made.scores(histories.items[:5])).all()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"epsilon": 0.0}, "epsilon=0.0"),
        ({"delta": 1.0}, "delta=1.0"),
        ({"num_kept": NUM_ITEMS + 1}, "num_kept=13"),
        ({"num_kept": 0}, "num_kept=0"),
        ({"popularity_budget_fraction": 1.0}, "popularity_budget_fraction=1.0"),
        ({"rounds": 0}, "rounds=0"),
        ({"max_gap": 0}, "max_gap=0"),
        ({"gap_decay": 1.5}, "gap_decay=1.5"),
        ({"age_decay": 0.0}, "age_decay=0.0"),
        ({"backward": -0.1}, "backward=-0.1"),
        ({"ordered": "no"}, "ordered='no'"),
        ({"backward": float("nan")}, "backward=nan"),
        ({"backward": float("inf")}, "backward=inf"),
    ],
)
def test_misuse_raises_before_any_noise(monkeypatch, histories, options, named):
    monkeypatch.setattr("dpx.recommend.popularity.release_integers", None)
    with pytest.raises(ValueError, match=named):
        transitions.fit(KEY, histories, **{"epsilon": 1.0, "delta": 1e-5, **options})


def test_a_recency_out_of_range_raises(histories):
    made = transitions.fit(KEY, histories, epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match=r"recency=1\.2"):
        made.scores(histories.items[:2], recency=1.2)
