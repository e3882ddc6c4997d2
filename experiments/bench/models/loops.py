"""Recurrent cells, scans, rematerialisation, branches and loops."""

from functools import partial

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import lax

from experiments.bench.models.building import equinox, haiku, linen, normal, of_nnx, plain, weights
from experiments.bench.models.measure import Case

WIDTH, LENGTH, DEPTH = 64, 24, 4
KEY = jax.random.key(0)


def sequences() -> jax.Array:
    """Inputs of recurrent layers."""
    return normal(100, WIDTH)


def masked(p, x):
    """Layers in a scan that mask their weights."""
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ jnp.tril(w)), None), x, p["w"])
    return x


class Block(nn.Module):
    """A small residual block."""

    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))), None


class Stack(nn.Module):
    """Blocks in a scan, perhaps rematerialised."""

    remat: bool

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        scan = nn.scan(block, {"params": 0}, split_rngs={"params": True}, length=DEPTH)
        return scan()(x, None)[0]


class NnxBlock(nnx.Module):
    """The same block in NNX."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


def nnx_stack(remat: bool) -> Case:
    """Blocks whose parameters `nnx.vmap` stacked, in `nnx.scan`."""

    @nnx.split_rngs(splits=DEPTH)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return NnxBlock(rngs)

    def call(block, x):
        return block(x)

    once = nnx.remat(call) if remat else call

    def apply(blocks, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, block):
            return once(block, x)

        return run(x, blocks)

    return of_nnx(make(nnx.Rngs(0)), sequences(), call=apply)


def haiku_recurrent(core):
    """A Haiku core, unrolled over positions."""

    def apply(x):
        cell = core(WIDTH)
        return hk.dynamic_unroll(cell, x, cell.initial_state(None))[0]

    return haiku(apply, sequences())


def equinox_recurrent(cell, start) -> Case:
    """An Equinox cell in a scan."""

    def apply(cell, x):
        def step(state, x):
            state = cell(x, state)
            return state, state[0] if isinstance(state, tuple) else state

        return lax.scan(step, start, x)[1]

    return equinox(cell(WIDTH, WIDTH, key=KEY), sequences(), call=apply)


def block(w, v, x):
    """A residual block of two matrices."""
    return x + jnp.tanh(x @ w) @ v


STACKED = {"w": (DEPTH, WIDTH, WIDTH), "v": (DEPTH, WIDTH, WIDTH)}
SHARED = {"w": (WIDTH, WIDTH), "v": (WIDTH, WIDTH)}


def scanned(wrap):
    """Blocks of stacked parameters, in a scan whose body is wrapped."""

    def apply(p, x):
        body = wrap(lambda x, pair: (block(pair[0], pair[1], x), None))
        return lax.scan(body, x, (p["w"], p["v"]))[0]

    return plain(apply, weights(**STACKED), sequences())


def shared(apply):
    """One block, used several times."""
    return plain(apply, weights(**SHARED), sequences())


def unrolled(p, x, wrap=jax.checkpoint):
    """Blocks of stacked parameters, one after the other."""
    for w, v in zip(p["w"], p["v"], strict=True):
        x = wrap(block)(w, v, x)
    return x


def branches(p, x):
    """A branch that the data choose."""
    return lax.cond(x[0, 0] > 0, lambda x: block(p["w"], p["v"], x), lambda x: x @ p["w"], x)


def switch(p, x):
    """One of three branches."""
    which = (jnp.abs(x[0, 0]) * 3).astype(int) % 3
    two = [lambda x: x @ p["w"], lambda x: jnp.tanh(x @ p["v"]), lambda x: x @ p["w"] @ p["v"]]
    return lax.switch(which, two, x)


def while_loop(p, x):
    """A loop of unknown length outside the gradient, and one product within."""
    start = lax.stop_gradient(x)
    found = lax.while_loop(lambda y: jnp.sum(y**2) > 1, lambda y: 0.5 * y, start)
    return block(p["w"], p["v"], x + found)


def chunked(p, x):
    """Positions in chunks by `lax.map`, rematerialised, as for a large output head."""
    chunks = x.reshape(4, -1, WIDTH)
    return lax.map(jax.checkpoint(lambda c: block(p["w"], p["v"], c)), chunks)


CASES = {
    "linen LSTM": lambda: linen(nn.RNN(nn.LSTMCell(WIDTH)), sequences()),
    "linen OptimizedLSTM": lambda: linen(nn.RNN(nn.OptimizedLSTMCell(WIDTH)), sequences()),
    "linen GRU": lambda: linen(nn.RNN(nn.GRUCell(WIDTH)), sequences()),
    "linen bidirectional": lambda: linen(
        nn.Bidirectional(nn.RNN(nn.SimpleCell(WIDTH)), nn.RNN(nn.MGUCell(WIDTH))), sequences()),
    "linen ConvLSTM": lambda: linen(nn.RNN(nn.ConvLSTMCell(4, (3, 3))), normal(6, 10, 10, 2)),
    "nnx LSTM": lambda: of_nnx(
        nnx.RNN(nnx.LSTMCell(WIDTH, WIDTH, rngs=nnx.Rngs(0))), sequences(), call=lambda m, x: m(x[None])[0]),
    "nnx GRU": lambda: of_nnx(
        nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=nnx.Rngs(0))), sequences(), call=lambda m, x: m(x[None])[0]),
    "haiku LSTM": lambda: haiku_recurrent(hk.LSTM),
    "haiku GRU": lambda: haiku_recurrent(hk.GRU),
    "haiku VanillaRNN": lambda: haiku_recurrent(hk.VanillaRNN),
    "equinox LSTMCell": lambda: equinox_recurrent(
        eqx.nn.LSTMCell, (jnp.zeros(WIDTH), jnp.zeros(WIDTH))),
    "equinox GRUCell": lambda: equinox_recurrent(eqx.nn.GRUCell, jnp.zeros(WIDTH)),
    "linen scan": lambda: linen(Stack(False), sequences()),
    "linen scan of remat": lambda: linen(Stack(True), sequences()),
    "nnx scan": lambda: nnx_stack(False),
    "nnx scan of remat": lambda: nnx_stack(True),
    "scan of stacked weights": lambda: scanned(lambda body: body),
    "scan of masked weights": lambda: plain(masked, weights(w=(4, 256, 256)), normal(32, 256)),
    "scan of remat": lambda: scanned(jax.checkpoint),
    "scan of remat that saves products": lambda: scanned(
        lambda body: jax.checkpoint(body, policy=jax.checkpoint_policies.dots_saveable)),
    "remat, unrolled": lambda: plain(unrolled, weights(**STACKED), sequences()),
    "stacked weights, unrolled": lambda: plain(
        partial(unrolled, wrap=lambda block: block),
        weights(w=(DEPTH, 256, 512), v=(DEPTH, 512, 256)), normal(32, 256)),
    "weights shared by a loop": lambda: shared(
        lambda p, x: lax.fori_loop(0, 3, lambda _, x: block(p["w"], p["v"], x), x)),
    "cond": lambda: shared(branches),
    "switch": lambda: shared(switch),
    "while loop outside the gradient": lambda: shared(while_loop),
    "chunks by lax.map of remat": lambda: shared(chunked),
    "associative scan": lambda: shared(
        lambda p, x: lax.associative_scan(
            lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (jax.nn.sigmoid(x @ p["w"]), x @ p["v"]))[1]),
}  # fmt: skip
