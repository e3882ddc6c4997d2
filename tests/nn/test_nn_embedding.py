"""`compute_dtype` reaches all of a model, and not its first look-up alone."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dpx.nn.pretrained import Decoder, DecoderSettings, Encoder, EncoderSettings
from dpx.nn.recurrent import Recurrent
from dpx.nn.transformer import Transformer
from dpx.training import precision

TOKENS = jnp.array([3, 1, 4, 1, 5, 9])
MODELS = {
    "transformer": lambda **given: Transformer(11, 6, dim=8, num_heads=2, **given),
    "GRU": lambda **given: Recurrent(11, 6, cell="gru", dim=8, **given),
    "LSTM": lambda **given: Recurrent(11, 6, cell="lstm", dim=8, **given),
}
PRETRAINED = {
    "decoder": functools.partial(Decoder, DecoderSettings(11)),
    "encoder": functools.partial(Encoder, EncoderSettings(11)),
}
# Attention weights are float32: two products in each of two blocks, and twice as many on the way back.
WIDE = {"transformer": 12, "GRU": 0, "LSTM": 0}


@pytest.mark.quick_cases("GRU-True")
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_products_are_in_the_type_that_parameters_are_cast_to(name, tied):
    graph, params = nnx.split(MODELS[name](tied=tied, embed_std=0.5, rngs=nnx.Rngs(0)))

    def loss(params, tokens):
        logits = nnx.merge(graph, params)(tokens)
        assert logits.dtype == jnp.float32
        return jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    narrow = precision.computed_in("bfloat16", loss)
    program = str(jax.make_jaxpr(jax.grad(narrow))(params, TOKENS))
    products = re.findall(r":(\w+)\[[\d,]+\] = dot_general", program)
    assert products.count("f32") == WIDE[name]
    assert products.count("bf16") == len(products) - WIDE[name] >= 6
    gradients = [jax.jit(jax.grad(each))(params, TOKENS) for each in (loss, narrow)]
    exact, found = (np.concatenate([x.ravel() for x in jax.tree.leaves(g)]) for g in gradients)
    assert found.dtype == np.float32
    assert 1e-4 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 3e-2


@pytest.mark.quick_cases("GRU")
@pytest.mark.parametrize("name", [*MODELS, "decoder", "encoder"])
def test_tokens_that_no_row_stands_for_are_named(name):
    """A look-up would wrap some of them around, clamp others and make others NaN."""
    model = (MODELS | PRETRAINED)[name](rngs=nnx.Rngs(0))
    for wrong in (11, -1):
        with pytest.raises(ValueError, match=f"tokens hold {wrong}, which must be from 0 to 10"):
            model(jnp.array([[0, 1], [2, wrong]]))
    with pytest.raises(ValueError, match="at least one token"):
        model(jnp.zeros((2, 0), int))
    assert model(jnp.array([0, 10])).shape == (2, 64 if name == "encoder" else 11)


@pytest.mark.quick_cases("GRU")
@pytest.mark.parametrize("name", [*MODELS, "decoder", "encoder"])
def test_padding_may_be_minus_one_where_the_mask_leaves_it_out(name):
    model = (MODELS | PRETRAINED)[name](rngs=nnx.Rngs(0))
    tokens, mask = jnp.array([3, 1, -1]), jnp.array([True, True, False])
    own = model(tokens, mask=mask)
    np.testing.assert_array_equal(own[:2], model(tokens.at[2].set(4), mask=mask)[:2])
    assert np.isfinite(own).all()
    for wrong in (-2, 11):
        with pytest.raises(ValueError, match=f"tokens hold {wrong}"):
            model(tokens.at[2].set(wrong), mask=mask)
