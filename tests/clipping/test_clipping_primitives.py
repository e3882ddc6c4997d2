"""Every primitive that gradients are read through: what is read adds up to the gradient."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_clipping_models import check, jit, per_example

from dpx import clipping
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


def test_every_rule_has_a_loss():
    assert set(RULES) - ALIKE <= set(LOSSES)


@pytest.mark.quick_cases(
    "reduce_precision",
    "reduce_precision of the example",
    "optimization_barrier",
    "broadcast_in_dim",
    "dynamic_update_slice of a column",
)
@pytest.mark.parametrize("name", LOSSES)
def test_what_is_read_adds_up_to_the_gradient(monkeypatch, name):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)
    loss = LOSSES[name]
    reader = plan.read(lambda p, example: loss(p[0], *example), [W], (X,))
    (form,) = plan.forms(reader)
    assert not form.unruled
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass")
    slack = 1e-2 if name == "convert_element_type" else 1e-4
    if name != "convert_element_type":  # Products of narrow cotangents are not rounded here.
        check(jit(fn)(W, X), per_example(loss, W, (X,)), 0.5, slack=slack)


@pytest.mark.quick_cases("10", "1", "4", "11", "12")
@pytest.mark.parametrize(
    "backward",
    [
        lambda g: 2.0 / (g + jnp.where(g < 0, -0.1, 0.1)),
        lambda g: 2.0 / (lax.optimization_barrier(g) + jnp.where(g < 0, -1.0, 1.0)),
        lambda g: jnp.clip(g, -0.1, 0.1),
        lambda g: g * g,
        lambda g: g + 1.0,
        lambda g: jnp.sort(g, 0),
        lambda g: jnp.where(g > 0, g, 0.0),
        lambda g: g * jnp.tril(jnp.ones((D, D))),
        lambda g: lax.scan(lambda c, r: (0.5 * c + r, None), 0 * g[0], g)[0] + 0 * g,
        lambda g: lax.fori_loop(0, 2, lambda i, c: c + g * c, g),
        lambda g: (
            g * (1 + jnp.arange(D * D)).reshape(D, D)
        ),  # Integers that are added are not zero.
        lambda g: g[::-1],
        lambda g: jnp.reshape(g, (D, D), order="F"),  # The axes change places first.
    ],
    ids=range(13),
)
def test_what_is_no_sum_of_products_is_held(monkeypatch, backward):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)
    loss = custom(backward)
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass")
    check(jit(fn)(W, X), per_example(loss, W, (X,)), 0.5)


def test_a_gradient_that_is_a_number_is_held():
    """The number that begins it, negated, depends on nothing."""

    def loss(b, x):
        return x.sum() - b[0]

    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5)
    check(jit(fn)(jnp.ones(D), X), per_example(loss, jnp.ones(D), (X,)), 0.5)


def test_what_is_found_out_of_bounds_is_not_zero():
    """A look-up in zeros fills in another number where it finds none."""

    def loss(w, x):
        found = jnp.zeros(D).at[jnp.arange(D) + 3].get(mode="fill", fill_value=1.0)
        return jnp.sum(jnp.sin(w * found * x[0]))

    fn, w = clipping.clipped_grad(loss, l2_clip_norm=0.5), jnp.ones(D)
    check(jit(fn)(w, X), per_example(loss, w, (X,)), 0.5)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (36,)], ids=str)
def test_a_shape_that_cuts_no_factor_evenly_is_held(shape):
    def loss(w, x):
        return ending(x @ w.reshape(D, D))

    w = W.reshape(shape)
    (form,) = plan.forms(plan.read(lambda p, example: loss(p[0], *example), [w], (X,)))
    assert bool(form.unruled) == (len(shape) == 2)


def test_a_number_over_a_sum_of_products_is_held(monkeypatch):
    """Of positive products, so that the quotient is well conditioned."""
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)
    product = jax.custom_vjp(lambda x, w: x @ w)
    product.defvjp(
        lambda x, w: (x @ w, (x, w)),
        lambda kept, g: (g @ kept[1].T, 2.0 / ((1 + kept[0] ** 2).T @ jnp.exp(g))),
    )

    def loss(w, x):
        return ending(product(x, w))

    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass")
    check(jit(fn)(W, X), per_example(loss, W, (X,)), 0.5)


@pytest.mark.parametrize(
    ("step", "unruled"),
    [
        (lambda c, r, whole: c + r, ()),
        (lambda c, r, whole: whole + c, ()),
        (lambda c, r, whole: c + c + r, ("scan",)),
        (lambda c, r, whole: r, ("scan",)),
    ],
    ids=["adds", "adds the same", "doubles", "replaces"],
)
def test_a_loop_adds_to_what_it_begins_with(monkeypatch, step, unruled):
    """What an iteration adds is a product of its own row, or one that is the same in all of them."""
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)

    def backward(kept, g):
        def body(c, rows):
            x, row = rows
            return step(c, x[:, None] @ row[None], jnp.einsum("ld,le->de", kept[0], g)), None

        return g @ kept[1].T, lax.scan(body, kept[0].T @ jnp.cos(g), (kept[0], g))[0]

    product = jax.custom_vjp(lambda x, w: x @ w)
    product.defvjp(lambda x, w: (x @ w, (x, w)), backward)

    def loss(w, x):
        return ending(product(x, w))

    reader = plan.read(lambda p, example: loss(p[0], *example), [W], (X,))
    assert [form.unruled for form in plan.forms(reader)] == [unruled]
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass")
    check(jit(fn)(W, X), per_example(loss, W, (X,)), 0.5)


def test_a_rule_is_added_as_the_contributors_guide_says(monkeypatch):
    guide = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    (block,) = re.findall(r"```python\n(@rule\(.*?)```", guide, re.DOTALL)
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)

    def loss(w, x):
        return ending(x @ jnp.cumsum(w, 0))

    def unruled():
        reader = plan.read(lambda p, example: loss(p[0], *example), [W], (X,))
        return [form.unruled for form in plan.forms(reader)]

    assert unruled() == [("cumsum",)]
    before = dict(RULES)
    try:
        exec(block, {"rule": rule, "lax": lax})
        assert unruled() == [()]
        fn = clipping.clipped_grad(loss, l2_clip_norm=0.5)
        check(jit(fn)(W, X), per_example(loss, W, (X,)), 0.5)
    finally:
        RULES.clear()
        RULES.update(before)
