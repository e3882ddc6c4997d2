"""Rematerialised blocks and stacks of them, whose gradients are made twice: exact, group by group."""

import functools

import clipping_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clipping_exact import check_groups, is_exact, jit, normal, norms_of, per_example, without_rule
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from dpx import clipping

DEPTH, WIDTH, WORDS, LENGTH, BATCH = 2, 6, 7, 5, 4
TOKENS = np.random.default_rng(0).integers(0, WORDS, size=(BATCH, LENGTH))
POLICIES = jax.checkpoint_policies
BLOCKS = {
    "w": normal(DEPTH, WIDTH, WIDTH),
    "up": normal(DEPTH, WIDTH, 3 * WIDTH),
    "down": normal(DEPTH, 3 * WIDTH, WIDTH),
    "scale": 1 + normal(DEPTH, WIDTH),
    "bias": normal(DEPTH, WIDTH, seed=1),
}
PARAMS = {"embed": normal(WORDS, WIDTH), "places": normal(9, WIDTH), "blocks": BLOCKS}


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


def summed_behind_a_block():
    """The block makes the gradient of a sum of rows, which is that of each row: it is longer."""

    def loss(w, x):
        return jnp.sum(jax.checkpoint(lambda row: jnp.sin(jnp.tanh(x * row)))(jnp.sum(w, 0)))

    return loss, np.ones((5, WIDTH), "f4") / 5, (normal(3, 4, WIDTH),)


CONSTRUCTS = {
    **{
        name: (lambda stack=stack: (loss_of(stack), PARAMS, (TOKENS,)))
        for name, stack in STACKS.items()
    },
    "nnx": nnx_scan_of_remat,
    "linen": clipping_models.MODELS["linen scan of remat"],
    "summed behind": summed_behind_a_block,
}


@pytest.mark.quick_cases("scan-two_pass", "summed behind-two_pass")
@pytest.mark.parametrize("how", ["two_pass", "auto", "one_pass"])
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_norms_and_sums_are_exact(name, how):
    is_exact(*CONSTRUCTS[name](), how)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scan", "nnx", "linen"])
def test_matrices_in_scans_of_blocks_have_rules(name):
    held = without_rule(*CONSTRUCTS[name]())
    assert all("bias" in path or "scale" in path for path in held)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_microbatches_are_exact(size):
    is_exact(*CONSTRUCTS["scan"](), "two_pass", microbatch_size=size)


@pytest.mark.slow
def test_groups_masks_frozen_parameters_and_aux_at_once():
    loss, mask = loss_of(loop), np.array([True, False, True, True])
    trained = {k: k not in ("up", "scale") for k in BLOCKS}
    clips = {"embed": 0.3, "places": 0.5, "blocks": 0.7}
    fn = clipping.clipped_grad(
        lambda p, tokens: (loss(p, tokens), tokens[0]),
        l2_clip_norm=clips,
        method="two_pass",
        wrt={"embed": True, "places": True, "blocks": trained},
        has_aux=True,
    )
    out = jit(fn)(PARAMS, TOKENS, mask=mask)
    np.testing.assert_array_equal(out.aux, TOKENS[:, 0] * mask)
    gradients = per_example(loss, PARAMS, (TOKENS,))
    gradients = jax.tree.unflatten(jax.tree.structure(PARAMS), gradients)
    gradients["blocks"] = [g for k, g in gradients["blocks"].items() if trained[k]]
    check_groups(out, {k: jax.tree.leaves(g) for k, g in gradients.items()}, clips, mask)


def test_a_group_that_is_too_long_to_be_scaled_silences_no_other():
    """No example adds anything to the first group, and every one does to the second, which a block makes."""
    x = 2 * normal(3, 4, WIDTH)

    def loss(p, x):
        return jnp.sum(jax.checkpoint(lambda w: jnp.sin(jnp.tanh(x @ w)))(p["block"])) + jnp.sum(
            1e16 * x[0] * p["before"]
        )

    p = {"before": jnp.ones(WIDTH), "block": jnp.eye(WIDTH)}
    fn = clipping.clipped_grad(loss, l2_clip_norm={"before": 1.0, "block": 0.5}, method="two_pass")
    out = jit(fn)(p, x)
    assert not np.any(out.grads["before"])
    gradients = per_example(lambda w, x: loss(p | {"block": w}, x), p["block"], (x,))
    check_groups(out, {"block": gradients}, {"block": 0.5})


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


@pytest.mark.slow
def test_a_penalty_on_a_parameter_without_a_rule_is_in_its_norms():
    """XLA's compiler for CPUs (0.10.2) gets a sum of squares wrong whose terms a constant multiplies."""

    def loss(p, x, scale):
        return jnp.sum(jnp.tanh(x @ (p * scale))) + 10 * jnp.sum(p**2)

    p, batch = normal(32, 32), (normal(BATCH, 5, 32), normal(BATCH, 32, 32))
    norms = norms_of(per_example(loss, p, batch))
    found = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=1.0, method="two_pass"))(p, *batch)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-3)
    assert jnp.linalg.norm(found.grads) <= BATCH


@pytest.mark.slow
def test_sums_of_narrow_parameters_are_not_rounded():
    """They are made wide before the block, so that their gradients are rounded after it."""
    w = jnp.asarray(np.random.default_rng(0).normal(size=(16, 24)) / 4, jnp.bfloat16)
    x = np.random.default_rng(1).normal(size=(4, 3, 16)).astype("f4")

    def of_wide(w, x):
        return jnp.sum(jax.checkpoint(lambda w, x: jnp.sin(jnp.tanh(x @ w)))(w, x))

    def loss(w, x):
        return of_wide(w.astype(jnp.float32), x)

    found = clipping.clipped_grad(loss, l2_clip_norm=1e6, method="two_pass")(w, x).grads
    assert found.dtype == jnp.float32
    expected = sum(jax.grad(of_wide)(w.astype(jnp.float32), one) for one in x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
