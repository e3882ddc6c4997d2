"""The worst record that one can build moves a release of an experiment by what it declares, and no more."""

import jax
import numpy as np
import pytest

from configs import next_tokens
from dpx import audit
from dpx.privacy import ADD_OR_REMOVE_ONE, REPLACE_ONE, PrivacyGuarantee
from dpx.runs import records
from experiments.cross_attention import classifiers, kernel_regression, token_memory
from experiments.cross_attention.token_memory import Positions
from experiments.dp_transformer import choice, classify, feature_center
from experiments.dp_transformer.labelled_texts import Labelled
from experiments.gram import features

KEY = jax.random.key(3)
BUDGET = {"epsilon": 1.0, "delta": 1e-5}


def lead(worst):
    """Of a user for whom one model ranks the item first, and the other nowhere."""
    config = records.load_config("recommender:synthetic,tiny")
    config.choice_budget_fraction = 0.25
    users = list(np.random.default_rng(0).random((30, 2)))
    prior = PrivacyGuarantee(1.0, 1e-5, ADD_OR_REMOVE_ONE, "user", "prior")

    def program(users):
        return choice.lead(KEY, config, *np.array(users).T)

    spent = choice.guarantee(config, prior, "user", ())
    return program, [*users, np.array(worst)], users, spent, np.arange(30)


def center(texts):
    """Of a user whose texts all have one direction."""
    x = np.random.default_rng(0).normal(size=(40 + texts, 8)).astype("f4")
    x[40:] = 1e3 * x[-1]
    users = np.minimum(np.arange(len(x)), 40)
    config = records.load_config("classify:sentences,tiny")

    def program(kept):
        own = np.isin(users, kept)
        return feature_center.private(KEY, config, x[own], users[own])

    spent = feature_center.guarantee(config, "text", ())
    return program, list(range(41)), list(range(40)), spent, None


def class_sums(texts):
    """Of a user whose texts all have one direction and one label."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40 + texts, 8))
    x[40:] = x[-1]
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    users, labels = np.minimum(np.arange(len(x)), 40), rng.integers(0, 3, len(x))
    labels[40:] = 2
    all_of_them = Labelled(x, labels, users)

    def run(kept):
        train = all_of_them.take(np.array(kept))
        return classifiers.class_sums(KEY, train.texts, classify.shares(train, 3), **BUDGET)

    return lambda kept: run(kept)[0], list(range(41)), list(range(40)), run(range(41))[2], None


def power_method():
    """Of a document along the basis, among so many that 32 bits would round by 0.06."""
    rows = np.random.default_rng(0).normal(size=(40, 5))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    start = np.linalg.qr(rows[:5].T)[0][:, :2]
    rows[0] = start[:, 0]

    def run(rows):
        return features.power_method(KEY, 1e6 * np.eye(5) + rows.T @ rows, start, 3, **BUDGET)

    return lambda rows: run(rows)[0], rows, rows[1:], run(rows)[1], None


def regression_of_prices(size):
    """Of a sale in place of another, both in corners of what is allowed or far outside."""
    rows = np.random.default_rng(0).uniform(-1, 1, (20, 5))
    rows[0] = size
    other = rows.copy()
    other[0, 2:4] *= -1

    def run(rows):
        x, y = rows[:, :4], rows[:, 4]
        return kernel_regression.private_regression(KEY, x, y, regularization=1.0, **BUDGET)

    return lambda rows: run(rows)[0], rows, other, run(rows)[1], None


def memory_of_tokens():
    """Of a document that says one thing all the time, and has the largest norm."""
    config = next_tokens.get_config("tiny")

    def drawn(count, seed):
        rng = np.random.default_rng(seed)
        keys = rng.normal(size=(count, 6, config.dim))
        keys /= np.linalg.norm(keys, axis=-1, keepdims=True) * 1.0001
        classes = rng.integers(config.num_classes + 1, size=(count, 6))
        return Positions(keys.astype(np.float32), classes, rng.random((count, 6)) < 0.8)

    public, rows = drawn(9, 1), drawn(40, 0)
    rows.keys[0], rows.classes[0], rows.mask[0] = rows.keys[0, 0], 2, True

    def program(kept):
        part = Positions(*(array[kept] for array in rows))
        total = token_memory.clipped_sum(config, part, public, config.degree)
        return np.asarray(token_memory.release_memory(config, KEY, total).moments)

    spent = token_memory.guarantee(config, "memory")
    return program, np.arange(40), np.arange(1, 40), spent, None


# With how near to what is declared the worst record comes.
WORST = {
    "lead, up": (lambda: lead((1.0, 0.0)), 0.99),
    "lead, down": (lambda: lead((0.0, 1.0)), 0.99),
    "center, a text": (lambda: center(1), 0.99),
    "center, a user": (lambda: center(30), 0.99),
    "class sums, a text": (lambda: class_sums(1), 1 - 1e-5),
    "class sums, a user": (lambda: class_sums(30), 1 - 1e-5),
    "power method": (power_method, 1 - 2e-5),
    "regression": (lambda: regression_of_prices(1.0), 0.97),
    "regression, far": (lambda: regression_of_prices(1e6), 0.97),
    "memory of tokens": (memory_of_tokens, 1 - 1e-5),
}


@pytest.mark.quick_cases("center, a text", "center, a user")
@pytest.mark.parametrize("name", WORST)
def test_the_worst_record_moves_a_release_by_what_it_declares(name):
    made, least = WORST[name]
    program, data, neighbour, spent, ids = made()
    with audit.recording():
        replayed = audit.replay(program, data, neighbour, ids=ids).check()
    assert least < replayed.largest_ratio <= 1 + 1e-6
    relation = {} if spent.neighboring == ADD_OR_REMOVE_ONE else {"neighboring": REPLACE_ONE}
    drawn = replayed.recording.epsilon(spent.delta, **relation)
    np.testing.assert_allclose(drawn, spent.epsilon, rtol=2e-3)
