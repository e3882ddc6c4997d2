"""An encoder whose settings make it a BERT, RoBERTa or DistilBERT.

Devlin et al. (arXiv 1810.04805), Liu et al. (arXiv 1907.11692), Sanh et al. (arXiv 1910.01108).
"""

import jax
import jax.numpy as jnp

from dpx import attention
from dpx.nn.pretrained.layers import ACTIVATIONS, Layers, split_heads
from dpx.nn.pretrained.settings import EncoderSettings


class Encoder(Layers):
    """A transformer in which every token attends to all others; `Layers` says how to run it.

    A text is one segment: pairs of texts, as for entailment, are not supported.
    """

    settings: EncoderSettings

    def __call__(self, tokens: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """The hidden states or, with a classification head, the logits of classes.

        Args and errors are those of `Decoder`.

        Returns:
          (..., L, d) in `dtype`, or (..., labels) float32.
        """
        settings = self.settings
        (x,) = self.states(tokens, mask)
        if not settings.labels:
            return x
        outer = self._outer()
        first = self._product(x[..., 0, :], outer["pooler"], x.dtype) + outer["pooler_bias"]
        pooled = ACTIVATIONS[settings.head_activation](first).astype(x.dtype)
        return self._product(pooled, outer["head"], jnp.float32) + outer["head_bias"]

    def _begin(self, tokens: jax.Array, mask: jax.Array | None) -> jax.Array:
        x = self._embedded(tokens, mask) + self._rows(self.positions, self._places(tokens))
        if self.settings.types:
            x = x + self._rows(self.types, jnp.zeros((), jnp.int32))
        return self._normed("norm", x, self._outer())

    def _run(self, x: jax.Array, mask: jax.Array | None, start: int, stop: int) -> jax.Array:
        seen = None if mask is None else attention.boolean(mask)[..., None, None, :]

        def layer(x, weights, adapters):
            return self._layer(x, weights, adapters, seen)

        return self._scan(layer, x, start, stop)

    def _places(self, tokens: jax.Array) -> jax.Array:
        """The row of each token in the table of positions."""
        padding = self.settings.padding
        if padding is None:
            return jnp.arange(tokens.shape[-1])
        own = (tokens != padding).astype(jnp.int32)
        return jnp.cumsum(own, axis=-1) * own + padding

    def _layer(self, x, weights, adapters, attend):
        """norm(x + Attention(x)), then norm(x + MLP(x))."""

        def project(name: str, x: jax.Array) -> jax.Array:
            return self._project(name, x, weights, adapters)

        heads = self.settings.num_heads
        q, k, v = (split_heads(project(name, x), heads) for name in ("query", "key", "value"))
        mixed = attention.dot_product_attention(q, k, v, mask=attend)
        mixed = jnp.moveaxis(mixed, -3, -2).reshape(x.shape)
        x = self._normed("attention_norm", x + project("out", mixed), weights)
        hidden = ACTIVATIONS[self.settings.activation](project("up", x))
        return self._normed("mlp_norm", x + project("down", hidden), weights)
