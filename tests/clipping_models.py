"""Unmodified models of every framework, each as (loss of one example, parameters, batch)."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

VOCABULARY, LENGTH, WIDTH, BATCH = 13, 6, 8, 5
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def tokens(seed=0, batch=BATCH, length=LENGTH):
    """Few distinct tokens, so that they repeat and are targets as well; zero is padding."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, 5, size=(batch, length))
    ids[:, 1] = ids[:, 0]
    ids[0, 3:] = 0
    return ids


def next_token_loss(logits, ids):
    weights = ids[1:] != 0
    return jnp.sum(cross_entropy(logits[:-1], ids[1:]) * weights) / 3.0


def vectors(width=WIDTH, batch=BATCH, seed=1):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(batch, width)).astype("f4"), rng.normal(size=batch).astype("f4")


class LinenBlock(nn.Module):
    norm: type = nn.LayerNorm
    gated: bool = False

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(jnp.ones(x.shape[0]))
        x = x + nn.MultiHeadDotProductAttention(2)(self.norm()(x), mask=mask)
        h = self.norm()(x)
        up = nn.Dense(12)(h)
        up = up * nn.silu(nn.Dense(12)(h)) if self.gated else nn.gelu(up)
        return x + nn.Dense(WIDTH)(up)


class LinenTransformer(nn.Module):
    tied: bool = True
    norm: type = nn.LayerNorm
    gated: bool = False
    remat: bool = False
    scan: int = 0

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(VOCABULARY, WIDTH)
        positions = self.param("positions", nn.initializers.normal(0.1), (20, WIDTH))
        x = embed(ids) + positions[: ids.shape[0]]
        block = nn.remat(LinenBlock) if self.remat else LinenBlock
        if self.scan:
            blocks = nn.scan(
                lambda module, x, _: (module(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.scan,
            )
            x, _ = blocks(block(self.norm, self.gated), x, None)
        else:
            x = block(self.norm, self.gated)(block(self.norm, self.gated)(x))
        x = self.norm()(x)
        return embed.attend(x) if self.tied else nn.Dense(VOCABULARY)(x)


def linen(**options):
    model = LinenTransformer(**options)
    ids = tokens()
    params = model.init(jax.random.key(0), ids[0])
    params = jax.tree.map(lambda p: p + 0.05 * jnp.sin(jnp.arange(p.size)).reshape(p.shape), params)
    return lambda p, ids: next_token_loss(model.apply(p, ids), ids), params, (ids,)


class NnxTransformer(nnx.Module):
    def __init__(self, tied, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 12, rngs=rngs)
        self.down = nnx.Linear(12, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2)
        self.head = None if tied else nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, ids, key):
        x = self.embed(ids)
        mask = nnx.make_causal_mask(ids)
        x = x + self.attention(self.norm(x), mask=mask)
        x = x + self.down(jax.nn.relu(self.up(self.norm(x))))
        x = self.dropout(x, deterministic=False, rngs=key)
        return self.embed.attend(x) if self.head is None else self.head(x)


def nnx_transformer(tied, as_state=False):
    model = NnxTransformer(tied, nnx.Rngs(0))
    ids, keys = tokens(), jax.random.split(jax.random.key(3), BATCH)

    def loss(model, ids, key):
        return next_token_loss(model(ids, key), ids)

    if not as_state:
        return loss, model, (ids, keys)
    graph, state = nnx.split(model)
    return lambda s, *example: loss(nnx.merge(graph, s), *example), state, (ids, keys)


def recurrent(cell):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            embed = nn.Embed(VOCABULARY, WIDTH)
            return embed.attend(nn.RNN(cell(WIDTH))(embed(ids)))

    model, ids = Model(), tokens()
    params = model.init(jax.random.key(0), ids[0])
    return lambda p, ids: next_token_loss(model.apply(p, ids), ids), params, (ids,)


def nnx_recurrent():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
            self.rnn = nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs))

        def __call__(self, ids):
            return self.embed.attend(self.rnn(self.embed(ids)[None])[0])

    return lambda m, ids: next_token_loss(m(ids), ids), Model(nnx.Rngs(0)), (tokens(),)


def convolutional():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, image):
            x = nn.relu(nn.Conv(4, (3, 3), strides=2)(image))
            x = nn.relu(nn.Conv(5, (2, 3), kernel_dilation=2, padding="VALID")(x))
            x = nn.Conv(5, (3, 3), feature_group_count=5)(x)
            x = nn.Conv(3, (3,))(x.reshape(-1, 5))
            return nn.Dense(3)(x.mean(0))

    rng = np.random.default_rng(0)
    images = rng.normal(size=(BATCH, 14, 14, 2)).astype("f4")
    model = Model()
    params = model.init(jax.random.key(0), images[0])
    labels = rng.integers(0, 3, BATCH)
    return lambda p, x, y: cross_entropy(model.apply(p, x), y), params, (images, labels)


def equinox_mlp():
    model = eqx.nn.MLP(WIDTH, "scalar", 9, 2, key=jax.random.key(0))
    return lambda m, x, y: (m(x) - y) ** 2, model, vectors()


def haiku_mlp():
    network = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([9, 1])(x)[0]))
    x, y = vectors()
    params = network.init(jax.random.key(0), x[0])
    return lambda p, x, y: (network.apply(p, x) - y) ** 2, params, (x, y)


MODELS = {
    "linen tied, LayerNorm": lambda: linen(),
    "linen untied, RMSNorm, gated": lambda: linen(tied=False, norm=nn.RMSNorm, gated=True),
    "linen remat": lambda: linen(remat=True),
    "linen scan": lambda: linen(scan=3),
    "linen scan of remat": lambda: linen(scan=2, remat=True),
    "nnx tied, dropout": lambda: nnx_transformer(True),
    "nnx untied": lambda: nnx_transformer(False),
    "nnx state": lambda: nnx_transformer(True, as_state=True),
    "linen GRU, tied": lambda: recurrent(nn.GRUCell),
    "linen LSTM, tied": lambda: recurrent(nn.OptimizedLSTMCell),
    "nnx GRU, tied": nnx_recurrent,
    "CNN": convolutional,
    "equinox MLP": equinox_mlp,
    "haiku MLP": haiku_mlp,
}
