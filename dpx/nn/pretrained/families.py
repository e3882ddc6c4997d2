"""Families of models in folders of Hugging Face, as tables: what settings and arrays are called in files.

Decoders are Llama, Mistral, Qwen 2, Qwen 3, Gemma 3 (text) and GPT-2; encoders BERT, RoBERTa and DistilBERT.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dpx.nn.pretrained import rotary
from dpx.nn.pretrained.file_settings import Keys
from dpx.nn.pretrained.layers import TABLES
from dpx.nn.pretrained.settings import DecoderSettings, EncoderSettings


class Family(NamedTuple):
    """A family of models in folders of Hugging Face.

    Attributes:
      kind: The class of its settings.
      names: For each setting that a file states as it is, its name there (see `Keys.settings`).
      rest: A function that reads other settings, given those.
      constants: The settings that all models of the family have.
      modules: For each parameter, the name of its module in files; {} is the number of the layer.
      architectures: The values of `architectures` that are supported.
      prefix: The prefix of module names in files of models with a head, and in few others.
      unused: Patterns of arrays that have no effect, such as heads that are not used.
      flags: For each flag in files, the projections that have a bias if it is set.
      turned: Whether matrices of layers are (out, in) in files.
    """

    kind: type
    names: Mapping[str, Any]
    rest: Callable[[Keys, dict[str, Any]], dict[str, Any]]
    constants: Mapping[str, Any]
    modules: Mapping[str, str]
    architectures: tuple[str, ...]
    prefix: str
    unused: tuple[str, ...]
    flags: Mapping[str, tuple[str, ...]] = {}
    turned: bool = True

    def settings(self, keys: Keys, name: str) -> DecoderSettings | EncoderSettings:
        """The settings of a model of the family of that name; raises ValueError for unknown keys."""
        found = keys.settings(self.names)
        found |= self.rest(keys, found)
        if biased := [p for flag, own in self.flags.items() if keys.flag(flag, False) for p in own]:
            found["biases"] = tuple(biased)
        keys.close()
        return self.kind(**found, **self.constants, family=name)

    def module(self, name: str) -> str:
        """The module that holds a parameter."""
        return self.modules[name.removesuffix("_bias")]

    def array(self, name: str) -> str:
        """The name of a parameter's array."""
        return f"{self.module(name)}.{'bias' if name.endswith('_bias') else 'weight'}"

    def is_turned(self, name: str, stacked: bool) -> bool:
        """Whether a matrix is (out, in) in the file instead of (in, out)."""
        return name not in TABLES and (self.turned or not stacked)

    def canonical(self, name: str) -> str:
        """The name of an array, without differences between versions of the same family."""
        name = name.removeprefix(self.prefix)
        return re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))

    def is_unused(self, name: str) -> bool:
        """Whether an array has no effect."""
        return any(re.fullmatch(pattern, name) for pattern in self.unused)


def _columns(table: str) -> list[dict[str, Any]]:
    """For each column after the first, its names by those in the first; a dash is none."""
    rows = [line.split() for line in table.strip().splitlines()]
    return [{row[0]: row[n] for row in rows if row[n] != "-"} for n in range(1, len(rows[0]))]


