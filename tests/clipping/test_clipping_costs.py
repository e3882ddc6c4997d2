"""Memory and work: what a program computes, and holds, is what is asked for and no more."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clipping_exact import METHODS, check, equations, is_exact, jit, normal, on_one_cpu, per_example
from jax import lax
from test_clipping_exact import a_tied_embedding, same
from test_clipping_programs import in_integers

from dpx import clipping
from dpx.clipping import batches, xla_cpu

DIM, LENGTH, BATCH = 32, 6, 3


def shape(*sizes, dtype="f4"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def compiled(function, *arguments) -> Any:
    return jit(function).lower(*arguments).compile()


def temp(function, *arguments) -> int:
    return compiled(function, *arguments).memory_analysis().temp_size_in_bytes


def layers(p, x):
    for i in range(4):
        x = jnp.tanh(x @ p[i])
    return jnp.sum(x**2)


def long_loop(w, x):
    """4,096 iterations have factors of 32 numbers each, and a gradient of 256."""
    step = jax.checkpoint(lambda state, _: (jnp.tanh(state @ w), None))
    return jnp.sum(lax.scan(step, x, length=4096)[0] ** 2)


def mapped_embedding(layer, tokens):
    x = jax.vmap(layer)(tokens)
    return jnp.sum(jnp.tanh(x[:-1] * x[1:]) @ layer.weight[tokens[0]])


TOKENS = shape(64, 6, dtype="i4")
EMBEDDING = jax.eval_shape(lambda: eqx.nn.Embedding(50_000, 64, key=jax.random.key(0)))
# A loss, parameters, a batch, and the bytes below which one pass stays, of examples held at once much more.
MEMORY = {
    "table": (a_tied_embedding, {"embed": shape(5000, 32), "mix": shape(32, 32)}, TOKENS, 64 * 5000 * 128),
    "mapped table": (mapped_embedding, EMBEDDING, shape(8, 5, dtype="i4"), 1e6),
    "stack": (layers, shape(4, 256, 256), shape(16, 4, 256), 3 * 4 * 256**2 * 4),
    "kernel": (lambda p, x: jnp.sum(jnp.tanh(same(x[None], p))), shape(3, 3, 8, 16),
               shape(4, 64, 64, 8), 9 * 4 * 64 * 64 * 8 * 4),
    "in integers": (lambda w, x: jnp.sum(jnp.sin(in_integers(x, w))), shape(128, 256),
                    shape(16, 4, 128), 16 * 128 * 256 * 2),
    "long loop": (long_loop, shape(16, 16), shape(3, 16), 3 * 4096 * 16 * 4 * 1.5),
}  # fmt: skip


@pytest.mark.quick_cases("stack", "kernel")
@pytest.mark.parametrize("name", MEMORY)
def test_no_example_holds_what_is_larger_than_its_factors(name):
    loss, params, x, most = MEMORY[name]
    clipped = clipping.clipped_grad(loss, l2_clip_norm=1.0, method="one_pass")
    assert temp(clipped, params, x) < most


@pytest.mark.slow
def test_memory_of_blocks_is_that_of_an_ordinary_step():
    """And what comes back to each block, which its gradient is made from: one activation a block.

    Though some compilers drop barriers, activations are not recomputed for both passes at once.
    """
    blocks, batch, width = 6, 8, 64

    def loss(weights, x):
        for pair in weights["blocks"]:
            x = jax.checkpoint(lambda x, a, b: x + jnp.sin(jnp.tanh(x @ a)) @ b)(x, *pair)
        return jnp.mean(jax.nn.log_softmax(x @ weights["head"])[:, 0])

    def ordinary(weights, x):
        return jax.grad(lambda w: jax.vmap(loss, (None, 0))(w, x).mean())(weights)

    clipped = clipping.clipped_grad(loss, l2_clip_norm=1.0, method="two_pass")
    weights = {
        "blocks": [[shape(width, 256), shape(256, width)]] * blocks,
        "head": shape(width, width),
    }
    given, handed = (weights, shape(batch, 64, width)), blocks * batch * 64 * width * 4
    assert temp(lambda *a: clipped(*a).grads, *given) <= 1.2 * temp(ordinary, *given) + handed


def count(function, name, *arguments):
    """How many equations of a primitive a program has, those inside of others included."""
    found = equations(jax.make_jaxpr(function)(*arguments))
    return sum(eqn.primitive.name == name or not name for eqn in found)


@pytest.mark.parametrize("scanned", [False, True])
def test_one_forward_pass_and_no_product_that_is_not_asked_for(scanned):
    """Of a block with two products, the forward pass takes both; the others the first one, recomputed.

    Back they go by two, one where the input's cotangent is of no use. Then come two norms, or two gradients.
    """

    @jax.checkpoint
    def body(x, p):
        return jnp.tanh(x @ p["a"]) @ p["b"], None

    def loss(p, x):
        return jnp.sum((lax.scan(body, x, p) if scanned else body(x, p))[0] ** 2)

    weight = shape(3, 6, 6) if scanned else shape(6, 6)
    fn = clipping.clipped_grad(loss, l2_clip_norm=1.0, method="two_pass")
    given = {"a": weight, "b": weight}, shape(4, 20, 6)
    assert count(lambda *a: fn(*a).grads, "tanh", *given) == 3
    products = count(lambda *a: fn(*a).grads, "dot_general", *given)
    assert products <= 2 + 2 * (1 + (2 if scanned else 1) + 2)


@pytest.mark.slow
def test_the_head_and_the_loss_are_part_of_the_first_pass_alone():
    """Also of parameters that are used in the blocks too, and of values that cross but do not matter."""
    cos = jax.custom_vjp(jnp.cos)  # A sine is what only going back takes.
    cos.defvjp(lambda x: (jnp.cos(x), x), lambda x, g: (-jnp.sin(x) * g,))

    def loss(p, x):
        seen = jnp.mean(x, 0)
        blocks = jax.checkpoint(lambda x, p: jnp.tanh(x @ p["a"] @ p["tied"]))(x * p["scale"], p)
        head = cos(blocks @ p["b"] + p["bias"]) @ p["tied"] + lax.stop_gradient(seen)
        return jnp.sum(head**2) + jnp.sum(seen) * 0

    p = {k: normal(6, 6, seed=i) for i, k in enumerate(("a", "b", "tied"))}
    p |= {"bias": np.ones(6, "f4"), "scale": np.full(6, 0.5, "f4")}
    x = normal(4, 5, 6)
    for clip in (1.0, dict.fromkeys(p, 0.5)):
        fn = clipping.clipped_grad(loss, l2_clip_norm=clip, method="two_pass")
        assert [count(lambda *a, fn=fn: fn(*a).grads, k, p, x) for k in ("cos", "sin")] == [1, 1]
    is_exact(loss, p, (x,), "auto")


def model(blocks):
    """Blocks that are written one after the other, and a batch."""
    sizes = {"in": (DIM, 2 * DIM), "bias": (2 * DIM,), "out": (2 * DIM, DIM), "scale": (DIM,)}
    params = [{k: normal(*n, seed=i) / 4 for k, n in sizes.items()} for i in range(blocks)]

    def loss(params, x):
        for block in params:
            hidden = jnp.tanh(x @ block["in"] + block["bias"])
            x = x + hidden @ block["out"] * (1 + block["scale"])
        return jnp.mean(x**2)

    return loss, params, normal(BATCH, LENGTH, DIM)


@pytest.mark.slow
def test_a_block_more_adds_little_to_the_program():
    """Equations are what tracing and the compiler's passes take time for."""

    def clipped(blocks):
        loss, params, x = model(blocks)
        return count(clipping.clipped_grad(loss, l2_clip_norm=1.0), "", params, x)

    def ordinary(blocks):
        loss, params, x = model(blocks)
        return count(jax.grad(lambda p: jax.vmap(loss, (None, 0))(p, x).mean()), "", params)

    assert clipped(8) - clipped(4) < 8 * (ordinary(8) - ordinary(4))


