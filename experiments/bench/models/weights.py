"""What models do to a weight before they use it."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from experiments.bench.models.building import haiku, linen, normal, of_nnx, plain, toward, weights
from experiments.bench.models.measure import Case

WIDTH, LENGTH = 64, 24
KEY = jax.random.key(0)


def one(function, **shapes):
    """A function of a few matrices and one sequence."""
    return plain(function, weights(**(shapes or {"w": (WIDTH, WIDTH)})), normal(LENGTH, WIDTH))


def penalised(p, x):
    """A loss with an L2 penalty on its weights."""
    return toward(x @ p["w"]) + 0.01 * sum(jnp.sum(w**2) for w in jax.tree.leaves(p))


def penalised_layers(p, x):
    """Two layers with an L2 penalty on both."""
    for w in p.values():
        x = jnp.tanh(x @ w)
    return toward(x) + 0.01 * sum(jnp.sum(w**2) for w in p.values())


def scale_of_rows(p, x):
    """Weight norm by hand: a direction and a length for every column."""
    w = p["w"]
    return x @ (p["g"] * w / jnp.linalg.norm(w, axis=0, keepdims=True))


def low_rank(p, x):
    """A weight that is a product of two."""
    return x @ (p["a"] @ p["b"])


def adapters(p, x):
    """A frozen product beside a low-rank one."""
    return x @ jax.lax.stop_gradient(p["w"]) + 2.0 * (x @ p["a"]) @ p["b"]


def merged(p, x):
    """The adapter added to the weight before the product."""
    return x @ (p["w"] + 2.0 * p["a"] @ p["b"])


def spectral() -> Case:
    """Linen's SpectralNorm with the vectors that it came with."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.SpectralNorm(nn.Dense(WIDTH))(x, update_stats=False)

    return linen(Model(), normal(LENGTH, WIDTH))


def standardised(p, x):
    """A convolution-like weight, standardised over its inputs."""
    w = p["w"]
    return x @ ((w - w.mean(0)) / jnp.sqrt(w.var(0) + 1e-5))


@jax.custom_vjp
def _straight(w):
    return jnp.round(w * 16) / 16


_straight.defvjp(lambda w: (_straight(w), None), lambda _, g: (g,))


@jax.custom_jvp
def _scaled(w, x):
    return x @ w


_scaled.defjvp(lambda primals, tangents: (
    primals[1] @ primals[0], tangents[1] @ primals[0] + primals[1] @ tangents[0]))  # fmt: skip


@jax.custom_vjp
def _by_hand(w, x):
    return x @ w


_by_hand.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, g: (r[1].T @ g, g @ r[0].T))


def narrow(dtype) -> Case:
    """Two layers in mixed precision: parameters in float32, cast for their products."""

    def loss(p, x):
        p = jax.tree.map(lambda w: w.astype(dtype), p)
        return toward(jnp.tanh(x.astype(dtype) @ p["w"]) @ p["v"])

    return Case(
        loss, weights(w=(WIDTH, WIDTH), v=(WIDTH, WIDTH)), (normal(LENGTH, WIDTH),), {}, True
    )


def masked(p, x):
    """Masked layers, as in autoregressive flows."""
    for w in p.values():
        x = jnp.tanh(x @ jnp.tril(w))
    return x


def scale_and_shift(p, x):
    """Biases and scales alone."""
    return jnp.tanh(x * p["scale"] + p["bias"]) * p["gate"]


