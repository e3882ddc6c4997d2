"""Partial sums: exact under any cut and any order of merging, private, and the release of the one call."""

import functools
import inspect
import itertools
import pickle

import numpy as np
import pytest
from release_cases import (
    BUDGET,
    COLUMNS,
    COUNT,
    KEY,
    MASK,
    NUM_ITEMS,
    PAIRS,
    RELEASES,
    WALKS,
    histories,
    leaves,
    made,
    records_of,
    same,
)

import dpx
from dpx import gram
from dpx.noise import secure
from dpx.recommend import item_gram, popularity
from dpx.release import Blocks, Partial, merge

# Those that OpenDP has noise for.
SECURE = [
    name for name, (make, _) in RELEASES.items() if "secure" in inspect.signature(make).parameters
]
CUTS = [
    [range(COUNT)],
    [range(11), range(11, COUNT)],
    [[i] for i in range(COUNT)],
    [range(0, COUNT, 3), [], range(2, COUNT, 3), range(1, COUNT, 3)],
]


class Shuffled(Blocks):
    """Blocks that are merged in a random tree, and what they were summed to."""

    def __init__(self, blocks, seed=0):
        super().__init__({f"block {i}": block for i, block in enumerate(blocks)})
        self.blocks, self.rng, self.totals = blocks, np.random.default_rng(seed), []

    def total(self, statistic):
        parts = [statistic(block).as_block(f"block {i}") for i, block in enumerate(self.blocks)]
        while len(parts) > 1:
            one, other = (parts.pop(self.rng.integers(len(parts))) for _ in range(2))
            parts.append(merge(one, other))
        self.totals.append(parts[0])
        return parts[0]


class Unread(Blocks):
    """Blocks that nothing may be read of."""

    def __init__(self):
        super().__init__({"a": None})

    def total(self, statistic):
        pytest.fail("data were read")


def blocks_of(name, cut, seed=0):
    # A memory of no rows has no attention, and no prompts teach nothing.
    empty = name in ("popularity", "n-grams", "Gram", "sparse Gram", "item Gram", "transitions")
    return Shuffled([records_of(name, chosen) for chosen in cut if chosen or empty], seed)


def totals(name, chosen):
    """The sums of all passes over some records, with the noise of one key."""
    blocks = blocks_of(name, [chosen])
    made(name, blocks, **BUDGET)
    return blocks.totals


@pytest.mark.quick_cases("Gram")
@pytest.mark.parametrize("name", RELEASES)
def test_blocks_in_any_order_make_the_release_of_the_one_call_to_the_last_bit(name):
    expected = made(name, records_of(name), **BUDGET)
    for cut in CUTS:
        for seed in range(2):
            same(made(name, blocks_of(name, cut, seed), **BUDGET), expected)
    total, *others = totals(name, range(COUNT))
    if not others:  # a sum that was made before
        same(made(name, total, **BUDGET), expected)


@pytest.mark.quick_cases("transitions", "trees", "Gram", "popularity")
@pytest.mark.parametrize("name", RELEASES)
def test_a_record_adds_no_more_than_is_stated_whatever_block_it_is_in(name):
    reached = 0.0
    for i in range(COUNT):
        for total in totals(name, [i]):
            size = np.sqrt(sum(float(np.sum(part.astype(object) ** 2)) for part in total.sums))
            assert size <= total.largest
            reached = max(reached, size / total.largest)
            assert total.num_records == 1
    # The paper's trees assume one range for all features.
    assert reached > {"sketch, random features": 0.3, "trees, as the paper": 0.7}.get(name, 0.99)


@pytest.mark.quick_cases("Gram", "transitions", "popularity")
@pytest.mark.parametrize("name", SECURE)
def test_the_same_sums_are_released_with_discrete_noise(name):
    pytest.importorskip("opendp")
    options = {"epsilon": 1e8, "delta": 1e-6}
    found = made(name, blocks_of(name, CUTS[1]), None, secure=True, **options)
    expected = made(name, records_of(name), **options)
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=5e-3)


def part(name="a", **options):
    return popularity.statistic(histories([0, 1, 2]), **options).as_block(name)


