"""Parameters of which a loss takes parts: each has a form of its own, and sums are those of the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clipping_exact import check_groups, is_exact, jit, normal, per_example, without_rule

import dpx
from dpx import clipping
from dpx.clipping.gradients import plan
from dpx.clipping.gradients.forms import Parts, Within

WIDTH, LENGTH, BATCH = 32, 4, 5
SEQUENCES = normal(BATCH, LENGTH, WIDTH, seed=9) * np.arange(1, BATCH + 1)[:, None, None]


def weights(*shape, seed=0):
    return normal(*shape, seed=seed) * 2 / np.sqrt(shape[-1], dtype="f4")


def blocks(remat=lambda body: body):
    """Two stacks of weights, gone through one block after the other; the second block is left out."""

    def body(up, down, x):
        return x + jnp.tanh(x @ up) @ down

    def loss(p, x):
        for i in (0, 2, 3):
            x = remat(body)(p["up"][i], p["down"][i], x)
        return jnp.sum((x + p["bias"]) ** 2)

    params = {"up": weights(4, WIDTH, 2 * WIDTH), "down": weights(4, 2 * WIDTH, WIDTH, seed=1)}
    return loss, params | {"bias": weights(WIDTH, seed=2)}, (SEQUENCES,)


def rematerialised():
    return blocks(jax.checkpoint)


def used_twice():
    """Parts along the last axis, of two lengths, one of them used again, under `jax.jit`."""

    @jax.jit
    def model(w, x):
        up = w[:, : 2 * WIDTH].reshape(WIDTH, 2, WIDTH)
        h = jnp.tanh(jnp.einsum("ld,dhe->lhe", x, up))
        return jnp.einsum("lhe,dhe->ld", h, up) @ w[:, 2 * WIDTH :]

    params = {"w": weights(WIDTH, 5 * WIDTH)}
    return lambda p, x: jnp.sum(model(p["w"], x) ** 2), params, (SEQUENCES,)


def taken_apart():
    """Split, of which one part is left out, and unstacked."""

    def loss(p, x):
        first, _, last = jnp.split(p["w"], [2, 3])
        for w in (*jnp.unstack(p["v"], axis=1)[1:], first.reshape(2 * WIDTH, WIDTH).T, last[0].T):
            x = jnp.tanh(x[:, : len(w)] @ w)
        return jnp.sum(x**2)

    return loss, {"w": weights(5, WIDTH, WIDTH), "v": weights(WIDTH, 4, WIDTH)}, (SEQUENCES,)


def scaled_first(dtype=jnp.float32):
    """The whole stack is cast and multiplied by a number before it is taken apart."""

    def loss(p, x):
        stack = -(2 * p["w"].astype(dtype)) / 3
        for i in range(5):
            x = jnp.tanh(x @ stack[i].astype(jnp.float32))
        return jnp.sum(x**2)

    return loss, {"w": weights(5, WIDTH, WIDTH), "v": weights(3)}, (SEQUENCES,)


def scaled_before_blocks():
    """The whole stack is multiplied by a number, and blocks take parts of what that makes."""

    def loss(p, x):
        stack = 3 * p["w"]
        for i in range(3):
            x = jax.checkpoint(lambda w, x: jnp.tanh(x @ w[0]))(stack[i : i + 1], x)
        return jnp.sum(x**2)

    return loss, {"w": weights(4, WIDTH, WIDTH)}, (SEQUENCES,)


def in_bfloat16():
    return scaled_first(jnp.bfloat16)


def fourier():
    """A complex weight from two stacks of real ones, for low and for high frequencies."""

    def loss(p, x):
        weights = p["re"] + 1j * p["im"]
        found = jnp.fft.rfft(x, axis=0)
        low = jnp.einsum("fi,iof->fo", found[:2], weights[0])
        high = jnp.einsum("fi,iof->fo", found[-2:], weights[1])
        return jnp.sum(jnp.abs(low) ** 2) + jnp.sum(jnp.sin(high.real))

    params = {"re": weights(2, WIDTH, WIDTH, 2), "im": weights(2, WIDTH, WIDTH, 2, seed=1)}
    return loss, params, (SEQUENCES,)


def chained():
    """Sums of four stacks, two at a time: all are cut where any of them is."""

    def loss(p, x):
        stacks = p["a"] + p["b"], p["b"] + p["c"], p["c"] + p["d"], p["a"]
        for w in (stacks[0][1], stacks[1][0], stacks[2][2], stacks[3][3]):
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    return loss, {n: weights(5, WIDTH, WIDTH, seed=i) for i, n in enumerate("abcd")}, (SEQUENCES,)


CUT = {
    blocks: {"up", "down"},
    rematerialised: {"up", "down"},
    used_twice: {"w"},
    taken_apart: {"w", "v"},
    scaled_first: {"w"},
    scaled_before_blocks: {"w"},
    in_bfloat16: {"w"},
    fourier: set(),
    chained: {"a", "b", "c", "d"},
}


def whole(p, x):
    """The stack is used as a whole too."""
    return jnp.sum(jnp.tanh(x @ p["w"][0]) @ p["w"][1]) + jnp.sum(
        jnp.einsum("ld,ndc->nlc", x, p["w"])
    )


def overlapping(p, x):
    both = [p["v"][i : i + 2].reshape(2, 3 * WIDTH, WIDTH) for i in (0, 1)]
    return sum(jnp.sum(jnp.tanh(jnp.einsum("ld,ncd->nlc", x, w))) for w in both)


def on_two_axes(p, x):
    return jnp.sum(jnp.tanh(x @ p["v"][0, 0]) @ p["v"][1, 2])


def added(p, x):
    """A part that no product uses: its gradient is held, and better by its rows."""
    return jnp.sum((x @ p["w"][0] + p["w"][1, :LENGTH]) ** 2)


def along_either_axis(p, x):
    """Parts of one size, which do not overlap as numbers of rows and of columns."""
    rows, columns = p["u"][0], p["u"][:, 1]
    return sum(jnp.sum(jnp.tanh(jnp.einsum("ld,ndc->nlc", x, w))) for w in (rows, columns))


def times_an_array(p, x):
    stack = p["w"] * jnp.arange(4.0 * WIDTH * WIDTH).reshape(4, WIDTH, WIDTH) / WIDTH**2
    return jnp.sum(jnp.tanh(x @ p["w"][0]) @ stack[1])


def every_other(p, x):
    return jnp.sum(jnp.tanh(x @ p["w"][0, ::2].T) @ p["w"][1, ::2])


def every_other_block(p, x):
    """Between its blocks are zeros."""
    return jnp.sum(jnp.tanh(x @ p["w"][::2].reshape(2 * WIDTH, WIDTH).T))


UNCUT = (
    whole, overlapping, on_two_axes, along_either_axis, times_an_array, every_other, added,
    every_other_block,
)  # fmt: skip


def uncut(loss):
    params = {"w": weights(4, WIDTH, WIDTH) * 2, "v": weights(4, 3, WIDTH, WIDTH, seed=1)}
    return loss, params | {"u": weights(3, 3, WIDTH, WIDTH, seed=2)}, (SEQUENCES,)


CONSTRUCTS = {case.__name__: case for case in CUT}
CONSTRUCTS |= {loss.__name__: (lambda loss=loss: uncut(loss)) for loss in UNCUT}


@pytest.mark.quick_cases("in_bfloat16")
@pytest.mark.parametrize("case", CUT, ids=lambda case: case.__name__)
def test_stacks_of_weights_are_kept_as_factors_by_rules(case):
    loss, params, batch = case()
    rows = dpx.explain_clipping(loss, params, *batch).rows
    assert {row.path for row in rows if row.rule == "Gram"} == CUT[case]
    assert not CUT[case] or without_rule(loss, params, batch) <= {"bias", "re", "im"}


# Products of narrow cotangents are not rounded.
@pytest.mark.quick_cases(
    "fourier-auto", "whole-auto", "on_two_axes-auto", "every_other_block-auto",
    "scaled_before_blocks-two_pass",
)  # fmt: skip
@pytest.mark.parametrize("how", ["auto", "two_pass"])
@pytest.mark.parametrize("name", [name for name in CONSTRUCTS if name != "in_bfloat16"])
def test_norms_and_sums_are_exact(name, how):
    is_exact(*CONSTRUCTS[name](), how)


def test_parts_that_blocks_make_are_made_again():
    """None of their factors is held: the blocks hand out norms alone."""
    loss, params, batch = rematerialised()
    leaves, tree = jax.tree.flatten(params)
    reader = plan.read(lambda p, e: loss(tree.unflatten(p), *e), leaves, batch)
    _, *stacks = plan.forms(reader, "two_pass")
    for stack in stacks:
        assert isinstance(stack, Parts)
        assert [type(part) for *_, part in stack.parts] == [Within] * 3


def test_parts_have_the_threshold_of_their_parameter():
    loss, params, batch = blocks()
    clips = {"up": 0.3, "down": 0.1, "bias": 0.2}
    gradients = per_example(loss, params, batch)
    gradients = {name: [g] for name, g in zip(sorted(params), gradients, strict=True)}
    found = jit(clipping.clipped_grad(loss, l2_clip_norm=clips, microbatch_size=2))(params, *batch)
    check_groups(found, gradients, clips)
    assert not np.asarray(found.grads["up"][1]).any()  # Nothing is taken of it.


def test_a_stack_takes_no_per_example_gradients():
    def loss(p, x):
        for i in range(4):
            x = jnp.tanh(x @ p["w"][i])
        return jnp.sum(x**2)

    shapes = [jax.ShapeDtypeStruct(s, "f4") for s in ((4, 256, 256), (16, LENGTH, 256))]

    def temp(method):
        fn = clipping.clipped_grad(loss, l2_clip_norm=1.0, method=method)
        lowered = jit(fn).lower({"w": shapes[0]}, shapes[1])
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temp("one_pass") < 3 * 4 * 256**2 * 4  # A few times the parameters.
    assert temp("vmap") > 16 * 4 * 256**2 * 4
