"""What two backward passes compute, and hold: one forward pass, and nothing that is not asked for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_clipping_models import check, jit, per_example
from test_clipping_two_pass import BATCH, LENGTH, WIDTH, median_norm

from dpx import clipping


def count(jaxpr, name):
    """How many equations of a primitive there are, also within others, branches of one `cond` apart."""
    total = 0
    for eqn in jaxpr.eqns:
        total += eqn.primitive.name == name
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                total += count(inner, name) if hasattr(inner, "eqns") else 0
    return total


@pytest.mark.parametrize("scanned", [False, True])
def test_one_forward_pass_and_no_product_that_is_not_asked_for(scanned):
    """Of a block with two products, the forward pass takes both; the others the first one, recomputed.

    Back they go by two, one where the input's cotangent is of no use. Then come two norms, or two gradients.
    """

    @jax.checkpoint
    def body(x, p):
        return jnp.tanh(x @ p["a"]) @ p["b"], None

    def loss(p, x):
        x = jax.lax.scan(body, x, p)[0] if scanned else body(x, p)[0]
        return jnp.sum(x**2)

    shape = (3, WIDTH, WIDTH) if scanned else (WIDTH, WIDTH)
    p = {"a": jnp.ones(shape), "b": jnp.ones(shape)}
    fn = clipping.clipped_grad(loss, l2_clip_norm=1.0, method="two_pass")
    found = jax.make_jaxpr(lambda p, x: fn(p, x).grads)(p, np.ones((BATCH, 20, WIDTH), "f4"))
    assert count(found.jaxpr, "tanh") == 3
    assert count(found.jaxpr, "dot_general") <= 2 + 2 * (1 + (2 if scanned else 1) + 2)


@pytest.mark.slow
def test_the_head_and_the_loss_are_part_of_the_first_pass_alone():
    """Also of parameters that are used in the blocks too, and of values that cross but do not matter."""

    @jax.custom_vjp
    def cos(x):
        return jnp.cos(x)

    # A sine is what only going back takes.
    cos.defvjp(lambda x: (jnp.cos(x), x), lambda x, g: (-jnp.sin(x) * g,))

    def loss(p, x):
        seen = jnp.mean(x, 0)
        blocks = jax.checkpoint(lambda x, p: jnp.tanh(x @ p["a"] @ p["tied"]))(x * p["scale"], p)
        head = cos(blocks @ p["b"] + p["bias"]) @ p["tied"] + jax.lax.stop_gradient(seen)
        return jnp.sum(head**2) + jnp.sum(seen) * 0

    rng = np.random.default_rng(0)
    p = {k: jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32) for k in ("a", "b", "tied")}
    p |= {"bias": jnp.ones(WIDTH), "scale": jnp.full(WIDTH, 0.5)}
    x = rng.normal(size=(BATCH, LENGTH, WIDTH)).astype("f4")
    gradients = per_example(loss, p, (x,))
    for clip in (1.0, dict.fromkeys(p, 0.5)):
        fn = clipping.clipped_grad(loss, l2_clip_norm=clip, method="two_pass")
        found = jax.make_jaxpr(lambda p, x, fn=fn: fn(p, x).grads)(p, x)
        assert count(found.jaxpr, "cos") == count(found.jaxpr, "sin") == 1
    fn = clipping.clipped_grad(loss, l2_clip_norm=median_norm(gradients))
    check(jit(fn)(p, x), gradients, median_norm(gradients))


@pytest.mark.slow
def test_memory_is_that_of_an_ordinary_step():
    """And what comes back to each block, which its gradient is made from: one activation a block.

    Though some compilers drop barriers, activations are not recomputed for both passes at once.
    """
    blocks, batch, width = 6, 8, 64

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    def loss(weights, x):
        for pair in weights["blocks"]:
            x = jax.checkpoint(lambda x, a, b: x + jnp.sin(jnp.tanh(x @ a)) @ b)(x, *pair)
        return jnp.mean(jax.nn.log_softmax(x @ weights["head"])[:, 0])

    def ordinary(weights, x):
        return jax.grad(lambda w: jax.vmap(loss, (None, 0))(w, x).mean())(weights)

    clipped = clipping.clipped_grad(loss, l2_clip_norm=1.0, method="two_pass")
    pair = [shape(width, 256), shape(256, width)]
    weights = {"blocks": [pair] * blocks, "head": shape(width, width)}

    def temp(fn) -> int:
        with jax.default_device(jax.devices("cpu")[0]):
            compiled: Any = jit(fn).lower(weights, shape(batch, 64, width)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    handed = blocks * batch * 64 * width * 4
    assert temp(lambda *arguments: clipped(*arguments).grads) <= 1.2 * temp(ordinary) + handed
