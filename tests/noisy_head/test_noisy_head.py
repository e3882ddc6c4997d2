"""Features, ridge, risks and the non-private parts of dpx.noisy_head against slow, obvious code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx import noisy_head
from dpx.nn.linear_attention import LinearAttentionHead

pytestmark = pytest.mark.optimized


def sample(num_prompts=200, length=12, dim=4, seed=0, noise_std=0.0):
    prompts = noisy_head.sample_prompts(
        jax.random.key(seed), num_prompts, length, dim, noise_std=noise_std
    )
    return noisy_head.Prompts(np.array(prompts.x), np.array(prompts.y))


def featurize(prompts, **bounds):
    """Features as NumPy arrays: outside the scope JAX would compute on them in float32."""
    return noisy_head.Features(*map(np.array, noisy_head.featurize(prompts, **bounds)))


def matrices(features):
    return np.einsum("ni,nj->nij", features.query, features.context)


def design(features):
    return matrices(features).reshape(len(features.query), -1)


def brute_ridge(features, regularization):
    A, t = design(features), np.asarray(features.target)
    gram = regularization * len(t) * np.eye(A.shape[1]) + A.T @ A
    return np.linalg.solve(gram, A.T @ t).reshape(features.query.shape[1], -1)


@pytest.mark.slow
def test_prompts_follow_the_model():
    x, y = sample(20_000, 3, 5, noise_std=0.5)
    np.testing.assert_allclose(np.linalg.norm(x, axis=-1), 1, rtol=1e-14)
    # Standard error of these means over 2e4 prompts is below 0.02.
    np.testing.assert_allclose(np.mean(y**2), 1.25, atol=0.06)
    np.testing.assert_allclose(
        np.einsum("nti,ntj->ij", x, x) / x[..., 0].size, np.eye(5) / 5, atol=0.01
    )
    # Tokens of a prompt share w: E y_1 y_2 x_1ᵀx_2 = E (x_1ᵀx_2)² = 1/D.
    shared = np.mean(y[:, 0] * y[:, 1] * np.sum(x[:, 0] * x[:, 1], axis=-1))
    np.testing.assert_allclose(shared, 1 / 5, atol=0.02)
    # Prompts do not share it: their labels are uncorrelated whatever the tokens.
    assert abs(np.mean(y[::2, 0] * y[1::2, 0])) < 0.05


@pytest.mark.slow
def test_featurize_is_the_formula():
    prompts = sample()
    features = featurize(prompts, response_clip=0.7, feature_radius=0.2)
    for k in range(10):
        y = np.clip(prompts.y[k], -0.7, 0.7)
        Z = np.outer(prompts.x[k, -1], sum(y[i] * prompts.x[k, i] for i in range(12)) / 12)
        Z *= min(1, 0.2 / np.linalg.norm(Z))
        np.testing.assert_allclose(matrices(features)[k], Z, atol=1e-15)
        assert features.target[k] == y[-1]
    assert noisy_head.featurize(prompts).query.dtype == jnp.float64
    np.testing.assert_array_equal(features.query, prompts.x[:, -1])


@pytest.mark.slow
def test_streaming_draws_the_same_prompts():
    key = jax.random.key(3)
    settings = {"noise_std": 0.3}
    bounds = {"response_clip": 1.0, "feature_radius": 0.3}
    whole = noisy_head.featurize(noisy_head.sample_prompts(key, 333, 31, 5, **settings), **bounds)
    streamed = noisy_head.sample_features(key, 333, 31, 5, **settings, **bounds)
    for a, b in zip(whole, streamed, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-14)
    one = noisy_head.sample_prompt(jax.random.split(key, 333)[7], 31, 5, **settings)
    np.testing.assert_allclose(
        noisy_head.featurize(one, **bounds).context[0], whole.context[7], atol=1e-14
    )


@pytest.mark.slow
def test_no_array_of_matrices():
    """N×D×D never exists: at N = 4096, D = 32 it would take 32 MiB beside 3 MiB of features."""
    shape = jax.ShapeDtypeStruct((4096, 32), jnp.float64)
    features = noisy_head.Features(shape, shape, jax.ShapeDtypeStruct((4096,), jnp.float64))
    bounds = noisy_head.HyperParameters(1.0, 1.0, 1.0)
    descent = noisy_head.Descent(bounds, regularization=1.0, step_size=0.1, steps=3)
    with jax.enable_x64(True):
        for function in (
            lambda f: noisy_head.ridge(f, 1.0),
            lambda f: noisy_head.noisy_descent(jax.random.key(0), f, descent, noise_multiplier=1.0),
        ):
            memory = jax.jit(function).lower(features).compile().memory_analysis()
            assert memory.temp_size_in_bytes < 12 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "gram", "cg", "qr"])
@pytest.mark.parametrize(("dim", "regularization"), [(2, 1e-4), (5, 5.0), (10, 0.01)])
def test_ridge(method, dim, regularization):
    features = featurize(sample(400, 9, dim))
    fast = noisy_head.ridge(features, regularization, method=method)
    slow = brute_ridge(features, regularization)
    np.testing.assert_allclose(fast, slow, rtol=1e-9, atol=1e-11)
    assert fast.dtype == jnp.float64


@pytest.mark.slow
def test_no_batch_of_matrices_reaches_lapack():
    """Batched calls at once deadlock XLA's thread pool: see `moments.one_at_a_time`."""
    keys = jax.random.split(jax.random.key(0), 7)
    hyper = noisy_head.HyperParameters(1.0, 1.0, 1.0)
    for fit in (
        lambda key, features: noisy_head.ridge(features, 1.0, method="gram"),
        lambda key, features: noisy_head.ridge(features, 1.0, method="qr"),
        lambda key, features: noisy_head.one_shot(
            key, features, hyper, regularization=1.0, noise_multiplier=1.0
        ),
    ):
        with jax.enable_x64(True):
            batch = jax.vmap(
                lambda key, fit=fit: fit(key, noisy_head.sample_features(key, 20, 6, 3))
            )
            program = jax.jit(batch).lower(keys).as_text()
        calls = [line for line in program.splitlines() if "@lapack_" in line]
        assert calls
        assert not any("tensor<7x" in line for line in calls)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e6, 1e9, 1e12])
