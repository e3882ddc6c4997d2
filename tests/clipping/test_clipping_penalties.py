"""Functions of weights beside other uses of them: penalties of every kind, scales and derivatives by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_clipping_models import check, jit, per_example
from test_clipping_weights import IN, OUT, X, by_gram, compare, normal

from dpx import clipping

SQUARE = {"w": normal(IN, IN)}


def scaled_between_cyclic_transposes():
    """A fixed scale along an axis that two transposes move to and from another place."""
    scale = np.linspace(0.5, 2, 4, dtype="f4")[:, None, None]

    def loss(p, x):
        w = jnp.transpose(jnp.transpose(p["w"], (1, 2, 0)) * scale, (2, 0, 1)) * scale[:3]
        return jnp.sum(jnp.sin(x @ w.reshape(IN, 5)))

    return loss, {"w": normal(3, 4, 5)}, (X,)


def trace_of_the_square():
    """A penalty whose derivative is the transpose of a square weight: of its shape, and no multiple of it."""

    def loss(p, x):
        return jnp.sum(jnp.sin(x @ p["w"])) + x[0, 0] * jnp.sum(p["w"] * p["w"].T)

    return loss, SQUARE, (X,)


def cubes():
    def loss(p, x):
        cubes = p["w"] * p["w"] * p["w"]
        return jnp.sum(jnp.sin(x @ p["w"])) + x[0, 0] * jnp.sum(cubes)

    return loss, SQUARE, (X,)


def barrier():
    """A derivative that is divided by the weight, and so no multiple of it."""

    def loss(p, x):
        return jnp.sum(jnp.sin(x @ p["w"])) - x[0, 0] * jnp.sum(jnp.log(p["w"]))

    return loss, {"w": jnp.exp(SQUARE["w"])}, (X,)


def scale_of_some_entries():
    """A scale for each column that a mask leaves to some of its entries."""
    mask = np.tril(np.ones((IN, OUT), bool), -1)

    def loss(p, x):
        scale = jnp.broadcast_to(jnp.exp(p["s"]), (IN, OUT))
        return jnp.sum(jnp.sin(x @ (p["w"] * jnp.where(mask, scale, 0))))

    return loss, {"w": normal(IN, OUT), "s": normal(OUT)}, (X,)


def residual_with_penalty():
    """A product with the weight and the identity: its result says nothing of that with the weight alone."""

    def loss(p, x):
        return jnp.sum(jnp.sin(x @ (p["w"] + jnp.eye(IN)))) + x[0, 0] * jnp.sum(p["w"] ** 2)

    return loss, SQUARE, (X,)


def group_lasso():
    """A penalty whose derivative is the weight times a number for each row."""

    def loss(p, x):
        lengths = jnp.linalg.norm(p["w"], axis=1)
        return jnp.sum(jnp.sin(x @ p["w"])) + x[0, 0] * jnp.sum(lengths)

    return loss, {"w": normal(IN, OUT)}, (X,)


def two_penalties():
    """Two fixed arrays in one gradient, which are not orthogonal."""

    def loss(p, x):
        penalty = x[0, 0] * jnp.sum(p["w"] ** 2) + x[0, 1] * jnp.sum(jnp.abs(p["w"]))
        return 0.1 * jnp.sum(jnp.sin(x @ p["w"])) + penalty

    return loss, SQUARE, (X,)


CASES = (
    scaled_between_cyclic_transposes, trace_of_the_square, cubes, barrier, scale_of_some_entries,
    residual_with_penalty, group_lasso, two_penalties,
)  # fmt: skip


@pytest.mark.quick_cases("group_lasso", "barrier")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_norms_and_sums_are_exact(monkeypatch, case):
    compare(monkeypatch, case, 0.0)


BACKWARDS = {
    "affine": lambda w, g: g + w,
    "square": lambda w, g: g * g,
    "quotient": lambda w, g: w / g,
}


@pytest.mark.quick_cases("penalty-quotient", "weight-square")
@pytest.mark.parametrize("name", BACKWARDS)
@pytest.mark.parametrize("inside", ["weight", "penalty"])
def test_derivatives_of_weights_that_are_not_linear_fall_back(monkeypatch, name, inside):
    by_gram(monkeypatch, 0.0)
    doubled = jax.custom_vjp(lambda w: w * 2)
    doubled.defvjp(lambda w: (w * 2, w), lambda w, g: (BACKWARDS[name](w, g),))

    def loss(p, x):
        if inside == "weight":
            return jnp.sum((x @ doubled(p["w"])) ** 2)
        return jnp.sum((x @ p["w"]) ** 2) + x[0, 0] * jnp.sum(doubled(p["w"]))

    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass")
    check(jit(fn)(SQUARE, X), per_example(loss, SQUARE, (X,)), 0.5)


@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
def test_a_penalty_on_a_weight_that_is_used_once(monkeypatch, method):
    """Two passes keep no more than the norm of what its use adds, were it not for the penalty."""
    by_gram(monkeypatch, 0.0)

    def loss(p, x):
        return jnp.sum(jnp.sin(x @ p["w"])) + x[0, 0] * jnp.sum(jnp.abs(p["w"]))

    params = {"w": normal(IN, IN)}
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method)
    check(jit(fn)(params, X), per_example(loss, params, (X,)), 0.5)


@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
def test_functions_of_a_weight_with_several_results(monkeypatch, method):
    """Such as its LU decomposition, of which one result is a small value and the loss takes others too."""

    def loss(p, x):
        gram = p["w"].T @ p["w"] + jnp.eye(OUT)
        return jnp.sum(jnp.linalg.solve(gram, x[0, :OUT]) * x[1, :OUT]) + 0.1 * jnp.sum(p["w"] ** 2)

    p = {"w": normal(IN, OUT)}
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method)
    check(jit(fn)(p, X), per_example(loss, p, (X,)), 0.5)


def test_look_ups_that_are_dropped_count_for_nothing_beside_a_penalty(monkeypatch):
    by_gram(monkeypatch, 0.0)

    def loss(p, ids):
        rows = p["e"].at[ids].get(mode="fill", fill_value=0)
        return jnp.sum(jnp.sin(rows + 1)) + 0.1 * ids[0] * jnp.sum(p["e"] ** 2)

    p, ids = {"e": normal(7, OUT)}, np.array([[1, 9, 2], [1, 1, 1], [6, 7, 8]])
    fn = jit(clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass"))
    check(fn(p, ids), per_example(loss, p, (ids,)), 0.5)


def test_penalties_that_cancel_add_no_more_than_the_threshold(monkeypatch):
    """Two fixed arrays, times numbers of which one is nearly what undoes the other."""
    by_gram(monkeypatch, 0.0)
    rng = np.random.default_rng(0)
    w = (1.3 + 1e-3 * rng.normal(size=(40, 30))).astype("f4")

    def loss(p, x, y, z):
        return (
            jnp.sum(x @ p["w"])
            + 1e4 * y * jnp.sum(p["w"] ** 2)
            + 1e4 * z * jnp.sum(jnp.abs(p["w"]))
        )

    y = rng.uniform(1, 2, size=512)
    z = -2 * 1.3 * y * (1 + 10.0 ** -rng.uniform(1, 3, size=512))
    fn = clipping.clipped_grad(loss, l2_clip_norm=1.0, method="one_pass")
    alone = jax.jit(
        lambda *b: jax.lax.map(lambda e: fn({"w": w}, *(v[None] for v in e)).grads["w"], b)
    )
    found = alone(np.zeros((512, 1, 40), "f4"), y.astype("f4"), z.astype("f4"))
    found = np.linalg.norm(np.asarray(found, "f8").reshape(512, -1), axis=1)
    assert found.max() <= 1
    assert found.max() > 0.99