@pytest.mark.slow
def test_aux_takes_no_forward_pass_of_its_own():
    params, x = [shape(64, 64)] * 4, shape(8, 16, 64)

    def deep(p, x):
        for w in p:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2), x

    def flops(loss, **options):
        fn = clipping.clipped_grad(loss, l2_clip_norm=1.0, **options)
        found: Any = jax.jit(fn).lower(params, x).compile()  # The compiler shares the forward pass.
        return found.cost_analysis()["flops"]

    assert flops(deep, has_aux=True) < 1.01 * flops(lambda p, x: deep(p, x)[0])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_what_is_frozen_costs_nothing(method):
    """As many operations, and as much memory, as a loss that knows the frozen weights as constants."""
    params = {
        "base": 0.1 * normal(4, 64, 64),
        "lora": {"a": np.ones((64, 2)), "b": np.ones((2, 64))},
    }
    params, x = jax.tree.map(jnp.float32, params), np.ones((8, 16, 64), "f4")

    def loss(params, x):
        for i in range(4):
            x = jnp.tanh(x @ params["base"][i])
        return jnp.sum((x + x @ params["lora"]["a"] @ params["lora"]["b"]) ** 2)

    def cost(fn):
        found: Any = jax.jit(fn).lower(params, x).compile()
        return found.cost_analysis()["flops"], found.memory_analysis().temp_size_in_bytes

    def clipped(loss, **options):
        return clipping.clipped_grad(loss, l2_clip_norm=1.0, method=method, **options)

    def by_hand(params, x):
        base = params["base"]
        return clipped(lambda lora, x: loss({"base": base, "lora": lora}, x))(params["lora"], x)

    flops, memory = cost(clipped(loss, wrt={"base": False, "lora": True}))
    assert (flops, memory) == cost(by_hand)
    # Four products forward, of which two passes do each twice, and none of their derivatives.
    assert flops < 1.5 * (2 if method == "two_pass" else 1) * 4 * 2 * x.size * 64
    assert 1.9 * flops < cost(clipped(loss))[0]


