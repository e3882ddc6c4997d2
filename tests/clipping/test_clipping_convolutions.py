"""Convolutions: gradients of kernels, offset by offset, in groups and depthwise, in every library."""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dpx import clipping
from dpx.clipping.gradients import plan
from dpx.clipping.gradients.convolution import Convolution

LAYOUTS = {
    1: ("NWC", "WIO", "NWC"),
    2: ("NHWC", "HWIO", "NCHW"),
    3: ("NCDHW", "DHWIO", "NDHWC"),
}


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "f4")


def equation_of(convolve, *operands):
    equations = jax.make_jaxpr(convolve)(*operands).jaxpr.eqns
    (found,) = [e for e in equations if e.primitive.name == "conv_general_dilated"]
    return found


@pytest.mark.quick_cases("1-padding3-2-1-2-2")
@pytest.mark.parametrize(
    "ndim", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    ("stride", "padding", "input_dilation", "kernel_dilation"),
    [
        (1, "SAME", 1, 1),
        (2, "VALID", 1, 2),
        (4, "VALID", 1, 1),
        (1, (1, 2), 2, 1),
        (2, (2, -1), 1, 1),
    ],
)
def test_gradients_of_kernels_are_those_of_autodiff(
    ndim, groups, stride, padding, input_dilation, kernel_dilation
):
    numbers = LAYOUTS[ndim]
    size = dict(zip(numbers[0], (2, 4), strict=False)) | {"N": 2, "C": 4}
    size |= dict(zip("DHW" if ndim == 3 else "HW"[-ndim:], [7, 6, 8], strict=False))
    x = drawn(*(size[axis] for axis in numbers[0]))
    kernel = drawn(*[3, 2, 4][:ndim], 4 // groups, 8, seed=1)

    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (stride,) * ndim,
            padding if isinstance(padding, str) else [padding] * ndim,
            (input_dilation,) * ndim, (kernel_dilation,) * ndim, numbers, feature_group_count=groups,
        )  # fmt: skip

    result, pull = jax.vjp(convolve, x, kernel)
    cotangent = drawn(*result.shape, seed=2)
    _, expected = pull(cotangent)
    equation = equation_of(convolve, x, kernel)
    np.testing.assert_allclose(Convolution(equation).evaluate(x, kernel), result, atol=1e-4)

    def of_kernel(x, cotangent):
        return jax.vjp(convolve, x, kernel)[1](cotangent)[1]

    traced = jax.make_jaxpr(of_kernel)(x, cotangent)
    equations = [e for e in traced.eqns if e.primitive.name == "conv_general_dilated"]
    env = dict(zip(traced.jaxpr.invars, (x, cotangent), strict=True))
    (gradient,) = [e for e in equations if all(v in env for v in e.invars)]
    found = Convolution(gradient).evaluate(*(env[v] for v in gradient.invars))
    # What follows only rearranges.
    found, expected = np.sort(np.ravel(found)), np.sort(np.ravel(expected))
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.quick_cases("strides2-dilations2-groups2")
@pytest.mark.parametrize(
    ("strides", "dilations", "groups"),
    [((1, 2), (1, 2), {}), ((3, 1), (2, 1), {"batch_group_count": 2}), ((2, 1), (1, 3), {})],
)
def test_each_direction_has_a_stride_and_a_dilation_of_its_own(strides, dilations, groups):
    x, kernel = drawn(4, 9, 12, 3), drawn(2, 3, 3, 8, seed=1)

    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, strides, ((1, 2), (0, 3)), (1, 2), dilations, ("NHWC", "HWIO", "NHWC"), **groups
        )  # fmt: skip

    found, expected = Convolution(equation_of(convolve, x, kernel)), convolve(x, kernel)
    np.testing.assert_allclose(found.evaluate(x, kernel), expected, atol=1e-4)
    number = {label: i for i, label in enumerate(found.sizes)}
    left, right = ([number[a] for a in axes] for axes in (found.left, found.right))
    made = [number[a] for axis in found.axes for a in axis]
    product = np.einsum(found.patches(x), left, found.grouped(kernel), right, made)
    np.testing.assert_allclose(product.reshape(expected.shape), expected, atol=1e-4)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (4, 4), strides=4)(x)  # Patches that do not overlap.
        x = nn.Conv(8, (3, 3), feature_group_count=8)(jax.nn.gelu(x))  # One feature to a group.
        x = nn.Conv(12, (1, 1))(jax.nn.gelu(x))
        x = nn.Conv(12, (3, 3), feature_group_count=2, kernel_dilation=2)(jax.nn.gelu(x))
        x = nn.ConvTranspose(4, (2, 2), strides=(2, 2))(jax.nn.gelu(x))
        return x.mean((0, 1)).sum() + (x**2).mean()


