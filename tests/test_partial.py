"""Partial sums: exact under any cut and any order of merging, private, and the release of the one call."""

import functools
import inspect
import itertools
import pickle

import jax
import numpy as np
import pytest
from scipy import sparse

import dpx
from dpx import cross_attention, gram, ngram, noisy_head
from dpx.cross_attention import sketch, tree
from dpx.data import Histories
from dpx.noise import secure
from dpx.partial import Partial, drive, in_memory, merge
from dpx.recommend import item_gram, popularity, transitions

KEY = jax.random.key(5)
BUDGET = {"epsilon": 2.0, "delta": 1e-6}
RNG = np.random.default_rng(0)
NUM_ITEMS = 11
WALKS = [RNG.integers(0, NUM_ITEMS, length) for length in RNG.integers(0, 9, 23)]
TOKENS, MASK = RNG.integers(0, 4, (23, 7)), np.arange(7) < RNG.integers(0, 8, (23, 1))
COLUMNS = RNG.normal(size=(6, 23)) * np.geomspace(1e-3, 1e3, 23)


def histories(chosen):
    return Histories(tuple(WALKS[i] for i in chosen), NUM_ITEMS)


def sequences(chosen):
    return TOKENS[chosen], MASK[chosen]


def columns(chosen):
    return COLUMNS[:, chosen]


KEYS, VALUES = RNG.uniform(0, 1, (23, 2)), RNG.uniform(-1, 1, (23, 3))
KEYS[4], VALUES[4] = 1.0, -1.0
DOMAIN = cross_attention.Domain("box", 2, 3, 1.0, 1.0, 1.0, 2.0)


def memory(chosen):
    return KEYS[chosen], VALUES[chosen]


def sketch_of(**options):
    about = {"domain": DOMAIN, "features": sketch.choose_features(DOMAIN, **options)}
    return (
        functools.partial(sketch.passes, **about),
        lambda key, block, **budget: sketch.build(key, *block, **about, **budget),
        memory,
    )


def trees_of(**options):
    about = {"domain": DOMAIN, "features": tree.choose_features(DOMAIN, degree=2), "bins": 8}
    return (
        functools.partial(tree.passes, **about, **options),
        lambda key, block, **budget: tree.build(key, *block, **about, **options, **budget),
        memory,
    )


def distances_of(kind, block, **options):
    return (
        functools.partial(kind.passes, **options),
        lambda key, block, **budget: kind.build(key, *block, **options, **budget),
        block,
    )


PROMPTS = noisy_head.Features(*RNG.normal(size=(2, 23, 3)), 9 * RNG.normal(size=23))
HYPER = noisy_head.HyperParameters(1.5, 0.8, 2.0)


def prompts(chosen):
    return noisy_head.Features(*(part[chosen] for part in PROMPTS))


TABLE = {"order": 2, "vocab_size": 4, "start": 0, "unit": "row"}
# For each release its passes, its one call, and the block of some of the records.
RELEASES = {
    "popularity": (
        functools.partial(popularity.passes, l2_clip_norm=1.5),
        functools.partial(popularity.fit, l2_clip_norm=1.5),
        histories,
    ),
    "n-grams": (
        functools.partial(ngram.passes, **TABLE),
        lambda key, block, **options: ngram.fit(key, *block, **TABLE, **options),
        sequences,
    ),
    "Gram": (
        functools.partial(gram.passes, column_bound=1.5, psd=True),
        functools.partial(gram.release, column_bound=1.5, psd=True),
        columns,
    ),
    "sparse Gram": (
        functools.partial(gram.passes, column_bound=1.5, neighboring="add_or_remove_one"),
        functools.partial(gram.release, column_bound=1.5, neighboring="add_or_remove_one"),
        lambda chosen: sparse.csc_array(COLUMNS[:, chosen]),
    ),
    "item Gram": (
        functools.partial(item_gram.passes, num_kept=5),
        functools.partial(item_gram.fit, num_kept=5),
        histories,
    ),
    "transitions": (
        functools.partial(transitions.passes, num_kept=5, rounds=3),
        functools.partial(transitions.fit, num_kept=5, rounds=3),
        histories,
    ),
    "sketch": sketch_of(degree=4),
    "sketch, random features": sketch_of(features="random", num_features=8),
    "trees": trees_of(),
    "trees, as the paper": trees_of(noise="truncated_laplace", budget="paper", copies=2),
    "distances": distances_of(
        cross_attention.DPTreeHighDim,
        lambda chosen: (KEYS[chosen] * [1, 3], VALUES[chosen, 0]),
        bound=[1.0, 3.0],
        weight_bound=1.0,
        power=3,
        bins=16,
    ),
    "distances on a line": distances_of(
        cross_attention.DPTreeDistance,
        lambda chosen: (KEYS[chosen, 0], VALUES[chosen, 1]),
        bound=1.0,
        weight_bound=1.0,
        bins=8,
        noise="truncated_laplace",
    ),
    "NoisyHead": (
        functools.partial(noisy_head.moment_sums.passes, hyper=HYPER, regularization=0.1),
        lambda key, block, **budget: noisy_head.fit_one_shot(
            key, block, HYPER, regularization=0.1, **budget
        ),
        prompts,
    ),
}
# Those that OpenDP has noise for.
SECURE = [
    name
    for name, (passes, *_) in RELEASES.items()
    if "secure" in inspect.signature(passes).parameters
]
CUTS = [
    [range(23)],
    [range(11), range(11, 23)],
    [[i] for i in range(23)],
    [range(0, 23, 3), [], range(2, 23, 3), range(1, 23, 3)],
]


