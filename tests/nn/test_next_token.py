"""The transformer and the recurrent models: what all of them have to do, and each its own."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dpx
from dpx.nn.pretrained import Decoder, DecoderSettings, Encoder, EncoderSettings
from dpx.nn.recurrent import Recurrent
from dpx.nn.transformer import Transformer, generate
from dpx.training import precision

TOKENS = jnp.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
MODELS = {
    "transformer": functools.partial(Transformer, num_heads=2),
    "gru": functools.partial(Recurrent, cell="gru"),
    "lstm": functools.partial(Recurrent, cell="lstm"),
}
PRETRAINED = {
    "decoder": lambda: Decoder(DecoderSettings(11), rngs=nnx.Rngs(0)),
    "encoder": lambda: Encoder(EncoderSettings(11), rngs=nnx.Rngs(0)),
}
# Attention weights are float32: two products in each of two blocks, and twice as many on the way back.
WIDE = {"transformer": 12, "gru": 0, "lstm": 0}


def build(name, **changes):
    if name in PRETRAINED:
        return PRETRAINED[name]()
    settings = {"dim": 8, "num_blocks": 2, "embed_std": 0.5, "rngs": nnx.Rngs(0)}
    return MODELS[name](11, 6, **(settings | changes))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_causality_last_only_padding_and_dropout(name):
    model = build(name)
    out = model(TOKENS)
    changed = model(TOKENS.at[:, 4].set(7))
    np.testing.assert_allclose(changed[:, :4], out[:, :4], atol=1e-6)
    assert np.abs(changed - out)[:, 4:].max() > 1e-5
    np.testing.assert_allclose(model(TOKENS, last_only=True), out[:, -1:], atol=1e-6)
    np.testing.assert_allclose(model(TOKENS[0]), out[0], atol=1e-6)
    mask = jnp.broadcast_to(jnp.arange(6) >= 2, (2, 6))
    padded = [model(TOKENS.at[:, :2].set(pad), mask=mask)[:, 2:] for pad in (0, 10)]
    np.testing.assert_allclose(*padded, atol=1e-6)
    if name != "transformer":  # which has positions
        np.testing.assert_allclose(padded[0], model(TOKENS[:, 2:]), atol=1e-5)
    assert np.isfinite(model(TOKENS, mask=jnp.zeros_like(mask))).all()
    model = build(name, dropout=0.5)
    np.testing.assert_array_equal(model(TOKENS), model(TOKENS))
    one, two, again = (model(TOKENS, dropout_key=jax.random.key(i)) for i in (0, 1, 0))
    assert np.abs(one - two).max() > 0
    np.testing.assert_array_equal(one, again)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_tying_shares_the_table(name):
    tied, untied = (nnx.split(build(name, tied=t))[1] for t in (True, False))
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(p)) for p in (tied, untied)]
    assert sizes[1] - sizes[0] == 11 * 8
    assert all(isinstance(v, nnx.Param) for _, v in tied.flat_state())


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        *[(name, {"num_blocks": 0}, "num_blocks") for name in MODELS],
        *[(name, {"dropout": 1.0}, "dropout") for name in MODELS],
        ("transformer", {"num_heads": 3}, "num_heads"),
        ("gru", {"cell": "rnn"}, "cell"),
    ],
)
def test_bad_arguments_are_named(name, changes, words):
    with pytest.raises(ValueError, match=words):
        build(name, **changes)
    with pytest.raises(ValueError, match="max_length"):
        build(name)(jnp.zeros(7, jnp.int32))


@pytest.mark.quick_cases("gru-True")
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_products_are_in_the_type_that_parameters_are_cast_to(name, tied):
    """`compute_dtype` reaches all of a model, and not its first look-up alone."""
    graph, params = nnx.split(build(name, tied=tied, num_blocks=2 if name == "transformer" else 1))

    def loss(params, tokens):
        logits = nnx.merge(graph, params)(tokens)
        assert logits.dtype == jnp.float32
        return jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    narrow = precision.computed_in("bfloat16", loss)
    program = str(jax.make_jaxpr(jax.grad(narrow))(params, TOKENS[0]))
    products = re.findall(r":(\w+)\[[\d,]+\] = dot_general", program)
    assert products.count("f32") == WIDE[name]
    assert products.count("bf16") == len(products) - WIDE[name] >= 6
    gradients = [jax.jit(jax.grad(each))(params, TOKENS[0]) for each in (loss, narrow)]
    exact, found = (np.concatenate([x.ravel() for x in jax.tree.leaves(g)]) for g in gradients)
    assert found.dtype == np.float32
    assert 1e-4 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 3e-2


@pytest.mark.quick_cases("gru")
@pytest.mark.parametrize("name", [*MODELS, *PRETRAINED])
def test_tokens_that_no_row_stands_for_are_named(name):
    """A look-up would wrap some of them around, clamp others and make others NaN."""
    model = build(name)
    for wrong in (11, -1):
        with pytest.raises(ValueError, match=f"tokens hold {wrong}, which must be from 0 to 10"):
            model(jnp.array([[0, 1], [2, wrong]]))
    with pytest.raises(ValueError, match="at least one token"):
        model(jnp.zeros((2, 0), int))
    assert model(jnp.array([0, 10])).shape == (2, 64 if name == "encoder" else 11)
    # Padding may be -1 where the mask leaves it out.
    tokens, mask = jnp.array([3, 1, -1]), jnp.array([True, True, False])
    own = model(tokens, mask=mask)
    np.testing.assert_array_equal(own[:2], model(tokens.at[2].set(4), mask=mask)[:2])
    assert np.isfinite(own).all()
    for wrong in (-2, 11):
        with pytest.raises(ValueError, match=f"tokens hold {wrong}"):
            model(tokens.at[2].set(wrong), mask=mask)


def test_another_attention_drops_in():
    def mean_of_values(q, k, v, *, mask):
        weights = mask / jnp.maximum(mask.sum(-1, keepdims=True), 1)
        return jnp.broadcast_to(weights @ v, (*q.shape[:-1], v.shape[-1]))

    model = build("transformer", attention=mean_of_values)
    assert np.abs(model(TOKENS) - build("transformer")(TOKENS)).max() > 1e-6
    changed = TOKENS.at[:, 5].set(0)
    np.testing.assert_allclose(model(TOKENS)[:, :5], model(changed)[:, :5], atol=1e-6)


@pytest.mark.slow
def test_generate_follows_the_model():
    """A model that always says `previous + 1` counts; one with known odds is sampled at those odds."""

    def successor(tokens):
        return 100.0 * jax.nn.one_hot((tokens + 1) % 11, 11)

    assert generate(successor, jax.random.key(0), 2, 4, start=2).tolist() == [[3, 4, 5, 6]] * 2

    def fixed(tokens):
        return jnp.broadcast_to(jnp.log(jnp.array([0.2, 0.5, 0.3])), (*tokens.shape, 3))

    drawn = generate(fixed, jax.random.key(0), 3000, 3, start=0)
    shares = np.bincount(np.asarray(drawn).ravel(), minlength=3) / drawn.size
    np.testing.assert_allclose(shares, [0.2, 0.5, 0.3], atol=0.03)


def by_hand(layer, x):
    """One step at a time, from the textbook."""

    def sigmoid(a):
        return 1 / (1 + np.exp(-a))

    w, u = np.asarray(layer.inputs.kernel[...]), np.asarray(layer.states.kernel[...])
    b = np.asarray(layer.inputs.bias[...])
    h = c = np.zeros(x.shape[-1])
    out = []
    for row in np.asarray(x):
        if layer.cell == "lstm":
            i, f, g, o = np.split(row @ w + b + h @ u, 4)
            c = sigmoid(f + 1) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
        else:
            r, z, n = np.split(row @ w + b, 3)
            hr, hz, hn = np.split(h @ u + np.asarray(layer.states.bias[...]), 3)
            z = sigmoid(z + hz)
            h = (1 - z) * np.tanh(n + sigmoid(r + hr) * hn) + z * h
        out.append(h)
    return np.stack(out)


@pytest.mark.quick_cases
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_layers_are_the_textbook_cells(cell):
    layer = build(cell).layers[0]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 8)), jnp.float32)
    found = layer(x, jnp.ones(5, bool))
    np.testing.assert_allclose(found, by_hand(layer, x), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_clipping_is_exact(cell):
    graph, params = nnx.split(build(cell, num_blocks=1))

    def loss(params, tokens):
        logits = nnx.merge(graph, params)(tokens[:-1])
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[1:, None], 1).mean()

    auto, slow = (
        jax.jit(dpx.clipped_grad(loss, l2_clip_norm=0.1, method=method))(params, TOKENS)
        for method in ("auto", "vmap")
    )
    np.testing.assert_allclose(auto.norms, slow.norms, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), auto.grads, slow.grads)
