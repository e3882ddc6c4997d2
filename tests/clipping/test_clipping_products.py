"""Products and convolutions that only look like those with a rule, and where weights come from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_clipping_models import check, jit, per_example

from dpx import clipping
from dpx.clipping.gradients import plan


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape) / 2, jnp.float32)


IN, LENGTH, BATCH = 12, 3, 4
X = normal(BATCH, LENGTH, IN, seed=1)


def median_norm(gradients):
    return float(np.median(np.sqrt(sum((g.reshape(len(g), -1) ** 2).sum(1) for g in gradients))))


@pytest.mark.parametrize("method", ["auto", "two_pass"])
def test_penalties_before_and_behind_recomputed_blocks(monkeypatch, method):
    """What leads on to a weight from a penalty is asked for in both passes, wherever blocks end."""
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)

    def loss(p, x):
        h = jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w))(x, p["w"])
        return jnp.sum((h @ p["v"]) ** 2) + x[0, 0] * (jnp.sum(p["w"] ** 2) + jnp.sum(p["v"] ** 2))

    p = {"w": normal(IN, IN), "v": normal(IN, IN, seed=3)}
    gradients = per_example(loss, p, (X,))
    clip = median_norm(gradients)
    fn = clipping.clipped_grad(loss, l2_clip_norm=clip, method=method)
    check(jit(fn)(p, X), gradients, clip)


def test_products_that_sum_over_axes_in_another_order():
    """Sums over leading axes are written otherwise in two passes, where both factors have them in order."""

    def loss(p, x):
        h = jax.checkpoint(lambda x, w: jnp.sin(x @ w))(x, p["w"])
        return jnp.sum(h**2) + x[0, 0] * jnp.sum(
            jnp.tensordot(p["a"], p["b"], ((0, 1), (1, 0))) ** 2
        )

    p = {"w": normal(IN, IN), "a": normal(5, 5, 3), "b": normal(5, 5, 2)}
    gradients = per_example(loss, p, (X,))
    clip = median_norm(gradients)
    fn = clipping.clipped_grad(loss, l2_clip_norm=clip, method="two_pass")
    check(jit(fn)(p, X), gradients, clip)


def test_a_part_that_is_joined_with_something_else(monkeypatch):
    """No single padding makes a parameter of a whole of which a part of it is a part."""
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)

    def loss(p, x):
        both = jnp.concatenate([p["v"], p["w"][:, 3:6], p["u"]], axis=1)
        return jnp.sum(jnp.sin(x @ both) ** 2)

    p = {"w": normal(IN, 7), "v": normal(IN, 2, seed=1), "u": normal(IN, 3, seed=2)}
    gradients = per_example(loss, p, (X,))
    for method in ("one_pass", "two_pass"):
        fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method)
        check(jit(fn)(p, X), gradients, 0.5)


@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
def test_images_that_are_parameters(monkeypatch, method):
    """A convolution of a parameter with a kernel of the example's own has no rule."""
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)
    numbers = ("NHC", "HIO", "NHC")

    def loss(p, x):
        y = jax.lax.conv_general_dilated(p["image"], x, (1,), "SAME", dimension_numbers=numbers)
        return jnp.sum(jnp.sin(y))

    p, x = {"image": normal(3, 3, 3)}, normal(BATCH, 3, 3, 3, seed=1)
    gradients = per_example(loss, p, (x,))
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method)
    check(jit(fn)(p, x), gradients, 0.5)


@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
def test_batch_groups(monkeypatch, method):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)

    def loss(p, x):
        y = jax.lax.conv_general_dilated(
            x,
            p["kernel"],
            (1,),
            "SAME",
            dimension_numbers=("NHC", "HIO", "NHC"),
            batch_group_count=2,
        )
        return jnp.sum(jnp.sin(y))

    p, x = {"kernel": normal(3, 2, 4)}, normal(BATCH, 4, 6, 2, seed=1)
    gradients = per_example(loss, p, (x,))
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method)
    check(jit(fn)(p, x), gradients, 0.5)


def test_a_cotangent_that_is_negated_on_the_way_out(monkeypatch):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)
    product = jax.custom_vjp(lambda x, w: -(x @ w))
    product.defvjp(
        lambda x, w: (-(x @ w), (x, w)), lambda kept, g: (-(g @ kept[1].T), -(kept[0].T @ g))
    )

    def loss(p, x):
        return jnp.sum(jnp.sin(product(x, p["w"])))

    p = {"w": normal(IN, IN)}
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass")
    check(jit(fn)(p, X), per_example(loss, p, (X,)), 0.5)


def test_a_number_over_a_weight_is_no_multiple_of_it(monkeypatch):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)

    def loss(p, x):
        return jnp.sum(jnp.sin(x @ (2.0 / p["w"])))

    p = {"w": jnp.exp(normal(IN, IN))}
    for method in ("one_pass", "two_pass"):
        fn = jit(clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method))
        check(fn(p, X), per_example(loss, p, (X,)), 0.5)


