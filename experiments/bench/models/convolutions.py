"""Convolutions of every kind."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import lax

from experiments.bench.models.building import equinox, haiku, linen, normal, of_nnx, plain, weights

KEY = jax.random.key(0)


def stack(*layers):
    """Linen layers in a row, on small images."""
    return linen(nn.Sequential(layers), normal(16, 16, 8))


def image_by_patches(params, x):
    """Patches cut out by a reshape, and multiplied: the stem of a vision transformer."""
    patches = x.reshape(4, 4, 4, 4, 8).transpose(0, 2, 1, 3, 4).reshape(16, 128)
    return jnp.tanh(patches @ params["stem"]) @ params["out"]


def causal_by_shifts(params, x):
    """A short depthwise convolution over time as sums of shifted copies, as state-space models have."""
    padded = jnp.pad(x, ((3, 0), (0, 0)))
    parts = [padded[i : i + x.shape[0]] * params["w"][i] for i in range(4)]
    return sum(parts) @ params["out"]


def by_lax(params, x):
    """A convolution with dimension numbers of its own."""
    out = lax.conv_general_dilated(
        x[None],
        params["w"],
        (2, 1),
        "SAME",
        rhs_dilation=(1, 2),
        dimension_numbers=("NCHW", "HWIO", "NHWC"),
    )
    return out[0]


CASES = {
    "linen Conv": lambda: stack(nn.Conv(16, (3, 3)), nn.relu, nn.Conv(16, (3, 3))),
    "linen Conv, strided and dilated": lambda: stack(
        nn.Conv(16, (3, 3), strides=2), nn.relu, nn.Conv(16, (3, 3), kernel_dilation=2)),
    "linen Conv, 1x1": lambda: stack(nn.Conv(32, (1, 1)), nn.relu, nn.Conv(8, (1, 1))),
    "linen Conv, depthwise": lambda: stack(
        nn.Conv(32, (1, 1)), nn.Conv(32, (3, 3), feature_group_count=32), nn.relu, nn.Conv(8, (1, 1))),
    "linen Conv, grouped": lambda: stack(nn.Conv(16, (3, 3), feature_group_count=4)),
    "linen Conv, one dimension": lambda: linen(
        nn.Sequential([nn.Conv(32, (5,)), nn.gelu, nn.Conv(32, (5,), padding="CAUSAL")]), normal(64, 16)),
    "linen ConvTranspose": lambda: stack(nn.ConvTranspose(8, (3, 3), strides=(2, 2))),
    "linen ConvLocal": lambda: linen(nn.ConvLocal(8, (3, 3)), normal(10, 10, 4)),
    "nnx Conv": lambda: of_nnx(
        nnx.Sequential(nnx.Conv(8, 16, (3, 3), rngs=nnx.Rngs(0)), nnx.relu,
                       nnx.Conv(16, 8, (3, 3), rngs=nnx.Rngs(1))), normal(16, 16, 8)),
    "nnx ConvTranspose": lambda: of_nnx(
        nnx.ConvTranspose(8, 8, (3, 3), strides=2, rngs=nnx.Rngs(0)), normal(8, 8, 8)),
    "haiku Conv2D": lambda: haiku(lambda x: hk.Conv2D(16, 3, stride=2)(x), normal(16, 16, 8)),
    "haiku DepthwiseConv2D": lambda: haiku(lambda x: hk.DepthwiseConv2D(2, 3)(x[None])[0], normal(12, 12, 8)),
    "haiku SeparableDepthwiseConv2D": lambda: haiku(
        lambda x: hk.SeparableDepthwiseConv2D(2, 3)(x[None])[0],  # pyright: ignore
        normal(12, 12, 8)),
    "haiku Conv2DTranspose": lambda: haiku(lambda x: hk.Conv2DTranspose(8, 3, 2)(x), normal(8, 8, 8)),
    "equinox Conv2d": lambda: equinox(eqx.nn.Conv2d(8, 16, 3, key=KEY), normal(8, 16, 16)),
    "equinox Conv2d, depthwise": lambda: equinox(
        eqx.nn.Conv2d(16, 16, 3, groups=16, key=KEY), normal(16, 16, 16)),
    "equinox ConvTranspose2d": lambda: equinox(
        eqx.nn.ConvTranspose2d(8, 8, 3, stride=2, key=KEY), normal(8, 8, 8)),
    "patches by reshape": lambda: plain(
        image_by_patches, weights(stem=(128, 64), out=(64, 8)), normal(16, 16, 8)),
    "depthwise over time by shifts": lambda: plain(
        causal_by_shifts, weights(w=(4, 64), out=(64, 64)), normal(64, 64)),
    "lax convolution": lambda: plain(by_lax, weights(w=(3, 3, 8, 16)), normal(8, 16, 16)),
}  # fmt: skip
