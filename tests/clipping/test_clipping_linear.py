"""Two passes are taken only where the derivative is linear: else an example could add too much."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_clipping_models import check, jit, per_example

from dpx import clipping
from dpx.clipping import custom, linear

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


@pytest.mark.parametrize("name", NONLINEAR)
def test_what_is_not_linear_takes_one_pass(name):
    loss = loss_with(NONLINEAR[name])
    with pytest.raises(ValueError, match="backward pass of jax"):
        jax.eval_shape(clipping.clipped_grad(loss, l2_clip_norm=0.5, method="two_pass"), W, X)
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5)
    check(jit(fn)(W, X), per_example(loss, W, (X,)), 0.5)


FIRST_ROW = lax.ScatterDimensionNumbers((1,), (0,), (0,))
CURVED = (
    jnp.abs, jnp.sign, jnp.floor, jnp.ceil, jnp.round, jnp.exp, jnp.exp2, jnp.expm1, jnp.log, jnp.log1p,
    jnp.sqrt, jnp.cbrt, jnp.square, jnp.sin, jnp.cos, jnp.tan, jnp.tanh, jnp.sinh, jnp.arctan, lax.rsqrt,
    lax.logistic, lax.erf, lax.lgamma, jnp.reciprocal, lax.cummax, lax.cummin, lax.cumprod, lax.cumlogsumexp,
    jnp.sort, jnp.max, jnp.min, jnp.prod, jnp.linalg.inv, jnp.linalg.qr, jnp.ones_like,
    lambda g: lax.top_k(g, 2)[0], lambda g: g[jnp.argmax(g)], lambda g: jnp.where(g > 0, g, 0.0),
    lambda g: lax.reduce_precision(g, 8, 7), lambda g: g.astype(jnp.float16).astype(g.dtype),
    lambda g: lax.clamp(-1.0, g, 1.0), lambda g: jnp.maximum(g, 0.0), lambda g: jnp.minimum(g, 0.0),
    lambda g: lax.rem(g, 2.0), lambda g: lax.nextafter(g, 1.0), lambda g: jnp.arctan2(g, 2.0),
    lambda g: lax.pow(g, 1.5), lambda g: g**3, lambda g: 1.0 / g, lambda g: g * g[0], lambda g: g @ g,
    lambda g: g + 1.0, lambda g: 1.0 - g,
    lambda g: lax.reduce_window(g, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"),
    lambda g: lax.scatter_max(g, jnp.zeros((1, 1), int), g[:1], FIRST_ROW),
    lambda g: lax.scatter_mul(g, jnp.zeros((1, 1), int), g[:1], FIRST_ROW),
)  # fmt: skip


@pytest.mark.parametrize("curved", CURVED, ids=range(len(CURVED)))
def test_no_function_that_is_not_linear_is_taken_for_one(curved):
    jaxpr = jax.make_jaxpr(curved)(jnp.ones((4, 4)))
    assert not linear._is_linear(jaxpr.jaxpr, 0), jaxpr


def test_a_backward_pass_that_cannot_be_traced_is_not_known_to_be_linear(monkeypatch):
    monkeypatch.setattr(custom, "derivative", lambda eqn, which: None)
    loss = loss_with(LINEAR["scaled"])
    with pytest.raises(ValueError, match="backward pass of jax"):
        jax.eval_shape(clipping.clipped_grad(loss, l2_clip_norm=0.5, method="two_pass"), W, X)


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_may_take_two(name):
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


@pytest.mark.parametrize("by", [jnp.linalg.solve, iterated], ids=["in one go", "iterated"])
def test_solvers_that_stop_when_the_error_is_small_take_one_pass(by):
    fn = clipping.clipped_grad(solved(by), l2_clip_norm=0.5, method="two_pass")
    if by is iterated:
        with pytest.raises(ValueError, match="solver"):
            jax.eval_shape(fn, W, X)
        fn = clipping.clipped_grad(solved(by), l2_clip_norm=0.5)
    check(jit(fn)(W, X), per_example(solved(by), W, (X,)), 0.5)


@pytest.mark.parametrize("inside", [in_scan, in_cond], ids=lambda f: f.__name__)
def test_bodies_are_looked_into(inside):
    loss = loss_with(NONLINEAR["sign"], inside)
    with pytest.raises(ValueError, match="changed at"):
        jax.eval_shape(clipping.clipped_grad(loss, l2_clip_norm=0.5, method="two_pass"), W, X)
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5)
    check(jit(fn)(W, X), per_example(loss, W, (X,)), 0.5)


@pytest.mark.parametrize("names", [("scaled", "sign"), ("sign", "scaled")], ids=" ".join)
def test_every_backward_pass_of_a_loss_is_looked_at(names):
    first, second = ((LINEAR | NONLINEAR)[name] for name in names)

    def inside(block, x, w):
        return jax.checkpoint(lambda x, w: loss_with(second)(w, block(x, w)))(x, w)

    fn = clipping.clipped_grad(loss_with(first, inside), l2_clip_norm=0.5, method="two_pass")
    with pytest.raises(ValueError, match="backward pass of jax"):
        jax.eval_shape(fn, W, X)


def test_no_example_adds_more_than_the_threshold():
    """The sign of a cotangent is as long whatever the loss is scaled by."""
    loss = loss_with(NONLINEAR["sign"])
    out = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=0.5))(W, X[:1])
    assert out.norms[0] > 100
    assert np.linalg.norm(out.grads) <= 0.5 * (1 + 1e-6)


def test_a_transpose_that_somebody_wrote_takes_one_pass():
    def transposed(x):
        return jax.custom_derivatives.linear_call(
            lambda _, x: 2 * x, lambda _, g: jnp.sign(g), (), x
        )

    def loss(w, x):
        return jnp.sum(jax.checkpoint(lambda x, w: transposed(jnp.tanh(x @ w)))(x, w) ** 2)

    options = {"l2_clip_norm": 0.5, "microbatch_size": 1}  # JAX cannot vectorise it.
    with pytest.raises(ValueError, match="linear_call"):
        jax.eval_shape(clipping.clipped_grad(loss, method="two_pass", **options), W, X)
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
    with pytest.raises(ValueError, match=r"backward pass of (jax.custom_jvp|CustomRoot)"):
        jax.eval_shape(clipping.clipped_grad(loss, method="two_pass", **options), W, X)
    out = jax.jit(clipping.clipped_grad(loss, **options))(W, X[:1])
    assert out.norms[0] > 100
    assert np.linalg.norm(out.grads) <= 0.5 * (1 + 1e-6)


@pytest.mark.parametrize("function", [
    jax.nn.relu, jax.nn.softmax, jax.nn.softplus, jax.nn.silu, jax.nn.logsumexp,
], ids=lambda f: f.__name__)  # fmt: skip
def test_functions_of_jax_may_take_two(function):
    def loss(w, x):
        return jnp.sum(jax.checkpoint(lambda x, w: function(x @ w))(x, w) ** 2)

    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="two_pass")
    check(jit(fn)(W, X), per_example(loss, W, (X,)), 0.5)
