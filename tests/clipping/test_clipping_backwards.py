"""Backward passes, also those that somebody wrote: what is read of them adds up to the gradient."""

import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clipping_exact import is_exact, normal, without_rule
from jax import lax

from dpx.clipping import jaxprs
from dpx.clipping.gradients import plan
from dpx.clipping.gradients.reading import RULES, rule

D = 6
X = np.random.default_rng(0).normal(size=(4, 3, D)).astype("f4")
W = jnp.asarray(np.random.default_rng(1).normal(size=(D, D)) / 2, "f4")


def layer(*widths):
    """What follows a change of the weight: a product whose result depends on its place."""
    return jnp.sin(jnp.arange(1.0, 1 + np.prod(widths)).reshape(widths))


def ending(h):
    return jnp.sum(jnp.sin(h) * layer(*h.shape))


def custom(backward):
    """A product whose weight has the gradient that `backward` makes of the usual one."""
    product = jax.custom_vjp(lambda x, w: x @ w)
    product.defvjp(
        lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, backward(kept[0].T @ g))
    )
    return lambda w, x: ending(product(x, w))


NUMBERS = ("NHC", "HIO", "NHC")

# By primitive, a loss of (weight, example) whose gradient goes through it.
LOSSES = {
    "dot_general": lambda w, x: ending(x @ w),
    "add_any": lambda w, x: ending(jnp.sin(x @ w) @ w.T),
    "add": custom(lambda g: lax.add(g, g)),
    "sub": custom(lambda g: lax.sub(2 * g, g)),
    "neg": custom(lambda g: -g),
    "mul": lambda w, x: ending(x @ (w * jnp.arange(1.0, 1 + D)[:, None])),
    "div": lambda w, x: ending(x @ (w / jnp.arange(1.0, 1 + D))),
    "convert_element_type": lambda w, x: ending(x @ w.astype("bfloat16").astype("f4")),
    "transpose": lambda w, x: ending(x @ w.T),
    "reshape": lambda w, x: ending(jnp.einsum("ld,dhe->lhe", x, w.reshape(D, 2, D // 2))),
    "squeeze": lambda w, x: ending(jnp.einsum("ld,kde->lke", x, w[None])),
    "expand_dims": custom(lambda g: jnp.expand_dims(g, 0)[0]),
    "broadcast_in_dim": custom(lambda g: lax.broadcast_in_dim(g, (1, D, D), (1, 2))[0]),
    "reduce_sum": lambda w, x: ending(jnp.einsum("ld,lde->le", x, jnp.broadcast_to(w, (3, D, D)))),
    "split": custom(lambda g: jnp.concatenate([2 * jnp.split(g, 2)[0], jnp.split(g, 2)[1]])),
    "slice": lambda w, x: ending(x @ jnp.concatenate([w, w[:2]], 0)[2:]),
    "concatenate": lambda w, x: ending(x @ jnp.split(w, 2, 1)[0] + x @ jnp.split(w, 2, 1)[1]),
    "pad": lambda w, x: ending(jnp.sin(x @ w) @ w + x[:, :4] @ w[1:5]),
    "dynamic_update_slice": lambda w, x: ending(
        x + lax.dynamic_slice(w, (jnp.argmax(x[0]), 0), (1, D))
    ),
    "dynamic_update_slice of a column": lambda w, x: ending(
        x @ lax.dynamic_slice(w, (0, jnp.argmax(x[0])), (D, 1))
    ),
    "scatter-add": lambda w, x: ending(w[jnp.argmax(x, 1)]),
    "conv_general_dilated": lambda w, x: ending(
        lax.conv_general_dilated(
            x[None, :, :3], w.reshape(2, 3, D), (1,), "SAME", dimension_numbers=NUMBERS
        )
    ),
    "remat": lambda w, x: ending(jax.checkpoint(lambda x: jnp.sin(x @ w) @ w)(x)),
    "scan": lambda w, x: ending(lax.scan(lambda c, x: (jnp.sin(c @ w + x),) * 2, x[0], x)[1]),
    "optimization_barrier": custom(lax.optimization_barrier),
    "reduce_precision": custom(lambda g: lax.reduce_precision(g, 8, 22)),
    "reduce_precision of the example": lambda w, x: ending(lax.reduce_precision(x, 8, 3) @ w),
}

# The same under another name, or what only some releases of JAX have.
ALIKE = {*jaxprs.REMAT, *jaxprs.PLAIN, "scatter_add"}


@pytest.fixture(autouse=True)
def by_factors(monkeypatch):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)


def test_every_rule_has_a_loss():
    assert set(RULES) - ALIKE <= set(LOSSES)


@pytest.mark.quick_cases(
    "reduce_precision", "reduce_precision of the example", "optimization_barrier", "broadcast_in_dim",
    "dynamic_update_slice of a column",
)  # fmt: skip
@pytest.mark.parametrize("name", LOSSES)
def test_what_is_read_adds_up_to_the_gradient(name):
    assert not without_rule(LOSSES[name], W, (X,))
    if name != "convert_element_type":  # Products of narrow cotangents are not rounded here.
        is_exact(LOSSES[name], W, (X,))


HELD = {
    "a number over it": lambda g: 2.0 / (g + jnp.where(g < 0, -0.1, 0.1)),
    "a number over it, behind a barrier": lambda g: (
        2.0 / (lax.optimization_barrier(g) + jnp.where(g < 0, -1.0, 1.0))
    ),
    "clipped": lambda g: jnp.clip(g, -0.1, 0.1),
    "squared": lambda g: g * g,
    "moved": lambda g: g + 1.0,
    "sorted": lambda g: jnp.sort(g, 0),
    "where it is positive": lambda g: jnp.where(g > 0, g, 0.0),
    "masked": lambda g: g * jnp.tril(jnp.ones((D, D))),
    "carried": lambda g: lax.scan(lambda c, r: (0.5 * c + r, None), 0 * g[0], g)[0] + 0 * g,
    "added to itself": lambda g: lax.fori_loop(0, 2, lambda i, c: c + g * c, g),
    # Integers that are added are not zero.
    "times integers": lambda g: g * (1 + jnp.arange(D * D)).reshape(D, D),
    "reversed": lambda g: g[::-1],
    "reshaped from its last axis on": lambda g: jnp.reshape(g, (D, D), order="F"),
}


@pytest.mark.quick_cases(
    "times integers", "moved", "added to itself", "reversed", "reshaped from its last axis on"
)
@pytest.mark.parametrize("name", HELD)
def test_what_is_no_sum_of_products_is_held_and_exact(name):
    assert without_rule(custom(HELD[name]), W, (X,))
    is_exact(custom(HELD[name]), W, (X,))


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (36,)], ids=str)
def test_a_shape_that_cuts_no_factor_evenly_is_held(shape):
    construct = (lambda w, x: ending(x @ w.reshape(D, D))), W.reshape(shape), (X,)
    assert bool(without_rule(*construct)) == (len(shape) == 2)
    is_exact(*construct)