# The loop that leaves out examples without a finite gradient, and how often and where its step runs.


@pytest.mark.slow
def test_a_step_is_as_exact_wherever_it_runs():
    """With an example that is not finite, and without jit, as one does to look for an error."""
    loss, params, x = model(2)
    gradient = clipping.clipped_grad(loss, l2_clip_norm=0.1)
    mask, gradients = np.arange(BATCH) != 1, per_example(loss, params, (x,))
    x[1, 0, 0] = np.nan
    check(jax.jit(gradient)(params, x, mask=mask), gradients, 0.1, mask, slack=1e-3)
    with jax.disable_jit():
        check(gradient(params, x, mask=mask), gradients, 0.1, mask, slack=1e-3)


@pytest.mark.parametrize(
    ("finite", "mask", "runs"),
    [
        ([True, True, True], [True, True, False], 1),
        ([True, True, True], [False, False, False], 0),
        ([True, False, True], [True, True, True], 2),
        ([False, False, True], [True, True, False], 2),
    ],
    ids=["finite", "masked", "one is not finite", "none is finite"],
)
def test_a_step_runs_as_often_as_examples_have_to_be_left_out(finite, mask, runs):
    """Nor do slices of a batch take time that hold no example."""
    seen = []

    def once(batch, keep):
        jax.debug.callback(seen.append, keep)
        (x,) = batch
        return [jnp.sum(jnp.where(keep, x, 0))], [x], x

    step = jax.jit(batches.finite_only(once))
    (total,), (norms,), _ = step((jnp.where(jnp.array(finite), 2.0, jnp.nan),), jnp.array(mask))
    jax.effects_barrier()
    assert len(seen) == runs
    kept = np.array(finite) & np.array(mask)
    assert total == 2 * kept.sum()
    np.testing.assert_array_equal(np.isnan(norms), np.array(mask) & ~np.array(finite))


