"""A decoder whose settings make it a Llama, Mistral, Qwen 2 or 3, Gemma 3 or GPT-2.

Sources: Touvron et al., "LLaMA" (arXiv 2302.13971), for rotary positions arXiv 2104.09864, and for grouped
queries arXiv 2305.13245. The default settings are those of Llama.
"""

import jax
import jax.numpy as jnp

from dpx import attention
from dpx.nn.pretrained.layers import ACTIVATIONS, Layers, split_heads
from dpx.nn.pretrained.settings import DecoderSettings, Rotary


class Decoder(Layers):
    """A causal transformer that returns the logits of the next token; `Layers` says how to run it.

    Rotary positions rotate pairs of coordinates, one from the first half of a head and one from the second
    half, as in Hugging Face.
    """

    settings: DecoderSettings

    def __call__(self, tokens: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """The logits of the next token.

        Args:
          tokens: (L,) ids of one text, or (..., L) of several; pad short ones on the right.
          mask: (..., L) bool, True at real tokens; no token attends to padding.

        Returns:
          (..., L, V) float32.

        Raises:
          ValueError: for more tokens than `context_length`, for no token, and outside `jit` for tokens that
            are not in the vocabulary.
        """
        return self.logits(self.trunk(tokens, mask), mask)

    def logits(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """The rest of the model after `trunk`: (..., L, d) -> (..., L, V) float32."""
        x = self._run(x, mask, self.first_adapted, self.settings.num_layers)
        outer = self._outer()
        x = self._normed("norm", x, outer)
        x = x if self.shift is None else x + self.shift[...].astype(x.dtype)
        if self.settings.tied:
            return self._product(x, outer["embed"], jnp.float32, axis=1)
        return self._product(x, outer["head"], jnp.float32)

    def _begin(self, tokens: jax.Array, mask: jax.Array | None) -> jax.Array:
        x = self._embedded(tokens, mask)
        if self.settings.embed_scale != 1:
            x = x * jnp.asarray(self.settings.embed_scale, x.dtype)
        if self.settings.rotary is None:
            x = x + self._rows(self.positions, jnp.arange(tokens.shape[-1]))
        return x

    def _run(self, x: jax.Array, mask: jax.Array | None, start: int, stop: int) -> jax.Array:
        kinds, of_layers = self.settings.kinds()
        attend = jnp.stack([_attending(x.shape[-2], window) for window, _ in kinds])
        if mask is not None:
            attend = attend & attention.boolean(mask)[..., None, None, :]
        turns = None
        if self.settings.rotary is not None:
            turns = jnp.stack([self._rotation(rotary, x.shape[-2]) for _, rotary in kinds])

        def layer(x, weights, adapters, kind=0):
            seen = jnp.take(attend, kind, axis=-3)[..., None, None, :, :]
            turn = None if turns is None else turns[kind]
            return self._layer(x, weights, adapters, seen, turn)

        several = [jnp.asarray(of_layers)] if len(kinds) > 1 else []
        return self._scan(layer, x, start, stop, *several)

    def _layer(self, x, weights, adapters, attend, turn):
        """x + Attention(norm(x)), then x + MLP(norm(x))."""
        settings = self.settings

        def project(name: str, x: jax.Array) -> jax.Array:
            return self._project(name, x, weights, adapters)

        normed = self._normed("attention_norm", x, weights)
        groups, size = settings.kv_heads, settings.width
        if settings.fused:
            ends = settings.num_heads * size, (settings.num_heads + groups) * size
            q, k, v = jnp.split(project("qkv", normed), ends, axis=-1)
        else:
            q, k, v = (project(name, normed) for name in ("query", "key", "value"))
        # All queries of a group share a head of keys: (..., groups, queries of a group, L, D).
        q = split_heads(q, groups, settings.num_heads // groups)
        k, v = split_heads(k, groups, 1), split_heads(v, groups, 1)
        if settings.query_key_norms:
            q, k = self._normed("query_norm", q, weights), self._normed("key_norm", k, weights)
        if turn is not None:
            q, k = _turned(q, turn), _turned(k, turn)
        scale = settings.attention_scale
        mixed = attention.dot_product_attention(q, k, v, mask=attend, scale=scale)
        mixed = project("out", jnp.moveaxis(mixed, -2, -4).reshape(*x.shape[:-1], -1))
        if settings.output_norms:
            mixed = self._normed("attention_out_norm", mixed, weights)
        x = x + mixed
        normed = self._normed("mlp_norm", x, weights)
        hidden = ACTIVATIONS[settings.activation](
            project("gate" if settings.gated else "up", normed)
        )
        hidden = project("down", hidden * project("up", normed) if settings.gated else hidden)
        if settings.output_norms:
            hidden = self._normed("mlp_out_norm", hidden, weights)
        return x + hidden

    def _rotation(self, rotary: Rotary, length: int) -> jax.Array:
        """The cosines and sines (2, L, D/2) of the rotation of each pair of a head at each position."""
        pairs = self.settings.width // 2
        frequencies = rotary.theta ** (-jnp.arange(pairs) / pairs)
        if rotary.factors is not None:
            frequencies = frequencies / jnp.asarray(rotary.factors)
        angles = jnp.arange(length)[:, None] * frequencies
        return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def _attending(length: int, window: int | None) -> jax.Array:
    """The mask (L, L) of attention: a token attends to itself and to those before it, within the window."""
    behind = jnp.arange(length)[:, None] - jnp.arange(length)
    return (behind >= 0) if window is None else (behind >= 0) & (behind < window)


def _turned(x: jax.Array, turn: jax.Array) -> jax.Array:
    """A head (..., L, D) in which coordinates i and i + D/2 are rotated as a pair."""
    cosine, sine = turn
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1).astype(x.dtype)