def with_backward(backward):
    """A product of (x, w, scale) with its cotangents by w and by scale, from (x, w, scale, g)."""

    @jax.custom_vjp
    def product(x, w, scale):
        return (x @ w) * scale

    product.defvjp(
        lambda *kept: (product(*kept), kept),
        lambda kept, g: (g @ kept[1].T, *backward(*kept, g)),
    )

    def loss(p, x):
        return ending(product(x, p["w"], jnp.exp(p["scale"])))

    return loss, {"w": W, "scale": normal(D)}, (X,)


@pytest.mark.parametrize(
    ("backward", "held"),
    [
        (lambda x, w, scale, g: (x.T @ g, jnp.sum(g, 0)), {"scale"}),
        (lambda x, w, scale, g: (x.T @ g + w, jnp.sum(g, 0)), {"w", "scale"}),
        # Of positive products, so that the quotient is well conditioned.
        (lambda x, w, scale, g: (2.0 / ((1 + x**2).T @ jnp.exp(g)), jnp.zeros(D)), {"w"}),
        (lambda x, w, scale, g: (x.T @ g, jnp.zeros(D)), set()),
        (lambda x, w, scale, g: (x.T @ g, jnp.ones(D)), {"scale"}),
        (lambda x, w, scale, g: lax.optimization_barrier((x.T @ g, jnp.sum(g, 0))), {"scale"}),
    ],
    ids=["product", "affine", "a number over it", "zeros", "ones", "barrier"],
)
def test_only_a_cotangent_of_zeros_counts_for_nothing(backward, held):
    """One that is the same for all entries is a gradient like any other."""
    construct = with_backward(backward)
    assert without_rule(*construct) == held
    is_exact(*construct)


