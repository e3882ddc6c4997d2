"""Every release that is a sum over records, made of any of the same 23 records."""

import functools

import jax
import numpy as np
from scipy import sparse

from dpx import cross_attention, gram, ngram, noisy_head
from dpx.cross_attention import sketch, trees
from dpx.data import Histories
from dpx.recommend import item_gram, popularity, transitions

KEY = jax.random.key(5)
BUDGET = {"epsilon": 2.0, "delta": 1e-6}
COUNT, NUM_ITEMS = 23, 11
RNG = np.random.default_rng(0)
WALKS = [RNG.integers(0, NUM_ITEMS, length) for length in RNG.integers(0, 9, COUNT)]
TOKENS, MASK = RNG.integers(0, 4, (COUNT, 7)), np.arange(7) < RNG.integers(0, 8, (COUNT, 1))
COLUMNS = RNG.normal(size=(6, COUNT)) * np.geomspace(1e-3, 1e3, COUNT)
KEYS, VALUES = RNG.uniform(0, 1, (COUNT, 2)), RNG.uniform(-1, 1, (COUNT, 3))
KEYS[4], VALUES[4] = 1.0, -1.0
PROMPTS = noisy_head.Features(*RNG.normal(size=(2, COUNT, 3)), 9 * RNG.normal(size=COUNT))
DOMAIN = cross_attention.Domain("box", 2, 3, 1.0, 1.0, 1.0, 2.0)


def histories(chosen):
    return Histories(tuple(WALKS[i] for i in chosen), NUM_ITEMS)


def sequences(chosen):
    return TOKENS[chosen], MASK[chosen]


def columns(chosen):
    return COLUMNS[:, chosen]


def memory(chosen):
    return KEYS[chosen], VALUES[chosen]


def prompts(chosen):
    return noisy_head.Features(*(part[chosen] for part in PROMPTS))


def sketch_of(**options):
    features = sketch.choose_features(DOMAIN, **options)
    return functools.partial(sketch.build, domain=DOMAIN, features=features), memory


def trees_of(**options):
    about = {"domain": DOMAIN, "features": trees.choose_features(DOMAIN, degree=2), "bins": 8}
    return functools.partial(trees.build, **about, **options), memory


def distances(kind, **options):
    return functools.partial(kind.build, weight_bound=1.0, **options)


# For each release the function that makes it, and the block of some of the records.
RELEASES = {
    "popularity": (functools.partial(popularity.fit, l2_clip_norm=1.5), histories),
    "n-grams": (
        functools.partial(ngram.fit, order=2, vocab_size=4, start=0, unit="row"),
        sequences,
    ),
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
        distances(cross_attention.DPTreeHighDim, bound=[1.0, 3.0], power=3, bins=16),
        lambda chosen: (KEYS[chosen] * [1, 3], VALUES[chosen, 0]),
    ),
    "distances on a line": (
        distances(cross_attention.DPTreeDistance, bound=1.0, bins=8, noise="truncated_laplace"),
        lambda chosen: (KEYS[chosen, 0], VALUES[chosen, 1]),
    ),
    "NoisyHead": (
        functools.partial(
            noisy_head.fit_one_shot,
            hyper=noisy_head.HyperParameters(1.5, 0.8, 2.0),
            regularization=0.1,
        ),
        prompts,
    ),
}
# Those whose records are two arguments, which are one block.
PAIRS = ("n-grams", *(name for name in RELEASES if name.startswith(("sketch", "trees", "dist"))))


def records_of(name, chosen=range(COUNT)):
    """Records, by number, in the form that a release takes."""
    return RELEASES[name][1](list(chosen))


def made(name, data, key=KEY, **options):
    """The release of records, of blocks or of a sum."""
    if name not in PAIRS:
        return RELEASES[name][0](key, data, **options)
    return RELEASES[name][0](key, *(data if isinstance(data, tuple) else (data, None)), **options)


def leaves(released):
    """The arrays of a release; its guarantee is an object."""
    found = [np.asarray(leaf) for leaf in jax.tree.leaves(released)]
    return [leaf for leaf in found if leaf.dtype != object]


def same(one, other):
    """Asserts that two releases have one guarantee and arrays of the same bits."""
    assert one.guarantee == other.guarantee
    for ours, theirs in zip(leaves(one), leaves(other), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.tobytes() == theirs.tobytes()
