"""Capture, rules and their edges: masks, groups, non-finite examples, look-ups, random networks."""

import dataclasses
import functools

import clipping_models
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from clipping_exact import WIDER, check, jit, per_example

import dpx
from dpx import clipping
from dpx.clipping import losses
from dpx.clipping import params as clipping_params
from dpx.clipping.gradients import plan

METHODS = ("one_pass", "two_pass")


def tied_loss(params, ids):
    x = jnp.tanh(params["embed"][ids] @ params["mix"])
    return clipping_models.next_token_loss(x @ params["embed"].T, ids)


def tied_params(vocabulary=13, width=8, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "embed": jnp.asarray(rng.normal(size=(vocabulary, width)), jnp.float32),
        "mix": jnp.asarray(rng.normal(size=(width, width)) / 3, jnp.float32),
    }


def rules_of(loss, params, *batch):
    """Parameter path -> (form, by factors or not, what it goes into, primitives without a rule)."""
    flat = clipping_params.flatten(params)
    one, _ = losses.functions(loss, False, flat)
    reader = plan.read(one, flat.leaves, batch)
    uses = [plan.uses(reader, out) for out in reader.jaxpr.outvars[1:]]
    each = zip(flat.paths, plan.forms(reader), uses, strict=True)
    return {
        path: (type(form), bool(form.products), [*uses], [*form.unruled])
        for path, form, uses in each
    }


@pytest.mark.quick_cases("one token only-two_pass")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("repeated", [False, True], ids=["some repeats", "one token only"])
def test_tied_embedding_with_repeats_masks_and_one_example(monkeypatch, method, repeated):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)
    params, ids = tied_params(), clipping_models.tokens()
    ids = np.full_like(ids, 3) if repeated else ids
    gradients = per_example(tied_loss, params, (ids,))
    fn = jit(clipping.clipped_grad(tied_loss, l2_clip_norm=0.5, method=method))
    mask = np.array([True, False, True, True, False])
    check(fn(params, ids, mask=mask), gradients, 0.5, mask)
    check(fn(params, ids[:1]), [g[:1] for g in gradients], 0.5)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(fn(params, ids, mask=~(mask | True))))


@pytest.mark.slow
def test_large_tables_and_kernels_never_have_per_example_gradients():
    params = tied_params(vocabulary=5000, width=32)
    ids = clipping_models.tokens(batch=64)
    assert rules_of(tied_loss, params, ids)["embed"][1]

    def temp(method):
        fn = clipping.clipped_grad(tied_loss, l2_clip_norm=1.0, method=method)
        return jit(fn).lower(params, ids).compile().memory_analysis().temp_size_in_bytes

    assert temp("one_pass") < 64 * 5000 * 32 * 4 < temp("vmap")


@pytest.mark.slow
def test_rules_found_in_unmodified_models():
    loss, params, batch = clipping_models.MODELS["linen GRU, tied"]()
    found = rules_of(loss, params, *batch)
    assert sorted(found["params/Embed_0/embedding"][2]) == ["dot_general", "gather"]
    assert found["params/GRUCell_0/hn/kernel"][2:] == (["dot_general"], [])
    loss, params, batch = clipping_models.MODELS["without rules"]()
    found = rules_of(loss, params, *batch)
    assert found["w"][3]
    assert found["w"][0] is plan.Held


@pytest.mark.slow
def test_explain_names_uses_rules_and_costs(capsys):
    loss, params, batch = clipping_models.MODELS["mixed uses"]()
    dpx.explain_clipping(loss, params, *batch)
    header, v, w, total, batch_line = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["parameter", "shape", "uses", "rule"]
    assert "cond" in v
    assert "dynamic_slice" in w
    assert total.startswith("sum")
    assert " examples at a time, about " in batch_line
    loss, params, batch = clipping_models.MODELS["without rules"]()
    dpx.explain_clipping(loss, params, *batch)
    assert "no rule for " in capsys.readouterr().out
    found = dpx.explain_clipping(tied_loss, tied_params(5000, 16), clipping_models.tokens())
    assert capsys.readouterr().out == f"{found}\n"
    embed, mix = found.rows
    assert (embed.path, embed.shape, embed.rule) == ("embed", (5000, 16), "Gram")
    assert sorted(embed.uses) == ["dot_general", "gather"]
    assert embed.has_rule
    assert mix.extra_bytes == 4 * 16 * 16
    assert found.extra_bytes == embed.extra_bytes + mix.extra_bytes
    assert found.extra_flops == embed.extra_flops + mix.extra_flops
    loss, params, batch = clipping_models.MODELS["without rules"]()
    without = dpx.explain_clipping(loss, params, *batch)
    assert [row.path for row in without.rows if not row.has_rule]


