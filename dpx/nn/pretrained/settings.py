"""The settings of decoders and encoders: sizes, and the differences between families."""

import dataclasses
from typing import Any

from dpx._validate import check_positive
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
class DecoderSettings:
    """The settings of a decoder.

    Attributes:
      vocab_size: V, the number of tokens.
      dim: d, the width of the residual stream.
      num_layers: N, the length of the first axis of every array in `layers`.
      num_heads: The number of heads of the queries.
      num_kv_heads: The number of heads of keys and values, which divides `num_heads`; equal by default.
      head_dim: D, the width of a head, by default d / num_heads.
      mlp_dim: The hidden width of the MLP, by default 3d.
      activation: The activation of the MLP: "silu", "relu", "tanh", "gelu", or "gelu_tanh", an approximation.
      gated: Whether the activated hidden values multiply others (SwiGLU, arXiv 2002.05202).
      fused: Whether queries, keys and values are one projection, "qkv".
      biases: The projections that have a bias.
      norm: "rms", or "layer" for LayerNorm with a bias.
      norm_offset: Added to the scales of norms; 1 in Gemma, which stores scales minus 1.
      norm_epsilon: Added to the mean square in norms.
      query_key_norms: Whether each head's queries and keys are normalised before they are rotated.
      output_norms: Whether the outputs of attention and MLP are normalised before they are added.
      rotary: Rotary positions; None for learned positions, of which there are `context_length`.
      window_rotary: The rotary positions of layers with a window, if they differ.
      windows: For each layer, the number of tokens that a token attends to, itself included; None for all
        before it. Without windows every layer attends to all.
      attention_scale: The factor of ⟨q, k⟩, by default 1/√D.
      embed_scale: The factor of embeddings.
      tied: Whether the logits use the embedding table or a head of their own.
      context_length: The largest number of tokens that the model was made for; None for no limit.
      family: The family, which determines the names of arrays and modules in files.

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
        _check_shared(self)
        if self.kv_heads < 1 or self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads={self.kv_heads} must be at least 1 and divide num_heads={self.num_heads}"
            )
        if self.head_dim is None and self.dim % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must divide dim={self.dim}: or give head_dim"
            )
        _check_sizes(head_dim=self.width, mlp_dim=self.hidden)
        for rotary in (self.rotary, self.window_rotary):
            self._check_rotary(rotary)
        if self.rotary is None and self.context_length is None:
            raise ValueError("context_length=None must be a number: learned positions have an end")
        if self.norm not in ("rms", "layer"):
            raise ValueError(f"norm={self.norm!r} must be 'rms' or 'layer'")
        if self.windows is not None and len(self.windows) != self.num_layers:
            raise ValueError(f"windows must be {self.num_layers} numbers, one a layer, or None")
        for size in self.windows or ():
            _check_sizes(windows=1 if size is None else size)

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
        """The number of heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def width(self) -> int:
        """D, the width of a head."""
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
        """The different kinds of layers (window and positions), and the kind of each layer."""
        local = self.window_rotary or self.rotary
        each = [
            (window, self.rotary if window is None else local)
            for window in self.windows or (None,) * self.num_layers
        ]
        distinct = list(dict.fromkeys(each))
        return distinct, [distinct.index(kind) for kind in each]


@dataclasses.dataclass(frozen=True)
class EncoderSettings:
    """The settings of an encoder.

    Attributes:
      vocab_size: V, the number of tokens.
      context_length: The largest number of tokens of a text, which is the number of learned positions.
      dim: d, the width of the residual stream.
      num_layers: N.
      num_heads: The number of heads, which divides `dim`.
      mlp_dim: The hidden width of the MLP, by default 4d.
      activation: The activation of the MLP, as in `DecoderSettings`.
      norm_epsilon: Added to the variance in LayerNorm.
      types: The number of rows of the table of segments, of which a text uses the first; 0 for no table.
      padding: The padding token, which does not count for positions, as in RoBERTa; with None all count.
      labels: The number of classes of a classification head on the first token; 0 for hidden states.
      head_activation: The activation of the head's hidden layer.
      family: The family, which determines the names of arrays and modules in files.

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
        _check_shared(self)
        _check_sizes(context_length=self.context_length, mlp_dim=self.hidden)
        if self.dim % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} must divide dim={self.dim}")
        if self.types < 0 or self.labels < 0:
            raise ValueError(f"types={self.types} and labels={self.labels} must be at least 0")
        _check_activation(head_activation=self.head_activation)

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


def _check_sizes(**sizes: int) -> None:
    """Raises ValueError for a size below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


def _check_shared(settings: DecoderSettings | EncoderSettings) -> None:
    """Raises ValueError for values that neither a decoder nor an encoder can have."""
    names = ("vocab_size", "dim", "num_layers", "num_heads")
    _check_sizes(**{name: getattr(settings, name) for name in names})
    check_positive(settings.norm_epsilon, "norm_epsilon", zero=True)
    _check_activation(activation=settings.activation)


def _check_activation(**given: str) -> None:
    """Raises ValueError for an unknown activation."""
    for name, value in given.items():
        if value not in ACTIVATIONS:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(ACTIVATIONS)}")
