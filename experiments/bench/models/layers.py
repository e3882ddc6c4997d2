"""One layer, or a few, of Linen, NNX, Haiku and Equinox."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from experiments.bench.models.building import (
    BATCH,
    equinox,
    haiku,
    integers,
    linen,
    next_token,
    normal,
    of_nnx,
    plain,
)
from experiments.bench.models.measure import Case

WIDTH, LENGTH, VOCABULARY = 64, 24, 512
KEY = jax.random.key(0)


def rngs() -> nnx.Rngs:
    """Fresh random streams."""
    return nnx.Rngs(0)


class LinenTied(nn.Module):
    """A look-up and the output head with the same table."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCABULARY, WIDTH)
        return embed.attend(nn.gelu(nn.Dense(WIDTH)(embed(tokens))))


class NnxTied(nnx.Module):
    """The same in NNX."""

    def __init__(self):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs())
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs())

    def __call__(self, tokens):
        return self.embed.attend(nnx.gelu(self.up(self.embed(tokens))))


class NnxDropout(nnx.Module):
    """A dropout layer that is given a key for each record."""

    def __init__(self):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs())
        self.down = nnx.Linear(WIDTH, WIDTH, rngs=rngs())
        self.dropout = nnx.Dropout(0.3)

    def __call__(self, x, key):
        return self.down(self.dropout(self.up(x), deterministic=False, rngs=key))


def haiku_tied(tokens):
    """A table that is looked up and transposed."""
    embed = hk.Embed(VOCABULARY, WIDTH)
    x = jax.nn.gelu(hk.Linear(WIDTH)(embed(tokens)))
    return x @ embed.embeddings.T


class EquinoxEmbedding(eqx.Module):
    """An embedding as Equinox's documentation has it: one token, vectorised."""

    embed: eqx.nn.Embedding
    down: eqx.nn.Linear

    def __init__(self, vocabulary=8192):
        self.embed = eqx.nn.Embedding(vocabulary, WIDTH, key=KEY)
        self.down = eqx.nn.Linear(WIDTH, 8, key=KEY)

    def __call__(self, tokens):
        return jax.vmap(self.down)(jax.vmap(self.embed)(tokens))


def language_model(module) -> Case:
    """Next tokens by an NNX module."""
    tokens = integers(VOCABULARY, LENGTH)
    return Case(lambda m, ids: next_token(m(ids), ids), module, (tokens,))


def frozen_linen() -> Case:
    """A BatchNorm with the statistics that it came with."""
    layers = [
        nn.Conv(8, (3, 3)),
        nn.BatchNorm(use_running_average=True),
        nn.relu,
        nn.Conv(8, (3, 3)),
    ]
    return linen(nn.Sequential(layers), normal(12, 12, 3))


def frozen_nnx() -> Case:
    """The same in NNX: parameters apart from the statistics."""
    module = nnx.Sequential(
        nnx.Conv(3, 8, (3, 3), rngs=rngs()),
        nnx.BatchNorm(8, use_running_average=True, rngs=rngs()),
        nnx.Conv(8, 8, (3, 3), rngs=rngs()),
    )
    return of_nnx(module, normal(12, 12, 3), call=lambda m, x: m(x[None])[0])


def frozen_haiku() -> Case:
    """The same in Haiku, whose statistics are a state."""

    def model(training):
        def apply(x):
            normed = hk.BatchNorm(True, True, 0.9)(hk.Conv2D(8, 3)(x)[None], training)
            return hk.Conv2D(8, 3)(normed)[0]

        return hk.transform_with_state(apply)

    x = normal(12, 12, 3)
    params, state = model(True).init(KEY, x[0])
    return plain(lambda p, x: model(False).apply(p, state, None, x)[0], params, x)


def training_linen() -> Case:
    """A BatchNorm that mixes examples: refused."""
    module = nn.BatchNorm(use_running_average=False)
    x = normal(WIDTH)
    variables = module.init(KEY, x)

    def loss(params, x):
        rest = {"params": params, "batch_stats": variables["batch_stats"]}
        return jnp.sum(module.apply(rest, x[None], mutable=["batch_stats"])[0] ** 3)

    return Case(loss, variables["params"], (x,))


