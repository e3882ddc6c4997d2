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


class Transformer(nnx.Module):
    """A decoder-only transformer with learned positions, whose embedding may be the output head.

    All state is in parameters: after `graphdef, params = nnx.split(model)` it is a plain function of params.

    Attributes (constructor arguments):
      vocab_size: M, the number of tokens or items.
      max_length: L, the length of the longest input.
      dim: d, the width of the residual stream.
      num_heads: The number of heads, which divides `dim`.
      num_blocks: The number of blocks of attention and MLP.
      mlp_dim: The hidden width of the MLP, by default 4d.
      dropout: The rate after the embedding and after each residual branch.
      tied: Whether the logits use the embedding table (plus a bias) or a head of their own.
      embed_std: The standard deviation of the initial embedding. If it is small, the first logits of a tied
        model are close to its output bias.
      attention: A function (q, k, v, *, mask) -> (..., Lq, D), by default exact softmax attention. Calls with
        `noise_std` pass (q, k, v, key_variance, *, mask), where v and the result are Moments; the default is
        then `dpx.reattention.attend`.
      rngs: Random keys for the initial parameters.
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
        for name, value in (("vocab_size", vocab_size), ("max_length", max_length), ("dim", dim)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if num_blocks < 1 or num_heads < 1 or dim % num_heads:
            raise ValueError(
                f"num_blocks={num_blocks} and num_heads={num_heads} must be at least 1, and heads "
                f"must divide dim={dim}"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout} must be in [0, 1)")
        init = nnx.initializers.normal(0.02)
        self.max_length = max_length
        self.dropout = dropout
        self.embed = embedding.Embed(vocab_size, dim, embed_std, rngs)
        self.positions = nnx.Param(init(rngs.params(), (max_length, dim)))
        self.blocks = nnx.List(
            [
                _Block(dim, num_heads, mlp_dim or 4 * dim, dropout, attention, rngs)
                for _ in range(num_blocks)
            ]
        )
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.output_bias = nnx.Param(jnp.zeros(vocab_size))
        self.head = None if tied else nnx.Linear(dim, vocab_size, use_bias=False, rngs=rngs)

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
        if length > self.max_length:
            raise ValueError(f"tokens of length {length} exceed max_length={self.max_length}")
        embedding.check_tokens(tokens, self.embed.num_embeddings, mask)
        keys = _split_or_none(dropout_key, len(self.blocks) + 1)
        x = self.embed(tokens) + self.positions[...][:length]
        x = _dropout(x, self.dropout, keys[0])
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
        x = self.norm(x)
        logits = self.embed.attend(x) if self.head is None else self.head(x)
        return embedding.biased(logits, self.output_bias[...])


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
        keys = _split_or_none(dropout_key, 2)
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
        x = x + _dropout(self.out(mixed), self.dropout, keys[0])
        normed = self.norm2(x)
        hidden = self.up(normed)
        activated = jax.nn.gelu(hidden, approximate=False)
        if noise is not None and not is_last:
            variance = noise.dense(self.up, normed, noise.normed(self.norm2, x))
            branch = noise.dense(self.down, activated, noise.gelu(hidden, variance))
            noise = noise.plus(branch, 0.0 if keys[1] is None else self.dropout)
        return x + _dropout(self.down(activated), self.dropout, keys[1]), noise

    def _split(self, x):
        """(..., L, d) to (..., heads, L, d / heads)."""
        return jnp.moveaxis(x.reshape(*x.shape[:-1], self.num_heads, -1), -2, -3)


def _split_or_none(key, count):
    return [None] * count if key is None else list(jax.random.split(key, count))


def _dropout(x, rate, key):
    return x if key is None else nnx.Dropout(rate, deterministic=False)(x, rngs=key)


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