# The module of each parameter in most decoders, in GPT-2, and in GGUF files of Llama.
_DECODERS = """
embed           embed_tokens                        wte               token_embd
positions       -                                   wpe               -
qkv             -                                   h.{}.attn.c_attn  -
query           layers.{}.self_attn.q_proj          -                 blk.{}.attn_q
key             layers.{}.self_attn.k_proj          -                 blk.{}.attn_k
value           layers.{}.self_attn.v_proj          -                 blk.{}.attn_v
out             layers.{}.self_attn.o_proj          h.{}.attn.c_proj  blk.{}.attn_output
query_norm      layers.{}.self_attn.q_norm          -                 -
key_norm        layers.{}.self_attn.k_norm          -                 -
gate            layers.{}.mlp.gate_proj             -                 blk.{}.ffn_gate
up              layers.{}.mlp.up_proj               h.{}.mlp.c_fc     blk.{}.ffn_up
down            layers.{}.mlp.down_proj             h.{}.mlp.c_proj   blk.{}.ffn_down
attention_norm  layers.{}.input_layernorm           h.{}.ln_1         blk.{}.attn_norm
mlp_norm        layers.{}.post_attention_layernorm  h.{}.ln_2         blk.{}.ffn_norm
norm            norm                                ln_f              output_norm
head            lm_head                             lm_head           output
"""
_LLAMA, _GPT2, GGUF_MODULES = _columns(_DECODERS)
_GEMMA = _LLAMA | {
    "attention_out_norm": "layers.{}.post_attention_layernorm",
    "mlp_norm": "layers.{}.pre_feedforward_layernorm",
    "mlp_out_norm": "layers.{}.post_feedforward_layernorm",
}
# In BERT, and in DistilBERT.
_ENCODERS = """
embed           embeddings.word_embeddings                   embeddings.word_embeddings
positions       embeddings.position_embeddings               embeddings.position_embeddings
types           embeddings.token_type_embeddings             -
norm            embeddings.LayerNorm                         embeddings.LayerNorm
query           encoder.layer.{}.attention.self.query        transformer.layer.{}.attention.q_lin
key             encoder.layer.{}.attention.self.key          transformer.layer.{}.attention.k_lin
value           encoder.layer.{}.attention.self.value        transformer.layer.{}.attention.v_lin
out             encoder.layer.{}.attention.output.dense      transformer.layer.{}.attention.out_lin
attention_norm  encoder.layer.{}.attention.output.LayerNorm  transformer.layer.{}.sa_layer_norm
up              encoder.layer.{}.intermediate.dense          transformer.layer.{}.ffn.lin1
down            encoder.layer.{}.output.dense                transformer.layer.{}.ffn.lin2
mlp_norm        encoder.layer.{}.output.LayerNorm            transformer.layer.{}.output_layer_norm
pooler          pooler.dense                                 pre_classifier
head            classifier                                   classifier
"""
_BERT, _DISTILBERT = _columns(_ENCODERS)
_ROBERTA = _BERT | {"pooler": "classifier.dense", "head": "classifier.out_proj"}
# Each setting in config.json of most decoders, of GPT-2, of BERT, and of DistilBERT.
_SETTINGS = """
vocab_size      vocab_size               vocab_size           vocab_size               vocab_size
dim             hidden_size              n_embd               hidden_size              dim
num_layers      num_hidden_layers        n_layer              num_hidden_layers        n_layers
num_heads       num_attention_heads      n_head               num_attention_heads      n_heads
mlp_dim         intermediate_size        -                    intermediate_size        hidden_dim
activation      hidden_act               activation_function  hidden_act               activation
norm_epsilon    rms_norm_eps             layer_norm_epsilon   layer_norm_eps           -
context_length  max_position_embeddings  n_positions          max_position_embeddings  max_position_embeddings
types           -                        -                    type_vocab_size          -
"""
LLAMA_SETTINGS, _GPT2_SETTINGS, _BERT_SETTINGS, _DISTILBERT_SETTINGS = _columns(_SETTINGS)


