"""Re-Attention inside the transformer, against elementwise moments of every activation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clipping_exact import check, per_example
from flax import nnx

import dpx
from dpx import reattention
from dpx.nn.transformer import Transformer
from dpx.reattention import Moments, ParameterNoise

VOCAB, LENGTH, DIM = 40, 12, 32
PROBABILITIES = 1 / np.arange(1, VOCAB + 1)
TOKENS = np.random.default_rng(0).choice(VOCAB, (8, LENGTH), p=PROBABILITIES / PROBABILITIES.sum())


def build(num_heads=1, num_blocks=3, std=None, seed=0, **settings):
    """A model; with `std`, one whose parameters went through so much noise."""
    settings = {"dim": DIM, "embed_std": 0.1} | settings
    rngs = nnx.Rngs(seed)
    model = Transformer(
        VOCAB, LENGTH, num_heads=num_heads, num_blocks=num_blocks, rngs=rngs, **settings
    )
    if std:
        graph, params = nnx.split(model)
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        pairs = zip(leaves, keys, strict=True)
        leaves = [leaf + std * jax.random.normal(key, leaf.shape) for leaf, key in pairs]
        model = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
    return model


def noise_of(scale=1.0):
    embedding, rest = (
        scale * reattention.effective_noise_std(1.0, 500, p) for p in (PROBABILITIES, None)
    )
    return ParameterNoise(jnp.asarray(embedding), rest)


def elementwise(model, tokens, noise):
    """Key variances (..., heads, L, D) of every block, by the functions of `dpx.reattention`, no shortcut."""
    rest = jnp.square(noise.rest)

    def of(parameter):
        return Moments(parameter[...], rest)

    def full(x):
        return Moments(x.mean, jnp.broadcast_to(x.var, x.mean.shape))

    def normed(layer, x):
        """The mean path is the model's own; the propagated mean would shrink with the noise."""
        found = reattention.layer_norm(full(x), of(layer.scale), of(layer.bias))
        return Moments(layer(x.mean), found.var)

    def dense(layer, x):
        return full(reattention.dense(full(x), of(layer.kernel), of(layer.bias)))

    table = Moments(model.embed.embedding[...], jnp.square(noise.embedding)[:, None])
    positions = Moments(model.positions[...], rest)
    x = reattention.add(
        reattention.rows(table, tokens), reattention.rows(positions, jnp.arange(LENGTH))
    )
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    found = []
    for block in model.blocks:
        h = normed(block.norm1, x)
        q, k, v = (
            jax.tree.map(block._split, dense(f, h)) for f in (block.query, block.key, block.value)
        )
        found.append(k.var)
        heads = reattention.attend(q.mean, k.mean, v, k.var, mask=causal)
        mixed = jax.tree.map(lambda a: jnp.moveaxis(a, -3, -2).reshape(x.mean.shape), heads)  # noqa: B023
        x = reattention.add(full(x), dense(block.out, mixed))
        hidden = dense(block.up, normed(block.norm2, x))
        activated = reattention.gelu(hidden, nodes=9)
        known = Moments(jax.nn.gelu(hidden.mean, approximate=False), activated.var)
        x = reattention.add(x, dense(block.down, known))
    return found


def in_forward_pass(model, tokens, noise):
    """The key variances that the model's attention is given."""
    found = []

    def spying(q, k, v, key_variance, *, mask):
        found.append(key_variance)
        return reattention.attend(q, k, v, key_variance, mask=mask)

    for block in model.blocks:
        block.attention = spying
    model(tokens, noise_std=noise)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_heads", [1, 4])
@pytest.mark.parametrize(("scale", "std"), [(0.01, None), (0.3, 0.1), (3.0, None)])
def test_key_variances_are_close_to_the_elementwise_ones(num_heads, scale, std):
    """The average over a key's coordinates; within 4 % at the first block, 14 and 24 % behind MLPs."""
    model = build(num_heads, std=std)
    exact = jax.jit(elementwise)(model, TOKENS, noise_of(scale))
    fast = in_forward_pass(model, TOKENS, noise_of(scale))
    for depth, (a, b) in enumerate(zip(exact, fast, strict=True)):
        average = np.asarray(a.mean((-3, -1)))
        ratio = np.asarray(b[..., 0, :, 0]) / average
        assert np.abs(ratio - 1).max() < 0.04 + 0.1 * depth
        assert np.corrcoef(np.log(average).ravel(), np.log(b[..., 0, :, 0]).ravel())[0, 1] > 0.99


