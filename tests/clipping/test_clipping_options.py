"""All options at once, in every framework, against the gradient of one example after another."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from test_clipping_models import jit, per_example

from dpx import clipping
from dpx.clipping import params as clipping_params

WIDTH = 6
X = np.random.default_rng(0).normal(size=(5, 3, WIDTH)).astype("f4")
KEYS = clipping.record_keys(jax.random.key(1), 0, np.arange(5))
MASK = np.array([True, True, True, False, True])


def two_layers(first, second, x, key):
    """A loss with dropout that uses one of its layers twice, and what it returns beside the loss."""
    h = jnp.tanh(first(first(x)))
    out = second(jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h, 0))
    return jnp.square(out).sum(), {"out": out.sum(-1)}


def plain():
    keys = jax.random.split(jax.random.key(0))
    names = ("first", "second")
    params = {
        name: {"w": jax.random.normal(key, (WIDTH, WIDTH)), "bias": jnp.full(WIDTH, 0.1)}
        for name, key in zip(names, keys, strict=True)
    }

    def loss(params, x, key):
        layers = [lambda h, p=params[name]: h @ p["w"] + p["bias"] for name in names]
        return two_layers(*layers, x, key)

    return loss, params, {"first": 3.0, "second": 2.0}


def linen():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, key):
            return two_layers(nn.Dense(WIDTH, name="first"), nn.Dense(4, name="second"), x, key)

    model = Model()
    variables = model.init(jax.random.key(0), X[0], KEYS[0])
    return model.apply, variables, {"params": {"first": 3.0, "second": 2.0}}


def haiku():
    def forward(x, key):
        return two_layers(hk.Linear(WIDTH, name="first"), hk.Linear(4, name="second"), x, key)

    model = hk.without_apply_rng(hk.transform(forward))
    params = model.init(jax.random.key(0), X[0], KEYS[0])
    params = {name: {"w": p["w"], "bias": p["b"] + 0.1} for name, p in params.items()}

    def loss(params, x, key):
        given = {name: {"w": p["w"], "b": p["bias"]} for name, p in params.items()}
        return model.apply(given, x, key)

    return loss, params, {"first": 3.0, "second": 2.0}


def equinox():
    class Model(eqx.Module):
        first: object
        second: object

    keys = jax.random.split(jax.random.key(0))
    model = Model(eqx.nn.Linear(WIDTH, WIDTH, key=keys[0]), eqx.nn.Linear(WIDTH, 4, key=keys[1]))

    def loss(model, x, key):
        return two_layers(jax.vmap(model.first), jax.vmap(model.second), x, key)

    return loss, model, Model(3.0, 2.0)


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x, key):
        return two_layers(self.first, self.second, x, key)


def nnx_module():
    return lambda m, x, key: m(x, key), NnxModel(nnx.Rngs(0)), {"first": 3.0, "second": 2.0}


def nnx_state():
    graph, state = nnx.split(NnxModel(nnx.Rngs(0)))
    clips = {"first": 3.0, "second": 2.0}
    return lambda state, x, key: nnx.merge(graph, state)(x, key), state, clips


def trained(path, leaf):
    """All but the bias of the second layer."""
    del leaf
    return not {"second", "bias"} <= set(path)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
@pytest.mark.parametrize("make", [plain, linen, haiku, equinox, nnx_module, nnx_state])
def test_all_options_at_once(make, method):
    loss, params, clips = make()
    gradients = per_example(lambda *args: loss(*args)[0], params, (X, KEYS))
    paths = clipping_params.flatten(params).paths
    kept = [k for k, path in enumerate(paths) if not ("second" in path and "bias" in path)]
    assert len(kept) == len(paths) - 1 == 3

    clipped = clipping.clipped_grad(
        loss, l2_clip_norm=clips, method=method, microbatch_size=2, strict=True, wrt=trained,
        has_aux=True,
    )  # fmt: skip
    found = jit(lambda x, keys, mask: clipped(params, x, keys, mask=mask))(X, KEYS, MASK)
    (norms, sums), clips = (jax.tree.leaves(t) for t in (found.norms, found.grads)), (3.0, 2.0)
    for name, clip, norm in zip(("first", "second"), clips, norms, strict=True):
        mine = [k for k in kept if name in paths[k]]
        squares = sum(np.square(gradients[k].reshape(5, -1)).sum(1) for k in mine)
        exact = np.sqrt(squares) * MASK
        assert exact[MASK].max() > clip
        np.testing.assert_allclose(norm, exact, rtol=1e-4)
        factors = clip / np.maximum(exact, clip) * MASK
        for k in mine:
            want = np.tensordot(factors, gradients[k], 1)
            got = np.asarray(sums[kept.index(k)], "f8")
            assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
    rows = zip(X, KEYS, strict=True)
    for row, (x, key) in enumerate(rows):
        value, aux = loss(params, x, key)
        np.testing.assert_allclose(found.losses[row], value * MASK[row], rtol=1e-5)
        if MASK[row]:
            np.testing.assert_allclose(found.aux["out"][row], aux["out"], rtol=1e-4, atol=1e-5)


@pytest.mark.quick_cases("one_pass")
@pytest.mark.parametrize("method", ["one_pass", "two_pass", "vmap"])
def test_a_loss_is_clipped_where_ranks_must_not_be_promoted(method):
    """The setting is for mistakes in the loss, which are still found."""

    def loss(params, x, shift):
        h = jnp.tanh(jnp.dot(params["table"][x], params["w"])) + shift
        return jnp.square(jnp.dot(h, params["table"].T)).mean()

    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(n, 8)).astype("f4") for name, n in (("table", 70), ("w", 8))}
    gradient = clipping.clipped_grad(loss, l2_clip_norm=0.1, method=method)
    tokens = rng.integers(0, 70, (3, 4))
    expected = gradient(params, tokens, np.ones((3, 1, 8), "f4"))
    with jax.numpy_rank_promotion("raise"):
        found = gradient(params, tokens, np.ones((3, 1, 8), "f4"))
        with pytest.raises(ValueError, match="rank_promotion"):
            gradient(params, tokens, np.ones((3, 8), "f4"))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("method", ["one_pass", "two_pass", "auto"])
def test_a_normalized_example_cannot_make_the_sum_infinite(method):
    """Its gradient is zero, because its inputs are; the cotangent is close to the largest float."""

    def loss(w, x, scale):
        return scale * jnp.sum(jax.checkpoint(lambda x: x @ w)(x))

    x = np.random.default_rng(0).normal(size=(3, 40, 4)).astype("f4")
    x[0] = 0.0
    gradient = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=1.0, method=method, normalize=True))
    sums = [
        gradient(np.ones((4, 4), "f4"), x, np.array([s, 1, 1], "f4")).grads for s in (1.0, 1e37)
    ]
    np.testing.assert_allclose(sums[1], sums[0], rtol=1e-5)
