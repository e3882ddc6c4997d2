"""The table of token embeddings of `Transformer` and `Recurrent`, and the checks of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dpx._numerics import is_traced, promoting


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


@promoting
def biased(logits: jax.Array, bias: jax.Array) -> jax.Array:
    """Logits plus bias in at least float32, since losses are differences of large numbers."""
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    return logits.astype(dtype) + bias.astype(dtype)
