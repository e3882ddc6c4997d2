"""Equations that a loss repeats are differentiated once, and only those that are the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_clipping_models import check, jit, per_example

import dpx
from dpx.clipping import program, repeats, tap

# Wide and short, so that products stand between runs: their factors are smaller than gradients.
WIDTH, LENGTH, BATCH = 32, 2, 5


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("f4") / np.sqrt(shape[-1])


SEQUENCES = normal(BATCH, LENGTH, WIDTH, seed=9) * np.arange(1, BATCH + 1)[:, None, None]


def blocks(between, count=4, remat=()):
    """A loss of blocks, with `between(i, x)` between products; those in `remat` are recomputed."""

    def body(i, w, x):
        return between(i, x @ w["in"]) @ w["out"]

    def loss(params, x):
        for i, w in enumerate(params):
            step = functools.partial(body, i)
            x = x + (jax.checkpoint(step) if i in remat else step)(w, x)
        return jnp.sum(x**2)

    params = [
        {
            "in": normal(WIDTH, 2 * WIDTH, seed=2 * i),
            "out": normal(2 * WIDTH, WIDTH, seed=2 * i + 1),
        }
        for i in range(count)
    ]
    return loss, params, (SEQUENCES,)


def alike(i, x):
    return jnp.tanh(x) * 0.5 + jax.nn.softmax(x)


def by_a_number(i, x):
    return jnp.tanh(x) * (0.5 + i)


def by_an_equation(i, x):
    return (jnp.sin if i % 2 else jnp.tanh)(x) * 0.5 + 1


def by_a_parameter_of_an_equation(i, x):
    return jnp.tanh(x) + jax.lax.cumsum(x, axis=i % 2, reverse=i > 1)


def by_the_order_of_operands(i, x):
    y, z = jnp.tanh(x), jnp.sin(x)
    return y - z if i % 2 else z - y


def by_a_constant(i, x):
    return jnp.tanh(x) * np.linspace(0, i, 2 * WIDTH, dtype="f4") + 1


def by_an_inner_function(i, x):
    return jax.jit(lambda x: jnp.tanh(x) * (i + 1))(x) + 1


BETWEEN = [
    alike, by_a_number, by_an_equation, by_a_parameter_of_an_equation, by_the_order_of_operands,
    by_a_constant, by_an_inner_function,
]  # fmt: skip


def exact(loss, params, batch, method="auto"):
    out = jit(dpx.clipped_grad(loss, l2_clip_norm=1.0, method=method))(params, *batch)
    check(out, per_example(loss, params, batch), 1.0)


@pytest.mark.parametrize("between", BETWEEN, ids=lambda f: f.__name__)
def test_blocks_that_differ_in_one_thing_are_not_taken_for_each_other(between):
    exact(*blocks(between))


def test_blocks_of_which_more_is_taken_later_are_not_taken_for_others():
    def loss(params, x):
        for i, w in enumerate(params):
            y = jnp.sin(x @ w["in"])
            x = jnp.tanh(y) @ w["out"] + (y[..., :WIDTH] if i % 2 else x)
        return jnp.sum(x**2)

    _, params, batch = blocks(alike)
    exact(loss, params, batch)


def test_blocks_of_which_other_values_are_taken_later_are_not_taken_for_others():
    def loss(params, x):
        for i, w in enumerate(params):
            y = jnp.sin(x @ w["in"])
            z = jnp.cos(y)
            x = (y * z) @ w["out"] + (y if i % 2 else z)[..., :WIDTH]
        return jnp.sum(x**2)

    _, params, batch = blocks(alike)
    exact(loss, params, batch)


@pytest.mark.parametrize("remat", [(0,), (3,), (0, 1, 2)], ids=str)
def test_what_follows_the_last_recomputed_block_may_repeat(remat):
    exact(*blocks(alike, remat=remat))


def runs(loss, params, batch):
    """The runs of a loss that are repeated, each with its function, none across a product of a parameter."""
    leaves = jax.tree.leaves(params)
    structure = jax.tree.structure(params)
    found = program.trace(
        lambda leaves, example: loss(jax.tree.unflatten(structure, leaves), *example),
        [jnp.asarray(leaf) for leaf in leaves],
        tuple(map(jnp.asarray, batch)),
    )
    jaxpr = found.closed.jaxpr
    uses = {use.path[0] for uses in found.captured.uses for use in uses}
    return list(repeats.find(jaxpr, uses, tap._results).values())


def test_equal_runs_share_one_function():
    found = runs(*blocks(alike))
    assert len(found) == 4
    assert len({run.function for run in found}) == 1
    assert not runs(*blocks(by_a_number))


def test_what_a_run_makes_may_be_a_result_of_the_whole():
    def both(x):
        return jnp.tanh(jnp.sin(jnp.sort(jnp.tanh(jnp.sin(x)))))

    jaxpr = jax.make_jaxpr(both)(jnp.ones(3)).jaxpr
    between = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name not in ("sin", "tanh")]
    found = repeats.find(jaxpr, between, tap._results)
    assert len(found) == 2
    assert list(found[max(found)].results) == jaxpr.outvars


def test_arrays_among_the_parameters_of_equations_are_equal_to_themselves_alone():
    one, other = np.zeros(2), np.ones(2)
    assert repeats._hashable(one) == repeats._hashable(one)
    assert repeats._hashable(one) != repeats._hashable(other)


def test_parameters_of_equations_that_are_equal_numbers_may_differ():
    given = [0, 0.0, -0.0, False, np.float32(0)]
    assert len({repeats._hashable(x) for x in given}) == len(given)
    assert repeats._hashable(float("nan")) == repeats._hashable(float("nan"))


def test_a_number_that_is_not_one_is_equal_to_itself_alone():
    """NaN equals NaN here, and -0.0 differs from 0.0."""

    for numbers, shared in [((np.nan,) * 2, True), ((0.0, -0.0), False)]:

        def both(w, x, numbers=numbers):
            for number in numbers:
                x = jnp.copysign(jnp.abs(x), np.float32(number)) @ w
            return x.sum()

        found = runs(both, normal(WIDTH, WIDTH), (SEQUENCES,))
        assert bool(found) == shared


def test_equations_with_effects_stay_where_they_are():
    seen = []

    def note(total):
        seen.append(float(total))

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
            jax.debug.callback(note, jnp.sum(x))
            x = jnp.sin(x) * 2
        return jnp.sum(x**2)

    params = [normal(WIDTH, WIDTH, seed=i) for i in range(3)]
    found = runs(loss, params, (SEQUENCES,))
    assert len({run.function for run in found}) == 2, "the equations before and after each callback"
    dpx.clipped_grad(loss, l2_clip_norm=1.0)(params, SEQUENCES)
    jax.effects_barrier()
    assert len(set(seen)) == 3 * BATCH


def test_no_run_goes_on_where_the_last_recomputed_equation_ends():
    """What is recomputed has no parameters here, and so is no block of its own."""
    recomputed = jax.checkpoint(jax.jit(lambda x: jnp.sin(x) * 3))

    def loss(params, x):
        for w in params:
            x = jnp.tanh(recomputed(jnp.cos(x))) @ w
        return jnp.sum(x**2)

    exact(loss, [normal(WIDTH, WIDTH, seed=i) for i in range(3)], (SEQUENCES,), "two_pass")
