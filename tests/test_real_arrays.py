"""What is no array of real numbers is refused by name wherever records, queries or samples come in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import sparse

import dpx
from dpx import audit, cross_attention, gram, ngram, noise, noisy_head
from dpx.cross_attention import baselines
from dpx.data import Histories
from dpx.recommend import item_gram

KEY = jax.random.key(0)
BUDGET = {"epsilon": 1.0, "delta": 1e-5}
MEMORY = {"key_bound": 1.0, "value_bound": 1.0}
WEIGHED = {"bound": 1.0, "weight_bound": 1.0}
COUNTS = {"order": 1, "vocab_size": 3, "start": 0, "unit": "line"}
ROWS = np.full((4, 2), 0.25)
COLUMN = ROWS[:, 0]
TOKENS, MASK = np.ones((2, 3), int), np.ones((2, 3), bool)
HYPER = noisy_head.HyperParameters(2.0, 2.0, 2.0)
PROMPTS = np.full((2, 3, 2), 0.5)


@functools.cache
def memory(name):
    """A release to query, made when a test first asks for it."""
    of_points = cross_attention.DPTreeHighDim.build
    of_pairs = functools.partial(cross_attention.build, KEY, ROWS, ROWS, clip=True, **MEMORY)
    return {
        "sketch": lambda: of_pairs(degree=2, epsilon=1e6, delta=0.1),
        "trees": lambda: of_pairs(mechanism="tree", degree=1, **BUDGET),
        "distances": lambda: of_points(KEY, ROWS, COLUMN, **WEIGHED, **BUDGET),
        "line": lambda: cross_attention.DPTree.build(KEY, COLUMN, sensitivity=1.0, **BUDGET),
        "counts": lambda: ngram.fit(KEY, TOKENS, MASK, **COUNTS, **BUDGET),
    }[name]()


def features(**changed):
    parts = {"query": ROWS, "context": ROWS, "target": COLUMN} | changed
    return noisy_head.Features(**parts)


def fit(data):
    settings = {
        **BUDGET,
        "sampling": "poisson",
        "batch_size": 2,
        "steps": 1,
        "l2_clip_norm": 1.0,
        "key": KEY,
    }
    return dpx.training.fit(
        lambda w, x: jnp.sum(w * x), jnp.zeros(2), data, optimizer=optax.sgd(0.1), **settings
    )


ENTRIES = {
    "X": (ROWS, lambda a: gram.release(KEY, a, column_bound=1.0, **BUDGET)),
    "X blocks": (ROWS, lambda a: gram.statistic([a], column_bound=1.0)),
    "matrix": (ROWS[:2], gram.attention),
    "matrix psd": (ROWS[:2], gram.project_psd),
    "matrix ease": (ROWS[:2], lambda a: item_gram.ease(a, 1.0)),
    "K": (ROWS, lambda a: cross_attention.build(KEY, a, ROWS, **MEMORY, **BUDGET)),
    "V": (ROWS, lambda a: cross_attention.build(KEY, ROWS, a, **MEMORY, **BUDGET)),
    "Q": (ROWS, lambda a: memory("sketch").query(a)),
    "Q sums": (ROWS, lambda a: memory("sketch").sums(a)),
    "Q trees": (ROWS, lambda a: memory("trees").query(a)),
    "Q sums of trees": (ROWS, lambda a: memory("trees").sums(a)),
    "x": (ROWS, lambda a: cross_attention.DPTreeHighDim.build(KEY, a, COLUMN, **WEIGHED, **BUDGET)),
    "weights": (
        COLUMN,
        lambda a: cross_attention.DPTreeHighDim.build(KEY, ROWS, a, **WEIGHED, **BUDGET),
    ),
    "x line": (
        COLUMN,
        lambda a: cross_attention.DPTreeDistance.build(KEY, a, COLUMN, **WEIGHED, **BUDGET),
    ),
    "y": (ROWS, lambda a: memory("distances").query(a)),
    "y line": (COLUMN, lambda a: memory("line").query(a)),
    "values": (
        COLUMN,
        lambda a: cross_attention.DPTree.build(KEY, a, sensitivity=1.0, **BUDGET),
    ),
    "V mean": (ROWS, lambda a: baselines.mean_of_values(KEY, a, value_bound=1.0, **BUDGET)),
    "prompts.x": (PROMPTS, lambda a: noisy_head.featurize(noisy_head.Prompts(a, PROMPTS[..., 0]))),
    "prompts.y": (
        PROMPTS[..., 0],
        lambda a: noisy_head.featurize(noisy_head.Prompts(PROMPTS, a)),
    ),
    "features.query": (
        ROWS,
        lambda a: noisy_head.fit_one_shot(
            KEY, features(query=a), HYPER, regularization=0.1, **BUDGET
        ),
    ),
    "features.target": (COLUMN, lambda a: noisy_head.ridge(features(target=a), 0.1)),
    "gamma": (ROWS[:2], lambda a: noisy_head.population_risk(a, 3)),
    "context": (ROWS, lambda a: noisy_head.predict(ROWS[:2], features(context=a))),
    "tokens": (TOKENS, lambda a: ngram.fit(KEY, a, MASK, **COUNTS, **BUDGET)),
    "mask": (MASK, lambda a: ngram.fit(KEY, TOKENS, a, **COUNTS, **BUDGET)),
    "tokens asked": (TOKENS, lambda a: memory("counts").log_prob(a)),
    "a user's items": (TOKENS[0], lambda a: Histories([a], 3)),
    "data": (ROWS, fit),
    "count": (
        COLUMN,
        lambda a: noise.release(KEY, a, sensitivity=1.0, noise_multiplier=1.0, label="count"),
    ),
    "statistic": (np.arange(40.0), lambda a: audit.epsilon_lower_bound(a, np.arange(40.0), 0.1)),
}
WRONG = {
    "masked": lambda a: np.ma.array(a, mask=a > 0),
    "strings": lambda a: a.astype(str),
    "times": lambda a: a.astype("timedelta64[s]"),
    "complex": lambda a: a.astype(complex),
    "records": lambda a: np.zeros(a.shape, [("a", float)]),
}


@pytest.mark.quick_cases("prompts.x-masked", "statistic-masked", "data-masked")
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ENTRIES)
def test_an_array_of_anything_but_real_numbers_is_named(name, wrong):
    array, call = ENTRIES[name]
    # DPTree and sums take the name of their argument from the first word here.
    named = name if name in ("a user's items",) else name.split()[0]
    with pytest.raises(ValueError, match=rf"^{named}(\[.*\])?(=| is a masked| has dtype)"):
        call(WRONG[wrong](array))


@pytest.mark.parametrize("name", ["K", "Q", "data", "features.query", "statistic"])
def test_a_list_of_masked_arrays_is_one(name):
    """NumPy would make an array of all that is under the masks."""
    array, call = ENTRIES[name]
    with pytest.raises(ValueError, match="is a masked array"):
        call(list(np.ma.array(array, mask=array > 0)))


def test_rows_of_several_lengths_are_named():
    with pytest.raises(ValueError, match="K must be an array, with rows of one length"):
        cross_attention.build(KEY, [[0.1, 0.2], [0.3]], ROWS[:2], **MEMORY, **BUDGET)


@pytest.mark.quick_cases("<lambda>0-mechanism0")
@pytest.mark.parametrize("mechanism", [{}, {"mechanism": "sampling", "eta": 9.0}])
@pytest.mark.parametrize(
    "same",
    [
        lambda a: a.astype(">f8"),
        lambda a: a.astype(np.longdouble),
        lambda a: np.repeat(a, 2, axis=1)[:, ::2],
        sparse.csr_array,
    ],
)
def test_a_gram_matrix_is_that_of_the_numbers_however_they_are_stored(mechanism, same):
    X = np.random.default_rng(0).uniform(-0.5, 0.5, (2, 6))
    options = {"column_bound": 1.0, "epsilon": 100.0, "delta": 1e-5} | mechanism
    expected = gram.release(KEY, X, **options).matrix
    found = gram.release(KEY, same(X), **options).matrix
    # Sums of dense and sparse columns may round differently in their last 64-bit digits.
    np.testing.assert_allclose(found, expected, rtol=1e-6)
