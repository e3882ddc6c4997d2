"""What `Transformer` and `Recurrent` share: the embedding of tokens, the head, and the checks of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dpx._numerics import is_traced, promoting
from dpx._validate import check_integer


class Embed(nnx.Embed):
    """An `nnx.Embed` that returns the type to which its table is cast, so that a model computes in that type.

    `nnx.Embed` itself returns the type of its initial table: a model that is cast to bfloat16 for one call
    (`compute_dtype` of `dpx.training.fit`) would compute in float32 from the first look-up on.

    Attributes (constructor arguments):
      num_embeddings: M, the number of rows.
      features: d, the number of columns.
      std: The standard deviation of the initial entries, which are normal.
      rngs: Random keys for the initial entries.
    """

    def __init__(self, num_embeddings: int, features: int, std: float, rngs: nnx.Rngs):
        init = nnx.initializers.normal(std)
        super().__init__(num_embeddings, features, embedding_init=init, rngs=rngs)
        self.dtype = None


def check_tokens(tokens: jax.Array, vocab_size: int, mask: jax.Array | None = None) -> None:
    """Raises ValueError for no token at all and, outside `jit`, for tokens outside of the vocabulary.

    A look-up would silently take another row for some of these, or none. Where `mask` (..., L) is False there
    is padding, for which -1 is allowed: the row that it takes has no influence.
    """
    if not tokens.shape or not tokens.shape[-1]:
        raise ValueError(f"tokens have shape {tokens.shape}: pass (..., L) with at least one token")
    if is_traced(tokens, mask) or not tokens.size:
        return
    if not getattr(tokens, "is_fully_addressable", True):  # Other processes hold some tokens.
        return
    padding = False if mask is None else ~np.asarray(mask) & (np.asarray(tokens) == -1)
    numbers = np.where(padding, 0, tokens)
    least, most = np.min(numbers), np.max(numbers)
    if least < 0 or most >= vocab_size:
        wrong = least if least < 0 else most
        raise ValueError(
            f"tokens hold {wrong}, which must be from 0 to {vocab_size - 1}: give padding one of these, or "
            "-1 where a mask leaves it out"
        )


class NextToken(nnx.Module):
    """A model of the next token between its embedding and its head.

    All state is in parameters: after `graphdef, params = nnx.split(model)` it is a plain function of params.

    Attributes (constructor arguments):
      vocab_size: M, the number of tokens or items.
      max_length: L, the length of the longest input.
      dim: d, the width of the embedding and of every state.
      num_blocks: The number of layers.
      dropout: The rate after the embedding and after each residual branch.
      tied: Whether the logits use the embedding table (plus a bias) or a head of their own.
      embed_std: The standard deviation of the initial embedding. If it is small, the first logits of a tied
        model are close to its output bias.
      rngs: Random keys for the initial parameters.
    """

    def _begin(self, vocab_size, max_length, dim, num_blocks, dropout, embed_std, rngs):
        sizes = {"vocab_size": vocab_size, "max_length": max_length, "dim": dim}
        for name, value in (sizes | {"num_blocks": num_blocks}).items():
            check_integer(value, name)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout} must be in [0, 1)")
        self.max_length, self.dropout = max_length, dropout
        self.embed = Embed(vocab_size, dim, embed_std, rngs)

    def _end(self, tied, rngs):
        vocab_size, dim = self.embed.num_embeddings, self.embed.features
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.output_bias = nnx.Param(jnp.zeros(vocab_size))
        self.head = None if tied else nnx.Linear(dim, vocab_size, use_bias=False, rngs=rngs)

    def _embedded(self, tokens, mask):
        """The embeddings (..., L, d) of tokens, which are checked."""
        if tokens.shape[-1] > self.max_length:
            raise ValueError(
                f"tokens of length {tokens.shape[-1]} exceed max_length={self.max_length}"
            )
        check_tokens(tokens, self.embed.num_embeddings, mask)
        return self.embed(tokens)

    def _logits(self, x):
        """The logits (..., L, M), in float32 at least, of the last layer's output (..., L, d)."""
        x = self.norm(x)
        logits = self.embed.attend(x) if self.head is None else self.head(x)
        return _biased(logits, self.output_bias[...])


def dropped(x, rate, key):
    """x after dropout at `rate`; without a key, x itself."""
    return x if key is None else nnx.Dropout(rate, deterministic=False)(x, rngs=key)


def split_or_none(key, count):
    """As many keys, or without a key as many times None."""
    return [None] * count if key is None else list(jax.random.split(key, count))


@promoting
def _biased(logits: jax.Array, bias: jax.Array) -> jax.Array:
    """Logits plus bias in at least float32, since losses are differences of large numbers."""
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    return logits.astype(dtype) + bias.astype(dtype)
