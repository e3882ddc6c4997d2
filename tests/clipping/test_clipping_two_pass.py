"""Two backward passes after one forward pass: exact where activations are recomputed, and no dearer."""

import dataclasses
import functools
from typing import Any

import clipping_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from test_clipping_engine import rules_of
from test_clipping_models import check, jit, per_example

from dpx import clipping

DEPTH, WIDTH, WORDS, LENGTH, BATCH = 2, 6, 7, 5, 4
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, WORDS, size=(BATCH, LENGTH))
POLICIES = jax.checkpoint_policies


def params():
    rng = np.random.default_rng(1)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / 2, jnp.float32)

    blocks = {
        "w": normal(DEPTH, WIDTH, WIDTH),
        "up": normal(DEPTH, WIDTH, 3 * WIDTH),
        "down": normal(DEPTH, 3 * WIDTH, WIDTH),
        "scale": 1 + normal(DEPTH, WIDTH),
        "bias": normal(DEPTH, WIDTH),
    }
    return {"embed": normal(WORDS, WIDTH), "places": normal(9, WIDTH), "blocks": blocks}


def block(p, x):
    mixed = jax.nn.softmax(x @ x.T) @ x @ p["w"]
    x = checkpoint_name(x + p["scale"] * mixed + p["bias"], "mixed")
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def loop(x, blocks, **options):
    for i in range(DEPTH):
        x = jax.checkpoint(block, **options)(jax.tree.map(lambda p, i=i: p[i], blocks), x)
    return x


def scan(x, blocks, shared=None):
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(x, p):
        return (block(p, x) if shared is None else block(p | {"w": shared}, x)), None

    return jax.lax.scan(body, x, blocks)[0]


def nested(x, blocks):
    """Rematerialised groups of rematerialised blocks."""
    groups = jax.tree.map(lambda p: p[:, None], blocks)
    body = jax.checkpoint(lambda x, group: (scan(x, group), None))
    return jax.lax.scan(body, x, groups)[0]


def shared_in_scan(x, blocks):
    """One weight that every iteration uses."""
    return scan(x, {k: v for k, v in blocks.items() if k != "w"}, blocks["w"][0])


STACKS = {
    "loop": loop,
    "dots_saveable": functools.partial(loop, policy=POLICIES.dots_saveable),
    "save_only_these_names": functools.partial(
        loop, policy=POLICIES.save_only_these_names("mixed")
    ),
    "scan": scan,
    "nested": nested,
    "shared in scan": shared_in_scan,
    "scan without remat": lambda x, blocks: jax.lax.scan(
        lambda x, p: (block(p, x), None), x, blocks
    )[0],
}


def loss_of(stack):
    """A tied embedding, and one of places that no example changes, around a stack of blocks."""

    def loss(params, tokens):
        x = params["embed"][tokens] + params["places"][: len(tokens)]
        x = stack(x, params["blocks"])
        logits = x @ params["embed"].T
        return clipping_models.cross_entropy(logits[:-1], tokens[1:]).sum()

    return loss


def median_norm(gradients):
    return float(np.median(np.sqrt(sum((g.reshape(len(g), -1) ** 2).sum(1) for g in gradients))))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow)
        if name
        in ("nested", "scan without remat", "save_only_these_names", "loop", "shared in scan")
        else name
        for name in STACKS
    ],
)
def test_sums_and_norms_are_exact(name):
    loss = loss_of(STACKS[name])
    gradients = per_example(loss, params(), (TOKENS,))
    clip = median_norm(gradients)
    fn = clipping.clipped_grad(loss, l2_clip_norm=clip, method="two_pass")
    check(jit(fn)(params(), TOKENS), gradients, clip)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(3 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.silu(self.up(self.norm(x))))


