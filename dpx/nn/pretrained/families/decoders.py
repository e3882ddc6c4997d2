"""The families Llama, Mistral, Qwen 2, Qwen 3, Gemma 3 (text) and GPT-2, as settings of one decoder."""

from typing import Any

from dpx.nn.pretrained import rotary
from dpx.nn.pretrained.families.family import Family
from dpx.nn.pretrained.file_settings import NEUTRAL, UNUSED, Keys
from dpx.nn.pretrained.settings import DecoderSettings

_MODULES = {
    "embed": "embed_tokens",
    "query": "layers.{}.self_attn.q_proj",
    "key": "layers.{}.self_attn.k_proj",
    "value": "layers.{}.self_attn.v_proj",
    "out": "layers.{}.self_attn.o_proj",
    "query_norm": "layers.{}.self_attn.q_norm",
    "key_norm": "layers.{}.self_attn.k_norm",
    "gate": "layers.{}.mlp.gate_proj",
    "up": "layers.{}.mlp.up_proj",
    "down": "layers.{}.mlp.down_proj",
    "attention_norm": "layers.{}.input_layernorm",
    "mlp_norm": "layers.{}.post_attention_layernorm",
    "norm": "norm",
    "head": "lm_head",
}
_GEMMA = _MODULES | {
    "attention_out_norm": "layers.{}.post_attention_layernorm",
    "mlp_norm": "layers.{}.pre_feedforward_layernorm",
    "mlp_out_norm": "layers.{}.post_feedforward_layernorm",
}
_GPT2 = {
    "embed": "wte",
    "positions": "wpe",
    "attention_norm": "h.{}.ln_1",
    "qkv": "h.{}.attn.c_attn",
    "out": "h.{}.attn.c_proj",
    "mlp_norm": "h.{}.ln_2",
    "up": "h.{}.mlp.c_fc",
    "down": "h.{}.mlp.c_proj",
    "norm": "ln_f",
    "head": "lm_head",
}
_QKV, _ATTENTION = ("query", "key", "value"), ("query", "key", "value", "out")


