"""Programs that forbid implicit promotion of types and ranks get the same releases as all others."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpx import cross_attention, gram, ngram, noise, noisy_head, training
from dpx.data import Histories
from dpx.recommend import item_gram, popularity, transitions

KEY = jax.random.key(0)
BUDGET = {"epsilon": 3.0, "delta": 1e-4}
RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(12, 3)).astype(np.float32)
KEYS = RNG.random((8, 1)).astype(np.float32)
HISTORIES = Histories([RNG.integers(0, 9, size=6) for _ in range(20)], 9)
BOUNDS = noisy_head.HyperParameters(1.0, 1.0, 1.0)


def fitted(**options):
    def loss(params, row):
        return jnp.sum(jnp.square(params["w"] @ row + params["b"]))

    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(2)}
    sizes = {"sampling": "poisson", "batch_size": 4, "steps": 2, "key": KEY, "log_every": 1}
    clip = {"l2_clip_norm": 1.0, "optimizer": optax.adam(0.1)}
    return training.fit(loss, params, (ROWS,), **(BUDGET | sizes | clip | options)).params


def privatized(*, jit):
    setting = {"l2_clip_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 4}
    private = training.privatize(key=KEY, **setting)
    state = private.init(ROWS)
    return (jax.jit(private.update) if jit else private.update)(ROWS, state)[0]


def remembered(**options):
    K, V = KEYS, np.sin(KEYS)
    bounds = {"key_bound": 1.0, "value_bound": 1.0}
    memory = cross_attention.build(KEY, K, V, **bounds, **BUDGET, **options)
    return memory.query(KEYS[:2])


def measured():
    about = {"weight_bound": 1.0, "bound": 1.0, "bins": 4}
    trees = cross_attention.DPTreeHighDim.build(KEY, KEYS, np.ones(8), **about, **BUDGET)
    return trees.query(KEYS[:2])


def counted():
    table = {"order": 2, "vocab_size": 4, "start": 0, "unit": "row", "l2_clip_norm": 2.0}
    tokens = np.arange(24).reshape(4, 6) % 4
    return ngram.fit(KEY, tokens, np.ones((4, 6), bool), **table, **BUDGET)[0]


def prompts():
    return noisy_head.sample_features(KEY, 6, 5, 2, response_clip=1.0, feature_radius=1.0)


GRAM = {"column_bound": 1.0, **BUDGET}
DESCENT = {"regularization": 0.1, "step_size": 0.1, "steps": 2}
PROGRAMS = {
    "fit": fitted,
    "fit, adaptive": lambda: fitted(l2_clip_norm=training.AdaptiveClipNorm(1.0, count_noise=2.0)),
    "fit, banded": lambda: fitted(noise="banded", bands=2),
    "fit, bfloat16": lambda: fitted(compute_dtype=jnp.bfloat16),
    "privatize": lambda: privatized(jit=False),
    "privatize, jitted": lambda: privatized(jit=True),
    "noise": lambda: noise.release(KEY, ROWS, sensitivity=1.0, noise_multiplier=1.0, label="x"),
    "noise of a law": lambda: noise.release(
        KEY, ROWS, sensitivity=1.0, law=noise.TruncatedLaplace(1.0, 3.0), label="x"
    ),
    "integers": lambda: noise.release_integers(
        KEY, np.arange(5), sensitivity=1.0, unit=1.0, noise_multiplier=1.0, label="x"
    ),
    "Laplace": lambda: noise.Laplace(1.0).sample(KEY, (5,)),
    "gram": lambda: gram.release(KEY, ROWS.T, **GRAM).matrix,
    "gram, traced": lambda: jax.jit(lambda X: gram.release(KEY, X, **GRAM).matrix)(ROWS.T),
    "gram, sampled": lambda: (
        gram.release(KEY, ROWS.T, mechanism="sampling", eta=200.0, **GRAM).matrix
    ),
    "sketch": remembered,
    "random features": lambda: remembered(features="random", num_features=8),
    "distances": measured,
    "tree": lambda: remembered(mechanism="tree"),
    "NoisyHead": lambda: noisy_head.fit(KEY, prompts(), hyper=BOUNDS, **DESCENT, **BUDGET).gamma,
    "NoisyHead in one shot": lambda: (
        noisy_head.fit_one_shot(KEY, prompts(), hyper=BOUNDS, regularization=0.1, **BUDGET).gamma
    ),
    "n-grams": counted,
    "popularity": lambda: popularity.fit(KEY, HISTORIES, l2_clip_norm=1.0, **BUDGET)[0],
    "transitions": lambda: transitions.fit(KEY, HISTORIES, num_kept=5, **BUDGET).estimate,
    "item Gram": lambda: item_gram.fit(KEY, HISTORIES, num_kept=5, **BUDGET).matrix,
}


@pytest.mark.quick_cases("gram")
@pytest.mark.filterwarnings("ignore::dpx.cross_attention.MemoryWarning")
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=list(PROGRAMS))
def test_a_release_does_not_need_implicit_promotion(program):
    expected = program()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.tree.map(np.testing.assert_array_equal, program(), expected)
