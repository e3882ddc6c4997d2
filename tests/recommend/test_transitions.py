"""The private transitions against slow code, their sensitivity under attack, their budget and misuse."""

import jax
import numpy as np
import pytest

import dpx
from dpx.data import Histories, synthetic_histories
from dpx.noise import secure
from dpx.recommend import rounds, transitions

KEY = jax.random.key(3)
NUM_ITEMS = 12


@pytest.fixture(scope="module")
def histories():
    return synthetic_histories(300, 6, NUM_ITEMS, predictability=0.7, seed=1)


def user_matrix(items, gap_decay=0.9, max_gap=20, age_decay=0.95):
    """Of one user: how much each item comes before each other one, pair by pair."""
    matrix = np.zeros((NUM_ITEMS, NUM_ITEMS))
    for second in range(len(items)):
        for first in range(max(0, second - max_gap), second):
            if items[first] != items[second]:
                weight = gap_decay ** (second - first - 1) * age_decay ** (len(items) - 1 - second)
                matrix[items[first], items[second]] += weight
    return matrix


def positions(items):
    """(M,) of one user: where the last occurrence of each item stands, from -1 to 1."""
    stands = np.zeros(NUM_ITEMS)
    for place, item in enumerate(items):
        stands[item] = 2 * place / (len(items) - 1) - 1 if len(items) > 1 else 0
    return stands


def norm(items, before, order_weight, position_weight):
    """Of what a user adds: pairs in either order, the order of the two, and where each item stands."""
    together, lead = np.triu(before + before.T), np.triu(before - before.T)
    parts = (together, order_weight * lead, position_weight * positions(items))
    return max(np.sqrt(sum(np.linalg.norm(part) ** 2 for part in parts)), 1e-30)


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


WEIGHTS = {"gap_decay": 0.8, "max_gap": 3, "age_decay": 0.9}


@pytest.mark.parametrize("rounds", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "order_weight",
    [0.4, pytest.param(1.0, marks=pytest.mark.slow), pytest.param(0.0, marks=pytest.mark.slow)],
)
def test_huge_epsilon_is_the_sum_of_normalized_matrices(histories, order_weight, rounds):
    """Of the two orders together the mean over rounds, of their difference what the last round has.

    Without order and positions, which of two items counts as the first one does not matter.
    """
    rng = np.random.default_rng(0)
    users = [*histories.items, rng.integers(0, NUM_ITEMS, 30), [4, 4, 4], [4, 5, 4, 5], [7], []]
    early, last = np.zeros((2, NUM_ITEMS, NUM_ITEMS))
    position_weight = 0.1 if order_weight else 0.0
    for items in users:
        matrix = user_matrix(items, **WEIGHTS)
        early += matrix / norm(items, matrix, 0.0, 0.0)
        last += matrix / norm(items, matrix, order_weight, position_weight)
    together = ((rounds - 1) * (early + early.T) + last + last.T) / rounds
    lead = np.clip(last - last.T, -together, together) if order_weight else 0
    counted = {"order_weight": order_weight, "position_weight": position_weight}
    made = fit_all(users, rounds=rounds, **counted, **WEIGHTS)
    np.testing.assert_allclose(made, (together + lead) / 2, atol=5e-3)


def test_the_number_of_items_follows_from_noise_and_users():
    assert transitions.default_num_kept(1.0, 30_000, 10**6) == 1500
    assert transitions.default_num_kept(2.0, 30_000, 10**6) == 750
    assert transitions.default_num_kept(2.0, 30_000, 100) == 100


@pytest.mark.parametrize("order_weight", [0.0, 0.4, 1.0])
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
def test_a_user_changes_the_sum_by_norm_one_or_nothing(histories, worst, order_weight):
    everything = np.ones((NUM_ITEMS, NUM_ITEMS), bool)
    everything = everything if order_weight else np.triu(everything)
    of = rounds.Round(np.arange(NUM_ITEMS), everything, 0.9, 50, 0.95, order_weight, 0.1)
    before = list(histories.items[:40])
    users = ([*before, np.asarray(worst, np.int32)], before)
    more, less = (of(Histories(tuple(walks), NUM_ITEMS)).sums[0] / secure.STEPS for walks in users)
    expected = 1.0 if len(worst) > 1 else 0.0  # whoever has two items has a last one
    assert np.linalg.norm(more - less) == pytest.approx(expected, abs=1e-8)


