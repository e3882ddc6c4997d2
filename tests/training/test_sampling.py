"""Batches of Poisson sampling and of random allocation: their laws, and what each draw follows from."""

from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpx import _watch
from dpx.noise.stream import Stream
from dpx.training import Poisson, allocated_batches, poisson_batches

RECORDS, Q = 1000, 0.1
of_both = pytest.mark.parametrize("seed", [0, Stream(bytes(32))], ids=["PCG64", "ChaCha20"])
by_both = pytest.mark.parametrize("draw", [poisson_batches, allocated_batches])


def padded(draw=poisson_batches, count: Any = RECORDS, **changes):
    settings: dict[str, Any] = {"sampling_probability": Q, "steps": 400, "seed": 0}
    return list(draw(count, **(settings | changes)))


def batches(draw=poisson_batches, count=RECORDS, **changes):
    return [indices[mask] for indices, mask in padded(draw, count, **changes)]


def joined(drawn):
    """(steps, records): which records each batch has."""
    found = np.zeros((len(drawn), RECORDS))
    for row, chosen in zip(found, drawn, strict=True):
        np.add.at(row, chosen, 1)
    assert found.max() == 1
    return found


def steps_of(**changes):
    """(epochs, records): the step of each record in each epoch of ten."""
    found = joined(batches(allocated_batches, **changes)).reshape(-1, 10, RECORDS)
    assert (found.sum(axis=1) == 1).all()
    return found.argmax(axis=1)


@of_both
@by_both
def test_batch_sizes_follow_the_binomial_law(draw, seed):
    """What the accountant assumes: a chi-squared test over 4,000 batches, of which epochs give one each."""
    every = 1 if draw is poisson_batches else 10
    sizes = np.array([len(chosen) for chosen in batches(draw, steps=4000, seed=seed)[::every]])
    edges = stats.binom.ppf([0.1, 0.25, 0.4, 0.6, 0.75, 0.9], RECORDS, Q)
    observed = np.bincount(np.searchsorted(edges, sizes), minlength=7)
    cumulative = np.concatenate([[0], stats.binom.cdf(edges, RECORDS, Q), [1]])
    _, p = stats.chisquare(observed, np.diff(cumulative) * len(sizes))
    assert p > 1e-3


@of_both
def test_each_example_joins_independently(seed):
    found = joined(batches(seed=seed))
    assert abs(found.mean() - Q) < 5 * np.sqrt(0.09 / found.size)
    correlation = np.corrcoef(found.T)[np.triu_indices(RECORDS, 1)]
    assert np.abs(correlation.mean()) < 1e-3
    assert np.var(correlation) == pytest.approx(1 / 400, rel=0.05)


@of_both
def test_each_record_is_in_one_batch_of_each_epoch(seed):
    steps_of(seed=seed)
    # Epochs of two and three steps, of which the last is not finished.
    drawn = batches(allocated_batches, sampling_probability=0.4, steps=9, seed=seed)
    for begin, end in ((0, 3), (3, 5), (5, 8)):
        assert sorted(np.concatenate(drawn[begin:end])) == list(range(RECORDS))
    assert 250 < len(drawn[8]) < 750


@of_both
def test_steps_of_an_epoch_are_uniform_and_records_independent(seed):
    found = steps_of(steps=4000, seed=seed)
    _, p = stats.chisquare(np.bincount(found.ravel(), minlength=10))
    assert p > 1e-3
    together = (found[:, :, None] == found[:, None, :100]).mean(axis=0)[100:]
    assert together.mean() == pytest.approx(Q, abs=5 * 0.3 / np.sqrt(400 * together.size))


@of_both
def test_each_epoch_is_drawn_anew(seed):
    found = steps_of(steps=4000, seed=seed)
    again = (found[1:] == found[:-1]).mean()
    assert again == pytest.approx(Q, abs=5 * 0.3 / np.sqrt(found[1:].size))
    assert not np.array_equal(found, steps_of(steps=4000, seed=1 << 40))