def blocks_of(name, cut):
    block = RELEASES[name][2]
    # A memory of no rows has no attention, and no prompts teach nothing.
    empty = name in ("popularity", "n-grams", "Gram", "sparse Gram", "item Gram", "transitions")
    return [block(list(chosen)) for chosen in cut if chosen or empty]


def merged(parts, rng):
    """Merges in a random tree."""
    parts = list(parts)
    while len(parts) > 1:
        one, other = (parts.pop(rng.integers(len(parts))) for _ in range(2))
        parts.append(merge(one, other))
    return parts[0]


def over_blocks(passes, blocks, rng):
    def sum_up(statistic):
        parts = [statistic(block).as_block(f"block {i}") for i, block in enumerate(blocks)]
        return merged(parts, rng)

    return drive(passes, sum_up)


def leaves(released):
    """The arrays of a release; its guarantee is an object."""
    found = [np.asarray(leaf) for leaf in jax.tree.leaves(released)]
    return [leaf for leaf in found if leaf.dtype != object]


VARIANTS = (
    "sketch",
    "distances",
    "sketch, random features",
    "distances on a line",
    "trees, as the paper",
)


@pytest.mark.quick_cases("popularity", "transitions", "Gram", "trees")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in VARIANTS else ()) for name in RELEASES],
)
def test_blocks_in_any_order_make_the_release_of_the_one_call_to_the_last_bit(name):
    passes, one_call, block = RELEASES[name]
    expected = one_call(KEY, block(list(range(23))), **BUDGET)
    for cut in CUTS:
        for seed in range(2):
            rng = np.random.default_rng(seed)
            found = over_blocks(passes(KEY, **BUDGET), blocks_of(name, cut), rng)
            assert found.guarantee == expected.guarantee
            for one, other in zip(leaves(found), leaves(expected), strict=True):
                assert one.tobytes() == other.tobytes()


def totals(passes, block):
    """The sums of all passes, with the noise of one key."""
    seen = []

    def sum_up(statistic):
        seen.append(statistic(block))
        return seen[-1]

    drive(passes, sum_up)
    return seen


@pytest.mark.quick_cases("sketch", "transitions", "NoisyHead", "trees", "Gram", "popularity")
@pytest.mark.parametrize("name", RELEASES)
def test_a_record_adds_no_more_than_is_stated_whatever_block_it_is_in(name):
    passes, _, block = RELEASES[name]
    reached = 0.0
    for i in range(23):
        for total in totals(passes(KEY, **BUDGET), block([i])):
            size = np.sqrt(sum(float(np.sum(part.astype(object) ** 2)) for part in total.sums))
            assert size <= total.largest
            reached = max(reached, size / total.largest)
            assert total.num_records == 1
    # The paper's trees assume one range for all features.
    assert reached > {"sketch, random features": 0.3, "trees, as the paper": 0.7}.get(name, 0.99)


@pytest.mark.parametrize("name", SECURE)
def test_the_same_sums_are_released_with_discrete_noise(name):
    pytest.importorskip("opendp")
    passes, one_call, block = RELEASES[name]
    options = {"epsilon": 1e8, "delta": 1e-6}
    blocks = blocks_of(name, CUTS[1])
    found = over_blocks(passes(None, secure=True, **options), blocks, np.random.default_rng(0))
    expected = one_call(KEY, block(list(range(23))), **options)
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=5e-3)


def part(chosen=(0, 1, 2), name="a", **options):
    return popularity.statistic(histories(chosen), **options).as_block(name)


def test_nothing_counts_twice_and_parts_fit_together():
    both = merge(part(name="a"), part(name="b"))
    assert both.blocks == {"a", "b"}
    assert both.num_records == 6
    np.testing.assert_array_equal(both.sums[0], 2 * part().sums[0])
    unnamed = popularity.statistic(histories([0]))
    for one, other, said in (
        (both, part(name="b"), "blocks=\\['b'\\] must be in one"),
        (part(), unnamed, "must have a name: use part.as_block"),
        (part(), part(name="b", l2_clip_norm=2.0), "same options"),
        (part(), gram.statistic(COLUMNS, column_bound=1.0).as_block("b"), "same statistic"),
        (part(), np.ones(3), "part=ndarray must be a Partial"),
    ):
        for pair in ((one, other), (other, one)):
            with pytest.raises(ValueError, match=said):
                merge(*pair)
    for wrong in ("", None, 3):
        with pytest.raises(ValueError, match="name="):
            unnamed.as_block(wrong)
    with pytest.raises(ValueError, match="has a name already"):
        both.as_block("c")
    kept = [item_gram.statistic(histories([0]), items=np.arange(k, k + 3)) for k in range(2)]
    with pytest.raises(ValueError, match="same options"):
        merge(kept[0].as_block("a"), kept[1].as_block("b"))


