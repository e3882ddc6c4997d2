"""Models of every framework: exact, by rules, with all options at once, and trained in parts."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clipping_exact import METHODS, check, check_groups, is_exact, jit, normal, per_example
from clipping_models import MODELS
from flax import linen as nn
from flax import nnx
from jax.core import Tracer

import dpx
from dpx import clipping
from dpx.clipping import params as clipping_params
from dpx.training import loop


@pytest.mark.quick_cases("haiku MLP-two_pass")
@pytest.mark.parametrize("how", ["one_pass", "two_pass", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_models_are_clipped_exactly(name, how):
    is_exact(*MODELS[name](), how)


# Parameters of each model that have a rule: kernels and tables, but few biases and scales.
WITH_RULE = {
    "linen tied, LayerNorm": 14,
    "linen untied, RMSNorm, gated": 17,
    "linen remat": 14,
    "linen scan": 8,
    "linen scan of remat": 8,
    "nnx tied, dropout": 7,
    "nnx untied": 8,
    "nnx state": 7,
    "linen GRU, tied": 7,
    "linen LSTM, tied": 1,
    "nnx GRU, tied": 3,
    "CNN": 4,
    "equinox MLP": 3,
    "haiku MLP": 2,
}


@pytest.mark.quick_cases("haiku MLP", "equinox MLP")
@pytest.mark.parametrize("name", MODELS)
def test_parameters_keep_their_rules(name):
    """Also on other versions of JAX, which name and nest equations in their own way."""
    loss, params, batch = MODELS[name]()
    found = dpx.explain_clipping(loss, params, *batch)
    assert sum(row.has_rule for row in found.rows) >= WITH_RULE[name]


def test_what_is_explained_is_printed_and_says_uses_rules_and_costs(capsys):
    sizes = {"embed": (5000, 16), "mix": (16, 16), "held": (5,), "unused": (5,)}
    params = {name: jnp.zeros(size) for name, size in sizes.items()}

    def loss(p, ids):
        x = p["embed"][ids] @ p["mix"]
        return jnp.sum(jnp.sin(x @ p["embed"].T)) + jnp.sum(jnp.cumsum(p["held"]) * x[0, :5]), ids

    found = dpx.explain_clipping(loss, params, np.zeros((3, 6), int), has_aux=True)
    assert capsys.readouterr().out == f"{found}\n"
    header, *_, total, last = str(found).splitlines()
    assert header.split()[:4] == ["parameter", "shape", "uses", "rule"]
    assert (total.split()[0], last[:30]) == ("sum", "3 of 3 examples at a time, abo")
    embed, held, mix, unused = found.rows
    assert (embed.path, embed.shape, embed.rule) == ("embed", (5000, 16), "Gram")
    assert sorted(embed.uses) == ["dot_general", "gather"]
    assert (held.rule, held.has_rule) == ("gradient (no rule for cumsum)", False)
    assert (unused.rule, unused.has_rule, unused.extra_bytes) == ("zero", True, 0)
    assert mix.extra_bytes <= 4 * 16 * 16
    assert found.extra_bytes == sum(row.extra_bytes for row in found.rows)
    assert found.extra_flops == sum(row.extra_flops for row in found.rows)
    wrt = {"embed": False, "mix": True, "held": False, "unused": False}
    some = dpx.explain_clipping(loss, params, np.zeros((3, 6), int), wrt=wrt, has_aux=True)
    assert [row.path for row in some.rows] == ["mix"]


# All options at once.

SIZE = 6
ROWS = np.random.default_rng(0).normal(size=(5, 3, SIZE)).astype("f4")
KEYS = clipping.record_keys(jax.random.key(1), 0, np.arange(5))
MASK = np.array([True, True, True, False, True])


def two_layers(first, second, x, key):
    """A loss with dropout that uses one of its layers twice, and what it returns beside the loss."""
    h = jnp.tanh(first(first(x)))
    out = second(jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h, 0))
    return jnp.square(out).sum(), {"out": out.sum(-1)}


def linen():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, key):
            return two_layers(nn.Dense(SIZE, name="first"), nn.Dense(4, name="second"), x, key)

    model = Model()
    variables = model.init(jax.random.key(0), ROWS[0], KEYS[0])
    return model.apply, variables, {"params": {"first": 3.0, "second": 2.0}}


def equinox():
    class Model(eqx.Module):
        first: object
        second: object

    keys = jax.random.split(jax.random.key(0))
    model = Model(eqx.nn.Linear(SIZE, SIZE, key=keys[0]), eqx.nn.Linear(SIZE, 4, key=keys[1]))

    def loss(model, x, key):
        return two_layers(jax.vmap(model.first), jax.vmap(model.second), x, key)

    return loss, model, Model(3.0, 2.0)


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(SIZE, SIZE, rngs=rngs)
        self.second = nnx.Linear(SIZE, 4, rngs=rngs)

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
@pytest.mark.parametrize("make", [linen, equinox, nnx_module, nnx_state])
def test_all_options_at_once(make, method):
    loss, params, clips = make()
    gradients = per_example(lambda *args: loss(*args)[0], params, (ROWS, KEYS))
    paths = clipping_params.flatten(params).paths
    kept = [k for k, path in enumerate(paths) if not ("second" in path and "bias" in path)]
    assert len(kept) == len(paths) - 1 == 3

    clipped = clipping.clipped_grad(
        loss, l2_clip_norm=clips, method=method, microbatch_size=2, strict=True, wrt=trained,
        has_aux=True,
    )  # fmt: skip
    found = jit(lambda x, keys, mask: clipped(params, x, keys, mask=mask))(ROWS, KEYS, MASK)
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
    rows = zip(ROWS, KEYS, strict=True)
    for row, (x, key) in enumerate(rows):
        value, aux = loss(params, x, key)
        np.testing.assert_allclose(found.losses[row], value * MASK[row], rtol=1e-5)
        if MASK[row]:
            np.testing.assert_allclose(found.aux["out"][row], aux["out"], rtol=1e-4, atol=1e-5)


# Training some of the parameters.

X = 2 * normal(6, 3, 8)


def plain_loss(params, x):
    h = jnp.tanh(x @ params["base"]["w"] + params["base"]["b"])
    h = h + (h @ params["lora"]["a"]) @ params["lora"]["b"]
    return jnp.sum((h @ params["base"]["w"].T) ** 2)


def plain_params():
    base = {"w": normal(8, 8), "b": normal(8)}
    return {"base": base, "lora": {"a": normal(8, 2), "b": normal(2, 8)}}


def lora_of(path, leaf):
    return "lora" in path and leaf.ndim == 2


class Adapted(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        linear = nnx.Linear(8, 5, rngs=rngs)
        self.layers = nnx.List([nnx.LoRA(8, 2, 5, base_module=linear, rngs=rngs)])
        self.layers[0].lora_b[...] = jax.random.normal(rngs.params(), (2, 5))
        self.head = nnx.Linear(5, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(5, use_running_average=True, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(jnp.tanh(self.layers[0](x))))


def module_loss(module, x):
    return jnp.sum(module(x) ** 2)


def of_plain():
    params = plain_params()
    part = params["lora"]
    return plain_loss, params, lambda lora, x: plain_loss(params | {"lora": lora}, x), part


def of_module():
    module = Adapted()
    graph, lora, rest = nnx.split(module, nnx.LoRAParam, ...)
    return module_loss, module, lambda p, x: module_loss(nnx.merge(graph, p, rest), x), lora


def of_state():
    _, module, of_part, part = of_module()
    graph, params, other = nnx.split(module, nnx.Param, ...)
    return lambda p, x: module_loss(nnx.merge(graph, p, other), x), params, of_part, part


def last_of(model):
    mask = jax.tree.map(lambda _: False, model)
    return eqx.tree_at(lambda m: m.layers[-1], mask, jax.tree.map(lambda _: True, mask.layers[-1]))


def of_equinox():
    model = eqx.nn.MLP(8, 1, 6, 2, key=jax.random.key(0))

    def loss(model, x):
        return jnp.sum(jax.vmap(model)(x) ** 2)

    trained, frozen = eqx.partition(model, last_of(model))
    return loss, model, lambda part, x: loss(eqx.combine(part, frozen), x), trained


NAMED = {
    "type": nnx.LoRAParam,
    "leaf": lambda path, leaf: isinstance(leaf, nnx.LoRAParam),
    "path": lambda path, leaf: path[-1] in ("lora_a", "lora_b"),
    "mask": {"layers": {0: {"base_module": False, "lora_a": True, "lora_b": True}}}
    | {"head": False, "norm": False},
}
TRAINED = {
    "function": (of_plain, lora_of),
    "prefix": (of_plain, {"base": False, "lora": True}),
    "mask": (of_plain, {"base": {"w": False, "b": False}, "lora": np.True_}),
    **{f"module, {name}": (of_module, wrt) for name, wrt in NAMED.items()},
    **{f"state, {name}": (of_state, wrt) for name, wrt in NAMED.items()},
    "equinox, mask": (of_equinox, last_of(of_equinox()[1])),
    "equinox, path": (of_equinox, lambda path, leaf: path[:2] == ("layers", 2)),
}


@pytest.mark.quick_cases("mask-two_pass")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_of_some_parameters_are_exact(name, method):
    make, wrt = TRAINED[name]
    loss, params, of_part, part = make()
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method, wrt=wrt, microbatch_size=4)
    out = jit(functools.partial(fn, params))(X)
    check(out, per_example(of_part, part, (X,)), 0.5)
    assert jax.tree.structure(out.grads) == jax.tree.structure(fn.trained(params))
    if isinstance(part, nnx.State):  # What nnx.grad and nnx.Optimizer make of the same filter.
        assert jax.tree.structure(out.grads) == jax.tree.structure(part)


@pytest.mark.quick_cases("one_pass")
@pytest.mark.parametrize("method", METHODS)
def test_groups_of_adapters(method):
    clips = {"base": None, "lora": {"a": 0.2, "b": 0.3}}
    fn = clipping.clipped_grad(plain_loss, l2_clip_norm=clips, method=method, wrt=lora_of)
    _, params, of_part, part = of_plain()
    out = jit(fn)(params, X)
    gradients = {k: [g] for k, g in zip("ab", per_example(of_part, part, (X,)), strict=True)}
    mine = clipping.ClippedGrads(out.grads["lora"], out.norms["lora"], out.losses, out.clips)
    check_groups(mine, gradients, clips["lora"])
    assert fn.sensitivity("add_or_remove_one") == pytest.approx(np.hypot(0.2, 0.3))


@pytest.mark.slow
def test_a_filter_sees_the_params_of_a_module_and_a_type_names_any_variable():
    module = Adapted()
    fn = clipping.clipped_grad(module_loss, l2_clip_norm=1.0, wrt=lambda path, leaf: "norm" in path)
    assert set(fn(module, X).grads["norm"]) == {"bias", "scale"}
    fn = clipping.clipped_grad(module_loss, l2_clip_norm=1.0, wrt=nnx.BatchStat)
    assert set(fn(module, X).grads["norm"]) == {"mean", "var"}


@pytest.mark.parametrize("number", [0, 1])
def test_leaves_of_a_list_are_chosen_by_their_number(number):
    params = {"layers": [jnp.ones(3), jnp.ones(3)]}
    gradient = clipping.clipped_grad(
        lambda p, x: jnp.sum(x), l2_clip_norm=1.0, wrt=lambda path, leaf: path == ("layers", number)
    )
    chosen = [leaf is not None for leaf in gradient.trained(params)["layers"]]
    assert chosen == [number == 0, number == 1]


@pytest.mark.slow
def test_what_is_not_trained_stays_as_it_is():
    loss, model, *_ = of_equinox()
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, wrt=last_of(model))
    private = dpx.privatize(
        l2_clip_norm=0.5, noise_multiplier=1.0, expected_batch_size=6, key=jax.random.key(0)
    )
    optimizer, part = optax.chain(private, optax.adamw(0.1)), fn.trained(model)
    updates, _ = optimizer.update(fn(model, X), optimizer.init(part), part)
    new = eqx.apply_updates(model, updates)
    assert not np.allclose(new.layers[2].weight, model.layers[2].weight)
    np.testing.assert_array_equal(new.layers[1].weight, model.layers[1].weight)


def test_wrong_choices():
    params = plain_params()
    for wrong in (3, "lora", {"base": 1}, {}, {"base": True, "lora": 1}):
        with pytest.raises(ValueError, match="wrt="):
            clipping.clipped_grad(plain_loss, l2_clip_norm=1.0, wrt=wrong)
    for wrt, l2_clip_norm, match in (
        ({"bas": True}, 1.0, "wrt=.*must be a prefix"),
        ({"base": False, "lora": False}, 1.0, "wrt=.*nothing to differentiate"),
        (nnx.LoRAParam, 1.0, "nothing to differentiate"),
        (lora_of, {"base": 1.0, "lora": 1.0}, "l2_clip_norm=.*not trained"),
        (lora_of, {"base": 1.0, "lora": None}, "l2_clip_norm=.*None where a parameter"),
    ):
        with pytest.raises(ValueError, match=match):
            clipping.clipped_grad(plain_loss, l2_clip_norm=l2_clip_norm, wrt=wrt)(params, X)


@pytest.mark.slow
def test_fit_trains_the_adapters_alone(monkeypatch):
    params, step, seen = plain_params(), loop._step, []

    def recorded(*arguments):
        seen.append(arguments[-2])
        return step(*arguments)

    monkeypatch.setattr(loop, "_step", recorded)
    trained = dpx.training.fit(
        plain_loss, params, X, epsilon=2.0, delta=1e-3, batch_size=3, steps=2, accountant="rdp",
        optimizer=optax.adamw(0.1), l2_clip_norm=1.0, key=jax.random.key(0), wrt=lora_of,
    )  # fmt: skip
    for name in ("w", "b"):
        np.testing.assert_array_equal(trained.params["base"][name], params["base"][name])
    assert not np.allclose(trained.params["lora"]["a"], params["lora"]["a"])
    # Arguments of the compiled step, which constants would be copied into.
    assert [leaf.shape for frozen in seen for leaf in jax.tree.leaves(frozen)] == [(8,), (8, 8)]
    assert all(isinstance(leaf, Tracer) for frozen in seen for leaf in jax.tree.leaves(frozen))