@pytest.mark.quick_cases("two_pass")
@pytest.mark.parametrize("method", METHODS)
def test_groups_and_non_finite_examples_by_gram(monkeypatch, method):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)

    def loss(params, ids, scale):
        return scale * tied_loss(params, ids)

    params, ids = tied_params(), clipping_models.tokens()
    scale = np.array([1, np.inf, 1, np.nan, 1], "f4")
    clips = {"embed": 0.3, "mix": 0.2}
    fn = jit(clipping.clipped_grad(loss, l2_clip_norm=clips, method=method))
    out, good = fn(params, ids, scale), np.isfinite(scale)
    np.testing.assert_array_equal(np.isinf(out.norms["mix"]), ~good)
    gradients = per_example(loss, params, (ids[good], scale[good]))
    for name, g in zip(("embed", "mix"), gradients, strict=True):
        norms = np.linalg.norm(g.reshape(3, -1), axis=1)
        np.testing.assert_allclose(out.norms[name][good], norms, rtol=1e-5 * WIDER)
        expected = np.tensordot(np.minimum(1, clips[name] / norms), g, 1)
        np.testing.assert_allclose(out.grads[name], expected, rtol=1e-4, atol=1e-6)
    nothing = fn(params, ids, scale * np.nan).grads
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(nothing))


@pytest.mark.parametrize("mode", ["clip", "fill", "wrap"])
def test_indices_out_of_range(monkeypatch, mode):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)

    def loss(params, ids):
        x = jnp.take(params["w"], ids, axis=1, mode=mode)
        x = jnp.where((ids >= -7) & (ids < 7), x, 0.0)
        return jnp.sum(jnp.sin(x) * jnp.arange(4.0)[:, None])

    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(4, 7)), jnp.float32)}
    ids = np.array([[0, 6, 7, 9], [-1, -7, -8, 3], [2, 2, 2, 2], [100, -100, 0, 0]])
    assert rules_of(loss, params, ids)["w"][2] == ["gather"]
    gradients = per_example(loss, params, (ids,))
    check(jit(clipping.clipped_grad(loss, l2_clip_norm=0.5))(params, ids), gradients, 0.5)


@pytest.mark.quick_cases("0.0001")
@pytest.mark.parametrize("remainder", [1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-6])
def test_cancelling_terms_never_exceed_the_threshold(monkeypatch, remainder):
    """Two positions whose gradients cancel but for a small remainder."""
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)
    rng = np.random.default_rng(0)

    x = rng.normal(size=(8, 2, 40)).astype("f4")
    x[:, 1] = x[:, 0] + remainder * rng.normal(size=(8, 40))
    g = np.repeat(rng.normal(size=(8, 1, 30)), 2, 1).astype("f4")
    g[:, 1] *= -1

    def cancelling(params, x, g):
        return 1e4 * jnp.sum((x @ params["w"]) * g)

    params = {"w": jnp.zeros((40, 30))}
    exact = 1e4 * np.einsum("bpr,bpc->brc", x.astype("f8"), g.astype("f8"))
    norms = np.linalg.norm(exact.reshape(8, -1), axis=1)
    fn = jit(clipping.clipped_grad(cancelling, l2_clip_norm=1e-3))
    out = fn(params, x, g)
    assert np.all(out.norms >= norms * (1 - 1e-6))
    if remainder >= 1e-1:
        np.testing.assert_allclose(out.norms, norms, rtol=1e-2)
    for i in range(8):
        alone = np.linalg.norm(np.asarray(fn(params, x[i : i + 1], g[i : i + 1]).grads["w"], "f8"))
        assert alone <= 1e-3


