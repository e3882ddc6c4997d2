"""Llamas that recompute activations (`jax.checkpoint`), and the same without that, clipped by two passes.

RMSNorm, causal attention, a gated MLP, a head of its own or tied to the embedding.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from experiments.bench.models.building import integers
from experiments.bench.models.measure import Case

HEADS, LENGTH = 4, 64


class Size(NamedTuple):
    """Of a model, and of its batch."""

    dim: int
    batch: int
    blocks: int
    words: int


SIZES = (Size(128, 8, 6, 512), Size(256, 4, 4, 512), Size(64, 16, 4, 4096))


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of arrays (L, D) with `HEADS` heads."""
    q, k, v = (x.reshape(x.shape[0], HEADS, -1) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(q.shape[0], -1)


def block(x: jax.Array, layer: Callable[[str, int, jax.Array], jax.Array], norm: Any) -> jax.Array:
    """One block of a Llama; `layer` is (name, width, array) -> array without a bias."""
    dim = x.shape[-1]
    h = norm("attention", x)
    x = x + layer("o", dim, attend(*(layer(name, dim, h) for name in "qkv")))
    h = norm("mlp", x)
    gated = jax.nn.silu(layer("gate", 3 * dim, h)) * layer("up", 3 * dim, h)
    return x + layer("down", dim, gated)


def widths(dim: int) -> dict[str, tuple[int, int]]:
    """Of the matrices of a block, by their names."""
    wide = {"gate": (dim, 3 * dim), "up": (dim, 3 * dim), "down": (3 * dim, dim)}
    return dict.fromkeys("qkvo", (dim, dim)) | wide


class Block(nnx.Module):
    """`block` in NNX."""

    def __init__(self, dim: int, rngs: nnx.Rngs):
        for name, (n, m) in widths(dim).items():
            setattr(self, name, nnx.Linear(n, m, use_bias=False, rngs=rngs))
        self.attention, self.mlp = (nnx.RMSNorm(dim, rngs=rngs) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        """(L, D) -> (L, D)."""
        return block(
            x, lambda name, _, x: getattr(self, name)(x), lambda name, x: getattr(self, name)(x)
        )


class Llama(nnx.Module):
    """A Llama in NNX, its blocks a "loop" or a "scan", rematerialised or not; `tied` has no own head."""

    def __init__(
        self, size: Size, layers: str, remat: bool, tied: bool = False, policy: Any = None
    ):
        rngs, dim = nnx.Rngs(0), size.dim
        self.remat, self.policy = remat, policy
        self.embed = nnx.Embed(size.words, dim, rngs=rngs)
        self.norm = nnx.RMSNorm(dim, rngs=rngs)
        self.head = None if tied else nnx.Linear(dim, size.words, use_bias=False, rngs=rngs)
        if layers == "scan":
            stacked = nnx.vmap(lambda rngs: Block(dim, rngs))
            self.blocks: Block | nnx.List[Block] = stacked(rngs.split(size.blocks))
        else:
            self.blocks = nnx.List([Block(dim, rngs) for _ in range(size.blocks)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens (L,) -> logits (L, vocabulary)."""

        def apply(each: Block, x: jax.Array) -> jax.Array:
            return each(x)

        apply = nnx.remat(apply, policy=self.policy) if self.remat else apply
        x = self.embed(tokens)
        if isinstance(self.blocks, Block):
            scanned = nnx.scan(apply, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            x = scanned(self.blocks, x)
        else:
            for each in self.blocks:
                x = apply(each, x)
        x = self.norm(x)
        return self.embed.attend(x) if self.head is None else self.head(x)


class LinenBlock(nn.Module):
    """`block` in Linen, as a scan takes it."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """(L, D) -> (L, D)."""

        def layer(name: str, width: int, x: jax.Array) -> jax.Array:
            return nn.Dense(width, use_bias=False, name=name)(x)

        return block(x, layer, lambda name, x: nn.RMSNorm(name=name)(x)), None


class LinenLlama(nn.Module):
    """A Llama in Linen, blocks rematerialised and scanned."""

    size: Size

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens (L,) -> logits (L, vocabulary)."""
        scanned = nn.scan(
            nn.remat(LinenBlock, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.size.blocks,
        )
        x = nn.Embed(self.size.words, self.size.dim)(tokens)
        x, _ = scanned()(x, None)
        return nn.Dense(self.size.words, use_bias=False)(nn.RMSNorm()(x))


def case(logits: Callable, params: Any, size: Size, method: str = "auto") -> Case:
    """The next tokens by `logits`, a function of (parameters, tokens)."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        found = logits(params, tokens[:-1])
        return optax.softmax_cross_entropy_with_integer_labels(found, tokens[1:]).mean()

    tokens = integers(size.words, LENGTH + 1, batch=size.batch)
    return Case(loss, params, (tokens,), method=method)


def of_nnx(layers: str, remat: bool, size: Size, *, method: str = "auto", **options: Any) -> Case:
    """A `Llama`."""
    model = Llama(size, layers, remat, **options)
    return case(lambda model, tokens: model(tokens), model, size, method)


def of_linen(size: Size) -> Case:
    """A `LinenLlama`."""
    model = LinenLlama(size)
    params = model.init(jax.random.key(0), jnp.zeros(LENGTH, int))
    return case(model.apply, params, size)


def of_jax(size: Size) -> Case:
    """The same in plain JAX: `jax.lax.scan` over `jax.checkpoint`."""
    rng, (dim, _, depth, words) = np.random.default_rng(0), size

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)

    blocks = {name: normal(depth, *shape) for name, shape in widths(dim).items()}
    blocks |= {name: jnp.ones((depth, dim)) for name in ("attention", "mlp")}
    params = {"embed": normal(words, dim), "blocks": blocks, "head": normal(dim, words)}

    def logits(params: Any, tokens: jax.Array) -> jax.Array:
        @partial(jax.checkpoint, prevent_cse=False)
        def body(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            def norm(name: str, x: jax.Array) -> jax.Array:
                return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * p[name]

            return block(x, lambda name, _, x: x @ p[name], norm), None

        x, _ = jax.lax.scan(body, params["embed"][tokens], params["blocks"])
        return x @ params["head"]

    return case(logits, params, size)


MODELS: dict[str, Callable[[Size], Case]] = {
    "nnx.remat": partial(of_nnx, "loop", True),
    "nnx.remat tied": partial(of_nnx, "loop", True, tied=True),
    "nnx.remat dots_saveable": partial(
        of_nnx, "loop", True, policy=jax.checkpoint_policies.dots_saveable
    ),
    "nnx.scan of nnx.remat": partial(of_nnx, "scan", True),
    "nn.scan of nn.remat": of_linen,
    "lax.scan of jax.checkpoint": of_jax,
    "no remat, two passes": partial(of_nnx, "loop", False, method="two_pass"),
    "nnx.scan, two passes": partial(of_nnx, "scan", False, method="two_pass"),
}
CASES = {
    f"Llama of width {size.dim}, {name}": partial(build, size)
    for size in SIZES
    for name, build in MODELS.items()
}