def _rotating(keys: Keys, found: dict[str, Any], *kv_heads: int) -> dict[str, Any]:
    """What most decoders state in the same way; `kv_heads` is a default, without which it is required."""
    width = keys.size("head_dim", max(found["dim"] // found["num_heads"], 1))
    count = keys.size("num_key_value_heads", *kv_heads)
    return {"num_kv_heads": count, "head_dim": width, "rotary": rotary.read(keys, width)}


def _llama(keys: Keys, found: dict[str, Any]) -> dict[str, Any]:
    return _rotating(keys, found, found["num_heads"])


def _mistral(keys: Keys, found: dict[str, Any]) -> dict[str, Any]:
    window = keys.optional_size("sliding_window", 4096)
    windows = (window,) * found["num_layers"] if window else None
    return {"windows": windows} | _rotating(keys, found)


def _qwen(keys: Keys, found: dict[str, Any]) -> dict[str, Any]:
    window, first = keys.optional_size("sliding_window"), keys.read("max_window_layers", None)
    windowed = keys.flag("use_sliding_window", False) and window is not None
    optional = not windowed or "layer_types" in keys
    if not isinstance(first, int | None if optional else int):
        raise keys.wrong("max_window_layers", first, "must be a number")
    numbers = range(found["num_layers"])
    default = [windowed and first is not None and number >= first for number in numbers]
    windows = _windows(keys, default, window if windowed else None)
    return {"windows": windows} | _rotating(keys, found)


def _gemma3(keys: Keys, found: dict[str, Any]) -> dict[str, Any]:
    keys.read("_sliding_window_pattern", None)  # repeats what `layer_types` say
    every = keys.size("sliding_window_pattern", 6)
    default = [(number + 1) % every != 0 for number in range(found["num_layers"])]
    windows = _windows(keys, default, keys.size("sliding_window"))
    width, thetas = keys.size("head_dim"), {"full_attention": 1e6, "sliding_attention": 10000.0}
    if (both := keys.part("rope_parameters")) is None:
        # In older files, `rope_scaling` holds for layers without a window only.
        local = rotary.Rotary(keys.number("rope_local_base_freq", thetas["sliding_attention"]))
        turn = rotary.read(keys, width, thetas["full_attention"])
    else:
        parts = [both.part(name) for name in thetas]
        both.close((), {})
        turn, local = (
            rotary.Rotary(theta) if part is None else rotary.described(part, width, theta)
            for part, theta in zip(parts, thetas.values(), strict=True)
        )
    if keys.read("use_bidirectional_attention", False):
        raise keys.wrong("use_bidirectional_attention", True, "must be false")
    return {
        "num_kv_heads": keys.size("num_key_value_heads"),
        "head_dim": width,
        "windows": windows,
        "rotary": turn,
        "window_rotary": local,
        "attention_scale": keys.number("query_pre_attn_scalar") ** -0.5,
        "embed_scale": found["dim"] ** 0.5,
    }


def _windows(keys: Keys, default: list[bool], window: int | None) -> tuple[int | None, ...] | None:
    """The window of each layer, by `layer_types` or else by `default`; None if no layer has one."""
    types = keys.read("layer_types", None)
    if types is not None:
        known = {"full_attention": False, "sliding_attention": True}
        fits = isinstance(types, list) and all(kind in [*known] for kind in types)
        if not fits or len(types) != len(default):
            needed = f"must be {len(default)} times full_attention or sliding_attention"
            raise keys.wrong("layer_types", types, needed)
        default = [known[kind] for kind in types]
        if any(default) and window is None:
            raise keys.wrong("layer_types", types, "must be full_attention without a window")
    windows = tuple(window if is_local else None for is_local in default)
    return windows if any(windows) else None


def _gpt2(keys: Keys, found: dict[str, Any]) -> dict[str, Any]:
    scale = None if keys.flag("scale_attn_weights", True) else 1.0
    return {"mlp_dim": keys.size("n_inner", 4 * found["dim"]), "attention_scale": scale}


def _encoder(keys: Keys, found: dict[str, Any]) -> dict[str, Any]:
    """The number of classes of the head, or 0 without a head. Files leave out the default, which is 2."""
    (architecture,) = keys.read("architectures")
    if not architecture.endswith("ForSequenceClassification"):
        return {"labels": 0}
    names = keys.read("id2label", None)
    if not isinstance(names, Mapping | None):
        raise keys.wrong("id2label", names, "must be names by number")
    return {"labels": keys.size("num_labels", 2 if names is None else len(names))}


def _roberta(keys: Keys, found: dict[str, Any]) -> dict[str, Any]:
    padding, longest = keys.read("pad_token_id", 1), found["context_length"]
    if not isinstance(padding, int) or not 0 <= padding < longest - 1:
        raise keys.wrong("pad_token_id", padding, "must be a token before the last position")
    return {"padding": padding, "context_length": longest - padding - 1} | _encoder(keys, found)


def _rotary_decoder(
    name: str, rest: Any, flags: Any = (), names: Any = (), modules=_LLAMA, **own: Any
) -> Family:
    known = LLAMA_SETTINGS | {"tied": ("tie_word_embeddings", False)} | dict(names)
    buffers = (r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"rotary_emb\.inv_freq")
    architectures = (f"{name}ForCausalLM",)
    return Family(
        DecoderSettings, known, rest, own, modules, architectures, "model.", buffers, dict(flags)
    )


def _of_bert(name: str, names: Any, rest: Any, modules: Any, *unused: str, **own: Any) -> Family:
    kinds = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification")
    architectures = tuple(f"{name}{kind}" for kind in kinds)
    unused = (r"embeddings\.position_ids", *unused)
    return Family(
        EncoderSettings, names, rest, own, modules, architectures, f"{name.lower()}.", unused
    )


_ATTENTION = {"attention_bias": ("query", "key", "value", "out")}
FAMILIES: dict[str, Family] = {
    "llama": _rotary_decoder("Llama", _llama, _ATTENTION | {"mlp_bias": ("gate", "up", "down")}),
    "mistral": _rotary_decoder("Mistral", _mistral),
    "qwen2": _rotary_decoder("Qwen2", _qwen, biases=("query", "key", "value")),
    "qwen3": _rotary_decoder("Qwen3", _qwen, _ATTENTION, query_key_norms=True),
    "gemma3_text": _rotary_decoder(
        "Gemma3",
        _gemma3,
        _ATTENTION,
        {"activation": "hidden_activation", "tied": ("tie_word_embeddings", True)},
        _GEMMA,
        norm_offset=1.0,
        query_key_norms=True,
        output_norms=True,
    ),
    "gpt2": Family(
        DecoderSettings,
        _GPT2_SETTINGS | {"tied": ("tie_word_embeddings", True)},
        _gpt2,
        {
            "biases": ("qkv", "out", "up", "down"),
            "gated": False,
            "fused": True,
            "norm": "layer",
            "rotary": None,
        },
        _GPT2,
        ("GPT2LMHeadModel",),
        "transformer.",
        (r"h\.\d+\.attn\.(masked_)?bias",),
        turned=False,
    ),
    "bert": _of_bert("Bert", _BERT_SETTINGS, _encoder, _BERT, r"pooler\..*", r"cls\..*"),
    "roberta": _of_bert(
        "Roberta", _BERT_SETTINGS, _roberta, _ROBERTA, r"pooler\..*", r"lm_head\..*"
    ),
    "distilbert": _of_bert(
        "DistilBert",
        _DISTILBERT_SETTINGS,
        _encoder,
        _DISTILBERT,
        r"vocab_\w+\..*",
        types=0,
        head_activation="relu",
    ),
}
