"""Derivatives that somebody wrote, linear or not: blocks are recomputed, and cotangents are never scaled."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_clipping_models import check, jit, per_example

from dpx import clipping

WIDTH, LENGTH, BATCH = 66, 20, 3
W = jnp.asarray(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)) / 8, jnp.float32)
X = np.random.default_rng(1).normal(size=(BATCH, LENGTH, WIDTH)).astype("f4")


def loss_with(backward, inside=lambda block, x, w: jax.checkpoint(block)(x, w)):
    """A recomputed block with a function in it that changes nothing but the cotangent."""

    @jax.custom_vjp
    def changed(x):
        return x

    changed.defvjp(lambda x: (x, x), lambda x, g: (backward(x, g),))

    def loss(w, x):
        return 9 * jnp.sum(inside(lambda x, w: changed(jnp.tanh(x @ w)), x, w) ** 2)

    return loss


def in_scan(block, x, w):
    return lax.scan(jax.checkpoint(lambda x, _: (block(x, w), None)), x, None, length=2)[0]


def in_cond(block, x, w):
    return lax.cond(x[0, 0] > 0, jax.checkpoint(block), lambda x, w: x @ w, x, w)


NONLINEAR = {
    "sign": lambda x, g: jnp.sign(g),
    "clipped": lambda x, g: jnp.clip(g, -0.1, 0.1),
    "affine": lambda x, g: g + x,
    "constant": lambda x, g: x,
    "square": lambda x, g: g * g,
    "quotient": lambda x, g: x / (2 + g * g),
    "of its norm": lambda x, g: g / (1 + jnp.linalg.norm(g)),
    "where it is positive": lambda x, g: jnp.where(g > 0, g, 0),
    "or something else": lambda x, g: jnp.where(x > 0, g, x),
    "beside something else": lambda x, g: lax.dynamic_update_slice(x, g[:1], (0, 0)),
    "integer": lambda x, g: g.astype(jnp.int32).astype(jnp.float32),
    "rounded": lambda x, g: g.astype(jnp.bfloat16).astype(jnp.float32),
    "sorted": lambda x, g: jnp.sort(g, 0),
    "square in a scan": lambda x, g: lax.scan(lambda c, _: (c * c, None), g, None, length=2)[0],
    "added in a scan": lambda x, g: lax.scan(lambda c, y: (c + y, None), g[0], x)[0] + 0 * g,
    "square in a branch": lambda x, g: lax.cond(x[0, 0] > 0, lambda g: g * g, lambda g: g, g),
    "choice of a branch": lambda x, g: lax.cond(g[0, 0] > 0, lambda g: g, lambda g: 2 * g, g),
    "quotient of cotangents": lambda x, g: g / g.sum(),
    "solved by a cotangent": lambda x, g: lax.linalg.triangular_solve(
        jnp.where(np.eye(LENGTH, dtype=bool), g.sum(), g[:, :LENGTH]), g, left_side=True, lower=True
    ),
    "squashed in a scan that starts from zero": lambda x, g: (
        lax.scan(lambda c, y: (c / (1e-3 + jnp.abs(c)) + 1e-3 * y, None), jnp.zeros(WIDTH), g)[0]
        + 0 * g
    ),
    "something else in a branch": lambda x, g: lax.cond(x[0, 0] > 0, lambda g: g, lambda g: x, g),
    "until it is small": lambda x, g: lax.while_loop(lambda g: jnp.max(g) > 1, lambda g: g / 2, g),
}

LINEAR = {
    "scaled": lambda x, g: -jnp.tanh(x) * g / 2,
    "masked": lambda x, g: jnp.where(x > 0, g, 0.0),
    "rearranged": lambda x, g: jnp.concatenate([g[::-1, 1:], jnp.zeros_like(g[:, :1])], 1),
    "multiplied": lambda x, g: g @ (x.T @ x) / LENGTH,
    "added up": lambda x, g: jnp.cumsum(g, 0) + g.sum(0) - g.mean(),
    "looked up": lambda x, g: jnp.zeros_like(g).at[jnp.arange(LENGTH) // 2].add(g[::-1]),
    "a derivative": lambda x, g: jax.vjp(jax.jit(jax.nn.softmax), x)[1](g)[0],
    "held back": lambda x, g: math.prod(lax.optimization_barrier((x, g))),
    "a scan": lambda x, g: lax.scan(lambda c, y: (c + y[0] * y[1],) * 2, 0 * g[0], (x, g))[1],
    "a branch": lambda x, g: lax.cond(x[0, 0] > 0, lambda g: g, lambda g: g * 2, g),
    "zero in places": lambda x, g: jnp.where(jnp.abs(x) > 0.3, g, jnp.zeros_like(g)),
}


@pytest.mark.quick_cases("quotient", "of its norm")
@pytest.mark.parametrize("name", NONLINEAR)
def test_what_is_not_linear_is_exact(name):
    loss = loss_with(NONLINEAR[name])
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5)
    check(jit(fn)(W, X), per_example(loss, W, (X,)), 0.5)


@pytest.mark.quick_cases("held back")
@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_is_exact(name):
    loss = loss_with(LINEAR[name])
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="two_pass")
    check(jit(fn)(W, X), per_example(loss, W, (X,)), 0.5)


def solved(by):
    """A block that ends in the solution of a system of equations."""

    def block(w, x):
        matrix = jnp.eye(LENGTH) + jnp.tanh(x @ w) @ jnp.tanh(x @ w).T / WIDTH
        return jnp.sum(by(matrix, x @ w) ** 2)

    return jax.checkpoint(block)


def iterated(matrix, y):
    return jax.scipy.sparse.linalg.cg(lambda z: matrix @ z, y, tol=1e-3)[0]


@pytest.mark.quick_cases
@pytest.mark.parametrize("by", [jnp.linalg.solve, iterated], ids=["in one go", "iterated"])
def test_solvers_are_differentiated_as_they_are(by):
    fn = clipping.clipped_grad(solved(by), l2_clip_norm=0.5, method="two_pass")
    check(jit(fn)(W, X), per_example(solved(by), W, (X,)), 0.5)


@pytest.mark.parametrize("inside", [in_scan, in_cond], ids=lambda f: f.__name__)
def test_what_is_not_linear_in_a_body_is_exact(inside):
    loss = loss_with(NONLINEAR["sign"], inside)
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5)
    check(jit(fn)(W, X), per_example(loss, W, (X,)), 0.5)


def test_no_example_adds_more_than_the_threshold():
    """The sign of a cotangent is as long whatever the loss is scaled by."""
    loss = loss_with(NONLINEAR["sign"])
    out = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=0.5, method="two_pass"))(W, X[:1])
    assert out.norms[0] > 100
    assert np.linalg.norm(out.grads) <= 0.5 * (1 + 1e-6)


def test_a_transpose_that_somebody_wrote_is_exact():
    def transposed(x):
        return jax.custom_derivatives.linear_call(
            lambda _, x: 2 * x, lambda _, g: jnp.sign(g), (), x
        )

    def loss(w, x):
        return jnp.sum(jax.checkpoint(lambda x, w: transposed(jnp.tanh(x @ w)))(x, w) ** 2)

    options = {"l2_clip_norm": 0.5, "microbatch_size": 1}  # JAX cannot vectorise it.
    check(jit(clipping.clipped_grad(loss, **options))(W, X), per_example(loss, W, (X,)), 0.5)


@jax.custom_jvp
def with_tangent(x):
    return jnp.tanh(x)


@with_tangent.defjvp
def _(given, tangents):
    changed = jax.custom_derivatives.linear_call(
        lambda _, x: x, lambda _, g: jnp.sign(g), (), tangents[0]
    )
    return jnp.tanh(given[0]), changed


def root(x):
    """An implicit layer, whose derivative is the solution of another equation."""

    def solution(matvec, y):
        return lax.custom_linear_solve(
            matvec, y, lambda _, b: b / 2, transpose_solve=lambda _, b: jnp.sign(b)
        )

    return lax.custom_root(lambda y: 2 * y - x, x, lambda _, x: x / 2, solution)


@pytest.mark.parametrize("layer", [with_tangent, root], ids=["tangent", "root"])
def test_a_derivative_forwards_hides_no_transpose(layer):
    """`jax.custom_jvp` is linear in tangents, but not always in cotangents."""

    def loss(w, x):
        return 9 * jnp.sum(jax.checkpoint(lambda x, w: layer(x @ w))(x, w) ** 2)

    options = {"l2_clip_norm": 0.5, "microbatch_size": 1}  # JAX cannot vectorise a `linear_call`.
    out = jax.jit(clipping.clipped_grad(loss, **options))(W, X[:1])
    assert out.norms[0] > 100
    assert np.linalg.norm(out.grads) <= 0.5 * (1 + 1e-6)


@pytest.mark.quick_cases("softmax", "relu")
@pytest.mark.parametrize("function", [
    jax.nn.relu, jax.nn.softmax, jax.nn.softplus, jax.nn.silu, jax.nn.logsumexp,
], ids=lambda f: f.__name__)  # fmt: skip
def test_functions_of_jax_are_exact(function):
    def loss(w, x):
        return jnp.sum(jax.checkpoint(lambda x, w: function(x @ w))(x, w) ** 2)

    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="two_pass")
    check(jit(fn)(W, X), per_example(loss, W, (X,)), 0.5)