CASES = {
    "linen Dense": lambda: linen(nn.Dense(WIDTH), normal(LENGTH, WIDTH)),
    "linen DenseGeneral": lambda: linen(nn.DenseGeneral((4, 16), axis=(-2, -1)), normal(8, 4, 16)),
    "linen Einsum": lambda: linen(nn.Einsum((4, WIDTH, 16), "td,hdk->htk"), normal(LENGTH, WIDTH)),
    "linen tied embedding": lambda: linen(LinenTied(), integers(VOCABULARY, LENGTH)),
    "linen LayerNorm, RMSNorm, GroupNorm": lambda: linen(
        nn.Sequential([nn.Dense(WIDTH), nn.LayerNorm(), nn.Dense(WIDTH), nn.RMSNorm(),
                       nn.Dense(WIDTH), nn.GroupNorm(8)]), normal(LENGTH, WIDTH)),
    "linen PReLU": lambda: linen(nn.Sequential([nn.Dense(WIDTH), nn.PReLU(), nn.Dense(8)]), normal(WIDTH)),
    "linen frozen BatchNorm": frozen_linen,
    "linen BatchNorm in training": training_linen,
    "nnx Linear stack": lambda: of_nnx(
        nnx.Sequential(nnx.Linear(WIDTH, 128, rngs=rngs()), nnx.relu, nnx.Linear(128, 8, rngs=rngs())),
        normal(WIDTH)),
    "nnx LinearGeneral": lambda: of_nnx(
        nnx.LinearGeneral((8, 16), (4, 16), axis=(-2, -1), rngs=rngs()), normal(LENGTH, 8, 16)),
    "nnx Einsum": lambda: of_nnx(
        nnx.Einsum("td,hdk->thk", (4, WIDTH, 16), (4, 16), rngs=rngs()), normal(LENGTH, WIDTH)),
    "nnx tied embedding": lambda: language_model(NnxTied()),
    "nnx frozen BatchNorm": frozen_nnx,
    "nnx Dropout by keys": lambda: of_nnx(
        NnxDropout(), normal(LENGTH, WIDTH), jax.random.split(KEY, BATCH)),
    "nnx LoRA, wrt the adapters": lambda: of_nnx(
        nnx.LoRALinear(WIDTH, WIDTH, lora_rank=4, rngs=rngs()), normal(LENGTH, WIDTH),
        wrt=nnx.LoRAParam),
    "nnx LoRA, all": lambda: of_nnx(
        nnx.LoRALinear(WIDTH, WIDTH, lora_rank=4, rngs=rngs()), normal(LENGTH, WIDTH)),
    "haiku MLP": lambda: haiku(lambda x: hk.nets.MLP([128, 8])(x), normal(WIDTH)),
    "haiku LayerNorm, Bias": lambda: haiku(
        lambda x: hk.Bias()(hk.LayerNorm(-1, True, True)(hk.Linear(WIDTH)(x))), normal(LENGTH, WIDTH)),
    "haiku tied embedding": lambda: haiku(haiku_tied, integers(VOCABULARY, LENGTH)),
    "haiku frozen BatchNorm": frozen_haiku,
    "haiku MultiHeadAttention": lambda: haiku(
        lambda x: hk.MultiHeadAttention(4, 16, w_init=hk.initializers.VarianceScaling())(x, x, x),
        normal(LENGTH, WIDTH)),
    "equinox MLP": lambda: equinox(eqx.nn.MLP(WIDTH, 8, 128, 2, key=KEY), normal(WIDTH)),
    "equinox Linear by vmap": lambda: equinox(
        eqx.nn.Linear(WIDTH, WIDTH, key=KEY), normal(LENGTH, WIDTH), call=lambda m, x: jax.vmap(m)(x)),
    "equinox Embedding by vmap": lambda: equinox(EquinoxEmbedding(), integers(8192, LENGTH)),
    "equinox LayerNorm by vmap": lambda: equinox(
        eqx.nn.Sequential([eqx.nn.Linear(WIDTH, WIDTH, key=KEY), eqx.nn.LayerNorm(WIDTH)]),
        normal(LENGTH, WIDTH), call=lambda m, x: jax.vmap(m)(x)),
    "equinox MultiheadAttention": lambda: equinox(
        eqx.nn.MultiheadAttention(4, WIDTH, key=KEY), normal(LENGTH, WIDTH),
        call=lambda m, x: m(x, x, x, mask=np.tril(np.ones((LENGTH, LENGTH), bool)))),
    "equinox PReLU, GroupNorm": lambda: equinox(
        eqx.nn.Sequential([eqx.nn.Conv2d(3, 8, 3, key=KEY), eqx.nn.GroupNorm(4, 8),
                           eqx.nn.Lambda(eqx.nn.PReLU()),
                           eqx.nn.Conv2d(8, 8, 3, key=KEY)]), normal(3, 12, 12)),
}  # fmt: skip