def linen():
    model = Linen()
    return model.init(jax.random.key(0), jnp.ones((1, 8, 8, 3)))["params"], (
        lambda params, x: model.apply({"params": params}, x[None])
    )


def equinox():
    keys = jax.random.split(jax.random.key(0), 3)
    layers = [
        eqx.nn.Conv2d(3, 8, 3, stride=2, padding=1, key=keys[0]),
        eqx.nn.Conv2d(8, 8, 3, groups=8, padding=1, key=keys[1]),
        eqx.nn.ConvTranspose2d(8, 4, 3, stride=2, groups=2, key=keys[2]),
    ]
    params, static = eqx.partition(layers, eqx.is_array)

    def loss(params, x):
        x = x.transpose(2, 0, 1)
        for layer in eqx.combine(params, static):
            x = jax.nn.gelu(layer(x))
        return (x**2).mean()

    return params, loss


def haiku():
    def forward(x):
        x = jax.nn.gelu(hk.Conv2D(8, 3, stride=2)(x[None]))
        x = jax.nn.gelu(hk.DepthwiseConv2D(2, 3)(x))
        return (hk.Conv2DTranspose(4, 3)(x) ** 2).mean()

    model = hk.without_apply_rng(hk.transform(forward))
    return model.init(jax.random.key(0), jnp.ones((8, 8, 3))), model.apply


def modules(remat=False):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Conv(3, 8, (3, 3), rngs=rngs)
            self.blocks = nnx.vmap(
                lambda rngs: nnx.Conv(8, 8, (3, 3), feature_group_count=4, rngs=rngs)
            )(rngs.split(3))

        def __call__(self, x):
            def block(x, layer):
                return x + jax.nn.gelu(layer(x))

            block = nnx.remat(block) if remat else block
            return nnx.scan(block, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                jax.nn.gelu(self.first(x)), self.blocks
            )

    model, params = nnx.split(Model(nnx.Rngs(0)))

    def loss(params, x):
        return (nnx.merge(model, params)(x[None]) ** 2).mean()

    return params, loss


def shared_by_scan():
    """One kernel for every step of a scan."""

    def loss(kernel, x):
        def step(x, _):
            same = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=3
            )  # fmt: skip
            return jnp.tanh(same), None

        return (jax.lax.scan(step, x[None], length=3)[0] ** 2).mean()

    return drawn(3, 3, 1, 3), loss


def tied():
    """One kernel for two convolutions, of which one is depthwise, and a product with it elsewhere."""

    def loss(params, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        kernel = params["kernel"]
        once = jax.lax.conv_general_dilated(
            x[None], kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=3
        )
        twice = jax.lax.conv_general_dilated(
            once, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=3
        )
        return (twice**2).mean() + jnp.sum(jnp.tanh(x[0] @ kernel.reshape(9, 3).T))

    return {"kernel": drawn(3, 3, 1, 3)}, loss


MODELS = {
    "linen": linen,
    "equinox": equinox,
    "haiku": haiku,
    "nnx.scan": modules,
    "nnx.scan over nnx.remat": functools.partial(modules, remat=True),
    "shared by a scan": shared_by_scan,
    "tied": tied,
}


def clipped_by_hand(params, loss, batch, clip):
    """Losses, norms and the clipped sum, from per-example gradients."""
    losses, gradients = jax.vmap(jax.value_and_grad(loss), (None, 0))(params, batch)
    norms = jnp.sqrt(
        sum(jnp.sum(g.reshape(len(batch), -1) ** 2, 1) for g in jax.tree.leaves(gradients))
    )
    factors = jnp.minimum(1, clip / norms)
    return losses, norms, jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), gradients)


