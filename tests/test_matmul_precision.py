"""What guarantees rest on is multiplied at full precision, also where a device would take TensorFloat-32."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core as extend

from dpx import gram
from dpx.training import correlated

KEY = jax.random.key(0)


def wishart(covariance):
    return gram.wishart_mean(KEY, covariance, 9)


def banded(x):
    about = {"sensitivity": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 1.0, "key": KEY}
    noise = correlated.banded(coefficients=(0.8, 0.6), **about)
    return noise.update(x, noise.init(x))[0]


def products(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn.params["precision"]
        for inner in extend.jaxprs_in_params(eqn.params):
            yield from products(inner)


@pytest.mark.quick_cases("banded")
@pytest.mark.parametrize("program", [wishart, banded])
def test_products_are_at_the_highest_precision(program):
    with jax.enable_x64(True):
        found = list(products(jax.make_jaxpr(program)(jnp.eye(3)).jaxpr))
    assert found
    assert all(each == (jax.lax.Precision.HIGHEST,) * 2 for each in found)