def first_round(num_items):
    everything = np.ones((num_items, num_items), bool)
    return rounds.Round(np.arange(num_items), everything, 0.9, 20, 0.95, 0.4, 0.1)


@pytest.mark.slow
def test_squares_of_tiny_weights_do_not_vanish_from_the_norm():
    """After 7,298 repeats of an item the weights before them are 1e-162."""
    tail = np.zeros(7298, np.int32)
    history = np.concatenate([np.arange(1, 201, dtype=np.int32), tail])
    first = first_round(201)
    estimate, _ = rounds.release_rounds(KEY, Histories((history,), 201), first, 0.0, 1)
    assert np.linalg.norm(estimate.astype(np.float64)) == pytest.approx(1, rel=1e-6)


def test_later_rounds_have_the_same_sensitivity(monkeypatch, histories):
    # The sums of every round, before noise: what is left out is forced, as by one common earlier output.
    released = []
    worst = np.random.default_rng(1).integers(0, NUM_ITEMS, 100)
    noise = np.random.default_rng(2).normal(size=(3, NUM_ITEMS**2)) * 1e4
    calls = iter([*noise, *noise])

    def recording(key, exact, *, sensitivity, unit, **_):
        assert sensitivity == secure.norm_bound(secure.STEPS, NUM_ITEMS**2)  # after rounding
        released.append(exact * unit)
        return released[-1] + next(calls)

    monkeypatch.setattr("dpx.noise.release_integers", recording)
    for users in (list(histories.items), [*histories.items, worst]):
        records = Histories(tuple(users), NUM_ITEMS)
        rounds.release_rounds(KEY, records, first_round(NUM_ITEMS), 1.0, 3)
    for without, with_worst in zip(released[:3], released[3:], strict=True):
        assert np.linalg.norm(with_worst - without) == pytest.approx(1.0, abs=1e-8)
    left = [sums.reshape(NUM_ITEMS, NUM_ITEMS) for sums in released[:3]]
    pairs = [np.count_nonzero(np.triu(sums, 1)) for sums in left]
    assert pairs[0] > pairs[1] > pairs[2] > 0
    # The order of the pairs that remain, and where the items stand, in the last round alone.
    assert not np.tril(left[0]).any()
    assert not np.tril(left[1]).any()
    assert (np.tril(left[2], -1).T[np.triu(left[2], 1) == 0] == 0).all()
    assert np.tril(left[2], -1).any()
    assert np.diag(left[2]).all()


def test_the_last_round_sums_where_the_items_stand(histories):
    users = [*histories.items[:30], [4, 4, 4], [4, 5, 4, 5], [7], []]
    everything = np.eye(NUM_ITEMS, dtype=bool)
    of = rounds.Round(np.arange(NUM_ITEMS), everything, 0.9, 20, 0.95, 1.0, 0.1)
    summed = of(Histories(tuple(np.asarray(items, np.int32) for items in users), NUM_ITEMS))
    stand = np.array([positions(items) for items in users])
    expected = (stand / np.maximum(np.linalg.norm(stand, axis=1), 1e-30)[:, None]).sum(axis=0)
    found = summed.sums[0].reshape(NUM_ITEMS, NUM_ITEMS) / secure.STEPS
    np.testing.assert_allclose(found, np.diag(expected), atol=1e-8)


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


def test_the_pairs_of_a_user_are_the_same_bits_whoever_else_is_there():
    walk = np.concatenate([[item, item + 1] * 20 for item in range(5)])
    other = np.array([4, 5, 0, 1])  # of pairs that are not in order
    first = rounds.Round(np.arange(6), np.ones((6, 6), bool), 0.9, 1, 0.95, 0.0, 0.0)
    alone, together = (first.pairs(Histories(walks, 6)) for walks in ((walk,), (walk, other)))
    np.testing.assert_array_equal(together.toarray()[0], alone.toarray()[0])


