"""Models of many blocks that nobody scanned, and of many small parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx import clipping
from dpx.clipping.gradients import plan

DIM, LENGTH, BATCH = 32, 6, 3


def model(blocks):
    """Blocks that are written one after the other, and a batch."""
    draw = np.random.default_rng(0)

    def weight(*shape):
        return jnp.asarray(draw.normal(size=shape) / 8, "f4")

    params = [
        {
            "in": weight(DIM, 2 * DIM),
            "bias": weight(2 * DIM),
            "out": weight(2 * DIM, DIM),
            "scale": weight(DIM),
        }
        for _ in range(blocks)
    ]

    def loss(params, x):
        for block in params:
            hidden = jnp.tanh(x @ block["in"] + block["bias"])
            x = x + hidden @ block["out"] * (1 + block["scale"])
        return jnp.mean(x**2)

    return loss, params, weight(BATCH, LENGTH, DIM)


def plain(loss, params, x, clip):
    """Norms by group, and clipped sums by parameter, of the gradients of one example after another."""
    rows = [jax.tree.leaves(jax.grad(loss)(params, one)) for one in x]
    gradients = [np.stack(each).astype("f8") for each in zip(*rows, strict=True)]
    structure, clips = jax.tree.structure(clip), jax.tree.leaves(clip)
    members = jax.tree.broadcast(structure.unflatten(range(len(clips))), params)
    members = jax.tree.leaves(members)
    squares = np.zeros((len(clips), len(x)))
    for group, each in zip(members, gradients, strict=True):
        squares[group] += np.square(each).reshape(len(x), -1).sum(1)
    norms = np.sqrt(squares)
    factors = np.minimum(1, np.reshape(clips, (-1, 1)) / norms)
    return norms, [np.tensordot(factors[g], x, 1) for g, x in zip(members, gradients, strict=True)]


def equations(function, *arguments):
    """The number of equations in the jaxpr of a function, and of what it calls where it stands."""

    def count(jaxpr):
        inner = [
            count(getattr(value, "jaxpr", value))
            for eqn in jaxpr.eqns
            for value in jax.tree.leaves(list(eqn.params.values()))
            if hasattr(getattr(value, "jaxpr", value), "eqns")
        ]
        return len(jaxpr.eqns) + sum(inner)

    return count(jax.make_jaxpr(function)(*arguments).jaxpr)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [False, True], ids=["one group", "a group for each block"])
def test_norms_of_blocks_are_exact(groups):
    loss, params, x = model(3)
    clip = [0.1, 0.2, 0.3] if groups else 0.1
    together = clipping.clipped_grad(loss, l2_clip_norm=clip)(params, x)
    norms, sums = plain(loss, params, x, clip)
    for a, b in zip(jax.tree.leaves(together.norms), norms, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3)  # Norms are rounded up by up to 1e-3.
    for a, b in zip(jax.tree.leaves(together.grads), sums, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.quick_cases("two groups")
@pytest.mark.parametrize("clip", [1.0, [0.5, 2.0]], ids=["one group", "two groups"])
def test_norms_of_parameters_that_are_alike(clip):
    """Each of them counts, in its own group."""
    draw = np.random.default_rng(0)
    layers = [jnp.asarray(draw.normal(size=(DIM, DIM)) * 3.0**-i, "f4") for i in range(8)]
    x = draw.normal(size=(BATCH, 2, DIM)).astype("f4")

    def loss(groups, x):
        for w in [*groups[0], *groups[1]]:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    params = [layers[:4], layers[4:]]
    found = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=clip))(params, x)
    norms, _ = plain(loss, params, x, clip)
    for a, b in zip(jax.tree.leaves(found.norms), norms, strict=True):
        assert np.all(a >= b * (1 - 1e-6))
        np.testing.assert_allclose(a, b, rtol=1e-3)


@pytest.mark.slow
def test_sequences_of_two_lengths_are_normed_apart():
    """As in an encoder and a decoder: inner products of one length are stacked, of two they cannot be."""
    _, params, x = model(4)

    def run(blocks, x):
        for block in blocks:
            x = jnp.tanh(x @ block["in"]) @ block["out"]
        return jnp.sum(x**2)

    def loss(params, x):
        return run(params[:2], x) + run(params[2:], x[2:])

    found = clipping.clipped_grad(loss, l2_clip_norm=0.1)(params, x)
    (norms,), sums = plain(loss, params, x, 0.1)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-3)
    for a, b in zip(jax.tree.leaves(found.grads), sums, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.quick_cases("all positions")
@pytest.mark.parametrize("last_only", [False, True], ids=["all positions", "the last position"])
def test_an_embedding_that_is_looked_up_and_multiplied_is_normed_with_the_rest(
    monkeypatch, last_only
):
    """With one number of positions for both its uses, or with two, whose matrices have different shapes."""
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)  # Gram matrices for all.
    draw = np.random.default_rng(0)
    params = {"table": draw.normal(size=(40, 16)), "mix": draw.normal(size=(16, 16)) / 4}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    ids = draw.integers(0, 5, (BATCH, LENGTH))  # Tokens are repeated.

    def loss(params, ids):
        x = jnp.tanh(params["table"][ids] @ params["mix"])
        x = x[-1:] if last_only else x
        return jnp.sum(jax.nn.logsumexp(x @ params["table"].T, axis=-1))

    for name in params:
        clip = {"table": 1e6, "mix": 1e6} | {name: 0.1}
        found = clipping.clipped_grad(loss, l2_clip_norm=clip)(params, ids)
        norms, _ = plain(loss, params, ids, clip)
        for a, b in zip(jax.tree.leaves(found.norms), norms, strict=True):
            assert np.all(a >= b * (1 - 1e-6))
            np.testing.assert_allclose(a, b, rtol=1e-3)


@pytest.mark.parametrize("clip", [1.0, [0.5, 2.0]], ids=["one group", "two groups"])
def test_gradients_of_different_lengths_are_normed_together(clip):
    sizes = [64, 192, 640, 100, 3], [640, 1, 2, 36]
    params = [[jnp.ones(n) for n in each] for each in sizes]
    lengths = [n for each in sizes for n in each]
    x = np.random.default_rng(0).normal(size=(BATCH, sum(lengths))).astype(np.float32)
    splits = np.cumsum(lengths)[:-1]

    def loss(params, x):
        parts = jnp.split(x, splits)
        flat = jax.tree.leaves(params)
        return sum(jnp.sum(p * part) for p, part in zip(flat, parts, strict=True))

    found = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=clip))(params, x)
    groups = np.split(x, [sum(sizes[0])], axis=1) if isinstance(clip, list) else [x]
    norms = [np.linalg.norm(each, axis=1) for each in groups]
    for a, b in zip(jax.tree.leaves(found.norms), norms, strict=True):
        assert np.all(a >= b * (1 - 1e-6))
        np.testing.assert_allclose(a, b, rtol=1e-4)
    thresholds = jax.tree.leaves(clip)
    sums = [
        np.minimum(1, c / n) @ each for c, n, each in zip(thresholds, norms, groups, strict=True)
    ]
    expected = np.split(np.concatenate(sums), splits)
    for a, b in zip(jax.tree.leaves(found.grads), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_block_more_adds_little_to_the_program():
    """Equations are what tracing and the compiler's passes take time for."""

    def per_block():
        counts = [
            equations(clipping.clipped_grad(loss, l2_clip_norm=1.0), params, x)
            for loss, params, x in (model(4), model(8))
        ]
        return (counts[1] - counts[0]) / 4

    def ordinary(blocks):
        loss, params, x = model(blocks)
        return equations(jax.grad(lambda p: jax.vmap(loss, (None, 0))(p, x).mean()), params)

    plain = (ordinary(8) - ordinary(4)) / 4
    assert per_block() < 8 * plain