@by_both
def test_it_goes_on_at_any_step_and_is_padded(draw):
    sequence = np.random.SeedSequence(5)
    whole = batches(draw, steps=47, seed=sequence)
    for start in (3, 10, 29, 46):
        tail = batches(draw, steps=47, seed=sequence, start=start)
        assert all(map(np.array_equal, whole[start:], tail))
    assert not np.array_equal(whole[0], whole[1])
    wide = padded(draw, steps=47, seed=sequence, multiple_of=64)
    for (indices, mask), chosen in zip(wide, whole, strict=True):
        assert len(indices) == len(mask) == -(-len(chosen) // 64) * 64
        assert indices.dtype == np.int32
        assert np.array_equal(indices[mask], chosen)


@pytest.mark.parametrize("seed", [4.0, np.int64(4)])
def test_a_seed_may_be_any_whole_number(seed):
    assert all(map(np.array_equal, batches(steps=2, seed=seed), batches(steps=2, seed=4)))


def test_children_of_one_seed_have_samples_of_their_own():
    one, other = (batches(seed=child, steps=3) for child in np.random.SeedSequence(5).spawn(2))
    for a, b in zip(one, other, strict=True):
        assert set(a) != set(b)


def test_batches_may_be_empty_or_have_everything():
    empty = padded(count=10, sampling_probability=1e-6, steps=3, multiple_of=4)
    assert [(len(indices), mask.sum()) for indices, mask in empty] == [(4, 0)] * 3
    assert batches(count=7, sampling_probability=1, steps=1)[0].tolist() == list(range(7))


@of_both
def test_groups_are_drawn_and_each_record_is_in_one(seed):
    def members(seed):
        return [set(x) for x in batches(sampling_probability=1.0, groups=2, steps=4, seed=seed)]

    first, second, third, fourth = members(seed)
    assert (third, fourth) == (first, second)
    assert not first & second
    assert first | second == set(range(1000))
    # Five standard deviations of the number of members among all records, and among every other one.
    assert abs(len(first) - 500) < 5 * np.sqrt(250)
    assert abs(len(first & set(range(0, 1000, 2))) - 250) < 5 * np.sqrt(125)
    assert members(1)[0] != first


def test_each_step_samples_from_one_group():
    about = {"sampling_probability": 0.3, "steps": 3000, "seed": 5}
    drawn = batches(count=60, **about, groups=3)
    taken = np.array([np.isin(np.arange(60), chosen) for chosen in drawn])
    groups = [taken[first::3].any(axis=0) for first in range(3)]
    assert (np.sum(groups, axis=0) == 1).all()
    for first, group in enumerate(groups):
        assert taken[first::3][:, group].mean() == pytest.approx(0.3, abs=0.01)
    (last,) = batches(count=60, **about, groups=3, start=2999)
    assert np.array_equal(last, drawn[-1])
    one = about | {"steps": 1}  # one group is ordinary sampling
    assert np.array_equal(batches(count=60, **one, groups=1), batches(count=60, **one))


def test_groups_are_drawn_apart_from_samples():
    settings = {"sampling_probability": 0.5, "steps": 1, "groups": 2}
    sizes = [len(batches(count=2, seed=seed, **settings)[0]) for seed in range(2000)]
    # Each of two records is in the first batch with a probability of a quarter: 125 pairs, give or take 11.
    assert abs(sizes.count(2) - 125) < 50


@of_both
def test_samples_are_cut_off_at_random_and_have_one_shape(seed):
    """Each of the sampled records is kept with the same probability, and so is each pair of them."""
    whole = batches(steps=3000, seed=seed)
    cut = padded(steps=3000, seed=seed, max_batch_size=105, multiple_of=8)
    kept = np.zeros(1000)
    for sampled, (few, real) in zip(whole, cut, strict=True):
        assert few.shape == real.shape == (112,)
        assert real.sum() == min(len(sampled), 105)
        assert set(few[real]) <= set(sampled)
        assert (np.diff(few[real]) > 0).all()
        if len(sampled) > 105:
            kept[few[real]] += 1
            kept[sampled] -= real.sum() / len(sampled)
    spread = kept.std() / np.sqrt(sum(len(x) > 105 for x in whole) * 0.1)
    assert 0.05 < spread < 0.5  # the standard deviation of a draw that keeps nine of ten
    assert abs(kept[:500].sum() - kept[500:].sum()) < 300


@pytest.mark.parametrize(
    ("draw", "changes"),
    [(poisson_batches, {}), (poisson_batches, {"max_batch_size": 100}), (allocated_batches, {})],
    ids=["poisson", "cut", "allocation"],
)
def test_a_record_moves_its_own_batches_alone(draw, changes, monkeypatch):
    """Where samples are cut off, at most one other is kept instead of it."""
    whole, ids = batches(draw, **changes), np.delete(np.arange(RECORDS), 7)
    monkeypatch.setattr(_watch, "record_ids", lambda count: ids)
    for full, less in zip(whole, batches(draw, RECORDS - 1, **changes), strict=True):
        changed = set(full) ^ set(ids[less])
        assert changed <= {7} or (changes and 7 in changed and len(changed) == 2)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        *(({"sampling_probability": bad}, "sampling_probability") for bad in (0.0, 1.1, None)),
        *(({"steps": bad}, "steps") for bad in (-1, float("inf"))),
        *(({"multiple_of": bad}, "multiple_of") for bad in (0, 2.5)),
        ({"start": float("nan")}, "start"),
        *(({"count": bad}, "num_examples") for bad in (0, 2.5, float("nan"), None, "10")),
    ],
)
def test_bad_arguments_are_named(changes, name):
    with pytest.raises(ValueError, match=name):
        padded(**changes)


def test_a_limit_may_be_numpys():
    assert type(Poisson(np.int64(9)).max_batch_size) is int
    assert Poisson(np.float64(9)) == Poisson(9)
