"""Votes that every query pays for: who is nearest, how far a document moves them, and what is answered."""

import types

import numpy as np
import pytest

from dpx.runs.experiment import Measure
from experiments.cross_attention import rivals, votes
from experiments.cross_attention.labelled import Documents


def documents(keys, queries, labels, groups=3):
    truth = np.zeros(len(queries), int)
    return Documents(keys, labels, queries, truth, groups, keys), np.eye(groups)[labels]


def unit(rng, *shape):
    rows = rng.normal(size=shape).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def slowly(keys, queries, labels, k, groups=3):
    """One query and one document at a time, in Python's integers."""
    whole = lambda row: [round(float(x) * 2**20) for x in row]  # noqa: E731
    found = np.zeros((len(queries), groups))
    for row, query in zip(found, queries, strict=True):
        near = [sum(a * b for a, b in zip(whole(key), whole(query), strict=True)) for key in keys]
        for place in sorted(range(len(keys)), key=lambda i: (-near[i], i))[:k]:
            row[labels[place]] += 1
    return found


def test_the_nearest_vote_as_one_by_one():
    rng = np.random.default_rng(0)
    keys, labels, queries = unit(rng, 30, 4), rng.integers(3, size=30), unit(rng, 130, 4)
    keys[7:12] = keys[3]
    data, values = documents(keys, queries, labels)
    for k, found in votes.nearest_votes(data, values, (1, 5, 29, 40)).items():
        np.testing.assert_array_equal(found, slowly(keys, queries, labels, k))


@pytest.mark.parametrize("k", [1, 4, 20, 50])
def test_a_document_moves_the_votes_of_the_nearest_by_what_is_declared(k):
    """Every document leaves once, also one of several that are equal, and where all documents vote."""
    rng = np.random.default_rng(1)
    keys, labels, queries = unit(rng, 20, 3), rng.integers(3, size=20), unit(rng, 40, 3)
    keys[5:9] = keys[2]
    data, values = documents(keys, queries, labels)
    whole, worst = votes.nearest_votes(data, values, (k,))[k], 0.0
    for place in range(20):
        kept = np.arange(20) != place
        data, values = documents(keys[kept], queries, labels[kept])
        less = votes.nearest_votes(data, values, (k,))[k]
        worst = max(worst, np.linalg.norm(whole - less, axis=1).max())
    declared = votes.Paid(1, k, 0).change
    assert worst == pytest.approx(declared if k < 20 else 1.0)


def test_the_order_of_two_documents_depends_on_no_third_one():
    """All are equally near, but for how a sum is rounded: so the first in the file vote."""
    rng = np.random.default_rng(2)
    row = unit(rng, 64)
    keys = np.stack([rng.permutation(row) for _ in range(300)])
    queries, labels = np.full((3, 64), 0.125, np.float32), rng.integers(3, size=300)
    data, values = documents(keys, queries, labels)
    expected = np.bincount(labels[:100], minlength=3)
    np.testing.assert_array_equal(votes.nearest_votes(data, values, (100,))[100], [expected] * 3)


def test_each_query_is_answered_once_from_one_budget():
    config = types.SimpleNamespace(query_counts=(3, 10, 100), neighbours=(5,))
    blocks = list(votes.paid(config, 25))
    assert len({block.label for block in blocks}) == len(blocks)
    for count, most in ((3, 8), (10, 2), (100, 1)):
        for neighbours in (None, 5):
            own = [b for b in blocks if (b.num_queries, b.neighbours) == (count, neighbours)]
            assert len(own) == most
            asked = [i for block in own for i in range(25)[block.part]]
            assert len(asked) == len(set(asked)) == min(25, count * most)
            assert all(len(range(25)[block.part]) <= count for block in own)
            assert {own[0].label} == {block.measure(0.0).place for block in own}
    many = types.SimpleNamespace(query_counts=(1,), neighbours=())
    assert len(list(votes.paid(many, 1000))) == 25


def test_a_memory_wins_where_what_is_paid_for_falls_below_it():
    level = {100: (0.5, 0.0), 10_000: (0.5, 0.0)}
    paid = {"nearest": {100: (0.8, 0.0), 10_000: (0.5, 0.05)}, "fresh_noise": level}
    assert rivals.wins_from(paid, 0.7) == pytest.approx(1000)
    assert rivals.wins_from(paid, 0.8) == pytest.approx(100)
    assert rivals.wins_from(paid, 0.81) == 0.0
    assert rivals.wins_from(paid, 0.55) is None
    runs = [
        types.SimpleNamespace(
            config={"epsilon": 1.0},
            measures=[
                *(
                    Measure("nearest", "accuracy", a, settings={"queries": 9, "neighbours": k})
                    for k, a in ((5, 0.5 + shift), (20, 0.6 - shift))
                ),
                Measure("sketch", "accuracy", 0.7),
            ],
        )
        for shift in (0.0, 0.02)
    ]
    assert rivals.best_paid(runs) == {"nearest": {9: pytest.approx((0.59, 0.01))}}