class Scanned(nnx.Module):
    """Rematerialised blocks in a scan, both by NNX."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = nnx.vmap(Block)(nnx.Rngs(0).split(DEPTH))

    def __call__(self, tokens):
        apply = nnx.remat(lambda block, x: block(x))
        scanned = nnx.scan(apply, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.embed.attend(scanned(self.blocks, self.embed(tokens)))


def nnx_scan_of_remat():
    def loss(model, tokens):
        return clipping_models.cross_entropy(model(tokens)[:-1], tokens[1:]).sum()

    return loss, Scanned(nnx.Rngs(0)), (TOKENS,)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [nnx_scan_of_remat, pytest.param(clipping_models.MODELS["linen scan of remat"], marks=pytest.mark.slow)],
    ids=["nnx", "linen"],
)  # fmt: skip
def test_scans_of_other_packages_are_exact_and_have_rules(case):
    loss, model, batch = case()
    for path, (_, _, uses, opaque) in rules_of(loss, model, *batch).items():
        assert "scan" not in opaque, path
        assert uses or "bias" in path or "scale" in path, path
    gradients = per_example(loss, model, batch)
    clip = median_norm(gradients)
    fn = clipping.clipped_grad(loss, l2_clip_norm=clip)  # which chooses two passes
    check(jit(functools.partial(fn, model))(*batch), gradients, clip)


def test_groups_masks_frozen_parameters_and_aux_at_once():
    loss, mask = loss_of(loop), np.array([True, False, True, True])
    whole = params()
    frozen = {k: whole["blocks"].pop(k) for k in ("up", "scale")}
    clips = {"embed": 0.3, "places": 0.5, "blocks": 0.7}

    def trained(p, tokens):
        return loss(p | {"blocks": p["blocks"] | frozen}, tokens)

    fn = clipping.clipped_grad(
        lambda p, tokens: (loss(p, tokens), tokens[0]),
        l2_clip_norm=clips,
        method="two_pass",
        wrt={"embed": True, "places": True, "blocks": {k: k not in frozen for k in params()["blocks"]}},
        has_aux=True,
    )  # fmt: skip
    out = jit(fn)(params(), TOKENS, mask=mask)
    np.testing.assert_array_equal(out.aux, TOKENS[:, 0] * mask)
    gradients = per_example(trained, whole, (TOKENS,))
    gradients = jax.tree.unflatten(jax.tree.structure(whole), gradients)
    for name, clip in clips.items():
        mine = dataclasses.replace(out, grads=out.grads[name], norms=out.norms[name])
        check(mine, jax.tree.leaves(gradients[name]), clip, mask)


def test_an_example_that_is_not_finite_adds_nothing():
    loss = loss_of(scan)

    def weighted(p, tokens, weight):
        return loss(p, tokens) * weight

    weights = np.array([1, np.inf, 2, np.nan], "f4")
    finite = np.isfinite(weights)
    gradients = per_example(weighted, params(), (TOKENS, np.where(finite, weights, 1)))
    fn = jit(clipping.clipped_grad(weighted, l2_clip_norm=1.0))
    out = fn(params(), TOKENS, weights)
    assert np.all(np.isinf(out.norms) == ~finite)
    out = dataclasses.replace(out, norms=np.where(finite, out.norms, 0))
    check(out, gradients, 1.0, finite)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_microbatches_and_a_batch_of_one_are_exact(size):
    loss = loss_of(scan)
    gradients = per_example(loss, params(), (TOKENS,))
    fn = clipping.clipped_grad(loss, l2_clip_norm=2.0, microbatch_size=size)
    check(jit(fn)(params(), TOKENS), gradients, 2.0)


def test_no_example_passing_is_a_sum_of_zero():
    fn = clipping.clipped_grad(loss_of(loop), l2_clip_norm=1.0)
    out = jit(fn)(params(), TOKENS, mask=np.zeros(BATCH, bool))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(out.grads))


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
    fn = clipping.clipped_grad(loss, l2_clip_norm=1.0)
    found = jax.make_jaxpr(lambda p, x: fn(p, x).grads)(p, np.ones((BATCH, 20, WIDTH), "f4"))
    assert count(found.jaxpr, "tanh") == 3
    assert count(found.jaxpr, "dot_general") == 2 + 2 * (1 + (2 if scanned else 1) + 2)


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
        fn = clipping.clipped_grad(loss, l2_clip_norm=clip)
        found = jax.make_jaxpr(lambda p, x, fn=fn: fn(p, x).grads)(p, x)
        assert count(found.jaxpr, "cos") == count(found.jaxpr, "sin") == 1
    fn = clipping.clipped_grad(loss, l2_clip_norm=median_norm(gradients))
    check(jit(fn)(p, x), gradients, median_norm(gradients))


def test_norms_that_a_scan_adds_up_are_rounded_up_for_each_of_its_iterations():
    """In whatever order a compiler adds them; the exact norm is known, and so is that of each iteration."""
    length, size = 512, 16

    @jax.checkpoint
    def body(x, w):
        return x, jnp.sum(x @ w)

    def loss(weights, x):
        return jnp.sum(jax.lax.scan(body, x, weights)[1])

    fn = clipping.clipped_grad(loss, l2_clip_norm=1.0, method="two_pass")
    found = fn(jnp.zeros((length, size, 2 * size)), jnp.ones((2, 3, size)))
    # Every entry of the gradient is 3. γ_512 is 3e-5.
    raised = np.square(np.asarray(found.norms, np.float64)) / (length * size * 2 * size * 3**2) - 1
    assert (raised >= length * 2.0**-24).all()


def test_memory_is_that_of_an_ordinary_step():
    """Though the compiler for CPUs drops barriers, activations are not recomputed for both passes at once."""

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    def loss(weights, x):
        for pair in weights["blocks"]:
            x = jax.checkpoint(lambda x, a, b: x + jnp.sin(jnp.tanh(x @ a)) @ b)(x, *pair)
        return jnp.mean(jax.nn.log_softmax(x @ weights["head"])[:, 0])

    def ordinary(weights, x):
        return jax.grad(lambda w: jax.vmap(loss, (None, 0))(w, x).mean())(weights)

    clipped = clipping.clipped_grad(loss, l2_clip_norm=1.0)
    weights = {"blocks": [[shape(64, 256), shape(256, 64)]] * 6, "head": shape(64, 64)}

    def temp(fn) -> int:
        with jax.default_device(jax.devices("cpu")[0]):
            compiled: Any = jit(fn).lower(weights, shape(8, 64, 64)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp(lambda *arguments: clipped(*arguments).grads) <= 1.2 * temp(ordinary)


def test_nothing_is_passed_twice_where_all_gradients_are_held():
    """A model that recomputes, but of which no parameter has a norm without its gradient."""

    def loss(params, x):
        def step(state, _):
            return jnp.tanh(state * params["scale"] + params["shift"]), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(step), x, length=5)[0] ** 2)

    params = {"scale": jnp.ones(4), "shift": jnp.zeros(4)}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), "f4")
    programs = {}
    for method in ("auto", "one_pass", "two_pass"):
        clipped = clipping.clipped_grad(loss, l2_clip_norm=1.0, method=method)
        programs[method] = len(str(jax.make_jaxpr(clipped)(params, x)).split("\n"))
    assert programs["auto"] == programs["one_pass"] != programs["two_pass"]


@pytest.mark.slow
def test_a_weight_that_only_a_penalty_uses():
    def loss(p, x):
        h = jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w))(x, p["w"])
        return jnp.sum(h) + x[0, 0] * jnp.sum(p["unused"] ** 2)

    p = {name: np.eye(70, dtype="f4") for name in ("w", "unused")}
    x = np.linspace(0, 1, 2 * 3 * 70, dtype="f4").reshape(2, 3, 70)
    two, one = (
        clipping.clipped_grad(loss, l2_clip_norm=1.0, method=method)(p, x)
        for method in ("two_pass", "vmap")
    )
    for name in p:
        np.testing.assert_allclose(two.grads[name], one.grads[name], rtol=1e-4, atol=1e-6)