@pytest.mark.slow
def test_the_rounds_keep_the_pairs_that_are_there(histories):
    many = synthetic_histories(20_000, 6, NUM_ITEMS, predictability=0.7, seed=1)
    made = transitions.fit(KEY, many, epsilon=5.0, delta=1e-5, num_kept=NUM_ITEMS)
    follows = np.zeros((NUM_ITEMS, NUM_ITEMS))
    for items in many.items:
        np.add.at(follows, (items[:-1], items[1:]), 1)
    np.fill_diagonal(follows, 0)
    found = in_catalogue_order(made, made.estimate)
    assert (found.argmax(axis=1) == follows.argmax(axis=1)).all()


@pytest.mark.slow
def test_popularity_and_rounds_compose_to_exactly_the_budget():
    # Of noise alone some pairs are left out after one round.
    empty = Histories(tuple(np.zeros(0, np.int32) for _ in range(300)), NUM_ITEMS)
    made = transitions.fit(KEY, empty, epsilon=1.3, delta=1e-4, num_kept=5, rounds=3)
    assert made.guarantee.epsilon == 1.3
    assert made.guarantee.unit == "user"
    assert "the catalogue of items is public" in made.guarantee.assumptions
    alone = dpx.Ledger().spend(made.guarantee, "transitions")
    assert alone.guarantee(1e-4).epsilon == pytest.approx(1.3, rel=1e-6)
    # By parts: the popularity, and three rounds whose first standard error is that of one round.
    std = float((made.standard_error + made.standard_error.T).max())
    parts = 1 / (dpx.gaussian_noise_multiplier(1.3, 1e-4) / np.sqrt(0.1)) ** 2 + 3 / std**2
    assert dpx.gaussian_epsilon(1 / np.sqrt(parts), 1e-4) == pytest.approx(1.3, rel=1e-5)


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
    made = transitions.fit(KEY, histories, epsilon=5.0, delta=1e-4, num_kept=8)
    users = [[0, 3, 5, 3], [11], [], list(range(NUM_ITEMS))]
    scored = made.scores([np.asarray(items, np.int32) for items in users], recency=0.6)
    place = {item: k for k, item in enumerate(made.items.tolist())}
    for user, items in enumerate(users):
        expected = made.prior_weight * made.log_popularity
        for k, item in enumerate(reversed(items)):
            if item in place:
                expected[made.items] += 0.6**k * made.weights[place[item]]
        np.testing.assert_allclose(scored[user], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("epsilon", [1e-6, 1e-2, 1e8])
def test_any_budget_works(histories, epsilon):
    made = transitions.fit(KEY, histories, epsilon=epsilon, delta=1e-5)
    assert np.isfinite(made.scores(histories.items[:5])).all()


@pytest.mark.parametrize("name", ["order_weight", "position_weight"])
def test_a_weight_whose_square_vanishes_is_refused(monkeypatch, histories, name):
    monkeypatch.setattr("dpx.recommend.popularity.release_integers", None)
    with pytest.raises(ValueError, match=f"{name}=1e-300"):
        transitions.fit(KEY, histories, epsilon=1.0, delta=1e-5, **{name: 1e-300})


@pytest.mark.parametrize(
    ("users", "recency", "named"),
    [
        ([[0]], 1.2, r"recency=1\.2"),
        ([[0], [1, -1]], 0.7, "user 1 has item -1, which must be in"),  # it would be the last one
        ([[0], [1, NUM_ITEMS]], 0.7, f"user 1 has item {NUM_ITEMS}, which must be in"),
        ([[1.9]], 0.7, r"items=\[1.9\] must be a list of whole numbers"),  # it would be another one
    ],
)
def test_what_has_no_scores_is_named(histories, users, recency, named):
    made = transitions.fit(KEY, histories, epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match=named):
        made.scores(users, recency=recency)
