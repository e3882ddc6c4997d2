"""Weights that are made of several: adapters merged with a weight, masks, casts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_clipping_models import check, jit, per_example

from dpx import clipping
from dpx.clipping import jaxprs
from dpx.clipping.gradients import plan

WIDTH, RANK, LENGTH, BATCH = 64, 2, 3, 8


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype("f4") / 4


W, MASK = normal(WIDTH, WIDTH), (normal(WIDTH, WIDTH, seed=1) > 0).astype("f4")
X = normal(BATCH, LENGTH, WIDTH, seed=2)
ADAPTER = {"a": normal(WIDTH, RANK), "b": normal(RANK, WIDTH)}


def merged(p):
    return W + 2.0 * (p["a"] @ p["b"])


def ending(h):
    return jnp.sum(jnp.sin(h) * jnp.sin(1.0 + jnp.arange(h.size)).reshape(h.shape))


def experts(p, x):
    """A weight for each of three experts, and an adapter of each."""
    w = jnp.stack([W, W.T, 2 * W]) + jnp.einsum("edr,erf->edf", p["a"], p["b"])
    return ending(jnp.einsum("ld,edf->elf", x, w))


def block(p, x):
    return jnp.sin(x @ merged(p))


def adapter_of(*leading):
    return {"a": normal(*leading, WIDTH, RANK), "b": normal(*leading, RANK, WIDTH)}


ADAPTERS = {
    "merged": (lambda p, x: ending(x @ merged(p)), ADAPTER),
    "merged with a scaled adapter": (lambda p, x: ending(x @ (W + 2.0 * p["a"] @ p["b"])), ADAPTER),
    "merged and turned": (lambda p, x: ending(jnp.einsum("ld,fd->lf", x, merged(p))), ADAPTER),
    "merged twice": (lambda p, x: ending(block(p, x) @ merged(p)), ADAPTER),
    "merged once and used twice": (
        lambda p, x: (lambda w: ending(jnp.sin(x @ w) @ w))(merged(p)),
        ADAPTER,
    ),
    "between a weight and its heads": (
        lambda p, x: ending(jnp.einsum("ld,dhe->hle", x, merged(p).reshape(WIDTH, 4, -1))),
        ADAPTER,
    ),
    "of experts": (experts, adapter_of(3)),
    "in a block that is recomputed": (
        lambda p, x: ending(jax.checkpoint(block)(p, x)),
        ADAPTER,
    ),
    "in a scan over layers": (
        lambda p, x: ending(lax.scan(lambda h, p: (block(p, h), None), x, p)[0]),
        adapter_of(4),
    ),
}


def mixed_into_blocks(p, x):
    """Three blocks of a weight, each a mixture of four: both factors of a block's gradient count blocks."""
    blocks = jnp.einsum("bk,kdf->bdf", W[:3, :4], p.reshape(4, 16, WIDTH))
    return ending(jnp.einsum("lbd,bdf->blf", x[:, :48].reshape(LENGTH, 3, 16), blocks))


OTHERS = {
    "in front of a mixture that is frozen": lambda p, x: ending(x @ (p @ W)),
    "behind one": lambda p, x: ending(x @ (W @ p)),
    "mixed into blocks": mixed_into_blocks,
    "masked": lambda p, x: ending(x @ (p * MASK)),
    "masked by columns": lambda p, x: ending(x @ (p * MASK[0])),
    "cast": lambda p, x: ending((x.astype("bfloat16") @ p.astype("bfloat16")).astype("f4")),
}


@pytest.mark.quick_cases(
    "between a weight and its heads-two_pass-1.5",
    "merged and turned-two_pass-0.0",
    "merged with a scaled adapter-two_pass-1.5",
)
@pytest.mark.parametrize("favor", [0.0, 1.5])
@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_merged_adapters_are_exact(monkeypatch, name, method, favor):
    """By factors, and by gradients that are made from them."""
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", favor)
    loss, p = ADAPTERS[name]
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method)
    check(jit(fn)(p, X), per_example(loss, p, (X,)), 0.5, slack=2e-4)


@pytest.mark.parametrize("name", ADAPTERS)
def test_no_example_has_a_gradient_of_the_size_of_what_adapters_are_merged_with(name):
    loss, p = ADAPTERS[name]
    shapes = [
        v.aval.shape
        for eqn in equations(jax.make_jaxpr(clipping.clipped_grad(loss, l2_clip_norm=0.5))(p, X))
        for v in eqn.outvars
    ]
    assert all(np.prod(shape, dtype=int) < BATCH * WIDTH * WIDTH for shape in shapes)


def equations(jaxpr):
    """All of a jaxpr, those inside of others included."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jaxprs.inside(eqn):
            yield from equations(inner)


@pytest.mark.quick_cases(
    "behind one-two_pass",
    "masked by columns-two_pass",
    "masked-one_pass",
    "mixed into blocks-one_pass",
)
@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_made_of_a_weight_is_exact(monkeypatch, name, method):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)
    loss = OTHERS[name]
    out = jit(clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method))(W, X)
    gradients = per_example(loss, W, (X,))
    if name != "cast":
        check(out, gradients, 0.5)
        return
    # The product of narrow factors is not rounded here, as it is in the gradient.
    norms = np.linalg.norm(gradients[0], axis=(1, 2))
    np.testing.assert_allclose(out.norms, norms, rtol=1e-3)
    expected = np.tensordot(0.5 / norms, gradients[0], 1)
    assert np.linalg.norm(out.grads - expected) < 5e-3 * np.linalg.norm(expected)


def test_only_a_mask_over_both_axes_and_a_mixture_of_blocks_have_no_rule():
    """The product of a mask and a sum of outer products is no such sum; nor is one added up over blocks."""
    for name, loss in OTHERS.items():
        reader = plan.read(
            lambda p, example, loss=loss: loss(p[0], *example), [jnp.asarray(W)], (X,)
        )
        (form,) = plan.forms(reader)
        assert bool(form.products) == (name not in ("masked", "mixed into blocks")), name