@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
def test_a_plain_look_up_beyond_the_table_counts_as_its_derivative_does(method):
    """`table[ids]` promises to stay in bounds; where it does not, the derivative drops the row."""

    def loss(params, ids, c):
        return jnp.sum(params["w"][ids] * c)

    params = {"w": jnp.arange(800.0).reshape(400, 2) / 100}
    ids = np.array([[399, 1000], [3, 3], [5, 600]])
    c = np.array([[[100.0, 0], [-99.99, 0]], [[1.0, 2], [3, 4]], [[1.0, 1], [1, 1]]], "f4")
    gradients = per_example(loss, params, (ids, c))
    fn = jit(clipping.clipped_grad(loss, l2_clip_norm=1.0, method=method))
    check(fn(params, ids, c), gradients, 1.0)
    assert np.linalg.norm(fn(params, ids[:1], c[:1]).grads["w"]) <= 1.001


@pytest.mark.parametrize("returned", [None, "pair"])
def test_a_loss_that_is_no_scalar_is_named(returned):
    def loss(params, x):
        return None if returned is None else (jnp.sum(params * x), x)

    with pytest.raises(ValueError, match="must return the scalar loss alone"):
        clipping.clipped_grad(loss, l2_clip_norm=1.0)(jnp.ones(2), jnp.ones((3, 2)))


@pytest.mark.parametrize("positions", [2, 64])
def test_crafted_rounding_gains_little(positions):
    """Small terms are lost in a running sum beside large ones, and these cancel between positions."""
    columns = np.zeros((positions, 3000), np.float32)
    columns[:, 16:] = 1.6 * 2.0**-12 / 4
    columns[: positions // 2, :16], columns[positions // 2 :, :16] = 0.25, -0.25
    x = np.zeros((1, positions, 256), np.float32)
    x[..., 0] = 1

    def loss(params, x, c):
        return 1e4 * jnp.sum(c * (x @ params["w"]))

    fn = jit(clipping.clipped_grad(loss, l2_clip_norm=1.0, method="one_pass"))
    found = fn({"w": jnp.zeros((256, 3000))}, x, columns[None]).grads["w"]
    assert np.linalg.norm(np.asarray(found, "f8")) <= 1


@pytest.mark.quick_cases("True-False")
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_squares_that_are_flushed_to_zero_do_not_hide_a_gradient(normalize, swapped):
    small, large = np.full((1, 20_000), 9e-20, "f4"), np.full((1, 8), 1e18, "f4")
    x, y = (large, small) if swapped else (small, large)

    def loss(params, x, y):
        return jnp.sum(y * (x @ params["w"]))

    params = {"w": jnp.zeros((x.shape[1], y.shape[1]))}
    for method in ("one_pass", "two_pass"):
        fn = jit(clipping.clipped_grad(loss, l2_clip_norm=1.0, method=method, normalize=normalize))
        out = fn(params, x, y)
        exact = np.linalg.norm(x.astype("f8")) * np.linalg.norm(y.astype("f8"))
        assert out.norms[0] >= exact
        assert 0.1 < np.linalg.norm(np.asarray(out.grads["w"], "f8")) <= 1


@pytest.mark.slow
def test_bfloat16_norms_match_the_factors_in_float64():
    """Casting inside the loss: norms and sums are those of the products of bfloat16 factors."""

    def loss(params, x):
        h = x.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)
        return jnp.sum(h.astype(jnp.float32) * jnp.sin(jnp.arange(900.0)))

    params = {"w": jnp.zeros((700, 900))}
    x = np.random.default_rng(0).normal(size=(4, 3, 700)).astype("f4")
    assert rules_of(loss, params, x)["w"][1]
    out = clipping.clipped_grad(loss, l2_clip_norm=2.0)(params, x)
    x16 = np.asarray(jnp.asarray(x, jnp.bfloat16), "f8")
    g16 = np.asarray(jnp.sin(jnp.arange(900.0)).astype(jnp.bfloat16), "f8")
    check(out, [np.einsum("bpr,c->brc", x16, g16)], 2.0)


