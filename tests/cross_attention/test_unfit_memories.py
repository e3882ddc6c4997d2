"""Memories that do not fit what was declared, and rows and logits at the edge of it."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_attention_memory import BOX, BUDGET, KEY, memory
from scipy import special

from dpx import cross_attention
from dpx.cross_attention import Domain, PolynomialFeatures, baselines, sketch, trees

pytestmark = pytest.mark.optimized

K, V, Q = memory(6, 2)


@pytest.mark.parametrize("shape", [(1, 6, 2), (3, 2, 2)])
def test_the_mean_of_values_has_one_matrix(shape):
    """The mean over the heads of one head would be its rows, with the noise of a mean."""
    with pytest.raises(ValueError, match=r"V has shape .* must be one matrix"):
        baselines.mean_of_values(KEY, V.reshape(shape), value_bound=1.0, **BUDGET)


@pytest.mark.parametrize("name", ["Q", "K", "V"])
def test_fresh_noise_is_for_one_head_and_one_row_of_queries(name):
    arrays = {"Q": Q, "K": K, "V": V}
    with pytest.raises(ValueError, match=rf"{name} has shape .* must be one matrix"):
        baselines.fresh_noise(KEY, **(arrays | {name: arrays[name][None]}), **BOX, **BUDGET)
    heads = {"K": K[None], "V": V[None]}
    with pytest.raises(ValueError, match=r"K has shape .* must be one matrix"):
        baselines.fresh_noise(KEY, Q, **heads, **BOX, **BUDGET)
    with pytest.raises(ValueError, match="no heads"):
        cross_attention.build(KEY, K[None][:0], V[None][:0], **BOX, **BUDGET)


@pytest.mark.parametrize("module", [sketch, trees])
@pytest.mark.parametrize("columns", [(2, 1), (1, 2)])
def test_a_domain_is_that_of_the_memory(module, columns):
    """Noise and budget are those of as many columns as the domain has."""
    domain = Domain("box", *columns, 1.0, 1.0, 1.0, 1.0)
    about = {"domain": domain, "features": PolynomialFeatures(columns[0], 2, 1.0), "clip": True}
    bins = {"bins": 2} if module is trees else {}
    with pytest.raises(ValueError, match="which must be the domain's"):
        module.build(KEY, K, V, **about, **BUDGET, **bins)
    with pytest.raises(ValueError, match="which must be the domain's"):
        module.statistic((K, V), **about, **bins)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["box", "ball"])
def test_a_row_at_the_edge_counts_however_large_its_logit_is(kind):
    """0.3 is more in 32 bits than in 64, by enough for e^50 to take it for a row that is too long."""
    bound = 0.3
    scale = bound**2 / 100 * (0.5 if kind == "box" else 1)
    corner, ones = np.full((2, 1), bound), np.ones((2, 1))
    declared = Domain.declare(
        corner, ones, key_bound=bound, value_bound=1.0, domain=kind, scale=scale
    )
    features = PolynomialFeatures(1, 200, scale)
    edge, inside = (
        sketch.statistic((key, ones), domain=declared, features=features).sums[0]
        for key in (corner, corner * (1 - 1e-6))
    )
    assert np.abs(edge).max() == pytest.approx(np.abs(inside).max(), rel=1e-3) != 0


@pytest.mark.quick_cases("box")
@pytest.mark.parametrize("value_domain", ["box", "ball", "simplex"])
def test_answers_are_in_the_values_domain_whatever_sums_and_masses_are(value_domain):
    """With logits up to 100 weights lie between e⁻¹⁰⁰ and e¹⁰⁰, which 32 bits hold neither of."""
    domain = Domain("ball", 1, 2, 1.0, 1.0, 1.0, 0.01, value_domain)
    far = jnp.asarray([0.0, 1.0, -1e30, 3e38, jnp.inf, -jnp.inf, jnp.nan])
    sums = jnp.stack(jnp.meshgrid(far, far, far), axis=-1).reshape(-1, 3)
    answers = domain.ratio(sums, jnp.exp(-100.0), jnp.exp(100.0))
    assert np.isfinite(answers).all()
    np.testing.assert_allclose(domain.nearest_values(answers), answers, atol=1e-6)


@pytest.mark.slow
def test_a_feature_of_high_degree_is_a_number_for_one_query():
    """Compiled for one query, a product of 112 coordinates became ∞·0, and the answer 0."""
    features = PolynomialFeatures(1, 112, 60.0)
    x = jnp.full((1, 1), 21.0)
    found = jax.jit(features.rows)(x)[:, 0]
    degrees = np.arange(113)
    logs = degrees * np.log(21 / np.sqrt(60)) - special.gammaln(degrees + 1) / 2
    # 112 products of 32 bits, each rounded by 6e-8; the smallest feature is 1e-42.
    np.testing.assert_allclose(found, np.exp(logs), rtol=2e-5, atol=1e-30)


@pytest.mark.slow
def test_logits_beyond_what_floats_hold_are_answered_and_their_sums_refused():
    bound = 2e5  # T_4 of the logits about the centre is 7e39, which is more than 32 bits hold
    K, V = np.full((1000, 1), bound), np.full((1000, 1), 0.7)
    options = {"degree": 4, "scale": 1.0, "epsilon": 1e8, "delta": 1e-5}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cross_attention.MemoryWarning)
        built = cross_attention.build(KEY, K, V, key_bound=bound, value_bound=1.0, **options)
    Q = np.array([[bound]])
    np.testing.assert_allclose(built.query(Q), 0.7, atol=1e-3)
    assert np.isfinite(built.sums(Q / 100)).all()
    with pytest.raises(ValueError, match="sums holds values that are not finite: use query"):
        built.sums(Q)
    assert not np.isfinite(jax.jit(built.sums)(Q)).all()


@pytest.mark.slow
def test_trees_answer_one_matrix_of_queries():
    built = cross_attention.build(KEY, K, V, mechanism="tree", degree=1, **BOX, **BUDGET)
    for ask in (built.query, built.sums):
        with pytest.raises(ValueError, match=r"Q has shape \(2, 3, 2\): trees answer"):
            ask(np.zeros((2, 3, 2)))


@pytest.mark.quick_cases("1e+300")
@pytest.mark.filterwarnings("error", "ignore:key can be guessed")
@pytest.mark.parametrize("row", [0.0, 1e300])
def test_a_row_of_zeros_or_beyond_32_bits_enters_a_ball_without_a_warning(row):
    """Which would tell of the row."""
    own = V.astype(np.float64)
    own[1] = row
    ball = {"value_bound": 5.0, "value_domain": "ball", "clip": True}
    about = {"mechanism": "tree", "degree": 2, "bins": 4}
    found = cross_attention.build(KEY, K, own, **about, **BOX | ball, **BUDGET).tables
    assert np.isfinite(found).all()


@pytest.mark.slow
def test_trees_clip_rows_under_jit():
    @jax.jit
    def build(K, V):
        options = {"mechanism": "tree", "degree": 2, "bins": 4, "clip": True}
        return cross_attention.build(KEY, K, V, **options, **BOX, **BUDGET).tables

    beyond = build(9 * K - 4, 9 * V)
    np.testing.assert_array_equal(beyond, build(np.clip(9 * K - 4, 0, 1), np.clip(9 * V, -1, 1)))