def test_nothing_counts_twice_and_parts_fit_together():
    both = merge(part("a"), part("b"))
    assert both.blocks == {"a", "b"}
    assert both.num_records == 6
    np.testing.assert_array_equal(both.sums[0], 2 * part().sums[0])
    unnamed = popularity.statistic(histories([0]))
    kept = [item_gram.statistic(histories([0]), items=np.arange(k, k + 3)) for k in range(2)]
    for one, other, said in (
        (both, part("b"), "blocks=\\['b'\\] must be in one"),
        (part(), unnamed, "must have a name: use part.as_block"),
        (part(), part("b", l2_clip_norm=2.0), "same options"),
        (part(), gram.statistic(COLUMNS, column_bound=1.0).as_block("b"), "same statistic"),
        (part(), np.ones(3), "part=ndarray must be a Partial"),
        (kept[0].as_block("a"), kept[1].as_block("b"), "same options"),
    ):
        for pair in ((one, other), (other, one)):
            with pytest.raises(ValueError, match=said):
                merge(*pair)
    for total, name, said in (
        *((unnamed, wrong, "name=") for wrong in ("", None, 3)),
        (both, "c", "has a name already"),
    ):
        with pytest.raises(ValueError, match=said):
            total.as_block(name)


def test_a_sum_that_may_overflow_is_refused_before_it_does():
    many = Partial("counts", {}, (np.zeros(1, np.int64),), 2**31, secure.STEPS).as_block("a")
    with pytest.raises(ValueError, match="num_records=4294967296 must be less than"):
        merge(many, Partial("counts", {}, many.sums, 2**31, secure.STEPS).as_block("b"))


@pytest.mark.slow
def test_partials_are_private(tmp_path):
    total = part()
    for name in ("trees", "distances", "NoisyHead"):
        for found in (total, *totals(name, [4])):
            words = f"Partial({found.statistic!r}, 1 blocks: private data, no guarantee)"
            assert repr(found) == words
    assert not hasattr(total, "guarantee")
    with pytest.raises(ValueError, match="private records"):
        dpx.save(total, tmp_path / "total")
    assert pickle.loads(pickle.dumps(total)).blocks == total.blocks  # it travels between workers


def test_a_release_takes_a_sum_of_its_own_statistic_and_nothing_else():
    counts, matrix = part(), gram.statistic(COLUMNS, column_bound=1.0)
    options = {"column_bound": 1.0, **BUDGET}
    sampling = {**options, "mechanism": "sampling", "eta": 100.0}
    for total, wrong, said in (
        (matrix, {**options, "column_bound": 2.0}, r"column_bound=2\.0 must be 1\.0"),
        (matrix, {**options, "clip": False}, "clip=False must be True"),
        (matrix, sampling, "must be 'gaussian' for a sum"),
        (Unread(), sampling, "must be 'gaussian' for a sum"),
    ):
        with pytest.raises(ValueError, match=said):
            gram.release(KEY, total, **wrong)
    with pytest.raises(ValueError, match=r"l2_clip_norm=1\.5 must be 1\.0"):
        made("popularity", counts, **BUDGET)
    for name in RELEASES:
        said = "summed more than once" if name in ("item Gram", "transitions") else "must be of the"
        with pytest.raises(ValueError, match=said):
            made(name, matrix if name == "popularity" else counts, **BUDGET)
    for name in PAIRS:
        with pytest.raises(ValueError, match=r"what comes after .* must be None"):
            made(name, (counts, MASK), **BUDGET)


@pytest.mark.parametrize("name", ["trees", "distances"])
def test_blocks_of_trees_need_a_number_of_bins(name):
    with pytest.raises(ValueError, match="bins=None must be"):
        made(name, Unread(), **BUDGET | {"bins": None})


@pytest.mark.parametrize("name", RELEASES)
def test_wrong_arguments_raise_before_anything_is_read(name):
    for wrong, said in (({"epsilon": 0.0}, "epsilon"), ({"delta": 1.0}, "delta")):
        with pytest.raises(ValueError, match=said):
            made(name, Unread(), **BUDGET | wrong)
    error, said = (ValueError, "key must be") if name in SECURE else (TypeError, "secure")
    with pytest.raises(error, match=said):
        made(name, Unread(), **BUDGET, secure=True)


def test_sums_of_all_cuts_are_those_of_slow_exact_arithmetic():
    exact = [0] * NUM_ITEMS
    for items in map(np.unique, WALKS):
        for item in items:
            exact[item] += round(2**30 / np.sqrt(len(items)))
    parts = [popularity.statistic(histories([i])).as_block(str(i)) for i in range(COUNT)]
    for order in itertools.islice(itertools.permutations(parts), 3):
        assert functools.reduce(merge, order).sums[0].tolist() == exact
