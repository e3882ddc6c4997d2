"""The loop that leaves out examples without a finite gradient, and how often and where its step runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_clipping_depth import BATCH, DIM, LENGTH, model, plain
from test_clipping_models import on_one_cpu

from dpx import clipping
from dpx.clipping import batches, xla_cpu


@pytest.mark.slow
@on_one_cpu
@pytest.mark.parametrize("longest_in_place", [0, 100000])
def test_long_steps_are_computations_of_their_own(monkeypatch, longest_in_place):
    """XLA goes through what is in the loop again and again; short steps are left there."""
    monkeypatch.setattr(xla_cpu, "LONG", longest_in_place)
    loss, params, x = model(2)
    gradient = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=0.1))
    assert ("inlineable" in gradient.lower(params, x).as_text()) == (longest_in_place == 0)
    (norms,), _ = plain(loss, params, x, 0.1)
    found = gradient(params, x.at[1, 0, 0].set(jnp.nan))
    without = clipping.clipped_grad(loss, l2_clip_norm=0.1)(params, x[jnp.array([0, 2])])
    np.testing.assert_allclose(found.norms[0], norms[0], rtol=1e-3)
    for a, b in zip(jax.tree.leaves(found.grads), jax.tree.leaves(without.grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.slow
@on_one_cpu
def test_a_step_is_as_long_as_all_that_its_scans_hold(monkeypatch):
    """A recurrent model has few equations outside of the scan, which XLA goes through as often."""
    monkeypatch.setattr(xla_cpu, "LONG", 200)

    def is_outlined(layers):
        def body(carry, x):
            for _ in range(layers):
                carry = jnp.sin(carry)
            return carry + x, None

        def loss(params, x):
            return jnp.sum(jax.lax.scan(body, jnp.zeros(DIM), x @ params["w"])[0])

        gradient = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=0.1))
        lowered = gradient.lower({"w": jnp.ones((DIM, DIM))}, jnp.ones((BATCH, LENGTH, DIM)))
        return "inlineable" in lowered.as_text()

    assert [is_outlined(layers) for layers in (1, 100)] == [False, True]


@pytest.mark.quick_cases("100000-[True, True, True]-None")
@pytest.mark.parametrize("microbatch_size", [None, 2])
@pytest.mark.parametrize("mask", [[True] * 3, [False] * 3, [False, True, False]], ids=str)
@pytest.mark.parametrize("longest_in_place", [0, 100000])
def test_sums_are_zero_where_no_example_is_left(
    monkeypatch, longest_in_place, mask, microbatch_size
):
    """Nor does the example of zeros that stands in then have a finite gradient."""
    monkeypatch.setattr(xla_cpu, "LONG", longest_in_place)

    def loss(params, x):
        return jnp.sum(jnp.log(x) @ params["w"]) + jnp.sum(params["b"] / x)

    params = {"w": jnp.ones((5, 7)), "b": jnp.ones(5)}
    gradient = clipping.clipped_grad(loss, l2_clip_norm=0.1, microbatch_size=microbatch_size)
    found = jax.jit(gradient)(params, jnp.full((3, 5), jnp.nan), mask=jnp.array(mask))
    for each in jax.tree.leaves(found.grads):
        np.testing.assert_array_equal(each, 0)
    np.testing.assert_array_equal(found.norms, np.where(mask, np.inf, 0))


@pytest.mark.parametrize(
    ("finite", "mask", "runs"),
    [
        ([True, True, True], [True, True, False], 1),
        ([True, True, True], [False, False, False], 0),
        ([True, False, True], [True, True, True], 2),
        ([False, False, True], [True, True, False], 2),
    ],
    ids=["finite", "masked", "one is not finite", "none is finite"],
)
def test_a_step_runs_as_often_as_examples_have_to_be_left_out(finite, mask, runs):
    """Nor do slices of a batch take time that hold no example."""
    seen = []

    def once(batch, keep):
        jax.debug.callback(seen.append, keep)
        (x,) = batch
        return [jnp.sum(jnp.where(keep, x, 0))], [x], x

    step = jax.jit(batches.finite_only(once))
    (total,), (norms,), _ = step((jnp.where(jnp.array(finite), 2.0, jnp.nan),), jnp.array(mask))
    jax.effects_barrier()
    assert len(seen) == runs
    kept = np.array(finite) & np.array(mask)
    assert total == 2 * kept.sum()
    np.testing.assert_array_equal(np.isnan(norms), np.array(mask) & ~np.array(finite))


@pytest.mark.slow
@pytest.mark.parametrize("longest_in_place", [0, 100000])
def test_a_step_runs_without_jit(monkeypatch, longest_in_place):
    """As one does to look for an error."""
    monkeypatch.setattr(xla_cpu, "LONG", longest_in_place)
    loss, params, x = model(1)
    gradient = clipping.clipped_grad(loss, l2_clip_norm=0.1)
    expected = gradient(params, x)
    with jax.disable_jit():
        found = gradient(params, x)
    for a, b in zip(jax.tree.leaves(found.grads), jax.tree.leaves(expected.grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@on_one_cpu
def test_who_names_no_microbatch_gets_what_a_cache_holds(monkeypatch):
    """And a batch that takes little, or whose parameters take more than its examples, is taken whole."""

    def chosen(size, one, parameters):
        return batches.chosen(size, one, [jax.ShapeDtypeStruct((parameters // 4,), jnp.float32)])

    assert chosen(64, 2**20, 2**20) == 11
    assert chosen(64, 2**10, 2**20) == 64
    assert chosen(64, 2**20, 2**26) == 64
    assert chosen(3, 2**30, 2**10) == 3  # Two at least: one is not vectorised.
    assert chosen(4, 2**30, 2**10) == 2
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert chosen(64, 2**30, 2**10) == 64


def test_the_bytes_of_an_example_are_those_of_the_method_that_is_the_default():
    """Blocks in a loop hand out norms alone, which is less than what one pass would hold for them."""

    @jax.checkpoint
    def block(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    p = {"up": jnp.ones((4, 8, 128)) / 8, "down": jnp.ones((4, 128, 8)) / 128}
    found = clipping.explain_clipping(
        lambda p, x: jnp.sum(jax.lax.scan(block, x, p)[0] ** 2), p, jnp.ones((2, 5, 8))
    )
    assert found.example_bytes < found.extra_bytes


@pytest.mark.slow
@on_one_cpu
def test_the_chosen_microbatch_is_that_which_is_explained_and_changes_no_result(monkeypatch):
    rng = np.random.default_rng(0)
    p = {"a": jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)}
    x = jnp.asarray(rng.normal(size=(12, 40, 8)), jnp.float32)

    def loss(p, x):
        return jnp.sum(jnp.tanh(x @ p["a"]) ** 2)

    whole = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=1.0, microbatch_size=12))(p, x)
    monkeypatch.setattr(batches, "CACHE", 4 * clipping.explain_clipping(loss, p, x).example_bytes)
    explained = clipping.explain_clipping(loss, p, x)
    assert (explained.microbatch_size, explained.batch_size) == (4, 12)
    assert str(explained).splitlines()[-1].startswith("4 of 12 examples at a time")
    program = jax.make_jaxpr(clipping.clipped_grad(loss, l2_clip_norm=1.0))(p, x)
    assert "f32[4,40,8]" in str(program)
    cut = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=1.0))(p, x)
    np.testing.assert_allclose(cut.grads["a"], whole.grads["a"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(cut.norms, whole.norms, rtol=1e-6)
