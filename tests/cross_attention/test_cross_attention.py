"""Private cross-attention: limits, behaviour, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_attention_memory import BOX, BUDGET, EXACT, KEY, memory

import dpx.attention
from dpx import cross_attention
from dpx.cross_attention import baselines
from dpx.cross_attention.domain import Domain
from dpx.cross_attention.features import PolynomialFeatures, truncated_exponential
from dpx.cross_attention.sketch import sums as sketch_sums


def ball(shape, radius, seed):
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return x / np.maximum(1, np.linalg.norm(x, axis=-1, keepdims=True) / radius)


@pytest.mark.quick_cases("sketch-2")
@pytest.mark.parametrize("d", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("mechanism", ["sketch", "tree"])
def test_without_noise_the_answer_is_attention(mechanism, d):
    K, V, Q = memory(3000, d)
    K[0], K[1], Q[0] = 0, 1, 1
    built = cross_attention.build(KEY, K, V, mechanism=mechanism, **BOX, **EXACT)
    exact = dpx.attention.dot_product_attention(Q, K, V, scale=1 / d)
    np.testing.assert_allclose(built.query(Q), exact, atol=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["exact", "paper"])
def test_without_noise_the_papers_tree_is_attention(budget):
    K, V, Q = memory(500, 1)
    options = {"mechanism": "tree", "degree": 4, "noise": "truncated_laplace", "copies": 3}
    built = cross_attention.build(KEY, K, V, budget=budget, **options, **BOX, **EXACT)
    exact = dpx.attention.dot_product_attention(Q, K, V, scale=1)
    np.testing.assert_allclose(built.query(Q), exact, atol=4e-3)


@pytest.mark.slow
def test_keys_as_models_produce_them():
    """A ball, any sign, √d, several heads: one release for all of them."""
    K, V, Q = ball((2, 900, 3), 2.0, 0), ball((2, 900, 3), 1.0, 1), ball((2, 40, 3), 1.5, 2)
    bounds = {"key_bound": 2.0, "query_bound": 1.5, "value_bound": 1.0}
    options = {"domain": "ball", "scale": 3**0.5, **bounds}
    built = cross_attention.build(KEY, K, V, **options, **EXACT)
    np.testing.assert_allclose(
        built.query(Q), dpx.attention.dot_product_attention(Q, K, V), atol=2e-3
    )
    noisy = cross_attention.build(KEY, K, V, **options, **BUDGET)
    single = cross_attention.build(KEY, K[0], V[0], **options, **BUDGET)
    assert noisy.noise_std == pytest.approx(2**0.5 * single.noise_std)
    assert "2 heads" in noisy.guarantee.mechanism


@pytest.mark.slow
def test_random_features_approach_attention_in_many_dimensions():
    K, V, Q = ball((2000, 64), 2.0, 0), ball((2000, 2), 1.0, 1), ball((40, 64), 2.0, 2)
    exact = dpx.attention.dot_product_attention(Q, K, V)
    options = {"domain": "ball", "scale": 8.0, "key_bound": 2.0, "value_bound": 1.0}
    options |= {"features": "random", **EXACT}
    errors = []
    for r in (64, 4096):
        built = cross_attention.build(KEY, K, V, num_features=r, **options)
        errors.append(float(abs(built.query(Q) - exact).mean()))
    assert errors[1] < errors[0] / 3
    assert errors[1] < 2e-3


@pytest.mark.slow
def test_streaming_sums_every_row_once():
    n = 10_007  # a prime: the last chunk is padded
    K, V, _ = memory(n, 2)
    built = cross_attention.build(KEY, K, V, degree=6, **BOX, **EXACT)
    phi = PolynomialFeatures(2, 6)(np.sqrt(2) * (K - 0.5))
    weights = np.concatenate([np.full((n, 1), np.sqrt(2)), V], 1)
    want = np.asarray(phi, np.float64).T @ weights
    np.testing.assert_allclose(built.moments, want, atol=0.02)
    assert built.moments[0, 0] == np.float32(n * np.sqrt(2))


@pytest.mark.slow
@pytest.mark.parametrize("wide", [False, True])
def test_building_never_makes_an_array_of_rows_by_features(wide):
    n, d = 10**6, 4
    domain = Domain("box", d, d, 1.0, 1.0, 1.0, float(d))
    features = PolynomialFeatures(d, 8, float(d))
    K = jax.ShapeDtypeStruct((n, d), jnp.float32)
    with jax.enable_x64(wide):
        compiled = sketch_sums.traced_sums.lower(K, K, features, domain, 1.0).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 200e6  # n × r would be 2 GB


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["sketch", "tree"])
def test_releases_are_pytrees_that_hold_no_data(mechanism):
    K, V, Q = memory(200, 2)
    built = cross_attention.build(KEY, K, V, mechanism=mechanism, degree=2, **BOX, **BUDGET)
    answers = built.query(Q)
    assert answers.shape == (50, 2)
    assert (abs(answers) <= 1).all()
    np.testing.assert_allclose(jax.jit(lambda b, q: b.query(q))(built, Q), answers, atol=1e-5)
    one_by_one = jax.vmap(lambda q: built.query(q[None])[0])(Q)
    np.testing.assert_allclose(one_by_one, answers, atol=1e-5)
    assert all(200 not in leaf.shape for leaf in jax.tree.leaves(built))
    guarantee = built.guarantee
    assert (guarantee.epsilon, guarantee.delta, guarantee.unit) == (1.0, 1e-6, "row of (K, V)")
    assert guarantee.neighboring.name == "REPLACE_ONE"
    assert "data within the declared bounds" in guarantee.assumptions


@pytest.mark.slow
def test_gradients_reach_the_queries():
    K, V, Q = memory(200, 2)
    built = cross_attention.build(KEY, K, V, **BOX, **EXACT)
    got = jax.grad(lambda q: built.query(q).sum())(Q)
    want = jax.grad(lambda q: dpx.attention.dot_product_attention(q, K, V, scale=0.5).sum())(Q)
    np.testing.assert_allclose(got, want, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("value_domain", ["box", "ball"])
def test_without_noise_baselines_are_exact(value_domain):
    K, V, Q = memory(500, 2)
    V = np.eye(9, dtype=np.float32)[np.arange(500) % 9] if value_domain == "ball" else V
    options = {"value_domain": value_domain, **EXACT}
    exact = dpx.attention.dot_product_attention(Q, K, V, scale=0.5)
    fresh = baselines.fresh_noise(KEY, Q, K, V, **BOX, **options)
    np.testing.assert_allclose(fresh.values, exact, atol=1e-4)
    mean = baselines.mean_of_values(KEY, V, value_bound=1.0, **options)
    np.testing.assert_allclose(mean.values[0], V.mean(0), atol=1e-5)
    tree = cross_attention.build(KEY, K, V, mechanism="tree", **BOX, **options)
    np.testing.assert_allclose(tree.query(Q), exact, atol=4e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_bound": 0.5}, r"K row \d+ is outside"),
        ({"V": np.ones((3, 2))}, "K has shape"),
        ({"value_bound": 0.5}, r"V row \d+ is outside"),
        ({"delta": 0.7, "mechanism": "tree", "noise": "truncated_laplace"}, "delta"),
        ({"mechanism": "forest"}, "mechanism='forest'"),
        ({"domain": "sphere"}, "domain='sphere'"),
        ({"value_domain": "sphere"}, "value_domain='sphere'"),
        ({"value_domain": "ball"}, r"V row \d+ is outside the ball of radius 1"),
        ({"domain": "ball", "mechanism": "tree"}, "K row|trees need features"),
        ({"features": "fourier"}, "features='fourier'"),
        ({"degree": 5}, "even"),
        ({"degree": 4000}, "r = .* features"),
        ({"mechanism": "tree", "bins": 2**28}, "use fewer bins"),
        ({"mechanism": "tree", "budget": "all"}, "budget='all'"),
        ({"copies": 2}, "copies=2 must be left out"),
        ({"mechanism": "tree", "secure": True}, "secure=True must be left out"),
        ({"mechanism": "tree", "query_bound": 2.0}, "trees need features"),
        ({"features": "random", "directions": np.ones((4, 3))}, "directions of shape"),
        ({"scale": 1e-3, "features": "random"}, "a row may contribute"),
    ],
)
def test_misuse_raises(options, message):
    K, V, _ = memory(20, 2)
    with pytest.raises(ValueError, match=message):
        cross_attention.build(**{"key": KEY, "K": K, "V": V, **BOX, **BUDGET, **options})


def test_misused_queries_raise():
    K, V, Q = memory(20, 2)
    with pytest.raises(ValueError, match="num_queries=49 must be at least the 50 rows"):
        baselines.fresh_noise(KEY, Q, K, V, num_queries=49, **BOX, **BUDGET)
    built = cross_attention.build(KEY, K, V, **BOX, **BUDGET)
    with pytest.raises(ValueError, match="Q row 3 is outside"):
        built.query(Q + 2 * (np.arange(50) == 3)[:, None])
    with pytest.raises(ValueError, match=r'build with domain="ball", where entries have any sign$'):
        built.query(-Q)
    with pytest.raises(ValueError, match=r"K row 0 .* any sign or pass clip=True"):
        cross_attention.build(KEY, K - 0.5, V, **BOX, **BUDGET)
    with pytest.raises(ValueError, match="Q has shape"):
        built.query(Q[:, :1])


def test_features_of_another_scale_are_refused():
    """The sensitivity is that of the domain's logits: features of another scale would need other noise."""
    K, V, _ = memory(10, 2)
    domain = Domain.declare(K, V, **BOX)
    for mechanism in (cross_attention.sketch, cross_attention.trees):
        for features in (PolynomialFeatures(2, 2, 0.5), PolynomialFeatures(1, 2, 2.0)):
            with pytest.raises(ValueError, match="must be those of the domain"):
                mechanism.build(KEY, K, V, domain=domain, features=features, **BUDGET)