@pytest.mark.quick_cases("a group for each-2")
@pytest.mark.parametrize("microbatch_size", [None, 2])
@pytest.mark.parametrize("clip", [0.5, [0.1, 0.2, 0.3]], ids=["one group", "a group for each"])
def test_small_gradients_in_two_types_and_several_groups(clip, microbatch_size):
    """Those of one type are joined where they share a threshold."""
    draw = np.random.default_rng(0)

    sizes = {"a": 6, "b": 9, "c": 9, "d": 6, "e": 1, "f": 4, "g": 8, "h": 8}
    types = {k: jnp.bfloat16 if k in "cdfh" else "f4" for k in sizes}
    params = [
        {k: jnp.asarray(draw.normal(size=n), types[k]) for k, n in sizes.items()} for _ in range(3)
    ]
    x = jnp.asarray(draw.normal(size=(5, 51)), "f4")

    def loss(params, x):
        flat = jnp.concatenate([block[k].astype("f4") for block in params for k in block])
        return jnp.sum(jnp.tanh(x[:, None] * flat[None, :]))

    run = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=clip, microbatch_size=microbatch_size))
    _, sums = plain(loss, params, x, clip)
    found = run(params, x)
    for a, b in zip(jax.tree.leaves(found.grads), sums, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=2e-3)


@pytest.mark.slow
def test_one_gradient_that_is_not_finite_among_those_taken_together():
    loss, params, x = model(3)
    x = x.at[1, 0, 0].set(jnp.inf)
    gradient = clipping.clipped_grad(loss, l2_clip_norm=1.0)
    found = gradient(params, x)
    expected = gradient(params, x[jnp.array([0, 2])])
    assert np.isinf(found.norms[1])
    for a, b in zip(jax.tree.leaves(found.grads), jax.tree.leaves(expected.grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
