"""GRU and LSTM language models, baselines of the transformer with the same inputs, outputs and tied head."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from dpx.nn import embedding

_GATES = {"gru": 3, "lstm": 4}


class Recurrent(embedding.NextToken):
    """A stack of GRUs (Cho et al., arXiv 1406.1078) or LSTMs (Hochreiter & Schmidhuber 1997) with residuals.

    The products with the inputs are computed for all positions at once, before the scan.

    Attributes (constructor arguments), beside those of `NextToken`:
      cell: "gru" or "lstm".
    """

    def __init__(
        self,
        vocab_size: int,
        max_length: int,
        *,
        cell: str,
        dim: int = 64,
        num_blocks: int = 1,
        dropout: float = 0.0,
        tied: bool = True,
        embed_std: float = 0.02,
        rngs: nnx.Rngs,
    ):
        if cell not in _GATES:
            raise ValueError(f"cell={cell!r} must be one of {sorted(_GATES)}")
        self._begin(vocab_size, max_length, dim, num_blocks, dropout, embed_std, rngs)
        self.layers = nnx.List([_Layer(cell, dim, rngs) for _ in range(num_blocks)])
        self._end(tied, rngs)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        mask: jax.Array | None = None,
        last_only: bool = False,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The logits of the next token.

        Args:
          tokens: (..., L) ids with any leading axes.
          mask: (..., L) bool, True at real tokens; padding does not change the state.
          last_only: Whether to return only the logits at the last position.
          dropout_key: If given, dropout is on. It serves the whole call, so call the model once per example.

        Returns:
          (..., L, M), or (..., 1, M) with `last_only`; float32 at least.

        Raises:
          ValueError: for too many tokens or none, or outside `jit` tokens that are not in the vocabulary.
        """
        keys = embedding.split_or_none(dropout_key, len(self.layers) + 1)
        x = embedding.dropped(self._embedded(tokens, mask), self.dropout, keys[0])
        mask = jnp.ones((), bool) if mask is None else mask
        mask = jnp.broadcast_to(mask, tokens.shape)
        for layer, key in zip(self.layers, keys[1:], strict=True):
            x = x + embedding.dropped(layer(x, mask), self.dropout, key)
        return self._logits(x[..., -1:, :] if last_only else x)


class _Layer(nnx.Module):
    """One recurrent layer over the positions."""

    def __init__(self, cell, dim, rngs):
        self.cell = cell
        width = _GATES[cell] * dim
        self.inputs = nnx.Linear(dim, width, rngs=rngs)
        self.states = nnx.Linear(dim, width, use_bias=cell == "gru", rngs=rngs)

    def __call__(self, x, mask):
        step = _gru if self.cell == "gru" else _lstm

        def advance(state, inputs):
            given, real = inputs
            moved = step(given, self.states(state[0]), state)
            state = tuple(jnp.where(real, new, old) for new, old in zip(moved, state, strict=True))
            return state, state[0]

        start = (jnp.zeros_like(x[..., 0, :]),) * (1 if self.cell == "gru" else 2)
        inputs = jnp.moveaxis(self.inputs(x), -2, 0), jnp.moveaxis(mask, -1, 0)[..., None]
        _, hidden = lax.scan(advance, start, inputs)
        return jnp.moveaxis(hidden, 0, -2)


def _gru(given, recalled, state):
    """The next state h' = (1 − z) n + z h, n = tanh(W x + r ⊙ (U h + b)), with reset r and update z."""
    reset, update, new = jnp.split(given, 3, -1)
    reset_state, update_state, new_state = jnp.split(recalled, 3, -1)
    z = nnx.sigmoid(update + update_state)
    n = jnp.tanh(new + nnx.sigmoid(reset + reset_state) * new_state)
    return ((1 - z) * n + z * state[0],)


def _lstm(given, recalled, state):
    """The next state c' = f c + i g and h' = o tanh(c'); the forget gate has an initial bias of 1."""
    i, f, g, o = jnp.split(given + recalled, 4, -1)
    cell = nnx.sigmoid(f + 1) * state[1] + nnx.sigmoid(i) * jnp.tanh(g)
    return nnx.sigmoid(o) * jnp.tanh(cell), cell
