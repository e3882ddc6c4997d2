"""Attention in its many forms, and mixtures of experts."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from experiments.bench.models.building import linen, normal, of_nnx, plain, weights

WIDTH, HEADS, LENGTH = 64, 4, 32
SIZE = WIDTH // HEADS
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))


def scores_to_out(scores, v):
    """Causal softmax attention from scores (H, T, S) and values (S, H, K)."""
    weight = jax.nn.softmax(jnp.where(CAUSAL, scores, -1e9))
    return jnp.einsum("hts,shk->thk", weight, v)


def projections(p, x, kv_heads=HEADS):
    """Queries, keys and values."""
    q = jnp.einsum("td,dhk->thk", x, p["q"])
    k, v = (jnp.einsum("td,dhk->thk", x, p[name]) for name in "kv")
    return q, *(jnp.repeat(a, HEADS // kv_heads, axis=1) for a in (k, v))


def grouped(kv_heads):
    """Grouped-query attention; multi-query for one head."""

    def attend(p, x):
        q, k, v = projections(p, x, kv_heads)
        out = scores_to_out(jnp.einsum("thk,shk->hts", q, k) / SIZE**0.5, v)
        return jnp.einsum("thk,hkd->td", out, p["o"])

    shapes = {"q": (WIDTH, HEADS, SIZE), "o": (HEADS, SIZE, WIDTH)}
    shapes |= dict.fromkeys("kv", (WIDTH, kv_heads, SIZE))
    return plain(attend, weights(**shapes), normal(LENGTH, WIDTH))


def full(scores, **extra):
    """Attention whose scores are a function of (params, q, k)."""
    shapes = dict.fromkeys("qkv", (WIDTH, HEADS, SIZE)) | {"o": (HEADS, SIZE, WIDTH)}

    def attend(p, x):
        q, k, v = projections(p, x)
        return jnp.einsum("thk,hkd->td", scores_to_out(scores(p, q, k), v), p["o"])

    return plain(attend, weights(**shapes, **extra), normal(LENGTH, WIDTH))


def rotary(p, q, k):
    """Rotary positions."""
    angle = np.arange(LENGTH)[:, None] / 100 ** (np.arange(SIZE // 2) / (SIZE // 2))
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def turn(x):
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    return jnp.einsum("thk,shk->hts", turn(q), turn(k)) / SIZE**0.5


def relative_bias(p, q, k):
    """A learned bias for every distance, as in T5."""
    distance = np.clip(np.arange(LENGTH)[:, None] - np.arange(LENGTH), 0, 15)
    return jnp.einsum("thk,shk->hts", q, k) / SIZE**0.5 + p["bias"][distance].transpose(2, 0, 1)


def soft_cap(p, q, k):
    """Queries and keys normalised with a learned scale, and scores capped, as in Gemma."""

    def normed(x, scale):
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * (1 + scale)

    q, k = normed(q, p["q_scale"]), normed(k, p["k_scale"])
    return 50 * jnp.tanh(jnp.einsum("thk,shk->hts", q, k) / 50)


def linear_attention(p, x):
    """Attention without a softmax, as a recurrence over positions."""
    q, k, v = (jax.nn.elu(x @ p[name]) + 1 for name in "qkv")

    def step(state, now):
        q, k, v = now
        state = 0.9 * state + jnp.outer(k, v)
        return state, q @ state

    return jax.lax.scan(step, jnp.zeros((WIDTH, WIDTH)), (q, k, v))[1] @ p["o"]


def latent(p, x):
    """Keys and values from a common low-rank code."""
    code = x @ p["down"]
    q = (x @ p["q"]).reshape(LENGTH, HEADS, SIZE)
    k, v = jnp.split((code @ p["up"]).reshape(LENGTH, HEADS, 2 * SIZE), 2, axis=-1)
    out = scores_to_out(jnp.einsum("thk,shk->hts", q, k) / SIZE**0.5, v)
    return out.reshape(LENGTH, WIDTH) @ p["o"]


def fused(p, x):
    """One matrix for queries, keys and values, split after the product."""
    q, k, v = (a.reshape(LENGTH, HEADS, SIZE) for a in jnp.split(x @ p["qkv"], 3, axis=-1))
    out = jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    return out.reshape(LENGTH, WIDTH) @ p["o"]


def cross(p, x, y):
    """Queries of one sequence, keys and values of another."""
    scores = (x @ p["q"]) @ (y @ p["k"]).T / WIDTH**0.5
    return jax.nn.softmax(scores) @ (y @ p["v"]) @ p["o"]


def dense_experts(p, x):
    """Every expert on every token, weighted by the gate."""
    gate = jax.nn.softmax(x @ p["gate"])
    hidden = jax.nn.gelu(jnp.einsum("td,edf->tef", x, p["up"]))
    return jnp.einsum("tef,efd,te->td", hidden, p["down"], gate)


def dispatched_experts(p, x):
    """The best expert of every token by one-hot products with a capacity, as in the Switch Transformer."""
    gate = jax.nn.softmax(x @ p["gate"])
    chosen = jax.nn.one_hot(jnp.argmax(gate, -1), 4)
    place = (jnp.cumsum(chosen, 0) * chosen - 1).astype(int)
    dispatch = jax.nn.one_hot(place, 16) * chosen[..., None]
    hidden = jax.nn.relu(
        jnp.einsum("ecd,edf->ecf", jnp.einsum("tec,td->ecd", dispatch, x), p["up"])
    )
    out = jnp.einsum("ecf,efd->ecd", hidden, p["down"])
    return jnp.einsum("tec,ecd,te->td", dispatch, out, gate)


def gathered_experts(p, x):
    """The matrices of the two best experts of every token, looked up."""
    gate, best = jax.lax.top_k(jax.nn.softmax(x @ p["gate"]), 2)
    hidden = jax.nn.gelu(jnp.einsum("td,tjdf->tjf", x, p["up"][best]))
    return jnp.einsum("tjf,tjfd,tj->td", hidden, p["down"][best], gate)


def ragged_experts(p, x):
    """Tokens sorted by expert, and one ragged product, which JAX cannot vectorise."""
    gate = jax.nn.softmax(x @ p["gate"])
    best = jnp.argmax(gate, -1)
    order = jnp.argsort(best)
    sizes = jnp.bincount(best, length=4)
    hidden = jax.nn.gelu(jax.lax.ragged_dot(x[order], p["up"], sizes))
    out = jax.lax.ragged_dot(hidden, p["down"], sizes)
    return out[jnp.argsort(order)] * jnp.max(gate, -1, keepdims=True)


EXPERTS = {"gate": (WIDTH, 4), "up": (4, WIDTH, 96), "down": (4, 96, WIDTH)}
SQUARE = dict.fromkeys("qkvo", (WIDTH, WIDTH))


def experts(function, **options):
    """A mixture of four experts."""
    return plain(function, weights(**EXPERTS), normal(LENGTH, WIDTH), **options)


CASES = {
    "linen MultiHeadDotProductAttention": lambda: linen(
        nn.MultiHeadDotProductAttention(HEADS), normal(LENGTH, WIDTH)),
    "nnx MultiHeadAttention": lambda: of_nnx(
        nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0)), normal(LENGTH, WIDTH)),
    "attention, grouped queries": lambda: grouped(2),
    "attention, one key head": lambda: grouped(1),
    "attention, rotary": lambda: full(rotary),
    "attention, relative bias": lambda: full(relative_bias, bias=(16, HEADS)),
    "attention, soft cap, normed queries": lambda: full(soft_cap, q_scale=(SIZE,), k_scale=(SIZE,)),
    "attention, linear, by scan": lambda: plain(linear_attention, weights(**SQUARE), normal(LENGTH, WIDTH)),
    "attention, latent": lambda: plain(
        latent, weights(down=(WIDTH, 16), up=(16, 2 * WIDTH), q=(WIDTH, WIDTH), o=(WIDTH, WIDTH)),
        normal(LENGTH, WIDTH)),
    "attention, fused projection": lambda: plain(
        fused, weights(qkv=(WIDTH, 3 * WIDTH), o=(WIDTH, WIDTH)), normal(LENGTH, WIDTH)),
    "attention, cross": lambda: plain(
        cross, weights(**SQUARE), normal(LENGTH, WIDTH), normal(48, WIDTH, seed=1)),
    "experts, dense": lambda: experts(dense_experts),
    "experts, dispatched": lambda: experts(dispatched_experts),
    "experts, gathered": lambda: experts(gathered_experts),
    "experts, ragged_dot, one example at a time": lambda: experts(ragged_experts, microbatch_size=1),
    "experts, ragged_dot, by vmap": lambda: experts(ragged_experts),
}  # fmt: skip
