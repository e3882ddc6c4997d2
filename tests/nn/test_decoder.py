"""A decoder of its own settings: its trunk, its adapters and what is trained of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dpx
from dpx.nn import lora
from dpx.nn.pretrained import Decoder, DecoderSettings, Rotary

TOKENS = np.random.default_rng(0).integers(0, 13, (3, 7))


WAYS = ("dtype", "param_dtype", "remat", "frozen", "unroll")


def build(**changes):
    settings = {"dim": 12, "num_layers": 3, "num_heads": 6, "num_kv_heads": 2}
    settings |= {"mlp_dim": 20, "head_dim": 4}
    ways = {k: changes.pop(k) for k in WAYS if k in changes}
    return Decoder(DecoderSettings(13, **(settings | changes)), **ways, rngs=nnx.Rngs(0))


def randomized(model, seed=0):
    """The same model with every parameter random, scales and zeros too."""
    graph, params = nnx.split(model)
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape).astype("f4"), params)
    return nnx.merge(graph, params)


@pytest.mark.slow
def test_the_trunk_is_what_no_adapter_touches():
    model = build()
    before = model(TOKENS)
    assert model.first_adapted == 0
    np.testing.assert_array_equal(model.trunk(TOKENS), model.embed[...][TOKENS])
    lora.attach(model, layers=1)
    assert model.first_adapted == 2
    np.testing.assert_allclose(model(TOKENS), before, atol=1e-5)  # new adapters change nothing
    trunk = model.trunk(TOKENS)
    model.adapters["query"]["second"] = nnx.LoRAParam(jnp.ones((1, 8, 24)))
    np.testing.assert_array_equal(model.trunk(TOKENS), trunk)
    assert np.abs(model(TOKENS) - before).max() > 1e-3
    np.testing.assert_array_equal(model.logits(trunk), model(TOKENS))


@pytest.mark.slow
def test_a_shift_alone_leaves_all_layers_to_the_trunk():
    model = build()
    lora.attach(model, target_modules=(), shift=True)
    assert model.first_adapted == model.settings.num_layers
    before = model(TOKENS)
    model.shift = nnx.LoRAParam(jnp.ones(12))
    expected = before + model.embed[...].sum(axis=1)
    np.testing.assert_allclose(model(TOKENS), expected, atol=1e-5)


@pytest.mark.quick_cases("False")
@pytest.mark.parametrize("remat", [False, True])
def test_bfloat16_is_near_and_remat_changes_nothing(remat):
    model = build()
    half = build(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, remat=remat)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(half))} == {jnp.dtype("bfloat16")}
    assert half(TOKENS).dtype == jnp.float32
    assert half.trunk(TOKENS).dtype == jnp.bfloat16
    np.testing.assert_allclose(half(TOKENS), model(TOKENS), atol=0.05)
    np.testing.assert_allclose(build(remat=remat)(TOKENS), model(TOKENS), atol=1e-5)


@pytest.mark.slow
def test_constants_have_no_gradient_and_adapters_have_the_same():
    gradients = {}
    for frozen in (False, True):
        model = build(frozen=frozen)
        lora.attach(model, target_modules=("q_proj", "up_proj"), rank=2, train_first=False)
        graph, params = nnx.split(randomized(model))
        found = jax.jit(jax.grad(loss_of(graph)))(params, TOKENS[0])
        gradients[frozen] = {"/".join(map(str, p)): v[...] for p, v in nnx.to_flat_state(found)}
    free, held = gradients[False], gradients[True]
    for name in ("adapters/query/second", "adapters/up/second", "norm", "layers/mlp_norm"):
        np.testing.assert_allclose(held[name], free[name], rtol=1e-4, atol=1e-5)
    for name in ("layers/query", "layers/down", "embed"):
        assert np.abs(free[name]).max() > 0
        assert not np.abs(held[name]).any()


def loss_of(graph):
    def loss(params, tokens):
        logits = nnx.merge(graph, params)(tokens[:-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).sum()

    return loss


@pytest.mark.slow
def test_only_what_is_named_is_trained():
    model = build()
    lora.attach(model, target_modules=("q_proj", "up_proj"), rank=3, layers=2, train_first=False)
    trained = nnx.state(model, nnx.LoRAParam)
    shapes = {"/".join(map(str, path)): v.shape for path, v in nnx.to_flat_state(trained)}
    assert shapes == {"adapters/query/second": (2, 3, 24), "adapters/up/second": (2, 3, 20)}
    same = build()
    lora.attach(same, target_modules=("q_proj", "up_proj"), rank=3, layers=2, train_first=False)
    pairs = zip(*(jax.tree.leaves(nnx.state(m)) for m in (model, same)), strict=True)
    assert all((a == b).all() for a, b in pairs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dim": 0}, "dim=0"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"num_kv_heads": 4}, "num_kv_heads=4"),
        ({"head_dim": 3}, "head_dim=3"),
        ({"head_dim": None, "num_heads": 5, "num_kv_heads": 1}, "num_heads=5 must divide dim=12"),
        ({"rotary": Rotary(factors=(1.0,))}, "rotary.factors has 1"),
        ({"window_rotary": Rotary(factors=(1.0,))}, "rotary.factors has 1"),
        ({"mlp_dim": 0}, "mlp_dim=0"),
        ({"rotary": Rotary(0.0)}, "rotary.theta=0"),
        ({"norm_epsilon": -1.0}, "norm_epsilon=-1"),
        ({"rotary": Rotary(factors=(1.0, 0.0))}, "rotary.factors=0"),
        ({"rotary": None}, "context_length=None"),
        ({"windows": (None, 2)}, "windows must be 3 numbers"),
        ({"windows": (None, 2, 0)}, "windows=0"),
        ({"activation": "mish"}, "activation='mish'"),
        ({"norm": "batch"}, "norm='batch'"),
    ],
)
def test_bad_sizes_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        build(**changes)


@pytest.mark.parametrize(
    ("before", "changes", "words"),
    [
        (None, {"target_modules": ("q_proj", "lm_head")}, "target_modules="),
        (None, {"target_modules": ()}, "target_modules=.*must be .all-linear. or some of mlp.down_proj"),
        (None, {"layers": 4}, "layers=4"),
        (None, {"layers": 0}, "layers=0"),
        (None, {"rank": 0}, "rank=0"),
        (None, {"alpha": 0.0}, "alpha=0"),
        # Others would change the factor, by which those that are there count.
        ({"target_modules": "q_proj"}, {"target_modules": ("v_proj",)}, "model has adapters"),
        ({"target_modules": (), "shift": True}, {"rank": 2}, "model has adapters"),
    ],
)  # fmt: skip
def test_bad_adapters_are_named(before, changes, words):
    model = build()
    if before is not None:
        lora.attach(model, **before)
    with pytest.raises(ValueError, match=words):
        lora.attach(model, **changes)


@pytest.mark.slow
def test_fit_trains_adapters_alone():
    model = build()
    lora.attach(model, rank=2)
    graph, params = nnx.split(model)
    fit = functools.partial(
        dpx.training.fit, loss_of(graph), params, np.repeat(TOKENS, 10, axis=0), delta=1e-3, batch_size=10,
        steps=3, optimizer=optax.adam(0.05), l2_clip_norm=1.0, key=jax.random.key(0), wrt=nnx.LoRAParam,
    )  # fmt: skip
    trained = fit(epsilon=100.0).params
    for (path, v), (_, old) in zip(*map(nnx.to_flat_state, (trained, params)), strict=True):
        moved = (np.asarray(v[...]) != np.asarray(old[...])).any()
        assert moved == ("adapters" in path), path