@pytest.mark.parametrize(
    ("step", "has_rule"),
    [
        (lambda c, r, whole: c + r, True),
        (lambda c, r, whole: whole + c, True),
        (lambda c, r, whole: c + c + r, False),
        (lambda c, r, whole: r, False),
    ],
    ids=["adds", "adds the same", "doubles", "replaces"],
)
def test_a_loop_adds_to_what_it_begins_with(step, has_rule):
    """What an iteration adds is a product of its own row, or one that is the same in all of them."""

    def backward(kept, g):
        def body(c, rows):
            x, row = rows
            return step(c, x[:, None] @ row[None], jnp.einsum("ld,le->de", kept[0], g)), None

        return g @ kept[1].T, lax.scan(body, kept[0].T @ jnp.cos(g), (kept[0], g))[0]

    product = jax.custom_vjp(lambda x, w: x @ w)
    product.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    construct = (lambda w, x: ending(product(x, w))), W, (X,)
    assert bool(without_rule(*construct)) != has_rule
    is_exact(*construct)


DOUBLED = {
    "affine": lambda w, g: g + w,
    "square": lambda w, g: g * g,
    "quotient": lambda w, g: w / g,
}


@pytest.mark.quick_cases("penalty-quotient", "weight-square")
@pytest.mark.parametrize("name", DOUBLED)
@pytest.mark.parametrize("inside", ["weight", "penalty"])
def test_derivatives_of_weights_that_are_not_linear_are_exact(name, inside):
    doubled = jax.custom_vjp(lambda w: w * 2)
    doubled.defvjp(lambda w: (w * 2, w), lambda w, g: (DOUBLED[name](w, g),))

    def loss(w, x):
        if inside == "weight":
            return jnp.sum((x @ doubled(w)) ** 2)
        return jnp.sum((x @ w) ** 2) + x[0, 0] * jnp.sum(doubled(w))

    is_exact(loss, W, (X,))


def test_several_results_are_exact():
    @jax.custom_vjp
    def both(x, w):
        return x @ w, jnp.sum(w)

    both.defvjp(
        lambda x, w: (both(x, w), (x, w)),
        lambda kept, g: (g[0] @ kept[1].T, kept[0].T @ g[0] + g[1]),
    )

    def loss(w, x):
        h, total = both(x, w)
        return jnp.sum(jnp.sin(h)) * total

    assert without_rule(loss, W, (X,))
    is_exact(loss, W, (X,))


@pytest.mark.quick_cases("auto")
@pytest.mark.parametrize("how", ["one_pass", "auto", "two_pass"])
def test_derivatives_that_are_refused_are_not_asked_for(how):
    """Equinox has functions that must not be differentiated with respect to some of their operands."""

    @jax.custom_vjp
    def product(x, w, fixed):
        return x @ w * fixed

    def forward(x, w, fixed):
        assert not fixed.perturbed
        return product(x.value, w.value, fixed.value), (x.value, w.value, fixed.value)

    def backward(kept, g):
        x, w, fixed = kept
        return g @ w.T * fixed, x.T @ g * fixed, jnp.zeros(())

    product.defvjp(forward, backward, symbolic_zeros=True)

    def loss(w, x):
        layer = jax.checkpoint(lambda x, w: product(x, w, jax.lax.stop_gradient(x[0, 0])))
        return ending(layer(x, w))

    is_exact(loss, W, (X,), how)
    is_exact(loss, W, (X,), how)  # JAX remembers what was traced before.


@pytest.mark.quick_cases("3.0", "0.25")
@pytest.mark.parametrize("gain", [-1.0, 0.25, 3.0])
def test_a_limit_in_the_backward_pass_holds_before_the_gain_of_the_weight(gain):
    limited = jax.custom_vjp(lambda x, w: x @ w)
    limited.defvjp(
        lambda x, w: (x @ w, (x, w)),
        lambda kept, g: (g @ kept[1].T, kept[0].T @ jnp.clip(g, -0.1, 0.1)),
    )
    is_exact(lambda w, x: jnp.sum((limited(x, gain * w) - 1) ** 2), W, (X,), slack=1e-3)


