"""One encoder, whose settings make it a BERT, RoBERTa or DistilBERT.

Devlin et al. (arXiv 1810.04805), Liu et al. (arXiv 1907.11692), Sanh et al. (arXiv 1910.01108).
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dpx import attention
from dpx.nn.pretrained.layers import (
    ACTIVATIONS,
    Layers,
    check_shared,
    check_sizes,
    layer_norm,
    split_heads,
)

_HEADS = {"tanh": jnp.tanh, "relu": jax.nn.relu}


@dataclasses.dataclass(frozen=True)
class EncoderSettings:
    """What an encoder is.

    Attributes:
      vocab_size: V tokens.
      context_length: The most tokens of a text: there are as many learned positions.
      dim: d, width of the residual stream.
      num_layers: N.
      num_heads: Heads, which divide `dim`.
      mlp_dim: Hidden width of the MLP, by default 4d.
      activation: Of the MLP: "gelu", "gelu_tanh", "silu" or "relu".
      norm_epsilon: Added to the variance in LayerNorm.
      types: Rows of the table of segments, of which a text takes the first; 0 for no table.
      padding: The token of padding, which positions do not count, as in RoBERTa; None counts all tokens.
      labels: Classes of a classification head on the first token; 0 for hidden states.
      head_activation: Of the head's hidden layer: "tanh" or "relu".
      family: By which names its arrays and modules go in files.

    Raises:
      ValueError: for sizes and numbers out of range, or that do not fit together.
    """

    vocab_size: int
    context_length: int = 64
    dim: int = 64
    num_layers: int = 2
    num_heads: int = 4
    mlp_dim: int | None = None
    activation: str = "gelu"
    norm_epsilon: float = 1e-12
    types: int = 2
    padding: int | None = None
    labels: int = 0
    head_activation: str = "tanh"
    family: str = "bert"

    def __post_init__(self):
        check_shared(self)
        check_sizes(context_length=self.context_length, mlp_dim=self.hidden)
        if self.dim % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} must divide dim={self.dim}")
        if self.types < 0 or self.labels < 0:
            raise ValueError(f"types={self.types} and labels={self.labels} must be at least 0")
        if self.head_activation not in _HEADS:
            raise ValueError(f"head_activation={self.head_activation!r} must be 'tanh' or 'relu'")

    @property
    def hidden(self) -> int:
        """Hidden width of the MLP."""
        return 4 * self.dim if self.mlp_dim is None else self.mlp_dim

    @property
    def first_position(self) -> int:
        """The row of the first token in the table of positions."""
        return 0 if self.padding is None else self.padding + 1

    def shapes(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """The shapes of parameters by name: outside the layers, and in each."""
        dim = self.dim
        outer = {"embed": (self.vocab_size, dim)}
        outer |= {"positions": (self.context_length + self.first_position, dim)}
        outer |= {"types": (self.types, dim)} if self.types else {}
        outer |= {"norm": (dim,), "norm_bias": (dim,)}
        if self.labels:
            outer |= {"pooler": (dim, dim), "pooler_bias": (dim,)}
            outer |= {"head": (dim, self.labels), "head_bias": (self.labels,)}
        inner = dict.fromkeys(("query", "key", "value", "out"), (dim, dim))
        inner |= {"up": (dim, self.hidden), "down": (self.hidden, dim)}
        inner |= {f"{name}_bias": shape[1:] for name, shape in inner.items()}
        norms = ("attention_norm", "attention_norm_bias", "mlp_norm", "mlp_norm_bias")
        return outer, inner | dict.fromkeys(norms, (dim,))


class Encoder(Layers):
    """A transformer in which every token looks at all others; see `Layers` for how it is run.

    A text is one segment: pairs of texts, as in entailment, have no second one here.
    """

    settings: EncoderSettings

    def __init__(
        self,
        settings: EncoderSettings,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        remat: bool = False,
        frozen: bool = False,
        unroll: bool = False,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            settings,
            *settings.shapes(),
            dtype=dtype,
            param_dtype=param_dtype,
            remat=remat,
            frozen=frozen,
            unroll=unroll,
            rngs=rngs,
        )

    def __call__(self, tokens: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Hidden states, or the logits of classes with a classification head.

        Args:
          tokens: (L,) ids of one text, or (..., L) of several; pad short ones on the right.
          mask: (..., L) bool, True at real tokens; padding is attended by nobody.

        Returns:
          (..., L, d) in `dtype`, or (..., labels) float32.

        Raises:
          ValueError: for more tokens than `context_length`, and outside `jit` for tokens that are not in the
            vocabulary, or no token at all.
        """
        settings = self.settings
        x = self._embedded(tokens, mask) + self._rows(self.positions, self._places(tokens))
        if settings.types:
            x = x + self._rows(self.types, jnp.zeros((), jnp.int32))
        outer = {name: value[...] for name, value, stacked in self.own() if not stacked}
        x = self._normed("norm", x, outer)
        seen = None if mask is None else attention.boolean(mask)[..., None, None, :]

        def layer(x, weights, adapters):
            return self._layer(x, weights, adapters, seen)

        for start, stop in ((0, self.first_adapted), (self.first_adapted, settings.num_layers)):
            x = self._scan(layer, x, start, stop)
        if not settings.labels:
            return x
        first = self._product(x[..., 0, :], outer["pooler"], x.dtype) + outer["pooler_bias"]
        pooled = _HEADS[settings.head_activation](first).astype(x.dtype)
        return self._product(pooled, outer["head"], jnp.float32) + outer["head_bias"]

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

    def _normed(self, name: str, x: jax.Array, weights) -> jax.Array:
        """x through the norm of that name."""
        return layer_norm(x, weights[name], weights[f"{name}_bias"], self.settings.norm_epsilon)