def test_a_sum_that_may_overflow_is_refused_before_it_does():
    many = Partial("counts", {}, (np.zeros(1, np.int64),), 2**31, secure.STEPS).as_block("a")
    with pytest.raises(ValueError, match="num_records=4294967296 must be less than"):
        merge(many, Partial("counts", {}, many.sums, 2**31, secure.STEPS).as_block("b"))


def test_partials_are_private(tmp_path):
    total = part()
    assert "private" in repr(total)
    assert not any(digit in repr(total).replace("1 blocks", "") for digit in "0123456789")
    assert not hasattr(total, "guarantee")
    for name in ("trees", "distances", "NoisyHead"):
        (other,) = totals(RELEASES[name][0](KEY, **BUDGET), RELEASES[name][2]([4]))
        said = f"Partial({other.statistic!r}, 1 blocks: private data, no guarantee)"
        assert repr(other.as_block("a")) == said
    with pytest.raises(ValueError, match="private records"):
        dpx.save(total, tmp_path / "total")
    assert pickle.loads(pickle.dumps(total)).blocks == total.blocks  # it travels between workers


def test_a_release_takes_its_own_statistic_and_nothing_else():
    counts, matrix = part(), gram.statistic(COLUMNS, column_bound=1.0)
    options = {"column_bound": 1.0, **BUDGET}
    with pytest.raises(ValueError, match="must be of the item popularity"):
        popularity.release(KEY, matrix, **BUDGET)
    with pytest.raises(ValueError, match="must be of the n-gram counts"):
        ngram.release(KEY, counts, unit="row", **BUDGET)
    with pytest.raises(ValueError, match=r"column_bound=2\.0 must be 1\.0"):
        gram.release(KEY, matrix, **options | {"column_bound": 2.0})
    with pytest.raises(ValueError, match="clip=False must be True"):
        gram.release(KEY, matrix, clip=False, **options)
    with pytest.raises(ValueError, match="must be 'gaussian' for a sum"):
        gram.release(KEY, matrix, mechanism="sampling", eta=100.0, **options)
    with pytest.raises(ValueError, match="must be of the Gram matrix"):
        gram.release(KEY, counts, **options)
    for release, named in (
        (tree.release, "trees of a memory"),
        (cross_attention.DPTreeDistance.release, "trees of distances"),
        (functools.partial(noisy_head.moment_sums.release, regularization=0.1), "second moments"),
    ):
        with pytest.raises(ValueError, match=f"must be of the {named}"):
            release(KEY, counts, **BUDGET)


@pytest.mark.parametrize("name", ["trees", "distances"])
def test_blocks_of_trees_need_a_number_of_bins(name):
    passes = RELEASES[name][0](KEY, **BUDGET | {"bins": None})
    with pytest.raises(ValueError, match="bins=None must be"):
        drive(passes, lambda statistic: pytest.fail("data were read"))


@pytest.mark.parametrize("name", RELEASES)
@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"epsilon": 0.0}, "epsilon"), ({"delta": 1.0}, "delta"), ({"secure": True}, "key must be")],
)
def test_wrong_arguments_raise_before_anything_is_read(name, wrong, said):
    if "secure" in wrong and name not in SECURE:
        with pytest.raises(TypeError, match="secure"):
            RELEASES[name][0](KEY, **BUDGET | wrong)
        return
    passes = RELEASES[name][0](KEY, **BUDGET | wrong)
    with pytest.raises(ValueError, match=said):
        drive(passes, lambda statistic: pytest.fail("data were read"))


def test_passes_run_once():
    passes = popularity.passes(KEY, **BUDGET)
    in_memory(passes, histories([0]))
    for wrong in (passes, popularity.passes, None):
        with pytest.raises(ValueError, match="must be passes that have not run"):
            in_memory(wrong, histories([0]))


def test_sums_of_all_cuts_are_those_of_slow_exact_arithmetic():
    weights = [np.unique(walk) for walk in WALKS]
    exact = [0] * NUM_ITEMS
    for items in weights:
        for item in items:
            exact[item] += round(2**30 / np.sqrt(len(items)))
    parts = [popularity.statistic(histories([i])).as_block(str(i)) for i in range(23)]
    for order in itertools.islice(itertools.permutations(parts), 3):
        found = functools.reduce(merge, order).sums[0]
        assert found.tolist() == exact