@pytest.mark.slow
def test_no_noise_no_correction():
    model = build()
    with pytest.raises(ValueError, match=r"noise_std\.embedding"):
        model(TOKENS, noise_std=ParameterNoise(jnp.ones(VOCAB - 1), 0.1))
    none = ParameterNoise(jnp.zeros(VOCAB), 0.0)
    np.testing.assert_allclose(model(TOKENS, noise_std=none), model(TOKENS), atol=1e-5)
    literal = build(attention=functools.partial(reattention.attend, renormalize=False))
    np.testing.assert_allclose(literal(TOKENS, noise_std=none), model(TOKENS), atol=1e-5)
    assert np.abs(model(TOKENS, noise_std=noise_of()) - model(TOKENS)).max() > 1e-4


@pytest.mark.slow
def test_causal_last_only_and_padding_hold_with_noise():
    model = build()
    out = model(TOKENS, noise_std=noise_of())
    np.testing.assert_allclose(
        model(TOKENS, last_only=True, noise_std=noise_of()), out[:, -1:], atol=1e-5
    )
    changed = TOKENS.copy()
    changed[:, 6] = 39
    np.testing.assert_allclose(model(changed, noise_std=noise_of())[:, :6], out[:, :6], atol=1e-5)
    mask = np.arange(LENGTH) >= 3
    changed = np.where(mask, TOKENS, 39)
    masked = [
        model(t, mask=jnp.asarray(mask), noise_std=noise_of())[:, 3:] for t in (TOKENS, changed)
    ]
    np.testing.assert_allclose(*masked, atol=1e-5)
    dropped = build(dropout=0.5)(TOKENS, dropout_key=jax.random.key(0), noise_std=noise_of())
    assert np.isfinite(dropped).all()


@pytest.mark.slow
def test_unseen_tokens_are_safe():
    huge = ParameterNoise(jnp.full(VOCAB, 1e15).at[:5].set(1e-3), 1e-3)

    def loss(params):
        logits = nnx.merge(graph, params)(TOKENS, noise_std=huge)
        return jax.nn.log_softmax(logits)[..., 0].mean()

    graph, params = nnx.split(build(num_blocks=2, dim=8))
    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


@pytest.mark.quick_cases("inf")
@pytest.mark.parametrize("std", [1e6, 1e12, np.inf])
def test_no_noise_of_parameters_is_too_large(std):
    graph, params = nnx.split(build(num_blocks=2, dim=8))
    noise = ParameterNoise(jnp.full(VOCAB, 1.0), std)
    assert np.isfinite(jax.jit(nnx.merge(graph, params))(TOKENS, noise_std=noise)).all()


@pytest.mark.slow
@pytest.mark.parametrize("last_only", [False, True])
def test_clipping_is_exact_and_treats_the_variance_as_a_constant(last_only, capsys):
    graph, params = nnx.split(build(num_heads=2, num_blocks=2, dropout=0.1, dim=8))

    def loss(noise, params, tokens, targets, key):
        model = nnx.merge(graph, params)
        logits = model(tokens, last_only=last_only, dropout_key=key, noise_std=noise)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[-len(logits) :, None], 1)
        return -picked.mean()

    batch = (jnp.asarray(TOKENS), jnp.asarray(TOKENS[::-1]), jax.random.split(jax.random.key(0), 8))
    noisy, plain = (functools.partial(loss, noise) for noise in (noise_of(), None))
    auto, slow = (
        jax.jit(dpx.clipped_grad(noisy, l2_clip_norm=0.3, method=method))(params, *batch)
        for method in ("auto", "vmap")
    )
    np.testing.assert_allclose(auto.norms, slow.norms, rtol=1e-5)
    check(auto, per_example(noisy, params, batch), 0.3)
    tables = []
    for each in (noisy, plain):
        dpx.explain_clipping(each, params, *batch)
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]


@pytest.mark.slow
def test_gradients_take_the_path_of_the_means():
    """The gradient is that of a model whose attention gets the same correction as a constant."""
    model = build(num_blocks=2)
    variances = in_forward_pass(build(num_blocks=2), TOKENS, noise_of())

    def loss(params, constant):
        given = iter(variances)

        def attend(q, k, v, key_variance, *, mask):
            return reattention.attend(q, k, v, next(given) if constant else key_variance, mask=mask)

        model = nnx.merge(graph, params)
        for block in model.blocks:
            block.attention = attend
        return jnp.square(model(TOKENS, noise_std=noise_of())).mean()

    graph, params = nnx.split(model)
    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    found, expected = (gradient(params, constant) for constant in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)
