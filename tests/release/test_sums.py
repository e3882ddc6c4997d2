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
from dpx.cross_attention import sketch, trees
from dpx.data import Histories
from dpx.noise import secure
from dpx.recommend import item_gram, popularity, transitions
from dpx.release import Blocks, Partial, merge

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
    return functools.partial(sketch.build, **about), memory


def trees_of(**options):
    about = {"domain": DOMAIN, "features": trees.choose_features(DOMAIN, degree=2), "bins": 8}
    return functools.partial(trees.build, **about, **options), memory


PROMPTS = noisy_head.Features(*RNG.normal(size=(2, 23, 3)), 9 * RNG.normal(size=23))
HYPER = noisy_head.HyperParameters(1.5, 0.8, 2.0)


def prompts(chosen):
    return noisy_head.Features(*(part[chosen] for part in PROMPTS))


TABLE = {"order": 2, "vocab_size": 4, "start": 0, "unit": "row"}
# For each release the function that makes it, and the block of some of the records.
RELEASES = {
    "popularity": (functools.partial(popularity.fit, l2_clip_norm=1.5), histories),
    "n-grams": (functools.partial(ngram.fit, **TABLE), sequences),
    "Gram": (functools.partial(gram.release, column_bound=1.5, psd=True), columns),
    "sparse Gram": (
        functools.partial(gram.release, column_bound=1.5, neighboring="add_or_remove_one"),
        lambda chosen: sparse.csc_array(COLUMNS[:, chosen]),
    ),
    "item Gram": (functools.partial(item_gram.fit, num_kept=5), histories),
    "transitions": (functools.partial(transitions.fit, num_kept=5, rounds=3), histories),
    "sketch": sketch_of(degree=4),
    "sketch, random features": sketch_of(features="random", num_features=8),
    "trees": trees_of(),
    "trees, as the paper": trees_of(noise="truncated_laplace", budget="paper", copies=2),
    "distances": (
        functools.partial(
            cross_attention.DPTreeHighDim.build,
            bound=[1.0, 3.0],
            weight_bound=1.0,
            power=3,
            bins=16,
        ),
        lambda chosen: (KEYS[chosen] * [1, 3], VALUES[chosen, 0]),
    ),
    "distances on a line": (
        functools.partial(
            cross_attention.DPTreeDistance.build,
            bound=1.0,
            weight_bound=1.0,
            bins=8,
            noise="truncated_laplace",
        ),
        lambda chosen: (KEYS[chosen, 0], VALUES[chosen, 1]),
    ),
    "NoisyHead": (
        functools.partial(noisy_head.fit_one_shot, hyper=HYPER, regularization=0.1),
        prompts,
    ),
}
# Those whose records are two arguments, which are one block.
PAIRS = ("n-grams", *(name for name in RELEASES if name.startswith(("sketch", "trees", "dist"))))
# Those that OpenDP has noise for.
SECURE = [
    name for name, (make, _) in RELEASES.items() if "secure" in inspect.signature(make).parameters
]
CUTS = [
    [range(23)],
    [range(11), range(11, 23)],
    [[i] for i in range(23)],
    [range(0, 23, 3), [], range(2, 23, 3), range(1, 23, 3)],
]


def blocks_of(name, cut):
    block = RELEASES[name][1]
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


class Shuffled(Blocks):
    """Blocks that are merged in a random tree, and what they were summed to."""

    def __init__(self, blocks, seed=0):
        super().__init__({f"block {i}": block for i, block in enumerate(blocks)})
        self.blocks, self.rng, self.totals = blocks, np.random.default_rng(seed), []

    def total(self, statistic):
        parts = [statistic(block).as_block(f"block {i}") for i, block in enumerate(self.blocks)]
        self.totals.append(merged(parts, self.rng))
        return self.totals[-1]


class Unread(Blocks):
    """Blocks that nothing may be read of."""

    def __init__(self):
        super().__init__({"a": None})

    def total(self, statistic):
        pytest.fail("data were read")


def made(name, data, key=KEY, **options):
    """The release of records, of blocks or of a sum."""
    if name not in PAIRS:
        return RELEASES[name][0](key, data, **options)
    return RELEASES[name][0](key, *(data if isinstance(data, tuple) else (data, None)), **options)


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


