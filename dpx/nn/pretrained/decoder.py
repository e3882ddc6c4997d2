"""One decoder, whose settings make it a Llama, Mistral, Qwen 2 or 3, Gemma 3 or GPT-2.

Touvron et al., "LLaMA" (arXiv 2302.13971); rotary positions are those of arXiv 2104.09864, grouped queries
those of arXiv 2305.13245. Llama's are the default settings. What another family does otherwise is a field.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dpx import attention
from dpx._validate import check_positive
from dpx.nn.pretrained.layers import (
    ACTIVATIONS,
    Layers,
    check_shared,
    check_sizes,
    layer_norm,
    rms_norm,
    split_heads,
)


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary positions: pair i of a head turns by θ^(−2i/D) / factor i at each position.

    Attributes:
      theta: θ, the base of the wavelengths.
      factors: Divisors of the D/2 frequencies, for models that were stretched to long inputs; None for 1.
    """

    theta: float = 10000.0
    factors: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class DecoderSettings:
    """What a decoder is.

    Attributes:
      vocab_size: V tokens.
      dim: d, width of the residual stream.
      num_layers: N, the length of the first axis of every array in `layers`.
      num_heads: Heads of the queries.
      num_kv_heads: Heads of keys and values, which divide `num_heads`; as many by default.
      head_dim: D, width of a head, by default d / num_heads.
      mlp_dim: Hidden width of the MLP, by default 3d.
      activation: Of the MLP: "silu", "relu", "gelu", or "gelu_tanh", its approximation by a tanh.
      gated: Whether the activated hidden values multiply others (SwiGLU, arXiv 2002.05202).
      fused: Whether queries, keys and values are one projection, "qkv".
      biases: The projections that have one.
      norm: "rms", or "layer" for LayerNorm with a bias.
      norm_offset: Added to the scales of norms; 1 in Gemma, which stores what they differ from 1 by.
      norm_epsilon: Added to the mean square in norms.
      query_key_norms: Whether each head's queries and keys are normalised before they are turned.
      output_norms: Whether what attention and MLP return is normalised before it is added.
      rotary: Rotary positions; None for learned ones, of which there are `context_length`.
      window_rotary: Those of layers with a window, where they differ.
      windows: Of each layer, how many tokens a token looks at, itself included; None for all before it.
        Without windows every layer looks at all.
      attention_scale: What ⟨q, k⟩ is multiplied by, 1/√D by default.
      embed_scale: What embeddings are multiplied by.
      tied: Whether the logits use the embedding table or a head of their own.
      context_length: The most tokens of a text that the model was made for, beyond which its answers are of
        no use; None for no limit.
      family: By which names its arrays and modules go in files.

    Raises:
      ValueError: for sizes and numbers out of range, or that do not fit together.
    """

    vocab_size: int
    dim: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_dim: int | None = None
    activation: str = "silu"
    gated: bool = True
    fused: bool = False
    biases: tuple[str, ...] = ()
    norm: str = "rms"
    norm_offset: float = 0.0
    norm_epsilon: float = 1e-5
    query_key_norms: bool = False
    output_norms: bool = False
    rotary: Rotary | None = Rotary()
    window_rotary: Rotary | None = None
    windows: tuple[int | None, ...] | None = None
    attention_scale: float | None = None
    embed_scale: float = 1.0
    tied: bool = True
    context_length: int | None = None
    family: str = "llama"

    def __post_init__(self):
        check_shared(self)
        if self.kv_heads < 1 or self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads={self.kv_heads} must be at least 1 and divide num_heads={self.num_heads}"
            )
        if self.head_dim is None and self.dim % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must divide dim={self.dim}: or give head_dim"
            )
        check_sizes(head_dim=self.width, mlp_dim=self.hidden)
        for rotary in (self.rotary, self.window_rotary):
            self._check_rotary(rotary)
        if self.rotary is None and self.context_length is None:
            raise ValueError("context_length=None must be a number: learned positions have an end")
        if self.norm not in ("rms", "layer"):
            raise ValueError(f"norm={self.norm!r} must be 'rms' or 'layer'")
        if self.windows is not None and len(self.windows) != self.num_layers:
            raise ValueError(f"windows must be {self.num_layers} numbers, one a layer, or None")
        for size in self.windows or ():
            check_sizes(windows=1 if size is None else size)

    def _check_rotary(self, rotary: Rotary | None) -> None:
        if rotary is None:
            return
        if self.width % 2:
            raise ValueError(f"head_dim={self.width} must be even: rotary positions turn pairs")
        check_positive(rotary.theta, "rotary.theta")
        factors = rotary.factors
        if factors is not None and len(factors) != self.width // 2:
            raise ValueError(
                f"rotary.factors has {len(factors)} numbers: it must have {self.width // 2}, one a pair"
            )
        for factor in factors or ():
            check_positive(factor, "rotary.factors")

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def width(self) -> int:
        """D."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def hidden(self) -> int:
        """Hidden width of the MLP."""
        return 3 * self.dim if self.mlp_dim is None else self.mlp_dim

    def shapes(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """The shapes of parameters by name: outside the layers, and in each."""
        dim, own, shared = self.dim, self.num_heads * self.width, self.kv_heads * self.width
        inner = {"qkv": (dim, own + 2 * shared)} if self.fused else {}
        if not self.fused:
            inner = {"query": (dim, own), "key": (dim, shared), "value": (dim, shared)}
        inner |= {"out": (own, dim), "gate": (dim, self.hidden), "up": (dim, self.hidden)}
        inner |= {"down": (self.hidden, dim)}
        if not self.gated:
            del inner["gate"]
        inner |= {f"{name}_bias": inner[name][1:] for name in self.biases}
        norms = ["attention_norm", "mlp_norm"]
        norms += ["attention_out_norm", "mlp_out_norm"] if self.output_norms else []
        inner |= dict.fromkeys(norms, (dim,))
        if self.norm == "layer":
            inner |= {f"{name}_bias": (dim,) for name in norms}
        if self.query_key_norms:
            inner |= dict.fromkeys(("query_norm", "key_norm"), (self.width,))
        outer = {"embed": (self.vocab_size, dim), "norm": (dim,)}
        if self.norm == "layer":
            outer["norm_bias"] = (dim,)
        if self.rotary is None and self.context_length is not None:
            outer["positions"] = (self.context_length, dim)
        if not self.tied:
            outer["head"] = (dim, self.vocab_size)
        return outer, inner

    def kinds(self) -> tuple[list[tuple[int | None, Any]], list[int]]:
        """What layers differ in, windows and positions, and of each layer which it has."""
        local = self.window_rotary or self.rotary
        each = [
            (window, self.rotary if window is None else local)
            for window in self.windows or (None,) * self.num_layers
        ]
        distinct = list(dict.fromkeys(each))
        return distinct, [distinct.index(kind) for kind in each]


class Decoder(Layers):
    """A causal transformer that gives the logits of the next token; see `Layers` for how it is run.

    Rotary positions turn pairs of coordinates of which one lies in the first half of a head and the other in
    the second half, as in Hugging Face.
    """

    settings: DecoderSettings

    def __init__(
        self,
        settings: DecoderSettings,
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
        """Logits of the next token.

        Args:
          tokens: (L,) ids of one text, or (..., L) of several; pad short ones on the right.
          mask: (..., L) bool, True at real tokens; padding is attended by nobody.

        Returns:
          (..., L, V) float32.
        """
        return self.logits(self.trunk(tokens, mask), mask)

    def trunk(self, tokens: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """What enters the first layer with adapters: tokens (..., L) -> (..., L, d) in `dtype`.

        Where only adapters are trained it never changes, so it can be computed once for each text.

        Raises:
          ValueError: for more tokens than `context_length`, and outside `jit` for tokens that are not in the
            vocabulary, or no token at all.
        """
        x = self._embedded(tokens, mask)
        if self.settings.embed_scale != 1:
            x = x * jnp.asarray(self.settings.embed_scale, x.dtype)
        if self.settings.rotary is None:
            x = x + self._rows(self.positions, jnp.arange(tokens.shape[-1]))
        return self._run(x, mask, 0, self.first_adapted)

    def logits(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """The rest of the model after `trunk`: (..., L, d) -> (..., L, V) float32."""
        x = self._run(x, mask, self.first_adapted, self.settings.num_layers)
        outer = {name: value[...] for name, value, stacked in self.own() if not stacked}
        x = self._normed("norm", x, outer)
        x = x if self.shift is None else x + self.shift[...].astype(x.dtype)
        if self.settings.tied:
            return self._product(x, outer["embed"], jnp.float32, axis=1)
        return self._product(x, outer["head"], jnp.float32)

    def _run(self, x: jax.Array, mask: jax.Array | None, start: int, stop: int) -> jax.Array:
        """Layers `start` to `stop`, with their adapters if these are the layers that have any."""
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
        # A head of keys serves all queries of its group: (..., groups, queries of a group, L, D).
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

    def _normed(self, name: str, x: jax.Array, weights) -> jax.Array:
        """x through the norm of that name."""
        settings = self.settings
        scale = weights[name].astype(jnp.float32) + settings.norm_offset
        if settings.norm == "layer":
            return layer_norm(x, scale, weights[f"{name}_bias"], settings.norm_epsilon)
        return rms_norm(x, scale, settings.norm_epsilon)

    def _rotation(self, rotary: Rotary, length: int) -> jax.Array:
        """Cosine and sine (2, L, D/2) of the angle by which each pair of a head turns at each position."""
        pairs = self.settings.width // 2
        frequencies = rotary.theta ** (-jnp.arange(pairs) / pairs)
        if rotary.factors is not None:
            frequencies = frequencies / jnp.asarray(rotary.factors)
        angles = jnp.arange(length)[:, None] * frequencies
        return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def _attending(length: int, window: int | None) -> jax.Array:
    """(L, L), True where a token looks at another one: itself and those before it, within the window."""
    behind = jnp.arange(length)[:, None] - jnp.arange(length)
    return (behind >= 0) if window is None else (behind >= 0) & (behind < window)


def _turned(x: jax.Array, turn: jax.Array) -> jax.Array:
    """Turns coordinate i of a head (..., L, D) together with coordinate i + D/2."""
    cosine, sine = turn
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1).astype(x.dtype)
