"""Functions of weights inside scans: exact, and no per-example gradient of a weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_clipping_models import check, jit, per_example

from dpx import clipping
from dpx.clipping.gradients import plan

DEPTH, WIDTH, LENGTH, BATCH = 3, 6, 5, 4


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape) / 2, jnp.float32)


X = normal(BATCH, LENGTH, WIDTH, seed=1)
STACKED = {"w": normal(DEPTH, WIDTH, WIDTH)}


def stack(function, **options):
    """Layers that use a function of their weight."""

    def loss(p, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.sin(x @ function(w)), None), x, p["w"], **options)
        return jnp.sum(x**2)

    return loss, STACKED, (X,)


def masked():
    return stack(jnp.tril)


def through_tanh_backwards():
    return stack(jnp.tanh, reverse=True, unroll=2)


def columns_of_length_one():
    return stack(lambda w: w / jnp.linalg.norm(w, axis=0))


def shared():
    """A recurrent cell with a mask that the loop shares, and states that come out."""

    def loss(p, x):
        def step(h, x):
            h = jnp.sin(h @ jnp.tril(p["w"]) + x)
            return h, jnp.sum(h)

        h, sums = jax.lax.scan(step, jnp.zeros(WIDTH), x)
        return jnp.sum(h**2) + jnp.sum(sums**2)

    return loss, {"w": normal(WIDTH, WIDTH)}, (X,)


def scaled_by_what_is_shared():
    """A function of a slice and of a weight that the loop shares."""

    def loss(p, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.sin(x @ (w * jnp.exp(p["scale"]))), None), x, p["w"])
        return jnp.sum(x**2)

    return loss, STACKED | {"scale": normal(WIDTH)}, (X,)


def of_two_stacks():
    """Functions of two slices, and a third slice as it is."""

    def loss(p, x):
        def step(x, layer):
            w, v, u = layer
            return jnp.sin(x @ jnp.tril(w) @ u) @ jnp.tanh(v), None

        x, _ = jax.lax.scan(step, x, (p["w"], p["v"], p["u"]))
        return jnp.sum(x**2)

    names = {name: normal(DEPTH, WIDTH, WIDTH, seed=n) for n, name in enumerate("uv", 2)}
    return loss, STACKED | names, (X,)


def of_a_slice_and_of_what_is_shared():
    """Two functions, one of a slice and one of a weight that the loop shares, that meet in a product."""

    def loss(p, x):
        def step(x, w):
            return jnp.sin(x @ jnp.tril(w) @ jnp.tril(p["v"])), None

        x, _ = jax.lax.scan(step, x, p["w"])
        return jnp.sum(x**2)

    return loss, STACKED | {"v": normal(WIDTH, WIDTH, seed=2)}, (X,)


def updated_in_every_step():
    """A weight that the loop adds to. Of what is added, the gradient is the sum that is carried so far."""

    def loss(p, x):
        def step(w, each):
            update, x = each
            w = w + update
            return w, jnp.sin(x @ w)

        _, rows = jax.lax.scan(step, p["start"], (p["w"], x[:DEPTH]))
        return jnp.sum(rows**2)

    return loss, STACKED | {"start": normal(WIDTH, WIDTH, seed=2)}, (X,)


def updated_after_every_step():
    """The same after the step has used it: what is carried so far is handed out before it is added to."""

    def loss(p, x):
        def step(w, each):
            update, x = each
            return w + update, jnp.sin(x @ w)

        w, rows = jax.lax.scan(step, p["start"], (p["w"], x[:DEPTH]))
        return jnp.sum(rows**2) + jnp.sum(jnp.sin(x @ w))

    return loss, STACKED | {"start": normal(WIDTH, WIDTH, seed=2)}, (X,)


CASES = (
    masked,
    through_tanh_backwards,
    columns_of_length_one,
    shared,
    scaled_by_what_is_shared,
    of_two_stacks,
    of_a_slice_and_of_what_is_shared,
    updated_in_every_step,
    updated_after_every_step,
)


@pytest.fixture(autouse=True)
def by_factors(monkeypatch):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)


def is_exact(loss, params, batch, **options):
    gradients = per_example(loss, params, batch)
    norms = np.sqrt(sum((g.reshape(BATCH, -1) ** 2).sum(1) for g in gradients))
    clip = float(np.median(norms))
    fn = clipping.clipped_grad(loss, l2_clip_norm=clip, **options)
    check(jit(fn)(params, *batch), gradients, clip)


@pytest.mark.quick_cases(
    "one_pass-shared",
    "one_pass-updated_in_every_step",
    "one_pass-updated_after_every_step",
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
def test_norms_and_sums_are_exact(case, method):
    loss, params, batch = case()
    is_exact(loss, params, batch, method=method)


@pytest.mark.slow
def test_what_is_made_of_a_carry_that_starts_as_a_weight_stays_in_the_loop():
    def loss(p, x):
        h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(jnp.sin(h)) @ p["w"] + x, None), p["start"], x)
        return jnp.sum(h**2)

    is_exact(loss, {"start": normal(WIDTH), "w": normal(WIDTH, WIDTH)}, (X,))


@pytest.mark.slow
def test_what_has_no_rule_is_exact_too():
    """Several results of one equation, some of which leave the loop; a carry; what is recomputed."""

    @jax.checkpoint
    def recomputed(x, w):
        return jnp.sin(x @ jnp.tanh(w))

    def loss(p, x):
        def step(carry, w):
            x, total = carry
            left, right = jnp.split(jnp.tanh(w), 2, axis=1)
            x = jnp.concatenate([jnp.sin(x @ left), x @ jnp.cos(right)], 1)
            return (recomputed(x, w), total + jnp.sum(left)), (right[0, 0], jnp.exp(left[0]))

        (x, total), (corners, rows) = jax.lax.scan(step, (x, 0.0), p["w"])
        return jnp.sum(x**2) + total * jnp.sum(corners) * jnp.sum(rows * x[:3, :3])

    is_exact(loss, STACKED, (X,))