@pytest.mark.slow
def test_scanned_layers_compile_once_per_shape():
    loss, params, batch = clipping_models.linen(scan=12)
    traced = []

    def counted(params, ids):
        traced.append(1)
        return loss(params, ids)

    fn = jit(clipping.clipped_grad(counted, l2_clip_norm=1.0))
    fn(params, *batch)
    fn(params, *batch)
    assert fn._cache_size() == 1
    assert len(traced) == 1


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_dropout_keys_and_closed_over_numpy_batches_in_microbatches(method):
    loss, params, (ids, keys) = clipping_models.nnx_transformer(True)
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method)
    whole = jit(fn)(params, ids[:3], keys[:3])
    parts = jit(lambda: dataclasses.replace(fn, microbatch_size=2)(params, ids[:3], keys[:3]))()
    np.testing.assert_allclose(parts.norms, whole.norms, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(parts.grads), jax.tree.leaves(whole.grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_user_with_many_sequences_is_one_example():
    params, ids = tied_params(), clipping_models.tokens(batch=12).reshape(4, 3, -1)

    def user_loss(params, ids):
        return jax.vmap(functools.partial(tied_loss, params))(ids).sum()

    gradients = per_example(user_loss, params, (ids,))
    check(jit(clipping.clipped_grad(user_loss, l2_clip_norm=0.5))(params, ids), gradients, 0.5)


@pytest.mark.slow
def test_sum_feeds_correlated_noise_of_jax_privacy():
    from jax_privacy import matrix_factorization, noise_addition

    params, ids = tied_params(), clipping_models.tokens()
    fn = clipping.clipped_grad(tied_loss, l2_clip_norm=0.5)
    strategy = matrix_factorization.toeplitz.optimal_max_error_strategy_coefs(4)
    privatizer = noise_addition.matrix_factorization_privatizer(
        matrix_factorization.toeplitz.inverse_as_streaming_matrix(strategy),
        stddev=0.0,
        prng_key=jax.random.key(0),
    )
    optimizer = optax.chain(privatizer, optax.sgd(0.1))
    total = jit(fn)(params, ids).grads
    updates, _ = optimizer.update(total, optimizer.init(params))
    for key in params:
        np.testing.assert_allclose(updates[key], -0.1 * total[key], rtol=1e-6)


ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu, "square": jnp.square, "none": lambda x: x}


@pytest.mark.slow
@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
@hypothesis.given(
    layers=st.lists(
        st.tuples(st.integers(0, 1), st.booleans(), st.sampled_from(sorted(ACTIVATIONS))),
        min_size=1,
        max_size=4,
    ),
    length=st.integers(1, 4),
    favor=st.sampled_from([0.0, 1.5]),
    seed=st.integers(0, 99),
)
def test_random_networks_that_share_weights(layers, length, favor, seed):
    """Layers pick one of two matrices, straight or transposed, over a few positions."""
    rng = np.random.default_rng(seed)
    params = {"w": [jnp.asarray(rng.normal(size=(5, 5)) / 3, jnp.float32) for _ in range(2)]}
    x = rng.normal(size=(3, length, 5)).astype("f4")

    def loss(params, x):
        for which, transposed, activation in layers:
            w = params["w"][which]
            x = ACTIVATIONS[activation](x @ (w.T if transposed else w))
        return jnp.sum(x * jnp.arange(1.0, 6.0)) + jnp.sum(x**2)

    gradients = per_example(loss, params, (x,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "FAVOR_GRADIENT", favor)
        check(jit(clipping.clipped_grad(loss, l2_clip_norm=0.7))(params, x), gradients, 0.7)


@pytest.mark.slow
def test_a_long_loop_around_a_small_parameter_keeps_no_factors():
    """4,096 iterations have factors of 32 numbers each, and a gradient of 256."""

    def loss(w, x):
        def step(state, _):
            return jnp.tanh(state @ w), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(step), x, length=4096)[0] ** 2)

    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(16, 16)) / 4, "f4")
    x = jnp.asarray(rng.normal(size=(3, 16)), "f4")
    memory = {}
    for method in ("one_pass", "two_pass", "vmap"):
        clipped = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=1.0, method=method))
        memory[method] = clipped.lower(w, x).compile().memory_analysis().temp_size_in_bytes
    assert max(memory["one_pass"], memory["two_pass"]) < 1.5 * memory["vmap"]
