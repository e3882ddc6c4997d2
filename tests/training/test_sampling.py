import numpy as np
import pytest
from scipy import stats

from dpx.noise.stream import Stream
from dpx.training.sampling import poisson_batches

of_both = pytest.mark.parametrize("seed", [0, Stream(bytes(32))], ids=["PCG64", "ChaCha20"])


def batches(**changes):
    settings = {"sampling_probability": 0.1, "steps": 400, "seed": 0}
    return list(poisson_batches(1000, **(settings | changes)))


@of_both
def test_batch_sizes_follow_the_binomial_law(seed):
    """What the accountant assumes is what the sampler does: a chi-squared test over 4,000 batches."""
    sizes = np.array([mask.sum() for _, mask in batches(steps=4000, seed=seed)])
    edges = stats.binom.ppf([0.1, 0.25, 0.4, 0.6, 0.75, 0.9], 1000, 0.1)
    observed = np.bincount(np.searchsorted(edges, sizes), minlength=7)
    cumulative = np.concatenate([[0], stats.binom.cdf(edges, 1000, 0.1), [1]])
    _, p = stats.chisquare(observed, np.diff(cumulative) * len(sizes))
    assert p > 1e-3


@of_both
def test_each_example_joins_independently(seed):
    joined = np.zeros((400, 1000))
    for row, (indices, mask) in zip(joined, batches(seed=seed), strict=True):
        row[indices[mask]] += 1
    assert joined.max() == 1
    assert abs(joined.mean() - 0.1) < 5 * np.sqrt(0.09 / joined.size)
    correlation = np.corrcoef(joined.T)[np.triu_indices(1000, 1)]
    assert np.abs(correlation.mean()) < 1e-3
    assert np.var(correlation) == pytest.approx(1 / 400, rel=0.05)


def test_padding_and_shapes():
    for indices, mask in batches(multiple_of=64):
        assert len(indices) == len(mask)
        assert len(mask) % 64 == 0
        assert len(mask) - mask.sum() < 64
        assert indices.dtype == np.int32
    sampled = [indices[mask] for indices, mask in batches(multiple_of=64)]
    assert all(np.array_equal(a, b[m]) for a, (b, m) in zip(sampled, batches(), strict=True))


def test_children_of_one_seed_have_samples_of_their_own():
    one, other = (batches(seed=child, steps=3) for child in np.random.SeedSequence(5).spawn(2))
    for (a, m), (b, n) in zip(one, other, strict=True):
        assert set(a[m]) != set(b[n])


@of_both
def test_groups_are_drawn_and_each_record_is_in_one(seed):
    def members(seed):
        every = batches(sampling_probability=1.0, groups=2, steps=4, seed=seed)
        return [set(indices[mask].tolist()) for indices, mask in every]

    first, second, third, fourth = members(seed)
    assert (third, fourth) == (first, second)
    assert not first & second
    assert first | second == set(range(1000))
    # Five standard deviations of the number of members among all records, and among every other one.
    assert abs(len(first) - 500) < 5 * np.sqrt(250)
    assert abs(len(first & set(range(0, 1000, 2))) - 250) < 5 * np.sqrt(125)
    assert members(1)[0] != first


def test_empty_batches_still_come():
    empty = list(poisson_batches(10, sampling_probability=1e-6, steps=3, seed=0, multiple_of=4))
    assert [mask.sum() for _, mask in empty] == [0, 0, 0]
    assert all(len(indices) == 4 for indices, _ in empty)


def test_everything_is_taken_with_probability_one():
    ((indices, mask),) = poisson_batches(7, sampling_probability=1, steps=1, seed=0)
    assert mask.all()
    assert indices.tolist() == list(range(7))


def test_resumes_at_any_step_and_takes_a_seed_sequence():
    sequence = np.random.SeedSequence(5)
    whole = batches(seed=sequence, steps=10)
    tail = batches(seed=sequence, steps=10, start=6)
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(whole[6:], tail, strict=True))
    assert not np.array_equal(whole[0][0], whole[1][0])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"sampling_probability": 0.0}, "sampling_probability"),
        ({"sampling_probability": 1.1}, "sampling_probability"),
        ({"sampling_probability": None}, "sampling_probability"),
        ({"steps": -1}, "steps"),
        ({"steps": float("inf")}, "steps"),
        ({"multiple_of": 0}, "multiple_of"),
        ({"multiple_of": 2.5}, "multiple_of"),
        ({"start": float("nan")}, "start"),
    ],
)
def test_bad_arguments_are_named(changes, name):
    with pytest.raises(ValueError, match=name):
        batches(**changes)


@pytest.mark.parametrize("count", [0, 2.5, float("nan"), None, "10"])
def test_bad_number_of_examples_is_named(count):
    with pytest.raises(ValueError, match="num_examples"):
        poisson_batches(count, sampling_probability=0.1, steps=1, seed=0)


@of_both
def test_samples_are_cut_off_at_random_and_have_one_shape(seed):
    """Each of the sampled records is kept with the same probability, and so is each pair of them."""
    whole = batches(steps=3000, seed=seed)
    cut = batches(steps=3000, seed=seed, max_batch_size=105, multiple_of=8)
    kept = np.zeros(1000)
    for (indices, mask), (few, real) in zip(whole, cut, strict=True):
        assert few.shape == real.shape == (112,)
        assert real.sum() == min(mask.sum(), 105)
        assert set(few[real]) <= set(indices[mask])
        assert (np.diff(few[real]) > 0).all()
        if mask.sum() > 105:
            kept[few[real]] += 1
            kept[indices[mask]] -= real.sum() / mask.sum()
    spread = kept.std() / np.sqrt(sum(m.sum() > 105 for _, m in whole) * 0.1)
    assert 0.05 < spread < 0.5  # the standard deviation of a draw that keeps nine of ten
    assert abs(kept[:500].sum() - kept[500:].sum()) < 300


def test_without_one_record_at_most_one_other_is_kept_instead(monkeypatch):
    """Replays of neighbours couple their samples by record."""
    from dpx import _watch

    whole = batches(max_batch_size=100)
    monkeypatch.setattr(_watch, "record_ids", lambda count: np.delete(np.arange(1000), 7))
    less = [
        np.delete(np.arange(1000), 7)[indices[mask]]
        for indices, mask in poisson_batches(
            999, sampling_probability=0.1, steps=400, seed=0, max_batch_size=100
        )
    ]
    for (indices, mask), other in zip(whole, less, strict=True):
        changed = set(indices[mask]) ^ set(other)
        assert changed <= {7} or (7 in changed and len(changed) == 2)


def test_a_seed_may_be_any_whole_number():
    for seed in (4.0, np.int64(4)):
        for found, want in zip(batches(steps=2, seed=seed), batches(steps=2, seed=4), strict=True):
            np.testing.assert_array_equal(found[0], want[0])


def test_groups_are_drawn_apart_from_samples():
    settings = {"sampling_probability": 0.5, "steps": 1, "groups": 2}
    masks = [next(poisson_batches(2, seed=seed, **settings))[1] for seed in range(2000)]
    # Each of two records is in the first batch with a probability of a quarter: 125 pairs, give or take 11.
    assert abs(sum(mask.sum() == 2 for mask in masks) - 125) < 50
