"""`fit(compute_dtype="bfloat16")`: narrow activations; gradients, sums, noise and optimizer in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import training_cases
from flax import nnx

import dpx
from dpx.training import precision

ROWS, LENGTH, VOCABULARY, DIM, CLIP = 24, 6, 12, 8, 0.05


def loss_fn(params, tokens, weight, key):
    """A tied embedding, dropout, a bias and a scale that have no rule, and a head in float32."""
    x = params["embed"][tokens] * jax.random.bernoulli(key, 0.9, (LENGTH, DIM)) * weight
    x = jnp.tanh(x @ params["mix"] + params["bias"]) * params["scale"]
    logits = (x @ params["embed"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:-1], tokens[1:]).mean()


def inputs():
    draw = np.random.default_rng(0)
    shapes = {"embed": (VOCABULARY, DIM), "mix": (DIM, DIM), "bias": (DIM,), "scale": (DIM,)}
    params = {name: jnp.asarray(draw.normal(size=shape), "f4") for name, shape in shapes.items()}
    tokens = draw.integers(0, VOCABULARY, (ROWS, LENGTH))
    return params, (tokens, draw.uniform(0.5, 1.5, ROWS))


def fit(**changes):
    params, data = inputs()
    settings = {"optimizer": optax.adam(0.1), "record_key": True, "compute_dtype": "bfloat16"}
    return training_cases.fit(data, changes.pop("loss", loss_fn), params, **settings | changes)


def length(tree):
    return np.sqrt(sum((np.asarray(x, "f8") ** 2).sum() for x in jax.tree.leaves(tree)))


def apart(one, other):
    return length(jax.tree.map(lambda a, b: np.asarray(a, "f8") - np.asarray(b, "f8"), one, other))


def batch():
    params, (tokens, weight) = inputs()
    keys = jax.random.split(jax.random.key(1), ROWS)
    return params, jnp.asarray(tokens), jnp.asarray(weight, jnp.float32), keys


@pytest.mark.parametrize("method", ["auto", pytest.param("vmap", marks=pytest.mark.slow)])
def test_sums_are_those_of_per_example_gradients_in_the_same_precision(method):
    params, *rows = batch()
    narrow = precision.computed_in(jnp.bfloat16, loss_fn)
    each = jax.jit(jax.vmap(jax.grad(narrow), (None, 0, 0, 0)))(params, *rows)
    norms = np.sqrt(sum((np.asarray(g, "f8") ** 2).reshape(ROWS, -1).sum(1) for g in each.values()))
    factors = np.minimum(1, CLIP / norms)
    expected = {name: np.tensordot(factors, np.asarray(g, "f8"), 1) for name, g in each.items()}
    found = jax.jit(dpx.clipped_grad(narrow, l2_clip_norm=CLIP, method=method))(params, *rows)
    wide = jax.jit(dpx.clipped_grad(loss_fn, l2_clip_norm=CLIP))(params, *rows)
    assert {x.dtype for x in jax.tree.leaves((found.grads, found.norms, found.losses))} == {
        jnp.dtype("float32")
    }
    # bfloat16 rounds by 2**-9, and a compiler may round less often.
    assert apart(found.grads, expected) / length(expected) < 2e-3
    assert apart(wide.grads, expected) / length(expected) > 3e-3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_record_adds_no_more_than_the_threshold(method, normalize):
    params, *rows = batch()
    gradient = dpx.clipped_grad(
        precision.computed_in(jnp.bfloat16, loss_fn),
        l2_clip_norm=dict.fromkeys(params, CLIP),
        method=method,
        normalize=normalize,
    )
    alone = jax.jit(jax.vmap(lambda *row: gradient(params, *(x[None] for x in row)).grads))(*rows)
    for sums in alone.values():
        lengths = np.linalg.norm(np.asarray(sums, "f8").reshape(ROWS, -1), axis=1)
        assert lengths.max() <= CLIP * (1 + 1e-6)
        assert lengths.max() > CLIP * 0.9


@pytest.mark.slow
def test_only_the_loss_is_narrow():
    seen = {}

    def watched(params, tokens, weight, key):
        seen.update({name: leaf.dtype.name for name, leaf in params.items()})
        seen.update(tokens=tokens.dtype.name, weight=weight.dtype.name)
        return loss_fn(params, tokens, weight, key)

    trained = fit(loss=watched)
    names = dict.fromkeys(("embed", "mix", "bias", "scale", "weight"), "bfloat16")
    assert seen == names | {"tokens": "int32"}
    assert {x.dtype.name for x in trained.params.values()} == {"float32"}
    wide = fit(compute_dtype=None)
    # The same noise and samples: what differs is rounding.
    assert 1e-5 < apart(trained.params, wide.params) < 0.05 * apart(wide.params, inputs()[0])
    assert trained.guarantee == wide.guarantee


@pytest.mark.slow
def test_microbatches_add_up_in_float32():
    whole, pieces = fit(), fit(microbatch_size=5)
    assert apart(whole.params, pieces.params) < 1e-4


@pytest.mark.slow
def test_what_is_frozen_is_cast_too():
    model = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 1, rngs=nnx.Rngs(1)))
    seen = []

    def loss(model, x):
        hidden = model.layers[0](x)
        seen.append(hidden.dtype)
        return jnp.square(model.layers[1](hidden)).sum()

    narrow = {"compute_dtype": "bfloat16", "wrt": lambda path, _: 1 in path}
    trained = training_cases.fit(training_cases.X, loss, model, **narrow)
    assert set(seen) == {jnp.dtype("bfloat16")}
    assert trained.params.layers[0].kernel[...].dtype == jnp.float32
    np.testing.assert_array_equal(trained.params.layers[0].kernel[...], model.layers[0].kernel[...])


@pytest.mark.slow
def test_parameters_may_have_several_types():
    def loss(params, row):
        return jnp.sum(jnp.square((row + params["shift"]) @ params["w"]))

    with jax.enable_x64(True):
        params = {"shift": jnp.zeros(3), "w": jnp.ones((3, 40), jnp.float32)}
        found = training_cases.fit(training_cases.X, loss, params).params
    assert {name: x.dtype for name, x in found.items()} == {"shift": np.float64, "w": np.float32}
