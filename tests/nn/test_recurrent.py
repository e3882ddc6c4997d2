import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dpx
from dpx.nn.recurrent import Recurrent

TOKENS = jnp.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
CELLS = ("gru", "lstm")


def build(cell, **changes):
    settings = {"dim": 8, "num_blocks": 2, "embed_std": 0.5, "rngs": nnx.Rngs(0)}
    return Recurrent(11, 6, cell=cell, **(settings | changes))


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
@pytest.mark.parametrize("cell", CELLS)
def test_layers_are_the_textbook_cells(cell):
    layer = build(cell).layers[0]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 8)), jnp.float32)
    found = layer(x, jnp.ones(5, bool))
    np.testing.assert_allclose(found, by_hand(layer, x), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_causal_last_only_and_padding(cell):
    model = build(cell)
    out = model(TOKENS)
    np.testing.assert_allclose(model(TOKENS.at[:, 4].set(7))[:, :4], out[:, :4], atol=1e-6)
    np.testing.assert_allclose(model(TOKENS, last_only=True), out[:, -1:], atol=1e-6)
    padded = jnp.concatenate([jnp.full((2, 2), 10), TOKENS[:, :4]], axis=1)
    mask = jnp.arange(6) >= 2
    np.testing.assert_allclose(model(padded, mask=mask)[:, 2:], model(TOKENS[:, :4]), atol=1e-5)
    one, two = (build(cell, dropout=0.5)(TOKENS, dropout_key=jax.random.key(i)) for i in range(2))
    assert np.abs(one - two).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_clipping_is_exact(cell):
    graph, params = nnx.split(build(cell, num_blocks=1))

    def loss(params, tokens):
        logits = nnx.merge(graph, params)(tokens[:-1])
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[1:, None], 1).mean()

    auto, slow = (
        jax.jit(functools.partial(dpx.clipped_grad(loss, l2_clip_norm=0.1, method=m), params))(
            TOKENS
        )
        for m in ("auto", "vmap")
    )
    np.testing.assert_allclose(auto.norms, slow.norms, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), auto.grads, slow.grads)


def test_tying_and_misuse():
    sizes = [
        sum(leaf.size for leaf in jax.tree.leaves(nnx.split(build("gru", tied=tied))[1]))
        for tied in (True, False)
    ]
    assert sizes[1] - sizes[0] == 11 * 8
    for changes, name in (({"dropout": 1.0}, "dropout"), ({"num_blocks": 0}, "num_blocks")):
        with pytest.raises(ValueError, match=name):
            build("gru", **changes)
    with pytest.raises(ValueError, match="cell"):
        build("rnn")
    with pytest.raises(ValueError, match="max_length"):
        build("gru")(jnp.zeros(7, jnp.int32))
