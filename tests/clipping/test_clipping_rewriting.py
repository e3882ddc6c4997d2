"""Two passes take no longer, and hold no more, than they must: how their programs are written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_clipping_models import check, jit, on_one_cpu, per_example

from dpx import clipping
from dpx.clipping import meshes, rewriting, two_pass
from dpx.clipping.gradients import plan
from dpx.clipping.program import trace

pytestmark = pytest.mark.optimized

DEPTH, WIDTH, LENGTH, BATCH = 3, 8, 6, 4
SHAPES = {"up": (WIDTH, 3 * WIDTH), "down": (3 * WIDTH, WIDTH)}
X = np.random.default_rng(0).normal(size=(BATCH, LENGTH, WIDTH)).astype("f4")


def params():
    rng = np.random.default_rng(1)
    return {k: jnp.asarray(rng.normal(size=(DEPTH, *s)) / 4, "f4") for k, s in SHAPES.items()}


def loss(p, x, scanned=True, policy=None):
    """Blocks that are recomputed, in a scan or one after the other."""

    @functools.partial(jax.checkpoint, policy=policy)
    def body(x, p):
        return x + jnp.sin(jnp.tanh(x @ p["up"])) @ p["down"], None

    if scanned:
        return jnp.sum(jax.lax.scan(body, x, p)[0] ** 2)
    for each in p:
        x, _ = body(x, each)
    return jnp.sum(x**2)


def apart(p):
    """The same parameters, each block's in arrays of their own."""
    return [jax.tree.map(lambda leaf, i=i: leaf[i], p) for i in range(DEPTH)]