def test_qr_ridge_is_exact_with_a_huge_row(size):
    """As the row grows, ridge becomes ridge on the others subject to fitting that row: a closed form."""
    features = featurize(sample(301, 9, 3))
    rows = [np.array(part) for part in features]
    rows[1][17] *= size / np.linalg.norm(rows[1][17])
    rows[2][17] = 0.5
    A, t = design(noisy_head.Features(*rows)), rows[2]
    huge, rest = A[17], np.delete(A, 17, axis=0)
    normal = rest.T @ rest + 301 * 0.01 * np.eye(9)
    free = np.linalg.solve(normal, rest.T @ np.delete(t, 17))
    # Sherman-Morrison in the scaled row, where nothing is large but the well-separated 1.
    unit = huge / np.linalg.norm(huge)
    spread = np.linalg.solve(normal, unit)
    weight = 1 / (np.linalg.norm(huge) ** -2 + unit @ spread)
    exact = free + spread * weight * (0.5 / np.linalg.norm(huge) - unit @ free)
    found = noisy_head.ridge(noisy_head.Features(*rows), 0.01, method="qr")
    np.testing.assert_allclose(np.reshape(found, -1), exact, rtol=1e-7, atol=1e-9)


def test_gradient_descent_converges_to_ridge():
    features = featurize(sample())
    run = {"regularization": 0.1, "step_size": 3.0, "steps": 300}
    gamma = noisy_head.gradient_descent(features, **run)
    np.testing.assert_allclose(gamma, noisy_head.ridge(features, 0.1), atol=1e-12)
    # As printed, the iteration converges to ridge with twice the regularization.
    gamma = noisy_head.gradient_descent(features, objective="paper", **run)
    np.testing.assert_allclose(gamma, noisy_head.ridge(features, 0.2), atol=1e-12)
    path = noisy_head.gradient_descent(features, trajectory=True, **run)
    assert path.shape == (300, 4, 4)


@pytest.mark.slow
@pytest.mark.parametrize("noise_std", [0.0, 0.7])
def test_population_risk_agrees_with_test_prompts(noise_std):
    gamma = np.random.default_rng(0).normal(size=(4, 4))
    reference = 3 * np.eye(4)
    features = noisy_head.sample_features(jax.random.key(1), 100_000, 7, 4, noise_std=noise_std)
    features = noisy_head.Features(*map(np.array, features))
    for other in (None, reference):
        error = noisy_head.predict(gamma if other is None else gamma - other, features)
        error = (np.array(error) - (features.target if other is None else 0)) ** 2
        exact = float(noisy_head.population_risk(gamma, 7, reference=other, noise_std=noise_std))
        found = float(noisy_head.empirical_risk(gamma, features, reference=other))
        np.testing.assert_allclose(found, error.mean(), rtol=1e-12)
        assert abs(found - exact) < 4 * error.std() / np.sqrt(error.size)


