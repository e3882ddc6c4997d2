"""Attention from a Gram matrix, its error bounds, and the layer that holds a release."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dpx
from dpx import gram
from dpx.attention import dot_product_attention
from dpx.nn.gram_attention import GramAttention, Release

KEY = jax.random.key(0)


@pytest.fixture
def X():
    return np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)


def released(X, epsilon):
    bound = float(np.linalg.norm(X, axis=0).max())
    return gram.release(KEY, X, epsilon=epsilon, delta=1e-6, column_bound=bound)


@pytest.mark.slow
def test_huge_epsilon_is_softmax_attention_with_equal_queries_and_keys(X):
    values = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 3)), jnp.float32)
    layer = GramAttention(released(X, 1e8), dpx.Ledger())
    query = jnp.asarray(X) * X.shape[1] ** 0.5  # undoes half of the reference's 1/√D
    expected = dot_product_attention(query, jnp.asarray(X), values)
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


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_exponential_kernel_is_softmax_attention_with_equal_queries_and_keys(scale):
    x = scale * np.random.default_rng(0).normal(size=(2, 6, 3))
    expected = np.zeros((2, 6, 6))
    for head, i in np.ndindex(2, 6):
        logits = [x[head, i] @ x[head, j] for j in range(6)]
        weights = [math.exp(logit - max(logits)) for logit in logits]
        expected[head, i] = np.array(weights) / sum(weights)
    actual = gram.attention(x @ np.swapaxes(x, 1, 2))
    np.testing.assert_allclose(actual, expected, atol=1e-4 * max(1, scale))


@pytest.mark.quick_cases("cosh")
@pytest.mark.parametrize("kernel", ["exp", "cosh"])
def test_a_temperature_makes_attention_of_many_columns_more_than_the_identity(kernel):
    X = np.random.default_rng(0).normal(size=(6, 5000)) / 6**0.5
    by_itself, tempered = (
        gram.attention(X @ X.T, kernel=kernel, temperature=t) for t in (1.0, 5000.0)
    )
    np.testing.assert_array_equal(by_itself, np.eye(6))
    want = gram.attention(X @ X.T / 5000.0, kernel=kernel)
    np.testing.assert_allclose(tempered, want, rtol=1e-5)
    assert tempered.max() < 0.25
    release = gram.release(KEY, X, epsilon=1.0, delta=1e-6, column_bound=2.0)
    layer = GramAttention(release, dpx.Ledger(), kernel=kernel, temperature=5000.0)
    np.testing.assert_allclose(layer(), tempered, atol=0.01)
    for wrong in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match=f"temperature={wrong}"):
            gram.attention(X @ X.T, kernel=kernel, temperature=wrong)


@pytest.mark.slow
def test_cosh_kernel_agrees_with_its_definition_and_does_not_overflow():
    A = np.random.default_rng(0).normal(size=(5, 5))
    expected = np.cosh(A) / np.cosh(A).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(gram.attention(A, kernel="cosh"), expected, rtol=1e-5)
    large = gram.attention(np.array([[1e6, -1e6], [0.0, 5e5]]), kernel="cosh")
    np.testing.assert_allclose(large, [[0.5, 0.5], [0.0, 1.0]], atol=1e-6)
    gradient = jax.grad(lambda A: gram.attention(A, kernel="cosh")[0, 0])(jnp.zeros((2, 2)))
    assert np.isfinite(gradient).all()


@pytest.mark.quick_cases("cosh")
@pytest.mark.parametrize("kernel", ["exp", "cosh"])
def test_bounds_hold_and_the_papers_is_vacuous(kernel):
    rng = np.random.default_rng(0)
    for r, rho, n in [(0.09, 0.01, 8), (0.09, 1.0, 4), (0.5, 0.1, 16), (2.0, 0.05, 3)]:
        bounds = gram.utility_bounds(n, logit_bound=r, relative_error=rho)
        for _ in range(200):
            A = r * rng.choice([-1, 1, rng.uniform(-1, 1)], size=(n, n))
            B = A + rho * r * rng.choice([-1, 1], size=(n, n))
            exact, released = (np.asarray(gram.attention(M, kernel=kernel)) for M in (A, B))
            assert np.abs(exact - released).max() <= bounds.corrected * (1 + 1e-4)
            assert np.abs(exact - 1 / n).max() <= bounds.uniform * (1 + 1e-4)
        if r < 0.5:
            assert bounds.uniform < bounds.paper
    assert gram.utility_bounds(8, logit_bound=0.09, relative_error=0.0).corrected == 0


@pytest.mark.parametrize(("logit_bound", "relative_error"), [(3.0, 0.02), (1.0, 0.3), (30.0, 0.2)])
def test_bounds_of_large_logits_are_those_of_probabilities(logit_bound, relative_error):
    known = gram.utility_bounds(3, logit_bound=logit_bound, relative_error=relative_error)
    assert known.corrected <= 1 - np.exp(-2 * relative_error * logit_bound) + 1e-9
    assert known.uniform <= 2 / 3 + 1e-9
    rng = np.random.default_rng(0)
    for _ in range(200):
        matrix = rng.choice([-1.0, 1.0], (3, 3)) * logit_bound
        moved = matrix + rng.choice([-1.0, 1.0], (3, 3)) * relative_error * logit_bound
        exact, other = (np.asarray(gram.attention(A)) for A in (matrix, moved))
        assert np.abs(exact - other).max() <= known.corrected + 1e-6
        assert np.abs(exact - 1 / 3).max() <= known.uniform + 1e-6


def test_entry_error_bounds_are_those_of_their_tails():
    """Of 15 entries, and of 25 squares with two tails each."""
    found = gram.gaussian_entry_error(2.0, 5, failure_probability=0.1)
    assert found == pytest.approx(2 * math.sqrt(2 * math.log(15 / 0.1)))
    found = gram.sampling_entry_error(500, 5, diagonal_bound=1.05, failure_probability=0.1)
    x = math.log(50 / 0.1)
    assert found == pytest.approx(1.05 * (2 * math.sqrt(x / 500) + 2 * x / 500))


@pytest.mark.slow
def test_entry_error_bounds_hold_at_their_probability():
    n, failure = 6, 0.05
    with jax.enable_x64(True):
        keys = jax.random.split(KEY, 4_000)
        covariance = jnp.asarray(np.diag(np.linspace(0.2, 1.0, n)) + 0.05)
        about = {"epsilon": 1.0, "delta": 1e-6, "column_bound": 1.0}
        made = jax.vmap(lambda key: gram.release(key, np.zeros((n, 1)), **about))(keys)
        means = jax.vmap(lambda key: gram.wishart_mean(key, covariance, 500))(keys)
    largest = np.abs(np.asarray(made.matrix)).max(axis=(1, 2))
    bound = gram.gaussian_entry_error(made.noise_std, n, failure_probability=failure)
    assert (largest > bound).mean() < failure
    assert bound < 1.5 * np.quantile(largest, 1 - failure)
    largest = np.abs(np.asarray(means - covariance)).max(axis=(1, 2))
    bound = gram.sampling_entry_error(500, n, diagonal_bound=1.05, failure_probability=failure)
    assert (largest > bound).mean() < failure
    assert bound < 3 * np.quantile(largest, 1 - failure)


def layer(ledger=None, **options):
    return GramAttention(released(np.ones((5, 8)), 1.0), ledger or dpx.Ledger(), **options)


def of_another_unit():
    about = {"epsilon": 1.0, "delta": 1e-6, "column_bound": 1.0, "max_column_change": 0.1}
    moved = gram.release(KEY, np.ones((5, 8)), **about)
    return dpx.Ledger().spend(moved.guarantee, "one column moves a little")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: layer(kernel="relu"), "kernel='relu'"),
        (lambda: layer()(jnp.ones((4, 2))), "row for each"),
        (lambda: layer(of_another_unit()), "unit"),
        (lambda: gram.attention(np.zeros((2, 3))), "="),
        (lambda: gram.attention(np.eye(2), kernel="relu"), "="),
        (lambda: gram.utility_bounds(0, logit_bound=1.0, relative_error=0.1), "="),
        (lambda: gram.utility_bounds(2, logit_bound=-1.0, relative_error=0.1), "="),
        (lambda: gram.gaussian_entry_error(1.0, 2, failure_probability=0.0), "="),
        (lambda: gram.sampling_entry_error(9, 2, diagonal_bound=1.0, failure_probability=1.0), "="),
        (lambda: gram.wishart_mean(KEY, jnp.eye(4), 3), "="),
        (lambda: gram.wishart_mean(KEY, jnp.eye(4), 2**54), "="),
    ],
)
def test_bad_arguments_raise(call, words):
    with pytest.raises(ValueError, match=words):
        call()
