"""What models do to a weight before they use it: parts, joins, reshapes and wrappers keep their rule."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from test_clipping_engine import rules_of
from test_clipping_models import check, jit, per_example

from dpx import clipping
from dpx.clipping.gradients import plan

WIDTH, LENGTH, BATCH = 6, 5, 4


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape) / 2, jnp.float32)


SEQUENCES = normal(BATCH, LENGTH, WIDTH, seed=1)


def joined_gates():
    """An LSTM cell whose four kernels are joined into one product, tied to a read-out."""

    def loss(p, x):
        kernel = jnp.concatenate([p["a"], p["b"], p["c"]], axis=1)
        both = jnp.concatenate([kernel, p["d"] @ jnp.eye(3 * WIDTH)], axis=0)

        def step(h, x):
            gates = jnp.concatenate([x, h]) @ both
            i, f, o = jnp.split(gates, 3)
            return jax.nn.sigmoid(i) * jnp.tanh(f) + o, None

        h, _ = jax.lax.scan(step, jnp.zeros(WIDTH), x)
        return jnp.sum((h @ p["a"].T) ** 2)

    params = {name: normal(WIDTH, WIDTH, seed=n) for n, name in enumerate("abc")}
    return loss, params | {"d": normal(WIDTH, 3 * WIDTH)}, (SEQUENCES,)


def split_heads():
    """One kernel for queries, keys and values, split, and each reshaped to heads."""

    def loss(p, x):
        q, k, v = jnp.split(p["qkv"], 3, axis=1)
        q, k = (jnp.einsum("ld,dhe->lhe", x, w.reshape(WIDTH, 2, 3)) for w in (p["q"], p["k"]))
        weights = jax.nn.softmax(jnp.einsum("lhe,mhe->hlm", q, k))
        mixed = jnp.einsum("hlm,md->ld", weights, x @ v)
        out = p["out"].reshape(2, 3, WIDTH)
        return jnp.sum(jnp.einsum("lhe,hed->ld", q, out) ** 2) + jnp.sum(
            mixed * (x @ p["qkv"][:, :WIDTH])
        )

    names = ("q", "k", "out")
    params = {name: normal(WIDTH, WIDTH, seed=n) for n, name in enumerate(names)}
    return loss, params | {"qkv": normal(WIDTH, 3 * WIDTH)}, (SEQUENCES,)


def wrapped():
    """Names, barriers and sharding constraints on a weight."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), "x")
    anywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def loss(p, x):
        w = checkpoint_name(p["w"], "w")
        w, v = jax.lax.optimization_barrier((w, p["v"]))
        v = jax.lax.with_sharding_constraint(v, anywhere)
        return jnp.sum(jnp.tanh(x @ w @ v) ** 2)

    return loss, {"w": normal(WIDTH, WIDTH), "v": normal(WIDTH, WIDTH, seed=1)}, (SEQUENCES,)


def passed_through():
    """A rematerialised, scanned body that returns the parameters that it was given."""

    def loss(p, x):
        @jax.checkpoint
        def body(carry, x):
            w, h = carry
            return (w, jnp.tanh(h @ w + x)), None

        (w, h), _ = jax.lax.scan(body, (p["w"], x[0]), x)
        return jnp.sum((h @ w) ** 2)

    return loss, {"w": normal(WIDTH, WIDTH)}, (SEQUENCES,)


def dead_code():
    def loss(p, x):
        jnp.sum(jnp.sin(p["w"]))
        return jnp.sum((x @ p["w"]) ** 2)

    return loss, {"w": normal(WIDTH, WIDTH)}, (SEQUENCES,)


def parts_of_parts():
    """Parts along both axes of a weight, each taken of a part."""

    def loss(p, x):
        part = p["w"][1:][:-2][:, 2:][:, 1:]
        return jnp.sum(jnp.sin(x[:, :4] @ part.T) ** 2) + jnp.sum((x @ p["w"][:, :WIDTH].T) ** 2)

    return loss, {"w": normal(9, 7)}, (SEQUENCES,)


def embedding(vocabulary=7, width=WIDTH, length=LENGTH):
    """Equinox's embedding, mapped over tokens with repeats, and tied to the read-out."""
    layer = eqx.nn.Embedding(vocabulary, width, key=jax.random.key(0))

    def loss(layer, tokens):
        x = jax.vmap(layer)(tokens)
        return jnp.sum(jnp.tanh(x[:-1] * x[1:]) @ layer.weight[tokens[0]])

    tokens = np.random.default_rng(0).integers(0, vocabulary, size=(8, length))
    return loss, layer, (tokens,)


def linen_lstm():
    """Flax joins the gates of this cell itself."""
    model = nn.RNN(nn.OptimizedLSTMCell(WIDTH))
    params = model.init(jax.random.key(0), SEQUENCES[0])
    return lambda p, x: jnp.sum(model.apply(p, x) ** 2), params, (SEQUENCES,)


CASES = (
    joined_gates, split_heads, wrapped, passed_through, dead_code, parts_of_parts, embedding,
    linen_lstm,
)  # fmt: skip