def equations(jaxpr, name):
    """All equations of a primitive, also within others."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                yield from equations(inner, name) if hasattr(inner, "eqns") else ()


@pytest.mark.parametrize("per_inner_product", [-1e9, 1e9], ids=["Gram", "product"])
def test_norms_in_place_are_exact_either_way(monkeypatch, per_inner_product):
    monkeypatch.setattr(plan, "PER_INNER_PRODUCT", per_inner_product)
    gradients = per_example(loss, params(), (X,))
    clip = float(np.median(np.sqrt(sum((g.reshape(BATCH, -1) ** 2).sum(1) for g in gradients))))
    fn = clipping.clipped_grad(loss, l2_clip_norm=clip)
    check(jit(fn)(params(), X), gradients, clip)
    # A Gram matrix for every factor, or one gradient of each example.
    shapes = [
        eqn.outvars[0].aval.shape
        for eqn in equations(jax.make_jaxpr(fn)(params(), X).jaxpr, "dot_general")
    ]
    squares = sum(shape[-2:] == (LENGTH, LENGTH) for shape in shapes)
    assert squares == (4 if per_inner_product < 0 else 0)


def test_the_quicker_norm_is_taken():
    """Few positions and large gradients have Gram matrices; many positions and small gradients have none."""

    def by_gram(length, width):
        p = {"w": jnp.zeros((width, width))}
        x = np.zeros((2, length, width), "f4")
        program = trace(lambda leaves, x: jnp.sum((x @ leaves[0]) ** 2), list(p.values()), x)
        rule = plan.in_place(program.choices[0], False).rule
        assert rule is not None
        return rule.by_gram

    assert by_gram(64, 256)
    assert by_gram(16, 64)
    assert not by_gram(64, 64)
    assert not by_gram(256, 256)


@on_one_cpu
@pytest.mark.parametrize("scanned", [True, False])
def test_sums_over_examples_and_positions_run_over_one_axis(scanned):
    fn = clipping.clipped_grad(functools.partial(loss, scanned=scanned), l2_clip_norm=1.0)
    given = params() if scanned else apart(params())
    found = list(equations(jax.make_jaxpr(fn)(given, X).jaxpr, "dot_general"))
    assert found
    assert all(len(eqn.params["dimension_numbers"][0][0]) == 1 for eqn in found)


def test_what_a_policy_saves_is_held_once():
    """JAX rounds it to what it is, which a compiler may keep as a second copy."""
    policy = jax.checkpoint_policies.dots_saveable
    each = functools.partial(loss, scanned=False, policy=policy)
    fn = clipping.clipped_grad(each, l2_clip_norm=1.0)
    program = jax.make_jaxpr(lambda p, x: fn(p, x).grads)(apart(params()), X).jaxpr
    assert len(list(equations(program, "cond"))) == 1  # Of two passes.
    assert not list(equations(program, "reduce_precision"))


@pytest.mark.parametrize(
    "numbers",
    [(((0, 1), (1, 0)), ((), ())), (((1, 0), (0, 1)), ((), ())), (((0, 1), (0, 1)), ((2,), (2,)))],
    ids=["crossed", "crossed back", "batched"],
)
def test_products_over_other_axes_are_what_they_were(numbers):
    draw = np.random.default_rng(0)
    x, y = (jnp.asarray(draw.normal(size=(3, 3, 3)), jnp.float32) for _ in range(2))

    def product(x):
        return jax.lax.dot_general(x, y, numbers)

    np.testing.assert_allclose(rewriting.vjp(product, x)[0], product(x), rtol=1e-5, atol=1e-6)


def test_roundings_that_round_something_stay():
    def function(x):
        return jax.lax.reduce_precision(jnp.sin(x), 8, 7) + jax.lax.reduce_precision(x, 8, 23)

    x = jnp.linspace(0, 1, 5)
    value, pull = rewriting.vjp(function, x)
    np.testing.assert_array_equal(value, function(x))
    np.testing.assert_array_equal(pull(x)[0], jax.vjp(function, x)[1](x)[0])
    found = jax.make_jaxpr(lambda x: rewriting.vjp(function, x)[0])(x)
    assert [e.params["mantissa_bits"] for e in equations(found.jaxpr, "reduce_precision")] == [7]


def test_norms_alike_are_traced_once(monkeypatch):
    """Three blocks of two products each: two shapes of factors, whatever the number of blocks."""
    calls = []
    norm = two_pass.grams.squared_norm
    monkeypatch.setattr(
        two_pass.grams, "squared_norm", lambda *given: calls.append(given) or norm(*given)
    )
    monkeypatch.setattr(plan, "PER_INNER_PRODUCT", -1e9)
    fn = clipping.clipped_grad(functools.partial(loss, scanned=False), l2_clip_norm=1.0)
    # Of a width that no other test has, whose norms may be known by now.
    shapes = {"up": (WIDTH, 29), "down": (29, WIDTH)}
    blocks = [{k: jnp.zeros(s) for k, s in shapes.items()} for _ in range(DEPTH)]
    jax.make_jaxpr(fn)(blocks, X)
    # Of two shapes, and each once more to learn the shape of the norm itself.
    assert len(calls) <= 4


def test_a_program_without_anything_to_rewrite_stays_itself():
    closed = jax.make_jaxpr(jax.jit(jnp.sin))(1.0)
    assert rewriting.rewritten(closed) is closed


def of_a_batch_of_one(p, x):
    """A model that is told a batch, as most are: its axis of length one stays to the end."""
    x = x[None]
    centred = x - x.mean(-1, keepdims=True)
    x = centred * (1 + centred.var(-1, keepdims=True)) ** -0.5 * p["scale"] + p["shift"]
    return jnp.sum(jnp.sin(x @ p["w"] + p["bias"] / jnp.exp(p["scale"])))


@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
@pytest.mark.parametrize("axes", [(), (1,), (1, 1)], ids=["(d)", "(1, d)", "(1, 1, d)"])
def test_a_batch_of_one_is_summed_over_with_the_positions(method, axes):
    """Sums over positions alone, with an axis of length one before them, take a CPU thirty times as long."""
    shapes = {"w": (WIDTH, WIDTH), **dict.fromkeys(("scale", "shift", "bias"), (*axes, WIDTH))}
    p = {
        k: jnp.asarray(np.random.default_rng(len(k)).normal(size=s), "f4")
        for k, s in shapes.items()
    }
    gradients = per_example(of_a_batch_of_one, p, (X,))
    clip = float(np.median(np.sqrt(sum((g.reshape(BATCH, -1) ** 2).sum(1) for g in gradients))))
    fn = clipping.clipped_grad(of_a_batch_of_one, l2_clip_norm=clip, method=method)
    check(jit(fn)(p, X), gradients, clip)
    sums = [
        (eqn.invars[0].aval.shape, eqn.params["axes"])
        for eqn in equations(jax.make_jaxpr(fn)(p, X).jaxpr, "reduce_sum")
    ]
    assert ((BATCH, 1, LENGTH, WIDTH), (1, 2)) in sums or not meshes.on_one_cpu()
    assert ((BATCH, 1, LENGTH, WIDTH), (2,)) not in sums or not meshes.on_one_cpu()