# Functions that change nothing but cotangents, from the value and its cotangent.

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
        jnp.where(np.eye(len(X[0]), dtype=bool), g.sum(), g[:, : len(X[0])]),
        g,
        left_side=True,
        lower=True,
    ),
    "squashed in a scan that starts from zero": lambda x, g: (
        lax.scan(lambda c, y: (c / (1e-3 + jnp.abs(c)) + 1e-3 * y, None), jnp.zeros(D), g)[0]
        + 0 * g
    ),
    "something else in a branch": lambda x, g: lax.cond(x[0, 0] > 0, lambda g: g, lambda g: x, g),
    "until it is small": lambda x, g: lax.while_loop(lambda g: jnp.max(g) > 1, lambda g: g / 2, g),
}

LINEAR = {
    "scaled": lambda x, g: -jnp.tanh(x) * g / 2,
    "masked": lambda x, g: jnp.where(x > 0, g, 0.0),
    "rearranged": lambda x, g: jnp.concatenate([g[::-1, 1:], jnp.zeros_like(g[:, :1])], 1),
    "multiplied": lambda x, g: g @ (x.T @ x) / len(X[0]),
    "added up": lambda x, g: jnp.cumsum(g, 0) + g.sum(0) - g.mean(),
    "looked up": lambda x, g: jnp.zeros_like(g).at[jnp.arange(len(X[0])) // 2].add(g[::-1]),
    "a derivative": lambda x, g: jax.vjp(jax.jit(jax.nn.softmax), x)[1](g)[0],
    "held back": lambda x, g: math.prod(lax.optimization_barrier((x, g))),
    "a scan": lambda x, g: lax.scan(lambda c, y: (c + y[0] * y[1],) * 2, 0 * g[0], (x, g))[1],
    "a branch": lambda x, g: lax.cond(x[0, 0] > 0, lambda g: g, lambda g: g * 2, g),
    "zero in places": lambda x, g: jnp.where(jnp.abs(x) > 0.3, g, jnp.zeros_like(g)),
}


def in_scan(block, x, w):
    return lax.scan(jax.checkpoint(lambda x, _: (block(x, w), None)), x, None, length=2)[0]


def in_cond(block, x, w):
    return lax.cond(x[0, 0] > 0, jax.checkpoint(block), lambda x, w: x @ w, x, w)


def changing(backward, inside=lambda block, x, w: jax.checkpoint(block)(x, w)):
    """A recomputed block with a function in it that changes nothing but the cotangent."""
    changed = jax.custom_vjp(lambda x: x)
    changed.defvjp(lambda x: (x, x), lambda x, g: (backward(x, g),))

    def loss(w, x):
        return 9 * jnp.sum(inside(lambda x, w: changed(jnp.tanh(x @ w)), x, w) ** 2)

    return loss


CHANGING = {
    **{name: changing(backward) for name, backward in (NONLINEAR | LINEAR).items()},
    "sign in a scan": changing(NONLINEAR["sign"], in_scan),
    "sign in a branch": changing(NONLINEAR["sign"], in_cond),
}


@pytest.mark.quick_cases("quotient", "of its norm", "held back", "sign in a scan")
@pytest.mark.parametrize("name", CHANGING)
def test_blocks_whose_derivatives_are_linear_or_not_are_exact(name):
    """They are recomputed, and cotangents are never scaled."""
    is_exact(CHANGING[name], W, (X,), "two_pass")


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


def transposed(x):
    return jax.custom_derivatives.linear_call(
        lambda _, x: 2 * x, lambda _, g: jnp.sign(g), (), jnp.tanh(x)
    )


@pytest.mark.parametrize("layer", [with_tangent, root, transposed], ids=["tangent", "root", "call"])
def test_a_transpose_that_somebody_wrote_is_exact(layer):
    """`jax.custom_jvp` is linear in tangents, but not always in cotangents."""

    def loss(w, x):
        return 9 * jnp.sum(jax.checkpoint(lambda x, w: layer(x @ w))(x, w) ** 2)

    # JAX cannot vectorise a `linear_call`.
    is_exact(loss, W, (X,), "auto", microbatch_size=1)


def test_a_rule_is_added_as_the_contributors_guide_says():
    guide = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    (block,) = re.findall(r"```python\n(@rule\(.*?)```", guide, re.DOTALL)
    construct = (lambda w, x: ending(x @ jnp.cumsum(w, 0))), W, (X,)
    assert without_rule(*construct)
    before = dict(RULES)
    try:
        exec(block, {"rule": rule, "lax": lax})
        assert not without_rule(*construct)
        is_exact(*construct)
    finally:
        RULES.clear()
        RULES.update(before)
