"""Scales inside weights that vary over rows and columns at once: exact."""

import jax.numpy as jnp
import pytest
from test_clipping_weights import BATCH, IN, LENGTH, OUT, X, compare, normal


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


@pytest.mark.quick_cases("held-scales_of_groups_used_twice")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("favor", [0.0, 1e9], ids=["Gram", "held"])
def test_norms_and_sums_are_exact(monkeypatch, case, favor):
    compare(monkeypatch, case, favor)
