"""What is said of a private memory before it is built: its error, its features, its size."""

import warnings

import jax
import numpy as np
import pytest
from cross_attention_memory import BUDGET, KEY

import dpx.attention
from dpx import cross_attention
from dpx.cross_attention import MemoryWarning, baselines
from dpx.cross_attention.sketch import expected
from dpx.privacy import gaussian_epsilon, gaussian_noise_multiplier

UNIT = {"key_bound": 1.0, "value_bound": 1.0}


def model(n, dim, value_dim, seed, **about):
    """A memory and queries as the model has them, written down anew."""
    rng = np.random.default_rng(seed)
    ball = about.get("domain", "box") == "ball"
    draw = rng.normal if ball else rng.uniform
    K, Q = draw(size=(n, dim)), draw(size=(100, dim))
    if ball:
        K, Q = (a / np.linalg.norm(a, axis=1, keepdims=True) for a in (K, Q))
    centred = K * dim**0.5 if ball else 2 * K - 1
    if about.get("value_domain") == "simplex":
        anchors = rng.normal(size=(value_dim, dim))
        anchors /= np.linalg.norm(anchors, axis=1, keepdims=True)
        V = np.eye(value_dim)[(centred @ anchors.T).argmax(1)]
    else:
        V = np.clip(np.tile(centred, (1, value_dim // dim + 1))[:, :value_dim], -1, 1)
        if about.get("value_domain") == "ball":
            V = centred[:, np.arange(value_dim) % dim]
            V /= np.linalg.norm(V, axis=1, keepdims=True)
    return K, V, Q


CASES = {
    "box": (20_000, 2, 3, {}),
    "ball": (5000, 6, 4, {"domain": "ball", "value_domain": "ball", "scale": 0.4, "degree": 4}),
    "a bias that is larger than the noise": (20_000, 3, 3, {"scale": 0.3, "degree": 2}),
    "more noise than attention": (200, 4, 4, {"scale": 0.5}),
    "labels that come and go": (
        3000, 12, 5,
        {"domain": "ball", "value_domain": "simplex", "neighboring": "add_or_remove_one", "scale": 0.5,
         "degree": 2},
    ),
    "random features": (
        3000, 8, 3, {"domain": "ball", "scale": 0.7, "features": "random", "num_features": 256}
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::dpx.cross_attention.MemoryWarning")
def test_the_expected_error_is_the_measured_one(name):
    """Within a factor 1.3, of memories that the test draws itself, as the model says."""
    n, dim, value_dim, about = CASES[name]
    found = cross_attention.expected_error(n, dim, value_dim, **UNIT, **BUDGET, **about)
    errors, means = [], []
    for seed in range(4):
        K, V, Q = model(n, dim, value_dim, seed, **about)
        key = jax.random.fold_in(KEY, seed)
        built = cross_attention.build(key, K, V, clip=True, **UNIT, **BUDGET, **about)
        exact = dpx.attention.dot_product_attention(Q, K, V, scale=1 / built.domain.scale)
        errors.append(np.abs(built.query(Q) - exact).mean())
        mean_options = {name: about[name] for name in ("value_domain",) if name in about}
        mean = baselines.mean_of_values(key, V, value_bound=1.0, **BUDGET, **mean_options)
        means.append(np.abs(mean.values - exact).mean())
    assert found.error / 1.3 < np.mean(errors) < 1.3 * found.error
    if "neighboring" not in about:  # the baseline replaces a row
        assert found.mean_error / 1.3 < np.mean(means) < 1.3 * found.mean_error
    assert found.num_features == built.features.num_features


def test_the_bias_is_the_error_without_noise():
    exactly = {**UNIT, "epsilon": 1e8, "delta": 1e-6, "scale": 0.3, "degree": 2}
    found = cross_attention.expected_error(10**9, 3, 3, **exactly)
    assert found.error == pytest.approx(found.bias, rel=1e-3)
    noisy = cross_attention.expected_error(10**9, 3, 3, **(exactly | BUDGET))
    assert noisy.bias == found.bias


@pytest.mark.slow
def test_features_are_chosen_by_what_is_told_apart_and_the_expected_error():
    """Higher degrees for larger budgets, the mean for none, and never a worse choice than by hand."""
    about = {**UNIT, "domain": "ball", "value_domain": "simplex", "delta": 1e-6}

    def expect(epsilon, n=5000, scale=1 / 3, **features):
        features |= about | {"epsilon": epsilon, "scale": scale}
        return cross_attention.expected_error(n, 16, 5, **features)

    chosen = {epsilon: expect(epsilon, features="auto") for epsilon in (1e-4, 1.0, 30.0)}
    degrees = [found.degree for found in chosen.values()]
    assert degrees[0] == 0
    assert degrees == sorted(degrees)
    assert degrees[2] >= 4
    for epsilon, found in chosen.items():
        by_hand = [expect(epsilon, degree=degree) for degree in (0, 2, 4)]
        least = 0.5 + 0.9 * (max(other.told_apart for other in by_hand) - 0.5)
        assert found.told_apart >= least or found.degree == 0
        as_good = [other for other in by_hand if other.told_apart >= max(least, found.told_apart)]
        assert found.error <= min((other.error for other in as_good), default=np.inf)
    temperatures = [expect(1.0, n, None, features="auto").scale for n in (1000, 10**6)]
    assert temperatures[0] > temperatures[1]  # more rows bear more detail


def test_heads_share_the_budget():
    """Four heads have the noise of one with twice the noise multiplier."""
    about = {"n": 1000, "dim": 3, "value_dim": 2, **UNIT, "delta": 1e-5, "degree": 2}
    less = gaussian_epsilon(2 * gaussian_noise_multiplier(1.0, 1e-5), 1e-5)
    four = cross_attention.expected_error(**about, epsilon=1.0, num_heads=4)
    alone = cross_attention.expected_error(**about, epsilon=less)
    assert four.error == pytest.approx(alone.error, rel=1e-6)
    assert four.error > 1.5 * cross_attention.expected_error(**about, epsilon=1.0).error


@pytest.mark.slow
def test_build_takes_what_is_chosen():
    K, V, _ = model(2000, 3, 3, 0, domain="ball", value_domain="simplex")
    about = {**UNIT, **BUDGET, "domain": "ball", "value_domain": "simplex", "features": "auto"}
    found = cross_attention.expected_error(2000, 3, 3, **about)
    built = cross_attention.build(KEY, K, V, clip=True, **about)
    assert (built.features.degree, built.domain.scale) == (found.degree, found.scale)
    private = {"neighboring": "add_or_remove_one"}
    with pytest.raises(ValueError, match="expected_records"):
        cross_attention.build(KEY, K, V, clip=True, **about, **private)
    builds = [
        cross_attention.build(
            KEY, K[:n], V[:n], clip=True, expected_records=2000, **about, **private
        )
        for n in (2000, 3)
    ]
    assert jax.tree.structure(builds[0]) == jax.tree.structure(builds[1])
    with pytest.raises(ValueError, match="degree=2 must be left out"):
        cross_attention.build(KEY, K, V, clip=True, degree=2, **about)


@pytest.mark.slow
def test_a_memory_that_the_mean_beats_is_said_before_it_is_built():
    K, V, _ = model(30, 4, 4, 0)
    with pytest.warns(MemoryWarning, match="where the private mean of V errs by"):
        cross_attention.build(KEY, K, V, **UNIT, **BUDGET)
    K, V, _ = model(30_000, 4, 4, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MemoryWarning)
        cross_attention.build(KEY, K, V, **UNIT, **BUDGET)
        # A private number of rows decides nothing that is seen, not even a warning.
        private = {"neighboring": "add_or_remove_one"}
        cross_attention.build(KEY, K[:5], V[:5], **UNIT, **BUDGET, **private)
    with pytest.warns(MemoryWarning):
        cross_attention.build(KEY, K[:5], V[:5], expected_records=30, **UNIT, **BUDGET, **private)


@pytest.mark.slow
def test_the_memory_that_it_takes_is_said_or_refused(monkeypatch):
    K, V, _ = model(30, 16, 2, 0, domain="ball")
    about = {**UNIT, "domain": "ball", "epsilon": 1e8, "delta": 1e-6}
    with pytest.raises(ValueError, match=r"5311735 features|beyond 4194304"):
        cross_attention.build(KEY, K, V, **about, scale=0.4, degree=10)
    monkeypatch.setattr(expected, "_MAX_BYTES", 10**5)
    with pytest.raises(ValueError, match="MiB, more than"):
        cross_attention.build(KEY, K, V, **about, scale=9.0, degree=2)
    monkeypatch.undo()
    monkeypatch.setattr(expected, "_LARGE_BYTES", 10**5)
    with pytest.warns(MemoryWarning, match="153 features of 3 sums take"):
        cross_attention.build(KEY, K, V, **about, scale=9.0, degree=2)