CASES = {
    "linen WeightNorm": lambda: linen(nn.WeightNorm(nn.Dense(WIDTH)), normal(LENGTH, WIDTH)),
    "linen WeightNorm, one position": lambda: linen(
        nn.Sequential([nn.WeightNorm(nn.Dense(256)), jnp.tanh, nn.WeightNorm(nn.Dense(256))]),
        normal(256, batch=64)),
    "linen WeightNorm, 1,024 wide": lambda: linen(
        nn.Sequential([nn.WeightNorm(nn.Dense(1024)), jnp.tanh, nn.WeightNorm(nn.Dense(1024))]),
        normal(1024, batch=192)),
    "linen SpectralNorm": spectral,
    "nnx WeightNorm": lambda: of_nnx(
        nnx.WeightNorm(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)),
                       variable_filter=nnx.PathContains("kernel"), rngs=nnx.Rngs(0)),
        normal(LENGTH, WIDTH)),
    "equinox WeightNorm": lambda: plain(
        lambda m, x: jax.vmap(m)(x), eqx.nn.WeightNorm(eqx.nn.Linear(WIDTH, WIDTH, key=KEY)),
        normal(LENGTH, WIDTH)),
    "haiku SpectralNorm": lambda: haiku(
        lambda x: x @ hk.SpectralNorm()(
            hk.get_parameter("w", (WIDTH, WIDTH), init=hk.initializers.RandomNormal()), update_stats=False),
        normal(LENGTH, WIDTH)),
    "weight norm by hand": lambda: one(scale_of_rows, w=(WIDTH, WIDTH), g=(WIDTH,)),
    "weight standardisation": lambda: one(standardised),
    "L2 penalty": lambda: Case(
        penalised, weights(w=(256, 256)), (normal(LENGTH, 256),)),
    "L2 penalty, one position": lambda: Case(
        penalised_layers, weights(a=(512, 512), b=(512, 512)), (normal(512, batch=32),)),
    "L2 penalty, 1,024 wide": lambda: Case(
        penalised_layers, weights(a=(1024, 1024), b=(1024, 1024)), (normal(1024, batch=192),)),
    "low-rank weight": lambda: one(low_rank, a=(WIDTH, 8), b=(8, WIDTH)),
    "LoRA beside": lambda: one(adapters, w=(WIDTH, WIDTH), a=(WIDTH, 4), b=(4, WIDTH)),
    "LoRA merged": lambda: one(merged, w=(WIDTH, WIDTH), a=(WIDTH, 4), b=(4, WIDTH)),
    "weight concatenated": lambda: one(
        lambda p, x: x @ jnp.concatenate([p["a"], p["b"]], axis=1), a=(WIDTH, 32), b=(WIDTH, 64)),
    "weight split": lambda: one(
        lambda p, x: sum(jnp.tanh(x @ w) for w in jnp.split(p["w"], 2, axis=1)), w=(WIDTH, 2 * WIDTH)),
    "weight reshaped": lambda: one(
        lambda p, x: jnp.einsum("td,dhk->thk", x, p["w"].reshape(WIDTH, 4, 16))),
    "weight sliced": lambda: one(lambda p, x: x[:, :32] @ p["w"][:32] + x[:, 32:] @ p["w"][32:]),
    "weight transposed and tied": lambda: one(lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T),
    "weight symmetrised": lambda: one(lambda p, x: x @ (p["w"] + p["w"].T)),
    "weight times a constant": lambda: one(lambda p, x: x @ (p["w"] * 0.125)),
    "weight times a mask": lambda: one(lambda p, x: x @ jnp.tril(p["w"])),
    "masked layers, one position": lambda: plain(
        masked, weights(a=(512, 512), b=(512, 512), c=(512, 512)), normal(512)),
    "masked layers, a sequence": lambda: plain(
        masked, weights(a=(512, 512), b=(512, 512), c=(512, 512)), normal(32, 512)),
    "weight through tanh": lambda: one(lambda p, x: x @ jnp.tanh(p["w"])),
    "weight rounded, straight through": lambda: one(lambda p, x: x @ _straight(p["w"])),
    "custom_jvp": lambda: one(lambda p, x: _scaled(p["w"], x)),
    "custom_vjp": lambda: one(lambda p, x: _by_hand(p["w"], x)),
    "einsum, two batch axes": lambda: one(
        lambda p, x: jnp.einsum("tgd,gdf->tgf", x.reshape(LENGTH, 4, 16), p["w"]), w=(4, 16, 32)),
    "einsum, weight on both sides": lambda: one(lambda p, x: jnp.einsum("td,de,se->ts", x, p["w"], x)),
    "weight stacked from parts": lambda: one(
        lambda p, x: jnp.einsum("td,ndf->tnf", x, jnp.stack([p["a"], p["b"]])),
        a=(WIDTH, 32), b=(WIDTH, 32)),
    "scale and shift": lambda: one(
        scale_and_shift, scale=(WIDTH,), bias=(WIDTH,), gate=(WIDTH,)),
    "mixed precision, bfloat16": lambda: narrow(jnp.bfloat16),
    "mixed precision, float16": lambda: narrow(jnp.float16),
}  # fmt: skip
