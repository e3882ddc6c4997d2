"""A pre-norm causal transformer for next-token and next-item prediction."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from dpx import attention as dpx_attention
from dpx import reattention
from dpx.nn import embedding
from dpx.reattention import Moments, ParameterNoise

Attention = Callable[..., Any]


class Transformer(embedding.NextToken):
    """A decoder-only transformer with learned positions, whose embedding may be the output head.

    Attributes (constructor arguments), beside those of `NextToken`:
      num_heads: The number of heads, which divides `dim`.
      num_blocks: The number of blocks of attention and MLP.
      mlp_dim: The hidden width of the MLP, by default 4d.
      attention: A function (q, k, v, *, mask) -> (..., Lq, D), by default exact softmax attention. Calls with
        `noise_std` pass (q, k, v, key_variance, *, mask), where v and the result are Moments; the default is
        then `dpx.reattention.attend`.
    """

    def __init__(
        self,
        vocab_size: int,
        max_length: int,
        *,
        dim: int = 64,
        num_heads: int = 1,
        num_blocks: int = 2,
        mlp_dim: int | None = None,
        dropout: float = 0.0,
        tied: bool = True,
        embed_std: float = 0.02,
        attention: Attention | None = None,
        rngs: nnx.Rngs,
    ):
        self._begin(vocab_size, max_length, dim, num_blocks, dropout, embed_std, rngs)
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"num_heads={num_heads} must be at least 1 and divide dim={dim}")
        init = nnx.initializers.normal(0.02)
        self.positions = nnx.Param(init(rngs.params(), (max_length, dim)))
        self.blocks = nnx.List(
            [
                _Block(dim, num_heads, mlp_dim or 4 * dim, dropout, attention, rngs)
                for _ in range(num_blocks)
            ]
        )
        self._end(tied, rngs)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        mask: jax.Array | None = None,
        last_only: bool = False,
        dropout_key: jax.Array | None = None,
        noise_std: ParameterNoise | None = None,
    ) -> jax.Array:
        """The logits of the next token.

        With `noise_std`, the forward pass also computes the variance of each token's activations due to the
        noise in the parameters, and attention is corrected for the variance of the keys. In the residual
        stream, the coordinates of a token share their average variance, so that a block needs no second
        product of matrices, and the last block needs the variance of its keys only. The variance counts as a
        constant (see `dpx.reattention.attend`), so that gradients are those of the means.

        Args:
          tokens: (..., L) ids with any leading axes; pad short histories on the left, to one length.
          mask: (..., L) bool, True at real tokens; no token attends to padding.
          last_only: Whether to return only the logits at the last position; the last block then computes
            nothing else.
          dropout_key: If given, dropout is on. It serves the whole call, so call the model once per example,
            with a key of its own: a dropout mask belongs to one record.
          noise_std: The standard deviations of the noise in the parameters; if given, Re-Attention is on.

        Returns:
          (..., L, M), or (..., 1, M) with `last_only`; float32 at least.

        Raises:
          ValueError: for too many tokens or none, a `noise_std` for another vocabulary, or outside `jit`
            tokens that are not in the vocabulary.
        """
        length = tokens.shape[-1]
        keys = embedding.split_or_none(dropout_key, len(self.blocks) + 1)
        x = self._embedded(tokens, mask) + self.positions[...][:length]
        x = embedding.dropped(x, self.dropout, keys[0])
        noise = None
        if noise_std is not None:
            if jnp.shape(noise_std.embedding) != (vocab_size := self.embed.num_embeddings,):
                raise ValueError(
                    f"noise_std.embedding has shape {jnp.shape(noise_std.embedding)}, which must be "
                    f"({vocab_size},): give one number per token"
                )
            rate = 0.0 if dropout_key is None else self.dropout
            noise = reattention.ResidualNoise.start(noise_std, tokens, rate)
        attend = jnp.tril(jnp.ones((length, length), bool))
        if mask is not None:
            attend = attend & mask[..., None, :]
        last = len(self.blocks) - 1
        for index, (block, key) in enumerate(zip(self.blocks, keys[1:], strict=True)):
            x, noise = block(x, noise, attend, index == last, last_only and index == last, key)
        return self._logits(x)


class _Block(nnx.Module):
    """A block: x + Attention(LayerNorm(x)), then x + MLP(LayerNorm(x))."""

    def __init__(self, dim, num_heads, mlp_dim, dropout, attention, rngs):
        self.num_heads = num_heads
        self.dropout = dropout
        self.attention = attention
        self.norm1 = nnx.LayerNorm(dim, rngs=rngs)
        self.query = nnx.Linear(dim, dim, rngs=rngs)
        self.key = nnx.Linear(dim, dim, rngs=rngs)
        self.value = nnx.Linear(dim, dim, rngs=rngs)
        self.out = nnx.Linear(dim, dim, rngs=rngs)
        self.norm2 = nnx.LayerNorm(dim, rngs=rngs)
        self.up = nnx.Linear(dim, mlp_dim, rngs=rngs)
        self.down = nnx.Linear(mlp_dim, dim, rngs=rngs)

    def __call__(self, x, noise, attend, is_last, last_only, dropout_key):
        keys = embedding.split_or_none(dropout_key, 2)
        normed = self.norm1(x)
        asking = normed[..., -1:, :] if last_only else normed
        q, k, v = self.query(asking), self.key(normed), self.value(normed)
        if last_only:
            attend = attend[..., -1:, :]
        mask = attend[..., None, :, :]
        if noise is None:
            attention = self.attention or dpx_attention.dot_product_attention
            heads = attention(self._split(q), self._split(k), self._split(v), mask=mask)
        else:
            variance = noise.normed(self.norm1, x)
            # With an axis for heads, which share the variance of a token.
            key_variance = noise.dense(self.key, normed, variance)[..., None, :, :]
            value_variance = noise.dense(self.value, normed, variance)[..., None, :, :]
            attention = self.attention or reattention.attend
            heads, mixed_variance = attention(
                self._split(q),
                self._split(k),
                Moments(self._split(v), value_variance),
                key_variance,
                mask=mask,
            )
        if last_only:
            x = x[..., -1:, :]
        mixed = jnp.moveaxis(heads, -3, -2).reshape(x.shape)
        if noise is not None and not is_last:
            branch = noise.dense(self.out, mixed, mixed_variance.mean(-3))
            noise = noise.plus(branch, 0.0 if keys[0] is None else self.dropout)
        x = x + embedding.dropped(self.out(mixed), self.dropout, keys[0])
        normed = self.norm2(x)
        hidden = self.up(normed)
        activated = jax.nn.gelu(hidden, approximate=False)
        if noise is not None and not is_last:
            variance = noise.dense(self.up, normed, noise.normed(self.norm2, x))
            branch = noise.dense(self.down, activated, noise.gelu(hidden, variance))
            noise = noise.plus(branch, 0.0 if keys[1] is None else self.dropout)
        return x + embedding.dropped(self.down(activated), self.dropout, keys[1]), noise

    def _split(self, x):
        """(..., L, d) to (..., heads, L, d / heads)."""
        return jnp.moveaxis(x.reshape(*x.shape[:-1], self.num_heads, -1), -2, -3)


def generate(
    apply: Callable[[jax.Array], jax.Array], key: jax.Array, count: int, length: int, *, start: int
) -> jax.Array:
    """Token sequences, drawn by ancestral sampling.

    Args:
      apply: (count, length) tokens -> (count, length, M) logits, causal.
      key: Random key for the samples.
      count: The number of sequences.
      length: The number of tokens of a sequence.
      start: The token before the first one.

    Returns:
      (count, length) int32 tokens, without the start.
    """

    def step(tokens, position):
        logits = apply(tokens)[:, position]
        drawn = jax.random.categorical(jax.random.fold_in(key, position), logits)
        # The draw at the last position is returned, but is no input of a later one.
        return tokens.at[:, position + 1].set(drawn, mode="drop"), drawn

    tokens = jnp.full((count, length), start, jnp.int32)
    _, drawn = lax.scan(step, tokens, jnp.arange(length))
    return drawn.T