@pytest.mark.parametrize("method", clipping.METHODS)
def test_complex_parameters_are_refused(method):
    def loss(p, x):
        return jnp.sum(jnp.abs(x @ p["w"]) ** 2)

    x = np.ones((2, 3), "f4")
    fn = clipping.clipped_grad(loss, l2_clip_norm=1.0, method=method)
    with pytest.raises(ValueError, match=r"params\[w\] is complex"):
        fn({"w": jnp.ones((3, 2), "complex64")}, x)


@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
def test_products_of_nothing(method):
    def loss(p, x):
        return jnp.sum(x[:, :0] @ p["w"][:0]) + jnp.sum(jnp.tanh(x @ p["w"]))

    p = {"w": normal(IN, IN)}
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method)
    check(jit(fn)(p, X), per_example(loss, p, (X,)), 0.5)


@pytest.mark.slow
def test_convolutions_without_jit():
    def loss(kernel, x):
        form = ("NWC", "WIO", "NWC")
        return jnp.sum(
            jnp.tanh(
                jax.lax.conv_general_dilated(x[None], kernel, (1,), "SAME", dimension_numbers=form)
            )
        )

    kernel = normal(3, IN, 8)
    fn = clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass")
    with jax.disable_jit():
        out = fn(kernel, X)
    check(out, per_example(loss, kernel, (X,)), 0.5)


@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
def test_weights_may_be_printed(method, capfd):
    def loss(p, x):
        jax.debug.print("weights {w}", w=p["w"][0, 0])
        return jnp.sum(jnp.tanh(x @ p["w"]))

    def seen(p, x):
        jax.debug.callback(lambda w: None, p["w"])
        return jnp.sum(jnp.tanh(x @ p["w"]))

    p = {"w": normal(IN, IN)}
    for each in (loss, seen):
        fn = clipping.clipped_grad(each, l2_clip_norm=0.5, method=method, strict=True)
        check(fn(p, X), per_example(loss, p, (X,)), 0.5)
    assert "weights" in capfd.readouterr().out


@pytest.mark.quick_cases("bfloat16")
@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn", "bfloat16"])
def test_narrow_tables(dtype):
    def loss(table, ids):
        return jnp.sum(jnp.sin(table.astype(dtype)[ids].astype(jnp.float32)))

    table, ids = normal(1000, 16), np.array([[3, 5, 3], [999, 0, 0]])
    one, vmap = (
        clipping.clipped_grad(loss, l2_clip_norm=0.5, method=method)(table, ids)
        for method in ("one_pass", "vmap")
    )
    np.testing.assert_allclose(one.norms, vmap.norms, rtol=1e-4)
    np.testing.assert_allclose(one.grads, vmap.grads, rtol=1e-4, atol=1e-6)


@pytest.mark.quick_cases("auto")
@pytest.mark.parametrize("method", ["auto", "one_pass", "vmap"])
def test_numbers_of_eight_bits(method):
    """Which JAX does not promote by itself."""
    eight = jnp.float8_e4m3fn

    def loss(p, x):
        block = jax.checkpoint(
            lambda x, w: (
                jnp.tanh(x.astype(eight).astype(jnp.float32) @ w) + p["b"].astype(jnp.float32)
            )
        )
        return jnp.sum(block(x, p["w"]) ** 2)

    p = {"w": normal(IN, IN), "b": jnp.zeros(IN, eight)}
    out = jit(clipping.clipped_grad(loss, l2_clip_norm=1e3, method=method))(p, X)
    want = jit(jax.grad(lambda w: sum(loss(p | {"w": w}, x) for x in X)))(p["w"])
    np.testing.assert_allclose(out.grads["w"], want, rtol=1e-4, atol=1e-5)
    assert out.grads["b"].dtype == jnp.float32


def with_a_weight_used_twice(p, x):
    hidden = jnp.tanh(x @ p["w"]) @ p["v"] + x @ p["w"] @ p["w"].T
    return jnp.sum(hidden**2)


def of_a_batch_of_one(p, x):
    return jnp.sum(jnp.tanh(x[None] @ p["w"]) @ p["v"])


COMMON = normal(LENGTH, IN, seed=9)


def beside_what_all_examples_share(p, x):
    return jnp.sum(jnp.sin(x @ p["v"].T) * (COMMON @ p["w"]))


@pytest.mark.parametrize(
    "loss", [with_a_weight_used_twice, of_a_batch_of_one, beside_what_all_examples_share]
)
def test_factors_of_products_that_share_or_add_axes(monkeypatch, loss):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)  # Gram matrices for all.
    p = {"w": normal(IN, 2 * IN), "v": normal(2 * IN, IN, seed=3)}
    gradients = per_example(loss, p, (X,))
    clip = median_norm(gradients)
    check(jit(clipping.clipped_grad(loss, l2_clip_norm=clip))(p, X), gradients, clip)