@pytest.mark.slow
def test_as_printed_is_the_papers_structure():
    """34, 90 and 339 copies are what the O(·) of Theorem 4.1 gives for a constant of 1."""
    for dim, copies in ((1, 34), (2, 90), (4, 339)):
        options = cross_attention.as_printed(dim)
        assert (options["degree"], options["copies"]) == (3, copies)
    K, V, Q = memory(100, 1)
    options = {**cross_attention.as_printed(1), "copies": 2}
    built = cross_attention.build(KEY, K, V, **options, **BOX, **EXACT)
    assert built.budget == "paper"
    assert "truncated laplace" in built.guarantee.mechanism
    exact = dpx.attention.dot_product_attention(Q, K, V, scale=1)
    np.testing.assert_allclose(built.query(Q), exact, atol=0.03)
    with pytest.raises(ValueError, match="failure_probability=0"):
        cross_attention.as_printed(1, failure_probability=0)


def test_odd_degrees_are_refused():
    """An odd truncation of the exponential turns negative, where the bound on ‖u − u'‖ would fail."""
    K, V, _ = memory(10, 1)
    with pytest.raises(ValueError, match="degree=3 must be even"):
        cross_attention.build(KEY, K, V, degree=3, **BOX, **BUDGET)
    z = np.linspace(-40, 40, 8001)
    series = {s: [truncated_exponential(v, s) for v in z] for s in (1, 2, 3, 8, 9)}
    assert all(min(series[s]) > 0 for s in (2, 8))
    assert all(min(series[s]) < 0 for s in (1, 3, 9))
