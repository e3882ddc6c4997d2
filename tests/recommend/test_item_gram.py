"""The private item–item recommender against slow code, its limit, its budget and misuse."""

import jax
import numpy as np
import pytest

from dpx.data import synthetic_histories
from dpx.recommend import item_gram, popularity

KEY = jax.random.key(3)


@pytest.fixture(scope="module")
def histories():
    return synthetic_histories(400, 6, 30, predictability=0.7, seed=1)


@pytest.mark.slow
def test_huge_epsilon_is_the_exact_gram_matrix_of_the_most_popular_items(histories):
    made = item_gram.fit(KEY, histories, epsilon=1e8, delta=1e-5, num_kept=8)
    weights = np.zeros(30)
    for items in histories.items:
        distinct = set(items.tolist())
        for item in distinct:
            weights[item] += 1 / np.sqrt(len(distinct))
    assert made.items.tolist() == np.argsort(-weights).tolist()[:8]
    place = {item: k for k, item in enumerate(made.items.tolist())}
    expected = np.zeros((8, 8))
    for items in histories.items:
        kept = [place[item] for item in set(items.tolist()) if item in place]
        for i in kept:
            for j in kept:
                expected[i, j] += 1 / len(kept)
    np.testing.assert_allclose(made.matrix, expected, atol=5e-3)


@pytest.mark.parametrize("epsilon", [1e-6, 1e-2, 1e8])
def test_any_budget_works(histories, epsilon):
    made = item_gram.fit(KEY, histories, epsilon=epsilon, delta=1e-5)
    assert np.isfinite(made.matrix).all()
    assert np.isfinite(made.log_popularity).all()


def test_ease_solves_the_constrained_ridge_regression(histories):
    vectors = item_gram.user_vectors(histories).toarray()
    weights = item_gram.ease(vectors.T @ vectors, 5.0)
    for j in range(30):
        others = np.delete(np.arange(30), j)
        X, y = vectors[:, others], vectors[:, j]
        column = np.linalg.solve(X.T @ X + 5.0 * np.eye(29), X.T @ y)
        np.testing.assert_allclose(weights[others, j], column, atol=1e-8)
        assert weights[j, j] == 0


def test_item_attention_is_a_row_softmax_without_the_diagonal():
    matrix = np.random.default_rng(0).normal(size=(6, 6))
    weights = item_gram.item_attention(matrix, 0.5)
    for i in range(6):
        exps = [0.0 if j == i else np.exp(matrix[i, j] / 0.5) for j in range(6)]
        np.testing.assert_allclose(weights[i], np.array(exps) / sum(exps), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_scores_add_the_history_and_the_popularity(histories):
    made = item_gram.fit(KEY, histories, epsilon=5.0, delta=1e-4, num_kept=10)
    weights = item_gram.ease(made.matrix, 20.0)
    vectors = item_gram.user_vectors(histories)[:7]
    scored = item_gram.scores(made, weights, vectors, prior_weight=0.3)
    for user in range(7):
        expected = 0.3 * made.log_popularity
        for item in set(histories.items[user].tolist()):
            for i, kept in enumerate(made.items):
                if kept == item:
                    expected[made.items] += weights[i]
        np.testing.assert_allclose(scored[user], expected, rtol=1e-4, atol=1e-5)
    dense = item_gram.scores(made, weights.tolist(), vectors.toarray().tolist(), prior_weight=0.3)
    np.testing.assert_array_equal(dense, scored)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "width", "named"),
    [(10, 29, r"vectors has shape \(2, 29\)"), (10, 31, "vectors"), (9, 30, "weights has shape")],
)
def test_scores_are_of_the_items_that_were_fitted(histories, kept, width, named):
    """More columns than the catalogue has would be left out, as if nobody had had these items."""
    made = item_gram.fit(KEY, histories, epsilon=5.0, delta=1e-4, num_kept=10)
    with pytest.raises(ValueError, match=named):
        item_gram.scores(made, np.eye(kept), np.ones((2, width)), prior_weight=0.1)


def test_the_rule_keeps_more_items_with_more_users_and_less_noise():
    kept = [popularity.default_num_kept(std, 31_013, 23_715) for std in (7.0, 2.0, 0.6, 1e-6)]
    assert kept == sorted(kept)
    assert kept[-1] == 4096
    assert popularity.default_num_kept(1.0, 100, 15) == 15


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: item_gram.ease(np.zeros((2, 3)), 1.0), "shape"),
        (lambda: item_gram.item_attention(np.eye(1), 1.0), "K=1"),
    ],
)
def test_matrices_that_fit_nothing_raise(call, named):
    with pytest.raises(ValueError, match=named):
        call()
