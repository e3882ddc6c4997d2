"""The feature maps against the series they stand for."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.cross_attention import features as polynomial
from dpx.cross_attention.features import PolynomialFeatures, RandomFeatures

pytestmark = pytest.mark.optimized


def draw(*shape, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "degree"), [(1, 0), (1, 5), (2, 4), (4, 3), (3, 8)])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_inner_products_are_the_truncated_exponential(dim, degree, scale):
    features = PolynomialFeatures(dim, degree, scale)
    x, y = draw(6, dim), draw(6, dim, seed=1)
    got = (features(x) * features(y)).sum(-1)
    logits = (x * y).sum(-1) / (dim if scale is None else scale)
    want = [sum(z**t / math.factorial(t) for t in range(degree + 1)) for z in logits]
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(
        want, [polynomial.truncated_exponential(z, degree) for z in logits], rtol=1e-5
    )


@pytest.mark.slow
def test_features_are_all_monomials_once():
    features = PolynomialFeatures(4, 3)
    assert features.num_features == 35
    want = {a for a in itertools.product(range(4), repeat=4) if sum(a) <= 3}
    assert {tuple(a) for a in features.exponents.tolist()} == want
    assert len(features.exponents) == 35
    x = draw(5, 4)
    for j, a in enumerate(features.exponents):
        coefficient = 1 / math.sqrt(math.prod(map(math.factorial, a.tolist())) * 4 ** a.sum())
        want = coefficient * np.prod(x**a, axis=-1)
        np.testing.assert_allclose(features(x)[:, j], want, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_ranges_are_attained_at_the_corner_and_never_passed():
    features = PolynomialFeatures(3, 5, 1.3)
    inside = 2.0 * np.random.default_rng(0).random((1000, 3)).astype(np.float32)
    assert (features(inside) <= features.ranges(2.0) * (1 + 1e-5)).all()
    np.testing.assert_allclose(features(np.full((1, 3), 2.0))[0], features.ranges(2.0), rtol=1e-5)


@pytest.mark.quick_cases("6")
@pytest.mark.parametrize("degree", [2, 3, 6, 9])
def test_relative_error_is_the_maximum_over_the_interval(degree):
    for low, high in [(-3.0, 2.0), (0.0, 1.0), (-0.5, 0.5)]:
        z = np.linspace(low, high, 20_001)
        series = np.array([polynomial.truncated_exponential(v, degree) for v in z])
        want = np.abs(1 - series * np.exp(-z)).max()
        got = polynomial.relative_error(degree, low, high)
        assert got == pytest.approx(want, rel=1e-4, abs=1e-14)


def test_smallest_degree():
    assert polynomial.smallest_degree(0, 1, 1e-4) == 6
    for tolerance in (0.1, 1e-3, 1e-7):
        degree = polynomial.smallest_degree(-2, 2, tolerance)
        assert degree % 2 == 0
        assert polynomial.relative_error(degree, -2, 2) <= tolerance
        assert polynomial.relative_error(degree - 2, -2, 2) > tolerance
    for bound in (500, 2500):  # beyond all floats
        with pytest.raises(ValueError, match="exponents reach"):
            polynomial.smallest_degree(-bound, bound)


@pytest.mark.slow
def test_random_features_are_unbiased_and_positive():
    x, y = draw(5, 16), draw(5, 16, seed=1)
    want = np.exp((x * y).sum(-1) / 4.0)

    def kernel(key):
        features = RandomFeatures.draw(key, 256, 16, 4.0)
        phi, psi = (features.rows(a.T) for a in (x, y))
        return (phi * psi).sum(0), phi.min()

    estimates, smallest = jax.vmap(kernel)(jax.random.split(jax.random.key(0), 400))
    error = estimates.std(0) / 20
    np.testing.assert_array_less(np.abs(estimates.mean(0) - want), 4 * error + 1e-5)
    assert smallest.min() > 0


@pytest.mark.slow
def test_random_directions_are_orthogonal_blocks_of_gaussians():
    directions = np.asarray(RandomFeatures.draw(jax.random.key(1), 40, 16).directions)
    assert directions.shape == (40, 16)
    gram = directions[:16] @ directions[:16].T
    np.testing.assert_allclose(gram, np.diag(np.diag(gram)), atol=1e-4)
    many = RandomFeatures.draw(jax.random.key(2), 16_000, 4).directions
    np.testing.assert_allclose(jnp.cov(many.T), np.eye(4), atol=0.06)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PolynomialFeatures(0, 2), "dim=0"),
        (lambda: PolynomialFeatures(None, 2), "dim=None"),
        (lambda: PolynomialFeatures(2, 2.5), "degree=2.5"),
        (lambda: PolynomialFeatures(2, 2, -1), "scale=-1"),
        (lambda: PolynomialFeatures(20, 12), r"r = 225792840 features.*random features"),
        (lambda: RandomFeatures.draw(jax.random.key(0), 0, 2), "num_features=0"),
        (lambda: RandomFeatures.draw(jax.random.key(0), 4, 2, 0.0), "scale=0"),
    ],
)
def test_misuse_raises(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_integers_are_features_of_the_same_floats():
    features, x = PolynomialFeatures(2, 4, 1.5), np.array([[0, 1], [2, 3]])
    want = features(x.astype(np.float32))
    np.testing.assert_array_equal(features(x), want)
    features = RandomFeatures.draw(jax.random.key(0), 4, 2, 1.5)
    want = features.rows(x.T.astype(np.float32))
    np.testing.assert_array_equal(features.rows(x.T), want)
    np.testing.assert_array_equal(features(x), want.T)


def test_arrays_of_another_dimension_are_named():
    features = PolynomialFeatures(3, 2)
    for call in (features, lambda x: features.rows(x.T)):
        with pytest.raises(ValueError, match=r"x has shape .*dim=3"):
            call(np.ones((5, 2)))
