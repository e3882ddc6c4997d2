import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dpx.nn.transformer import Transformer, generate


def build(**changes):
    settings = {"dim": 8, "num_heads": 2, "num_blocks": 2, "rngs": nnx.Rngs(0)}
    return Transformer(11, 6, **(settings | changes))


TOKENS = jnp.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


@pytest.mark.slow
def test_causality():
    model = build()
    changed = TOKENS.at[:, 4].set(7)
    np.testing.assert_allclose(model(TOKENS)[:, :4], model(changed)[:, :4], atol=1e-6)
    assert np.abs(model(TOKENS) - model(changed))[:, 4:].max() > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_last_only_is_the_last_position(tied):
    model = build(tied=tied)
    np.testing.assert_allclose(model(TOKENS, last_only=True), model(TOKENS)[:, -1:], atol=1e-6)
    np.testing.assert_allclose(model(TOKENS[0]), model(TOKENS)[0], atol=1e-6)


@pytest.mark.slow
def test_padding_is_attended_by_nobody():
    model = build()
    mask = jnp.array([[False, False, True, True, True, True]] * 2)
    changed = TOKENS.at[:, :2].set(0)
    masked = model(TOKENS, mask=mask)[:, 2:]
    np.testing.assert_allclose(masked, model(changed, mask=mask)[:, 2:], atol=1e-6)
    assert np.isfinite(model(TOKENS, mask=jnp.zeros_like(mask))).all()


@pytest.mark.slow
def test_tying_shares_the_table():
    tied, untied = (nnx.split(build(tied=t))[1] for t in (True, False))
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(p)) for p in (tied, untied)]
    assert sizes[1] - sizes[0] == 11 * 8
    assert all(isinstance(v, nnx.Param) for _, v in tied.flat_state())


@pytest.mark.slow
def test_dropout_needs_its_key():
    model = build(dropout=0.5)
    np.testing.assert_array_equal(model(TOKENS), model(TOKENS))
    one, two = (model(TOKENS, dropout_key=jax.random.key(i)) for i in range(2))
    assert np.abs(one - two).max() > 0
    np.testing.assert_array_equal(one, model(TOKENS, dropout_key=jax.random.key(0)))


def test_another_attention_drops_in():
    def mean_of_values(q, k, v, *, mask):
        weights = mask / jnp.maximum(mask.sum(-1, keepdims=True), 1)
        return jnp.broadcast_to(weights @ v, (*q.shape[:-1], v.shape[-1]))

    model = build(attention=mean_of_values)
    assert np.abs(model(TOKENS) - build()(TOKENS)).max() > 1e-6
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


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_heads": 3}, "num_heads"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_bad_arguments_are_named(changes, name):
    with pytest.raises(ValueError, match=name):
        build(**changes)
    with pytest.raises(ValueError, match="max_length"):
        build()(jnp.zeros(7, jnp.int32))