@pytest.mark.slow
def test_corrupt_moves_what_it_says():
    prompts = sample(5)
    for where, moved in {
        "context": [1] * 12 + [0],
        "all": [1] * 13,
        "query": [0] * 12 + [1],
    }.items():
        bad = noisy_head.corrupt(prompts, 3, alpha=2.5, mu=0.5, where=where)
        np.testing.assert_allclose(
            np.array(bad.y[3]) - prompts.y[3], 2.5 * np.array(moved), atol=1e-14
        )
        np.testing.assert_allclose(np.array(bad.x[3]) - prompts.x[3], 0.5, atol=1e-14)
        others = [0, 1, 2, 4]
        np.testing.assert_array_equal(np.array(bad.x)[others], prompts.x[others])
    with pytest.raises(ValueError, match="where='labels'"):
        noisy_head.corrupt(prompts, 3, alpha=1.0, mu=1.0, where="labels")
    for index in (-1, 5, 0.5):
        with pytest.raises(ValueError, match=f"index={index}"):
            noisy_head.corrupt(prompts, index, alpha=1.0, mu=1.0)


@pytest.mark.slow
def test_head_computes_equation_2_2():
    """The head against (2.2) in full, and against ⟨Γ, Z⟩."""
    prompts = sample(6, 9, 3)
    gamma = np.random.default_rng(1).normal(size=(3, 3))
    features = featurize(prompts)
    expected = np.einsum("ij,nij->n", gamma, matrices(features))
    single = LinearAttentionHead(gamma.astype(np.float32))
    np.testing.assert_allclose(single(prompts.x, prompts.y), expected, atol=1e-6)
    with jax.enable_x64(True):
        head = LinearAttentionHead(gamma)
        np.testing.assert_allclose(head(prompts.x, prompts.y), expected, atol=1e-14)
        np.testing.assert_allclose(head(prompts.x, prompts.y[:, :-1]), expected, atol=1e-14)
    E = np.concatenate([prompts.x[0].T, prompts.y[0][None]])
    E[-1, -1] = 0
    PV, KQ = np.zeros((4, 4)), np.zeros((4, 4))
    PV[-1, -1], KQ[:-1, :-1] = 1, gamma.T
    full = E + PV @ E @ (E.T @ KQ @ E) / 9
    np.testing.assert_allclose(full[-1, -1], expected[0], atol=1e-14)
    with pytest.raises(ValueError, match="do not fit"):
        single(prompts.x, prompts.y[:, :4])
    with pytest.raises(ValueError, match="gamma has shape"):
        LinearAttentionHead(np.zeros((2, 3)))


def test_global_precision_is_left_alone():
    assert not jax.config.jax_enable_x64
    noisy_head.ridge(noisy_head.featurize(sample()), 1.0)
    assert not jax.config.jax_enable_x64
    assert jnp.ones(1).dtype == jnp.float32


PROMPTS = sample(10, 3, 2)
FEATURES = featurize(PROMPTS)
MISUSE = {
    "must be .N, L": lambda: featurize(PROMPTS._replace(y=PROMPTS.y[:, 1:])),
    "prompts.x .*not finite": lambda: featurize(PROMPTS._replace(x=PROMPTS.x * np.nan)),
    "features have shapes": lambda: ridge(target=np.ones(3)),
    "features.target": lambda: ridge(target=FEATURES.target * np.inf),
    "response_clip=0": lambda: featurize(PROMPTS, response_clip=0.0),
    "feature_radius=-1": lambda: featurize(PROMPTS, feature_radius=-1.0),
    "method='svd'": lambda: noisy_head.ridge(FEATURES, 1.0, method="svd"),
    "gamma has shape": lambda: noisy_head.population_risk(np.ones((2, 3)), 4),
    "rule='x'": lambda: noisy_head.hyperparameters(10, 5, 2, regularization=1.0, rule="x"),
}


def ridge(**changed):
    return noisy_head.ridge(FEATURES._replace(**changed), 1.0)


@pytest.mark.parametrize("message", MISUSE)
def test_misuse(message):
    with pytest.raises(ValueError, match=message):
        MISUSE[message]()