@pytest.mark.quick_cases("Gram-wrapped")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize(
    "favor", [0.0, pytest.param(1e9, marks=pytest.mark.slow)], ids=["Gram", "held"]
)
def test_norms_and_sums_are_exact(monkeypatch, case, favor):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", favor)
    loss, params, batch = case()
    for path, (_, _, _, opaque) in rules_of(loss, params, *batch).items():
        assert path.endswith("bias") or case is passed_through or not opaque, path
    fn = jit(clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass"))
    check(fn(params, *batch), per_example(loss, params, batch), 0.5)


@pytest.mark.slow
def test_a_mapped_embedding_takes_no_more_than_its_sum():
    loss, layer, (tokens,) = embedding(vocabulary=50_000, width=64)
    shapes = jax.eval_shape(lambda: layer)

    def temp(method):
        fn = clipping.clipped_grad(loss, l2_clip_norm=1.0, method=method)
        return jit(fn).lower(shapes, tokens).compile().memory_analysis().temp_size_in_bytes

    assert temp("one_pass") < 1e6 < temp("vmap")


@pytest.mark.parametrize("step", [1, 3])
def test_a_slice_that_is_added_is_looked_up(step):
    """So are rows at some distance from each other."""

    def loss(p, x):
        rows = p["w"][2 : 2 + step * LENGTH : step]
        return jnp.sum((rows + x) ** 2) + jnp.sum(jnp.sin(p["w"][:LENGTH] + x))

    params = {"w": normal(40, WIDTH)}
    assert rules_of(loss, params, SEQUENCES)["w"][3] == []
    fn = jit(clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass"))
    check(fn(params, SEQUENCES), per_example(loss, params, (SEQUENCES,)), 0.5)


def test_rows_of_a_table_that_are_no_parameters_have_no_gradient(monkeypatch):
    """Such as a row of zeros for padding, or a frozen part of the vocabulary, before and after the table."""
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)
    before, after = normal(2, WIDTH, seed=1), np.zeros((1, WIDTH), "f4")

    def loss(p, tokens):
        rows = jnp.concatenate([before, p["w"], after])[tokens]
        return jnp.sum(jnp.sin(rows) * jnp.arange(1.0, 1 + LENGTH)[:, None])

    tokens = np.array([[0, 2, 2, 8, 1, 7], [8, 8, 0, 1, 3, 2], [2, 4, 6, 0, 7, 3]])[:, :LENGTH]
    params = {"w": normal(6, WIDTH)}
    assert rules_of(loss, params, tokens)["w"][2] == ["gather"]
    fn = jit(clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass"))
    check(fn(params, tokens), per_example(loss, params, (tokens,)), 0.5)


@pytest.mark.slow
def test_weights_times_a_number_inside_loops_have_rules():
    """Equalised learning rates: the weight is divided by a number wherever it is used."""

    def loss(p, x):
        def body(h, v):
            return jnp.sin(h @ (0.5 * v) + h @ (-(v / 3.0)).T), None

        h, _ = jax.lax.scan(jax.checkpoint(body), x, p["blocks"])
        image = jax.lax.conv_general_dilated(
            h[None], p["kernel"] * 2.0, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
        )
        return jnp.sum(jnp.cos(image)) + jnp.sum((p["table"] * 4.0)[jnp.array([1, 0, 1])] ** 2)

    rng = np.random.default_rng(0)
    shapes = {"blocks": (3, 8, 8), "kernel": (3, 8, 4), "table": (5, 2)}
    params = {n: jnp.asarray(rng.normal(size=s) / 2, jnp.float32) for n, s in shapes.items()}
    x = rng.normal(size=(4, 6, 8)).astype("f4")
    assert all(row.has_rule for row in clipping.explain_clipping(loss, params, x).rows)
    for method in ("one_pass", "two_pass"):
        fn = jit(clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method))
        check(fn(params, x), per_example(loss, params, (x,)), 0.5)


def complex_weights(kind):
    """Complex weights of two real arrays."""
    rng = np.random.default_rng(0)
    p = {n: jnp.asarray(rng.normal(size=(8, 6, 5)) / 2, jnp.float32) for n in ("re", "im")}

    def weight(p):
        if kind == "complex":
            return jax.lax.complex(p["re"], p["im"]) / 2.0
        return p["re"] - (1j * p["im"])

    def loss(p, x):
        spectrum = jnp.fft.rfft(x, axis=0)[:5]
        if kind == "looked up":
            found = weight(p)[jnp.argmax(x, 1)]
        else:
            found = jnp.einsum("mi,iom->mo", spectrum, weight(p))
        return jnp.sum(jnp.sin(jnp.real(found))) + jnp.sum(jnp.abs(found) ** 2)

    return loss, p, (rng.normal(size=(4, 9, 8)).astype("f4"),)


@pytest.mark.quick_cases("Gram-sum")
@pytest.mark.parametrize("kind", ["complex", "sum", "looked up"])
@pytest.mark.parametrize(
    "favor", [0.0, pytest.param(1e9, marks=pytest.mark.slow)], ids=["Gram", "held"]
)
def test_complex_weights_of_real_parameters(monkeypatch, kind, favor):
    """Fourier operators."""
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", favor)
    loss, params, batch = complex_weights(kind)
    for method in ("one_pass", "two_pass"):
        fn = jit(clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method))
        check(fn(params, *batch), per_example(loss, params, batch), 0.5)


def test_sums_of_weights_have_rules():
    def loss(p, x):
        def body(h, _):
            return jnp.sin(h @ (p["a"] + p["a"].T) - h @ (p["b"] - 2 * p["a"])), None

        return jnp.sum(jax.lax.scan(body, x, length=2)[0])

    params = {name: normal(WIDTH, WIDTH, seed=i) for i, name in enumerate("ab")}
    rows = clipping.explain_clipping(loss, params, SEQUENCES).rows
    assert all(row.has_rule for row in rows)
    fn = jit(clipping.clipped_grad(loss, l2_clip_norm=0.5))
    check(fn(params, SEQUENCES), per_example(loss, params, (SEQUENCES,)), 0.5)