@pytest.mark.quick_cases("Gram")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in VARIANTS else ()) for name in RELEASES],
)
def test_blocks_in_any_order_make_the_release_of_the_one_call_to_the_last_bit(name):
    expected = made(name, RELEASES[name][1](list(range(23))), **BUDGET)
    for cut in CUTS:
        for seed in range(2):
            found = made(name, Shuffled(blocks_of(name, cut), seed), **BUDGET)
            assert found.guarantee == expected.guarantee
            for one, other in zip(leaves(found), leaves(expected), strict=True):
                assert one.tobytes() == other.tobytes()


def totals(name, block):
    """The sums of all passes, with the noise of one key."""
    blocks = Shuffled([block])
    made(name, blocks, **BUDGET)
    return blocks.totals


@pytest.mark.quick_cases("transitions", "trees", "Gram", "popularity")
@pytest.mark.parametrize("name", RELEASES)
def test_a_record_adds_no_more_than_is_stated_whatever_block_it_is_in(name):
    reached = 0.0
    for i in range(23):
        for total in totals(name, RELEASES[name][1]([i])):
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
    found = made(name, Shuffled(blocks_of(name, CUTS[1])), None, secure=True, **options)
    expected = made(name, RELEASES[name][1](list(range(23))), **options)
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


@pytest.mark.slow
def test_partials_are_private(tmp_path):
    total = part()
    assert "private" in repr(total)
    assert not any(digit in repr(total).replace("1 blocks", "") for digit in "0123456789")
    assert not hasattr(total, "guarantee")
    for name in ("trees", "distances", "NoisyHead"):
        (other,) = totals(name, RELEASES[name][1]([4]))
        assert repr(other) == f"Partial({other.statistic!r}, 1 blocks: private data, no guarantee)"
    with pytest.raises(ValueError, match="private records"):
        dpx.save(total, tmp_path / "total")
    assert pickle.loads(pickle.dumps(total)).blocks == total.blocks  # it travels between workers


def test_a_release_takes_a_sum_of_its_own_statistic_and_nothing_else():
    counts, matrix = part(), gram.statistic(COLUMNS, column_bound=1.0)
    options = {"column_bound": 1.0, **BUDGET}
    with pytest.raises(ValueError, match=r"column_bound=2\.0 must be 1\.0"):
        gram.release(KEY, matrix, **options | {"column_bound": 2.0})
    with pytest.raises(ValueError, match="clip=False must be True"):
        gram.release(KEY, matrix, clip=False, **options)
    for other in (matrix, Unread()):
        with pytest.raises(ValueError, match="must be 'gaussian' for a sum"):
            gram.release(KEY, other, mechanism="sampling", eta=100.0, **options)
    with pytest.raises(ValueError, match=r"l2_clip_norm=1\.5 must be 1\.0"):
        made("popularity", counts, **BUDGET)
    for name in RELEASES:
        said = "summed more than once" if name in ("item Gram", "transitions") else "must be of the"
        with pytest.raises(ValueError, match=said):
            made(name, matrix if name == "popularity" else counts, **BUDGET)
    for name in PAIRS:
        with pytest.raises(ValueError, match=r"what comes after .* must be None"):
            made(name, (counts, MASK), **BUDGET)


@pytest.mark.parametrize("name", ["popularity", "Gram", "sketch", "trees", "distances"])
def test_a_sum_that_was_made_before_is_released_as_its_records_are(name):
    (sums,) = totals(name, RELEASES[name][1](list(range(23))))
    found, expected = (
        made(name, sums, **BUDGET),
        made(name, Shuffled([RELEASES[name][1](list(range(23)))]), **BUDGET),
    )
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("name", ["trees", "distances"])
def test_blocks_of_trees_need_a_number_of_bins(name):
    with pytest.raises(ValueError, match="bins=None must be"):
        made(name, Unread(), **BUDGET | {"bins": None})


@pytest.mark.parametrize("name", RELEASES)
@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"epsilon": 0.0}, "epsilon"), ({"delta": 1.0}, "delta"), ({"secure": True}, "key must be")],
)
def test_wrong_arguments_raise_before_anything_is_read(name, wrong, said):
    known = "secure" not in wrong or name in SECURE
    with pytest.raises(ValueError if known else TypeError) as raised:
        made(name, Unread(), **BUDGET | wrong)
    assert (said if known else "secure") in str(raised.value)


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