def _shared(keys: Keys, activation: str = "hidden_act", **more: Any) -> dict[str, Any]:
    """The settings that all families but GPT-2 state in the same way."""
    dim, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    return {
        "vocab_size": keys.size("vocab_size"),
        "dim": dim,
        "num_layers": keys.size("num_hidden_layers"),
        "num_heads": heads,
        "head_dim": keys.size("head_dim", max(dim // heads, 1)),
        "mlp_dim": keys.size("intermediate_size"),
        "activation": keys.activation(activation),
        "norm_epsilon": keys.number("rms_norm_eps"),
        "context_length": keys.size("max_position_embeddings"),
    } | more


def _done(keys: Keys, **settings: Any) -> DecoderSettings:
    keys.close(UNUSED, NEUTRAL)
    return DecoderSettings(**settings)


def _biased(keys: Keys, name: str, projections: tuple[str, ...]) -> tuple[str, ...]:
    return projections if keys.flag(name, False) else ()


def _llama(keys: Keys, family: str) -> DecoderSettings:
    settings = _shared(keys, num_kv_heads=None, family=family)
    settings["num_kv_heads"] = keys.size("num_key_value_heads", settings["num_heads"])
    biases = _biased(keys, "attention_bias", _ATTENTION)
    biases += _biased(keys, "mlp_bias", ("gate", "up", "down"))
    turn = rotary.read(keys, settings["head_dim"])
    tied = keys.flag("tie_word_embeddings", False)
    return _done(keys, biases=biases, rotary=turn, tied=tied, **settings)


def _mistral(keys: Keys, family: str) -> DecoderSettings:
    settings = _shared(keys, num_kv_heads=keys.size("num_key_value_heads"), family=family)
    window = keys.optional_size("sliding_window", 4096)
    turn = rotary.read(keys, settings["head_dim"])
    tied = keys.flag("tie_word_embeddings", False)
    windows = (window,) * settings["num_layers"] if window else None
    return _done(keys, windows=windows, rotary=turn, tied=tied, **settings)


def _qwen(keys: Keys, family: str) -> DecoderSettings:
    settings = _shared(keys, num_kv_heads=keys.size("num_key_value_heads"), family=family)
    if family == "qwen3":
        settings["query_key_norms"] = True
        settings["biases"] = _biased(keys, "attention_bias", _ATTENTION)
    else:
        settings["biases"] = _QKV
    window, first = keys.optional_size("sliding_window"), keys.read("max_window_layers", None)
    windowed = keys.flag("use_sliding_window", False) and window is not None
    numbers = range(settings["num_layers"])
    if windowed and "layer_types" not in keys and not isinstance(first, int):
        raise keys.wrong("max_window_layers", first, "must be a number")
    default = [windowed and first is not None and number >= first for number in numbers]
    windows = _windows(keys, default, window if windowed else None)
    turn = rotary.read(keys, settings["head_dim"])
    tied = keys.flag("tie_word_embeddings", False)
    return _done(keys, windows=windows, rotary=turn, tied=tied, **settings)


def _gemma3(keys: Keys, family: str) -> DecoderSettings:
    kv_heads, width = keys.size("num_key_value_heads"), keys.size("head_dim")
    settings = _shared(keys, "hidden_activation", num_kv_heads=kv_heads, family=family)
    settings["head_dim"] = width
    every = keys.size("_sliding_window_pattern", keys.read("sliding_window_pattern", 6))
    default = [(number + 1) % every != 0 for number in range(settings["num_layers"])]
    windows = _windows(keys, default, keys.size("sliding_window"))
    both = keys.part("rope_parameters")
    if both is None:
        # In older files, `rope_scaling` holds for layers without a window only.
        local = rotary.Rotary(keys.number("rope_local_base_freq", 10000.0))
        turn = rotary.read(keys, width, 1e6)
    else:
        parts = [both.part(name) for name in ("full_attention", "sliding_attention")]
        both.close()
        turn, local = (
            rotary.Rotary(theta) if part is None else rotary.described(part, width, theta)
            for part, theta in zip(parts, (1e6, 10000.0), strict=True)
        )
    scale = keys.number("query_pre_attn_scalar") ** -0.5
    biases = _biased(keys, "attention_bias", _ATTENTION)
    tied = keys.flag("tie_word_embeddings", True)
    if keys.read("use_bidirectional_attention", False):
        raise keys.wrong("use_bidirectional_attention", True, "must be false")
    own = {"windows": windows, "rotary": turn, "window_rotary": local, "attention_scale": scale}
    own |= {"norm_offset": 1.0, "query_key_norms": True, "output_norms": True}
    return _done(
        keys, biases=biases, tied=tied, embed_scale=settings["dim"] ** 0.5, **own, **settings
    )


def _windows(keys: Keys, default: list[bool], window: int | None) -> tuple[int | None, ...] | None:
    """The window of each layer, by `layer_types` or else by `default`; None if no layer has one."""
    types = keys.read("layer_types", None)
    if types is not None:
        known = {"full_attention": False, "sliding_attention": True}
        if not isinstance(types, list) or len(types) != len(default) or not set(types) <= {*known}:
            needed = f"must be {len(default)} times full_attention or sliding_attention"
            raise keys.wrong("layer_types", types, needed)
        default = [known[kind] for kind in types]
        if any(default) and window is None:
            raise keys.wrong("layer_types", types, "must be full_attention without a window")
    windows = tuple(window if is_local else None for is_local in default)
    return windows if any(windows) else None


def _gpt2(keys: Keys, family: str) -> DecoderSettings:
    dim, scaled = keys.size("n_embd"), keys.flag("scale_attn_weights", True)
    settings = {
        "vocab_size": keys.size("vocab_size"),
        "dim": dim,
        "num_layers": keys.size("n_layer"),
        "num_heads": keys.size("n_head"),
        "mlp_dim": keys.size("n_inner", 4 * dim),
        "activation": keys.activation("activation_function"),
        "norm_epsilon": keys.number("layer_norm_epsilon"),
        "context_length": keys.size("n_positions"),
        "tied": keys.flag("tie_word_embeddings", True),
        "attention_scale": None if scaled else 1.0,
        "biases": ("qkv", "out", "up", "down"),
    }
    summary = ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")
    unused = {*UNUSED, "n_ctx", *(f"summary_{name}" for name in summary)}
    keys.close(unused, {**NEUTRAL, "scale_attn_by_inverse_layer_idx": False})
    return DecoderSettings(
        **settings, gated=False, fused=True, norm="layer", rotary=None, family=family
    )


_BUFFERS = (r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"rotary_emb\.inv_freq")


def _family(settings: Any, name: str, modules=_MODULES) -> Family:
    return Family(settings, modules, (f"{name}ForCausalLM",), "model.", _BUFFERS)


FAMILIES: dict[str, Family] = {
    "llama": _family(_llama, "Llama"),
    "mistral": _family(_mistral, "Mistral"),
    "qwen2": _family(_qwen, "Qwen2"),
    "qwen3": _family(_qwen, "Qwen3"),
    "gemma3_text": _family(_gemma3, "Gemma3", _GEMMA),
    "gpt2": Family(
        _gpt2,
        _GPT2,
        ("GPT2LMHeadModel",),
        "transformer.",
        (r"h\.\d+\.attn\.(masked_)?bias",),
        turned=False,
    ),
}
