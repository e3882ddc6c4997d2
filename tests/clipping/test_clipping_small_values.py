"""Scales inside weights that vary over rows and columns at once: exact, and no gradient is held."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_clipping_engine import rules_of
from test_clipping_weights import BATCH, IN, LENGTH, OUT, X, compare, costs, normal

from dpx.clipping import fixed_terms, small_values
from dpx.clipping import weights as _weights


def scales_of_groups():
    """A scale for each four inputs of a column: it varies over rows and columns at once."""

    def loss(p, x):
        w = p["w"] * jnp.exp(p["s"])[:, None]
        return jnp.sum(jnp.sin(x @ w.reshape(IN, OUT)))

    return loss, {"w": normal(3, 4, OUT), "s": normal(3, OUT)}, (X,)


def scales_of_groups_at_one_position():
    loss, params, _ = scales_of_groups()
    return loss, params, (X[:, 0],)


def scales_of_groups_used_twice():
    """The scaled weight of each head, as it is and transposed."""

    def loss(p, x):
        w = p["s"][..., None] * p["w"] / 3
        h = jnp.einsum("lhd,hdge->lhge", x, w)
        return jnp.sum(jnp.sin(jnp.einsum("lhge,hdge->lhd", jnp.sin(h), w)))

    params = {"w": normal(2, 6, 3, 4), "s": normal(2, 6, 3)}
    return loss, params, (X.reshape(BATCH, LENGTH, 2, 6),)


def scaled_basis():
    """Coefficients of functions of each input, and a scale for each pair of input and output: a KAN."""

    def loss(p, x):
        basis = jnp.stack([jnp.sin(n * x) for n in range(1, 5)], -1)
        w = (p["w"] * p["s"][..., None]).reshape(OUT, 4 * IN)
        return jnp.sum(jnp.sin(basis.reshape(-1, 4 * IN) @ w.T))

    return loss, {"w": normal(OUT, IN, 4), "s": normal(OUT, IN)}, (X[:, 0],)


CASES = (
    scales_of_groups, scales_of_groups_at_one_position, scales_of_groups_used_twice, scaled_basis,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch):
    monkeypatch.setattr(_weights, "is_large", lambda shape: True)
    monkeypatch.setattr(_weights, "SMALL", 2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("favor", [0.0, 1e9], ids=["Gram", "held"])
def test_norms_and_sums_are_exact(monkeypatch, case, favor):
    compare(monkeypatch, case, favor)


def test_a_scale_for_each_input_and_output_holds_no_gradient_of_the_weight(monkeypatch):
    monkeypatch.setattr(_weights, "SMALL", 8)

    def loss(p, x):
        w = (p["w"] * p["s"][..., None]).reshape(64, 32 * 16)
        return jnp.sum(jnp.sin(w @ x))

    params = {"w": normal(64, 32, 16), "s": normal(64, 32)}
    sizes = [costs(loss, params, (jnp.ones((n, 32 * 16)),), "one_pass")[1] for n in (8, 16)]
    assert (sizes[1] - sizes[0]) / 8 < params["w"].size * 4 / 2
    assert rules_of(loss, params, jnp.ones((8, 32 * 16)))["w"][1]


@pytest.mark.parametrize("ratio", [(1, 1, 1), (3, 1, 1), (1, 4, 1), (1, 1, 6), (3, 4, 6)], ids=str)
@pytest.mark.parametrize(
    "axes",
    [(None, None, 0), (None, 0, None), (0, None, 1), (1, None, 0), (None, 1, 0), (2, 0, 1)],
    ids=str,
)
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)], ids=str)
def test_a_gradient_is_that_of_the_product_times_the_array(axes, ratio, order):
    """With blocks of a weight that is used twice, and with what else is known of its first use."""
    draw = np.random.default_rng(0)
    array, ratio = draw.normal(size=(3, 4, 6)), draw.normal(size=ratio)
    layout, split = rules.Layout((3, 4, 6), *((a,) for a in order)), [(3,), (4,), (6,)]
    k, r, c = layout.sizes()
    rows, columns = draw.normal(size=(2, k, 5, r)), draw.normal(size=(2, k, 5, c))
    product = np.einsum("ukpr,ukpc->krc", rows, columns)
    gradient = product.transpose(np.argsort(order)) * array * ratio
    summed = tuple(a for a, axis in enumerate(axes) if axis is None)
    kept = [axis for axis in axes if axis is not None]
    expected = np.sum(gradient, summed).transpose(np.argsort(kept))

    def narrow(x):
        return jnp.asarray(x, jnp.float32)

    pairs = [rules.Pair(narrow(r), narrow(c)) for r, c in zip(rows, columns, strict=True)]
    term = fixed_terms.Term(0, axes, "", narrow(ratio))
    for by_rows in (None, False, True):
        found = None
        if by_rows is not None:
            found = fixed_terms.contract(pairs[0], narrow(array.transpose(order)), by_rows)
        uses = list(zip(pairs, (found, None), strict=True))
        result = small_values.small_gradient(
            term, narrow(array), layout, split, uses, expected.shape
        )
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
