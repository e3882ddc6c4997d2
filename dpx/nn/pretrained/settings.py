"""The settings of decoders and encoders: sizes, and the differences between families."""

import dataclasses
from typing import Any

from dpx._validate import check_choice, check_integer, check_positive
from dpx.nn.pretrained.layers import ACTIVATIONS


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary positions: from one position to the next, pair i of a head turns by θ^(−2i/D) / factor i.

    Attributes:
      theta: θ, the base of the wavelengths.
      factors: Divisors of the D/2 frequencies, for models that were extended to long inputs; None for 1.
    """

    theta: float = 10000.0
    factors: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What a decoder and an encoder have in common.

    Attributes:
      vocab_size: V, the number of tokens.
      dim: d, the width of the residual stream.
      num_layers: N, the length of the first axis of every array in `layers`.
      num_heads: The number of heads of the queries.
      mlp_dim: The hidden width of the MLP, by default 3d in a decoder and 4d in an encoder.
      activation: The activation of the MLP: "silu", "relu", "tanh", "gelu", or "gelu_tanh", an approximation.
      norm_epsilon: Added to the mean square, or the variance, in norms.
      context_length: The largest number of tokens that the model was made for; None for no limit.
      family: The family, which determines the names of arrays and modules in files.

    Raises:
      ValueError: for sizes and numbers out of range, or that do not fit together.
    """

    vocab_size: int
    _: dataclasses.KW_ONLY
    dim: int = 64
    num_layers: int = 2
    num_heads: int = 4
    mlp_dim: int | None = None
    activation: str = "silu"
    norm_epsilon: float = 1e-5
    context_length: int | None = None
    family: str = "llama"

    def __post_init__(self):
        for name in ("vocab_size", "dim", "num_layers", "num_heads"):
            check_integer(getattr(self, name), name)
        check_integer(self.hidden, "mlp_dim")
        check_positive(self.norm_epsilon, "norm_epsilon", zero=True)
        check_choice(self.activation, "activation", tuple(ACTIVATIONS))

    @property
    def hidden(self) -> int:
        """Hidden width of the MLP."""
        return 3 * self.dim if self.mlp_dim is None else self.mlp_dim


@dataclasses.dataclass(frozen=True)
class DecoderSettings(_Settings):
    """The settings of a decoder: those of `_Settings`, and its own.

    Attributes:
      num_kv_heads: The number of heads of keys and values, which divides `num_heads`; equal by default.
      head_dim: D, the width of a head, by default d / num_heads.
      gated: Whether the activated hidden values multiply others (SwiGLU, arXiv 2002.05202).
      fused: Whether queries, keys and values are one projection, "qkv".
      biases: The projections that have a bias.
      norm: "rms", or "layer" for LayerNorm with a bias.
      norm_offset: Added to the scales of norms; 1 in Gemma, which stores scales minus 1.
      query_key_norms: Whether each head's queries and keys are normalised before they are rotated.
      output_norms: Whether the outputs of attention and MLP are normalised before they are added.
      rotary: Rotary positions; None for learned positions, of which there are `context_length`.
      window_rotary: The rotary positions of layers with a window, if they differ.
      windows: For each layer, the number of tokens that a token attends to, itself included; None for all
        before it. Without windows every layer attends to all.
      attention_scale: The factor of ⟨q, k⟩, by default 1/√D.
      embed_scale: The factor of embeddings.
      tied: Whether the logits use the embedding table or a head of their own.
    """

    num_kv_heads: int | None = None
    head_dim: int | None = None
    gated: bool = True
    fused: bool = False
    biases: tuple[str, ...] = ()
    norm: str = "rms"
    norm_offset: float = 0.0
    query_key_norms: bool = False
    output_norms: bool = False
    rotary: Rotary | None = Rotary()
    window_rotary: Rotary | None = None
    windows: tuple[int | None, ...] | None = None
    attention_scale: float | None = None
    embed_scale: float = 1.0
    tied: bool = True

    def __post_init__(self):
        super().__post_init__()
        check_integer(self.kv_heads, "num_kv_heads")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_kv_heads={self.kv_heads} must divide num_heads={self.num_heads}")
        if self.head_dim is None and self.dim % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must divide dim={self.dim}: or give head_dim"
            )
        check_integer(self.width, "head_dim")
        for rotary in (self.rotary, self.window_rotary):
            if rotary is not None:
                self._check_rotary(rotary)
        if self.rotary is None and self.context_length is None:
            raise ValueError("context_length=None must be a number: learned positions have an end")
        check_choice(self.norm, "norm", ("rms", "layer"))
        if self.windows is not None and len(self.windows) != self.num_layers:
            raise ValueError(f"windows must be {self.num_layers} numbers, one a layer, or None")
        for size in self.windows or ():
            check_integer(1 if size is None else size, "windows")

    def _check_rotary(self, rotary: Rotary) -> None:
        pairs, odd = divmod(self.width, 2)
        if odd:
            raise ValueError(f"head_dim={self.width} must be even: rotary positions turn pairs")
        if rotary.factors is not None and len(rotary.factors) != pairs:
            raise ValueError(
                f"rotary.factors has {len(rotary.factors)} numbers: it must have {pairs}, one a pair"
            )
        check_positive(rotary.theta, "rotary.theta")
        for factor in rotary.factors or ():
            check_positive(factor, "rotary.factors")

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def width(self) -> int:
        """D, the width of a head."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

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
        """The different kinds of layers (window and positions), and the kind of each layer."""
        local = self.window_rotary or self.rotary
        each = [
            (window, self.rotary if window is None else local)
            for window in self.windows or (None,) * self.num_layers
        ]
        distinct = list(dict.fromkeys(each))
        return distinct, [distinct.index(kind) for kind in each]


@dataclasses.dataclass(frozen=True)
class EncoderSettings(_Settings):
    """The settings of an encoder: those of `_Settings`, with a number of learned positions, and its own.

    Attributes:
      types: The number of rows of the table of segments, of which a text uses the first; 0 for no table.
      padding: The padding token, which does not count for positions, as in RoBERTa; with None all count.
      labels: The number of classes of a classification head on the first token; 0 for hidden states.
      head_activation: The activation of the head's hidden layer.
    """

    activation: str = "gelu"
    norm_epsilon: float = 1e-12
    context_length: int = 64
    family: str = "bert"
    types: int = 2
    padding: int | None = None
    labels: int = 0
    head_activation: str = "tanh"

    def __post_init__(self):
        super().__post_init__()
        check_integer(self.context_length, "context_length")
        if self.dim % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} must divide dim={self.dim}")
        check_integer(self.types, "types", 0)
        check_integer(self.labels, "labels", 0)
        check_choice(self.head_activation, "head_activation", tuple(ACTIVATIONS))

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
