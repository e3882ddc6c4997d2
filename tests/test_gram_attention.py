"""The symmetric attention layer: its limit, its ledger, its state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dpx
from dpx import gram
from dpx.attention import softmax
from dpx.nn.gram_attention import GramAttention, Release

KEY = jax.random.key(0)


@pytest.fixture
def X():
    return np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)


def released(X, epsilon):
    bound = float(np.linalg.norm(X, axis=0).max())
    return gram.release(KEY, X, epsilon=epsilon, delta=1e-6, column_bound=bound)


def test_huge_epsilon_is_softmax_attention_with_equal_queries_and_keys(X):
    values = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 3)), jnp.float32)
    layer = GramAttention(released(X, 1e8), dpx.Ledger())
    query = jnp.asarray(X) * X.shape[1] ** 0.5  # undoes half of the reference's 1/√D
    expected = softmax(query, jnp.asarray(X), values)
    np.testing.assert_allclose(layer(values), expected, atol=2e-3)
    np.testing.assert_allclose(layer().sum(axis=1), 1, rtol=1e-5)


def test_the_ledger_holds_the_cost_once_however_often_the_layer_is_called(X):
    ledger = dpx.Ledger()
    layer = GramAttention(released(X, 1.0), ledger)
    before = ledger.guarantee(1e-6)
    layer(), layer()
    assert ledger.guarantee(1e-6) == before
    assert before.epsilon == pytest.approx(1.0)
    GramAttention(
        gram.release(jax.random.key(1), X, epsilon=1.0, delta=1e-6, column_bound=1.0), ledger
    )
    assert 1.4 < ledger.guarantee(1e-6).epsilon < 1.6  # √2 in μ, not 2


def test_the_release_is_state_and_not_a_parameter(X):
    layer = GramAttention(released(X, 1.0), dpx.Ledger(), kernel="cosh")
    assert not jax.tree.leaves(nnx.state(layer, nnx.Param))
    assert [leaf.shape for leaf in jax.tree.leaves(nnx.state(layer, Release))] == [(5, 5)]
    run = nnx.jit(lambda layer, values: layer(values))
    values = jnp.ones((5, 2))
    np.testing.assert_allclose(run(layer, values), layer(values), rtol=1e-5)


def test_misuse_raises(X):
    release = released(X, 1.0)
    with pytest.raises(ValueError, match="kernel='relu'"):
        GramAttention(release, dpx.Ledger(), kernel="relu")
    with pytest.raises(ValueError, match="row for each"):
        GramAttention(release, dpx.Ledger())(jnp.ones((4, 2)))
    ledger = dpx.Ledger().spend(release.guarantee, "one column moves anywhere")
    moved = gram.release(KEY, X, epsilon=1.0, delta=1e-6, column_bound=1.0, beta=0.1)
    with pytest.raises(ValueError, match="unit"):
        GramAttention(moved, ledger)