@on_one_cpu
def test_who_names_no_microbatch_gets_what_a_cache_holds(monkeypatch):
    """And a batch that takes little, or whose parameters take more than its examples, is taken whole."""

    def chosen(size, one, parameters):
        return batches.chosen(size, one, [shape(parameters // 4)])

    assert chosen(64, 2**20, 2**20) == 11
    assert chosen(64, 2**10, 2**20) == 64
    assert chosen(64, 2**20, 2**26) == 64
    assert chosen(3, 2**30, 2**10) == 3  # Two at least: one is not vectorised.
    assert chosen(4, 2**30, 2**10) == 2
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert chosen(64, 2**30, 2**10) == 64


def test_the_bytes_of_an_example_are_those_of_the_method_that_is_the_default():
    """Blocks in a loop hand out norms alone, which is less than what one pass would hold for them."""

    @jax.checkpoint
    def block(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    def loss(p, x):
        return jnp.sum(lax.scan(block, x, p)[0] ** 2)

    p = {"up": jnp.ones((4, 8, 128)) / 8, "down": jnp.ones((4, 128, 8)) / 128}
    found = clipping.explain_clipping(loss, p, jnp.ones((2, 5, 8)))
    assert found.example_bytes < found.extra_bytes


@pytest.mark.slow
@on_one_cpu
def test_the_chosen_microbatch_is_that_which_is_explained_and_is_exact(monkeypatch):
    w, x = normal(8, 8), normal(12, 40, 8)

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    monkeypatch.setattr(batches, "CACHE", 4 * clipping.explain_clipping(loss, w, x).example_bytes)
    explained = clipping.explain_clipping(loss, w, x)
    assert (explained.microbatch_size, explained.batch_size) == (4, 12)
    assert str(explained).splitlines()[-1].startswith("4 of 12 examples at a time")
    program = jax.make_jaxpr(clipping.clipped_grad(loss, l2_clip_norm=1.0))(w, x)
    assert "f32[4,40,8]" in str(program)
    is_exact(loss, w, (x,), "auto", microbatch_size=None)


# What is done for one compiler alone.


@pytest.mark.quick_cases("rows")
@pytest.mark.parametrize(
    "trick", [t for t in sorted(xla_cpu.TRICKS) if t != "kept" or xla_cpu.keeps_blocks()]
)
def test_results_do_not_depend_on_a_trick(monkeypatch, trick):
    """A held gradient, a block under remat, convolutions with features first, a sum beside an axis of one."""
    monkeypatch.setattr(xla_cpu, "uses", lambda name: name in xla_cpu.TRICKS)
    params = {"a": normal(48, 48) / 4, "b": normal(48, 2100) / 4, "c": np.zeros(2100, "f4")}
    params |= {"k": normal(4, 1, 5, 3), "l": normal(2, 4, 3, 3)}
    x, mask = normal(3, 20, 48), np.array([True, False, True])

    def loss(p, x):
        images = jnp.tanh(lax.conv(x[None, None], p["k"], (2, 1), "SAME"))
        images = lax.conv(images, p["l"], (1, 2), "VALID")
        x = jax.checkpoint(lambda x, a: jnp.tanh(x @ a))(x, p["a"])
        scores = jax.nn.log_softmax(x @ p["b"] + p["c"])
        short = jnp.sum(jnp.sum(images, 2) ** 2)  # (1, 2, height, width)
        return jnp.mean(scores[:, 0]) + jnp.sum(x**2) + jnp.sum(images**2) / 99 + short / 99

    fn = jit(clipping.clipped_grad(loss, l2_clip_norm=0.5))
    jax.clear_caches()
    with_it = fn.lower(params, x, mask=mask).as_text()
    monkeypatch.setattr(xla_cpu, "TRICKS", xla_cpu.TRICKS - {trick})
    jax.clear_caches()
    assert fn.lower(params, x, mask=mask).as_text() != with_it
    check(fn(params, x, mask=mask), per_example(loss, params, (x,)), 0.5, mask=mask)
    jax.clear_caches()


@pytest.mark.parametrize(
    ("version", "keeps"),
    [((0, 9, 1), True), ((0, 11, 3), True), ((0, 12, 0), False), ((1, 0, 0), False)],
)
def test_activations_are_kept_before_one_version(monkeypatch, version, keeps):
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(xla_cpu, "uses", lambda name: True)
    assert xla_cpu.keeps_blocks() == keeps


def test_what_holds_on_other_machines(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not any(map(xla_cpu.uses, xla_cpu.TRICKS))
    assert not xla_cpu.keeps_blocks()