# The others only take longer.
QUICK = {
    "one_pass": ["shared by a scan", "tied"],
    "two_pass": ["shared by a scan", "tied"],
}
CASES = [
    pytest.param(name, method, marks=() if name in quick else pytest.mark.slow)
    for method, quick in QUICK.items()
    for name in MODELS
]


@pytest.mark.quick_cases("tied-two_pass")
@pytest.mark.parametrize(("name", "method"), CASES)
def test_models_with_convolutions_are_clipped_exactly(name, method):
    params, loss = MODELS[name]()
    size = 1 if name == "haiku" else 3
    batch = drawn(size, 8, 8, 3, seed=3)
    clip = float(jnp.median(clipped_by_hand(params, loss, batch, 1.0)[1]))
    losses, norms, expected = clipped_by_hand(params, loss, batch, clip)
    clipped = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=clip, method=method))
    found = clipped(params, batch)
    np.testing.assert_allclose(found.losses, losses, rtol=1e-5)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-4)
    scale = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(expected))
    for got, want in zip(jax.tree.leaves(found.grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4 * scale)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n in MODELS if n != "tied"]
)  # Its uses split axes differently.
def test_no_kernel_needs_gradients_of_its_own_for_want_of_a_rule(name):
    params, loss = MODELS[name]()
    leaves, tree = jax.tree.flatten(params)

    def of_leaves(leaves, example):
        return loss(tree.unflatten(leaves), example[0])

    forms = plan.forms(plan.read(of_leaves, leaves, [drawn(2, 8, 8, 3)]))
    for leaf, form in zip(leaves, forms, strict=True):
        assert leaf.ndim < 4 or not form.unruled


def test_patches_are_not_held_where_the_gradient_is():
    """Patches of 3 × 3 are nine times as large as the input."""
    kernel, x = drawn(3, 3, 8, 16), drawn(4, 64, 64, 8)

    def loss(kernel, x):
        same = jax.lax.conv_general_dilated(
            x[None], kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(jnp.tanh(same))

    clipped = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=1.0))
    memory = clipped.lower(kernel, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 9 * x.nbytes


@pytest.mark.quick_cases
@pytest.mark.parametrize(
    ("numbers", "gain"),
    [
        (("NHWC", "HWIO", "NHWC"), 1),
        pytest.param(("NCHW", "OIHW", "NCHW"), -2, marks=pytest.mark.slow),
        pytest.param(("HCNW", "WOHI", "WHCN"), 0.5, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_that_are_larger_than_patches(numbers, gain, dtype):
    """An example of two images, whose kernel is larger than their patches."""
    size = {"N": 2, "C": 16, "H": 3, "W": 2}
    x = drawn(3, *(size[axis] for axis in numbers[0])).astype(dtype)
    x *= jnp.arange(1, 4, dtype=dtype).reshape(-1, 1, 1, 1, 1)
    size |= {"H": 3, "W": 2, "O": 32, "I": 16}
    kernel = (drawn(*(size[axis] for axis in numbers[1])) / 8).astype(dtype)

    def loss(params, x):
        y = jax.lax.conv_general_dilated(
            x, params["kernel"] * gain, (2, 1), "SAME", dimension_numbers=numbers
        )
        return jnp.sum(jnp.sin(y.astype("f4")))

    params = {"kernel": kernel}
    reader = plan.read(
        lambda leaves, example: loss({"kernel": leaves[0]}, example[0]), [kernel], [x]
    )
    assert plan.forms(reader)[0].products
    norms = clipped_by_hand(params, loss, x, 1.0)[1]
    clip = float(jnp.median(norms))
    found = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=clip))(params, x)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-4 if dtype == "float32" else 2e-2)
    gradients = jax.vmap(jax.grad(loss), (None, 0))(params, x)["kernel"].astype("f4")
    factors = np.minimum(1, clip / np.asarray(found.norms))
    expected = np.tensordot(factors, np.asarray(gradients, "f8"), 1)
    scale = np.abs(expected).max()
    rounding = 3e-5 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(found.grads["kernel"], expected, atol=rounding * scale)
    alone = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=0.5))
    for each in x:
        added = np.asarray(alone(params, each[None]).grads["kernel"], "f8")
        assert np.linalg.norm(added) <= 0.5 * (1 + 1e-6)
