"""Training some of the parameters: exact, and what is frozen costs nothing."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.core import Tracer
from test_clipping_models import check, jit, per_example

import dpx
from dpx import clipping
from dpx.clipping import params as clipping_params
from dpx.training import loop

METHODS = [name for name in clipping.METHODS if name != "auto"]  # One of the others.
X = np.random.default_rng(0).normal(size=(6, 3, 8)).astype("f4")


def plain_loss(params, x):
    h = jnp.tanh(x @ params["base"]["w"] + params["base"]["b"])
    h = h + (h @ params["lora"]["a"]) @ params["lora"]["b"]
    return jnp.sum((h @ params["base"]["w"].T) ** 2)


def plain_params(seed=0):
    rng = np.random.default_rng(seed)
    sizes = {"base": {"w": (8, 8), "b": (8,)}, "lora": {"a": (8, 2), "b": (2, 8)}}
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape) / 3, jnp.float32),
        sizes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def lora_of(path, leaf):
    return "lora" in path and leaf.ndim == 2


def lora_gradients():
    params = plain_params()
    return per_example(lambda lora, x: plain_loss(params | {"lora": lora}, x), params["lora"], (X,))


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


@pytest.mark.slow
@pytest.mark.parametrize("microbatch_size", [None, 4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "wrt",
    [lora_of, {"base": False, "lora": True}, {"base": {"w": False, "b": False}, "lora": np.True_}],
    ids=["function", "prefix", "mask"],
)
def test_gradients_are_those_of_the_adapters_alone(wrt, method, microbatch_size):
    fn = clipping.clipped_grad(
        plain_loss, l2_clip_norm=0.5, method=method, wrt=wrt, microbatch_size=microbatch_size
    )
    out = jit(fn)(plain_params(), X)
    assert out.grads["base"] == {"w": None, "b": None}
    check(out, lora_gradients(), 0.5)


@pytest.mark.quick_cases("one_pass")
@pytest.mark.parametrize("method", METHODS)
def test_groups_of_adapters(method):
    clips = {"base": None, "lora": {"a": 0.2, "b": 0.3}}
    fn = clipping.clipped_grad(plain_loss, l2_clip_norm=clips, method=method, wrt=lora_of)
    out = jit(fn)(plain_params(), X)
    for name, gradient in zip("ab", lora_gradients(), strict=True):
        norms = np.linalg.norm(gradient.reshape(6, -1), axis=1)
        np.testing.assert_allclose(out.norms["lora"][name], norms, rtol=1e-4)
        expected = np.tensordot(np.minimum(1, clips["lora"][name] / norms), gradient, 1)
        np.testing.assert_allclose(out.grads["lora"][name], expected, rtol=1e-4, atol=1e-6)
    assert fn.sensitivity("add_or_remove_one") == pytest.approx(np.hypot(0.2, 0.3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrt",
    [
        nnx.LoRAParam,
        lambda path, leaf: isinstance(leaf, nnx.LoRAParam),
        lambda path, leaf: path[-1] in ("lora_a", "lora_b"),
        {"layers": {0: {"base_module": False, "lora_a": True, "lora_b": True}}}
        | {"head": False, "norm": False},
    ],
    ids=["type", "leaf", "path", "mask"],
)
@pytest.mark.parametrize("as_state", [False, True], ids=["module", "state"])
def test_nnx_modules_and_states(wrt, as_state):
    module = Adapted()
    graph, lora, rest = nnx.split(module, nnx.LoRAParam, ...)
    gradients = per_example(
        lambda lora, x: module_loss(nnx.merge(graph, lora, rest), x), lora, (X,)
    )
    loss, params = module_loss, module
    if as_state:
        graph_of_all, params, other = nnx.split(module, nnx.Param, ...)
        loss = lambda state, x: module_loss(nnx.merge(graph_of_all, state, other), x)  # noqa: E731
    fn = clipping.clipped_grad(loss, l2_clip_norm=1.0, wrt=wrt)
    out = jax.jit(fn)(params, X)
    check(out, gradients, 1.0)
    # What nnx.grad and nnx.Optimizer make of the same filter.
    assert jax.tree.structure(out.grads) == jax.tree.structure(nnx.state(module, nnx.LoRAParam))
    assert jax.tree.structure(fn.trained(params)) == jax.tree.structure(out.grads)


@pytest.mark.slow
def test_a_filter_sees_the_params_of_a_module_and_a_type_names_any_variable():
    module = Adapted()
    fn = clipping.clipped_grad(module_loss, l2_clip_norm=1.0, wrt=lambda path, leaf: "norm" in path)
    assert set(fn(module, X).grads["norm"]) == {"bias", "scale"}
    fn = clipping.clipped_grad(module_loss, l2_clip_norm=1.0, wrt=nnx.BatchStat)
    assert set(fn(module, X).grads["norm"]) == {"mean", "var"}


@pytest.mark.slow
def test_equinox_modules():
    model = eqx.nn.MLP(8, 1, 6, 2, key=jax.random.key(0))
    mask = jax.tree.map(lambda _: False, model)
    mask = eqx.tree_at(lambda m: m.layers[-1], mask, jax.tree.map(lambda _: True, mask.layers[-1]))

    def loss(model, x):
        return jnp.sum(jax.vmap(model)(x) ** 2)

    trained, frozen = eqx.partition(model, mask)
    gradients = per_example(lambda part, x: loss(eqx.combine(part, frozen), x), trained, (X,))
    for wrt in (mask, lambda path, leaf: path[:2] == ("layers", 2)):
        fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, wrt=wrt)
        out = jit(functools.partial(fn, model))(X)
        check(out, gradients, 0.5)
        assert jax.tree.structure(out.grads) == jax.tree.structure(fn.trained(model))
    optimizer = optax.chain(
        dpx.privatize(
            l2_clip_norm=0.5, noise_multiplier=1.0, expected_batch_size=6, key=jax.random.key(0)
        ),
        optax.adamw(0.1),
    )
    part = fn.trained(model)
    updates, _ = optimizer.update(out, optimizer.init(part), part)
    new = eqx.apply_updates(model, updates)
    assert not np.allclose(new.layers[2].weight, model.layers[2].weight)
    np.testing.assert_array_equal(new.layers[1].weight, model.layers[1].weight)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_what_is_frozen_costs_nothing(method):
    """As many operations, and as much memory, as a loss that knows the frozen weights as constants."""
    rng = np.random.default_rng(0)
    params = {
        "base": [jnp.asarray(rng.normal(size=(64, 64)), jnp.float32) for _ in range(4)],
        "lora": {"a": jnp.ones((64, 2)), "b": jnp.ones((2, 64))},
    }
    x = np.ones((8, 16, 64), "f4")

    def loss(params, x):
        for w in params["base"]:
            x = jnp.tanh(x @ w)
        return jnp.sum((x + x @ params["lora"]["a"] @ params["lora"]["b"]) ** 2)

    def cost(fn, params, *arguments):
        compiled: Any = jax.jit(fn).lower(params, *arguments).compile()
        return compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes

    whole = clipping.clipped_grad(loss, l2_clip_norm=1.0, method=method)
    some = clipping.clipped_grad(
        loss, l2_clip_norm=1.0, method=method, wrt={"base": False, "lora": True}
    )

    def by_hand(params, x):
        base = params["base"]
        fn = clipping.clipped_grad(
            lambda lora, x: loss({"base": base, "lora": lora}, x), l2_clip_norm=1.0, method=method
        )
        return fn(params["lora"], x)

    flops, temp = cost(some, params, x)
    assert (flops, temp) == cost(by_hand, params, x)
    # Four products forward, of which two passes do each twice, and none of their derivatives.
    products = 4 * 2 * x.size * 64
    runs = 2 if method == "two_pass" else 1
    assert flops < 1.5 * runs * products
    assert 1.9 * flops < cost(whole, params, x)[0]


def test_explain_lists_what_is_trained(capsys):
    dpx.explain_clipping(plain_loss, plain_params(), X, wrt=lora_of)
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["parameter", "lora/a", "lora/b", "sum", str(len(X))]


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


def test_constants_are_what_is_frozen():
    flat = clipping_params.flatten(plain_params(), lora_of)
    assert flat.paths == ["lora/a", "lora/b"]
    assert [x.shape for x in flat.constants] == [(8,), (8, 8)]


@pytest.mark.parametrize(
    "wrt",
    [lora_of, {"base": False, "lora": True}, {"base": {"w": False, "b": False}, "lora": np.True_}],
    ids=["function", "prefix", "mask"],
)
def test_leaves_of_a_tree_are_chosen(wrt):
    assert clipping_params.select(wrt, plain_params()) == [False, False, True, True]


@pytest.mark.parametrize("number", [0, 1])
def test_leaves_of_a_list_are_chosen_by_their_number(number):
    params = {"layers": [jnp.ones(3), jnp.ones(3)]}
    chosen = clipping_params.select(lambda path, leaf: path == ("layers", number), params)
    assert chosen == [number == 0, number == 1]


@pytest.mark.slow
def test_leaves_of_a_state_are_chosen():
    """By a mask with the names of the module, and by one that is a state itself."""
    _, state, _ = nnx.split(Adapted(), nnx.Param, ...)
    wanted = [
        leaf in ("lora_a", "lora_b") for *_, leaf in (path for path, _ in nnx.to_flat_state(state))
    ]
    assert sum(wanted) == 2
    mask = {"layers": {0: {"base_module": False, "lora_a": True, "lora_b": True}}}
    mask |= {"head": False, "norm": False}
    whole = jax.tree.map(lambda _: False, state)
    whole["layers"][0]["lora_a"], whole["layers"][0]["lora_b"] = True, True
    for wrt in (nnx.LoRAParam, lambda path, leaf: path[-1] in ("lora_a", "lora_b"), mask, whole):
        assert clipping_params.select(wrt, state) == wanted


@pytest.mark.slow
def test_leaves_of_an_equinox_module_are_chosen():
    """By a mask, which is a module that can be called, and by names and numbers in paths."""
    model = eqx.filter(eqx.nn.MLP(3, 1, 2, 1, key=jax.random.key(0)), eqx.is_array)
    mask = jax.tree.map(lambda _: False, model)
    mask = eqx.tree_at(lambda m: m.layers[1].weight, mask, True)
    assert callable(mask)
    for wrt in (mask, lambda path, leaf: path == ("layers", 1, "weight")):
        chosen = clipping_params.select(wrt, model)
        leaves = jax.tree.leaves(model)
        assert [x.shape for x, c in zip(leaves, chosen, strict=True) if c] == [(1, 2)]
