"""The Gram release: exact limits, distributions, guarantees, and likelihood-ratio audits."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from scipy import stats

import dpx
from dpx import gram
from dpx.audit import epsilon_lower_bound
from dpx.gram import wishart
from experiments.bench import gram as bench_gram

KEY = jax.random.key(6)
BUDGET = {"epsilon": 1.0, "delta": 1e-6, "column_bound": 1.0}
SAMPLING = {"mechanism": "sampling", "eta": 200.0}


@pytest.fixture
def X():
    return np.random.default_rng(0).normal(size=(5, 300)) / 5


@jax.jit
def sampling_draws(keys, covariance, k):
    return jax.vmap(lambda key: gram.wishart_mean(key, covariance, k))(keys)


def project(X, bound):
    """Columns projected one by one."""
    lengths = np.linalg.norm(np.asarray(X, np.float64), axis=0)
    return X * np.minimum(1, bound / np.maximum(lengths, 1e-300))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["exp", "cosh"])
@pytest.mark.parametrize("neighboring", ["replace_one", "add_or_remove_one"])
def test_huge_epsilon_gives_the_exact_matrix(X, kernel, neighboring):
    clipped = project(X, 0.3)
    exact = clipped @ clipped.T
    budget = {"epsilon": 1e8, "delta": 1e-6, "column_bound": 0.3, "neighboring": neighboring}
    noisy = gram.release(KEY, X, **budget)
    sampled = gram.release(KEY, X, mechanism="sampling", eta=1.0, **budget)
    np.testing.assert_allclose(noisy.matrix, exact, atol=2e-5)
    np.testing.assert_allclose(sampled.matrix, exact, atol=2e-3)
    np.testing.assert_allclose(
        gram.attention(noisy.matrix, kernel=kernel), gram.attention(exact, kernel=kernel), atol=1e-4
    )


@pytest.mark.slow
def test_paper_calibration_approaches_the_exact_matrix_as_its_shift_allows(X):
    exact = project(X, 1.0) @ project(X, 1.0).T
    made = gram.release(KEY, X, eta=1e7, **BUDGET, **gram.as_printed())
    assert made.guarantee.mechanism.endswith("Gaussian outer products, paper calibration")
    # Relative error about √(2/k) of the shift.
    assert np.abs(made.matrix - exact).max() < 6 * 1e7 * math.sqrt(2 / made.num_samples)


@pytest.mark.slow
def test_noise_has_the_stated_covariance():
    made = gram.release(KEY, np.zeros((3, 1)), **BUDGET)
    draw = jax.vmap(lambda key: gram.release(key, np.zeros((3, 1)), **BUDGET).matrix)
    draws = np.asarray(draw(jax.random.split(KEY, 40_000))) / made.noise_std
    np.testing.assert_array_equal(draws, np.swapaxes(draws, 1, 2))
    upper = draws[:, *np.triu_indices(3)]
    expected = np.diag([1, 0.5, 0.5, 1, 0.5, 1])
    np.testing.assert_allclose(np.cov(upper.T), expected, atol=0.03)  # 4 standard errors
    assert np.abs(upper.mean(axis=0)).max() < 0.02
    # In the coordinates of the Frobenius norm every direction has variance 1.
    direction = np.array([[1, 2, 0], [2, -1, 1], [0, 1, 3]]) / math.sqrt(21)
    assert stats.kstest(np.einsum("kij,ij->k", draws, direction), "norm").pvalue > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("k", [3, 7, 100])
def test_bartlett_agrees_with_summing_outer_products(k):
    covariance = np.array([[2.0, 0.5, 0.1], [0.5, 1.0, -0.3], [0.1, -0.3, 0.5]])
    with jax.enable_x64(True):
        fast = np.asarray(
            sampling_draws(jax.random.split(KEY, 10_000), jnp.asarray(covariance), float(k))
        )
    samples = np.random.default_rng(1).multivariate_normal(np.zeros(3), covariance, (10_000, k))
    slow = np.einsum("tki,tkj->tij", samples, samples) / k
    for index in [(0, 0), (1, 1), (2, 2), (0, 1), (1, 2)]:
        assert stats.ks_2samp(fast[:, *index], slow[:, *index]).pvalue > 1e-3
    assert stats.ks_2samp(np.linalg.det(fast), np.linalg.det(slow)).pvalue > 1e-3


@pytest.mark.slow
def test_all_draws_of_a_sampled_matrix_have_keys_of_their_own(monkeypatch):
    keys, bits = [], jax.random.bits

    def spied(key, *args):
        keys.append(tuple(np.asarray(jax.random.key_data(key)).tolist()))
        return bits(key, *args)

    monkeypatch.setattr(jax.random, "bits", spied)
    with jax.disable_jit(), jax.enable_x64(True):
        wishart._draw(KEY, jnp.eye(3), 18.0, 0.01)
    own = tuple(np.asarray(jax.random.key_data(KEY)).tolist())
    assert len({*keys, own}) == len(keys) + 1 > 3


@pytest.mark.slow
def test_psd_projection_is_the_nearest_psd_matrix(X):
    about = BUDGET | {"epsilon": BUDGET["epsilon"] / 10}  # enough noise for negative eigenvalues
    noisy = np.asarray(gram.release(KEY, X, **about).matrix, np.float64)
    projected = np.asarray(gram.release(KEY, X, psd=True, **about).matrix, np.float64)
    assert np.linalg.eigvalsh(noisy).min() < -1
    assert np.linalg.eigvalsh(projected).min() > -1e-5
    negative = np.minimum(np.linalg.eigvalsh(noisy), 0)
    assert np.linalg.norm(noisy - projected) == pytest.approx(np.linalg.norm(negative), rel=1e-5)


@pytest.mark.slow
def test_a_release_runs_under_jit_and_is_differentiable(X):
    X = jnp.asarray(X, jnp.float32)
    made = jax.jit(lambda key, X: gram.release(key, X, **BUDGET))(KEY, X)
    plain = gram.release(KEY, X, **BUDGET).guarantee
    (rounded,) = set(made.guarantee.assumptions) - set(plain.assumptions)
    assert "they have 32 bits" in rounded
    assert made.guarantee == plain.assuming(rounded)
    exact = project(X, 1.0) @ project(X, 1.0).T
    assert np.abs(made.matrix - exact).max() < 5 * made.noise_std
    gradient = jax.grad(lambda X: gram.attention(gram.release(KEY, X, **BUDGET).matrix)[0, 1])(X)
    assert np.isfinite(gradient).all()


@pytest.mark.slow
def test_guarantee_says_what_it_covers(X):
    assert gram.release(KEY, X, **BUDGET).guarantee.unit == "column of X"
    moved = gram.release(KEY, X, max_column_change=0.1, **BUDGET).guarantee
    assert moved.neighboring == NeighboringRelation.REPLACE_ONE
    assert "max_column_change=0.1" in moved.unit
    whole = gram.release(KEY, X, neighboring="add_or_remove_one", **BUDGET).guarantee
    assert whole.neighboring == NeighboringRelation.ADD_OR_REMOVE_ONE
    assert whole.assumptions == ("the number of rows of X is public",)
    promised = gram.release(
        KEY, X * 0.1, clip=False, assume_good=True, **BUDGET, **SAMPLING
    ).guarantee
    assert any("norm at most 1" in words for words in promised.assumptions)
    assert any("⪰" in words for words in promised.assumptions)
    assert promised.assumptions[0] == "the shape of X is public"


@pytest.mark.parametrize("relation", ["REPLACE_ONE", "ADD_OR_REMOVE_ONE"])
def test_a_relation_is_the_enum_or_its_lower_case_name_everywhere(X, relation):
    named, member = relation.lower(), NeighboringRelation[relation]
    assert (
        gram.release(KEY, X, neighboring=named, **BUDGET).guarantee
        == gram.release(KEY, X, neighboring=member, **BUDGET).guarantee
    )
    spent = {"epsilon": 1.0, "delta": 1e-6, "unit": "row", "mechanism": "by hand"}
    by_name = dpx.PrivacyGuarantee(neighboring=named, **spent)
    assert by_name == dpx.PrivacyGuarantee(neighboring=member, **spent)
    gradient = dpx.clipped_grad(lambda w, x: w * x, l2_clip_norm=3.0)
    assert gradient.sensitivity(named) == gradient.sensitivity(member)
    with pytest.raises(ValueError, match=f"'{relation}' must be .* its lower-case name"):
        gram.release(KEY, X, neighboring=relation, **BUDGET)
    with pytest.raises(ValueError, match=r"'replace' must be .* use one of add_or_remove_one"):
        gradient.sensitivity("replace")


@pytest.mark.slow
@pytest.mark.parametrize("max_column_change", [0.3, 1.0, 2.0])
def test_audit_of_additive_noise(max_column_change):
    assert 0.6 < bench_gram.audit_noise(max_column_change, 1_000_000).epsilon < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("eta", [30.0, 300.0])
def test_audit_of_sampling(eta):
    assert 0.6 < bench_gram.audit_sampling(eta, 1_000_000).epsilon < 1.0


@pytest.mark.slow
def test_audit_refutes_sampling_without_the_shift():
    # Without ηI a column along a direction that the others leave empty shows in the rank: what skipping
    # the shift, or checking XXᵀ ⪰ ηI on the data, costs.
    k = gram.max_samples(
        1.0, 1e-3, column_bound=1.0, eta=300.0, n=2, neighboring="add_or_remove_one"
    )
    with jax.enable_x64(True):
        samples = [
            np.asarray(sampling_draws(keys, jnp.diag(jnp.array([300.0, least])), float(k)))[:, 1, 1]
            for keys, least in zip(jax.random.split(KEY, (2, 10_000)), (1.0, 1e-9), strict=True)
        ]
    assert epsilon_lower_bound(*samples, 1e-3).epsilon > 5.0
