"""Two backward passes after one forward pass: exact where activations are recomputed."""

import dataclasses
import functools

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


@pytest.mark.quick_cases("scan")
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
    for path, (_, _, _, unruled) in rules_of(loss, model, *batch).items():
        assert not unruled or "bias" in path or "scale" in path, path
    gradients = per_example(loss, model, batch)
    clip = median_norm(gradients)
    fn = clipping.clipped_grad(loss, l2_clip_norm=clip)  # which chooses two passes
    check(jit(functools.partial(fn, model))(*batch), gradients, clip)


@pytest.mark.slow
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


def test_what_is_broadcast_behind_a_block_is_longer():
    """The block makes the gradient of a sum of rows, which is that of each row."""
    x = np.random.default_rng(0).normal(size=(3, 4, WIDTH)).astype("f4")

    def loss(w, x):
        return jnp.sum(jax.checkpoint(lambda row: jnp.sin(jnp.tanh(x * row)))(jnp.sum(w, 0)))

    w = jnp.ones((5, WIDTH)) / 5
    out = jit(clipping.clipped_grad(loss, l2_clip_norm=0.5, method="two_pass"))(w, x)
    check(out, per_example(loss, w, (x,)), 0.5)


def test_a_group_that_is_too_long_to_be_scaled_silences_no_other():
    """No example adds anything to the first group, and every one does to the second, which a block makes."""
    x = np.random.default_rng(0).normal(size=(3, 4, WIDTH)).astype("f4")

    def loss(p, x):
        return jnp.sum(jax.checkpoint(lambda w: jnp.sin(jnp.tanh(x @ w)))(p["block"])) + jnp.sum(
            1e16 * x[0] * p["before"]
        )

    p = {"before": jnp.ones(WIDTH), "block": jnp.eye(WIDTH)}
    fn = clipping.clipped_grad(loss, l2_clip_norm={"before": 1.0, "block": 0.5}, method="two_pass")
    out = jit(fn)(p, x)
    assert not np.any(out.grads["before"])
    gradients = per_example(lambda w, x: loss(p | {"block": w}, x), p["block"], (x,))
    mine = dataclasses.replace(out, grads=out.grads["block"], norms=out.norms["block"])
    check(mine, gradients, 0.5)


@pytest.mark.slow
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


@pytest.mark.slow
def test_no_example_passing_is_a_sum_of_zero():
    fn = clipping.clipped_grad(loss_of(loop), l2_clip_norm=1.0)
    out = jit(fn)(params(), TOKENS, mask=np.zeros(BATCH, bool))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(out.grads))


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


@pytest.mark.slow
def test_a_penalty_on_a_parameter_without_a_rule_is_in_its_norms():
    """XLA's compiler for CPUs (0.10.2) gets a sum of squares wrong whose terms a constant multiplies."""
    rng = np.random.default_rng(0)
    v, x, scales = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in [(32, 32), (BATCH, 5, 32), (BATCH, 32, 32)]
    )

    def loss(p, x, scale):
        return jnp.sum(jnp.tanh(x @ (p * scale))) + 10 * jnp.sum(p**2)

    gradients = jax.vmap(jax.grad(loss), (None, 0, 0))(v, x, scales)
    norms = jnp.linalg.norm(gradients.reshape(BATCH, -1), axis=1)
    gradient = clipping.clipped_grad(loss, l2_clip_norm=1.0, method="two_pass")
    found = jax.jit(gradient)(v, x, scales)
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
