"""The settings in a model's file, read key by key, so that no key is ignored silently."""

from collections.abc import Collection, Mapping
from typing import Any

# Keys of config.json that do not affect what a model computes: names, training, and generation.
_UNUSED = """
    _attn_implementation _attn_implementation_autoset _name_or_path _num_labels architectures
    attention_dropout attention_probs_dropout_prob attn_implementation attn_pdrop bos_token_id
    cache_implementation classifier_dropout dropout dtype embd_pdrop eos_token_id finetuning_task
    gradient_checkpointing hidden_dropout_prob id2label initializer_range is_llama_config
    keys_to_ignore_at_inference label2id language model_type name_or_path num_labels output_attentions
    output_hidden_states output_past pad_token_id pretraining_tp problem_type qa_dropout
    reorder_and_upcast_attn resid_pdrop return_dict seq_classif_dropout sinusoidal_pos_embds
    task_specific_params tokenizer_class torch_dtype torchscript transformers_version
    transformers.js_config use_bfloat16 use_cache

    n_ctx pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    tie_weights_ tie_word_embeddings

    bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_scores prefix remove_invalid_values repetition_penalty
    return_dict_in_generate sep_token_id suppress_tokens temperature top_k top_p typical_p
"""
UNUSED = frozenset(_UNUSED.split())
# Keys that affect a model of any family, unless they have this value.
NEUTRAL: Mapping[str, Any] = {
    "add_cross_attention": False,
    "chunk_size_feed_forward": 0,
    "directionality": "bidi",
    "is_decoder": False,
    "is_encoder_decoder": False,
    "position_embedding_type": "absolute",
    "rope_interleaved": False,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_encoder_decoder": False,
    "use_mrope": False,
}
# The names of activations in files, and those in `Decoder` and `Encoder`.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_REQUIRED = object()
_LARGEST = 2**25  # more than any model has of anything


class Keys:
    """The settings in a file. Each is read once, and `close` refuses settings that were not read.

    Args:
      where: The file, for errors.
      settings: The settings by name.
    """

    def __init__(self, where: str, settings: Mapping[str, Any]):
        self.where, self._left = where, dict(settings)

    def wrong(self, name: str, value: Any, needed: str) -> ValueError:
        """The error for a value that cannot be used."""
        return ValueError(f"{self.where} has {name}={value!r}, which {needed}: use another model")

    def read(self, name: str, default: Any = _REQUIRED) -> Any:
        """A value; raises ValueError if it is missing and has no default."""
        if name not in self._left and default is _REQUIRED:
            raise ValueError(f"{self.where} must hold {name!r}, and does not: use another model")
        return self._left.pop(name, default)

    def _fitting(self, name: str, value: Any, fits: bool, needed: str) -> Any:
        if not fits:
            raise self.wrong(name, value, needed)
        return value

    def size(self, name: str, default: Any = _REQUIRED) -> int:
        """An integer from 1 to `_LARGEST`; null is the default."""
        value = self.read(name, default)
        value = default if value is None and default is not _REQUIRED else value
        fits = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST
        return self._fitting(name, value, fits, f"must be one number from 1 to {_LARGEST}")

    def optional_size(self, name: str, default: int | None = None) -> int | None:
        """As `size`, or None for null."""
        if self._left.get(name, default) is None:
            return self.read(name, None)
        return self.size(name, default)

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """A positive number."""
        value = self.read(name, default)
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        fits = fits and 0 < value < float("inf")
        return float(self._fitting(name, value, fits, "must be a positive and finite number"))

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        """True or False."""
        value = self.read(name, default)
        return self._fitting(name, value, isinstance(value, bool), "must be true or false")

    def activation(self, name: str) -> str:
        """An activation, by its name in `Decoder` and `Encoder`."""
        value, needed = self.read(name), f"must be one of {', '.join(_ACTIVATIONS)}"
        fits = isinstance(value, str) and value in _ACTIVATIONS
        return _ACTIVATIONS[self._fitting(name, value, fits, needed)]

    def part(self, name: str) -> "Keys | None":
        """Settings within the settings, or None if there are none of that name."""
        value = self.read(name, None)
        fits = value is None or isinstance(value, Mapping)
        self._fitting(name, value, fits, "must be settings by name")
        return None if value is None else Keys(f"{self.where}, {name},", value)

    def settings(self, names: Mapping[str, Any]) -> dict[str, Any]:
        """Settings by name: each is read as what it is, by its name in the file or that and a default."""
        read = {"activation": self.activation, "norm_epsilon": self.number, "tied": self.flag}
        return {
            setting: read.get(setting, self.size)(*([name] if isinstance(name, str) else name))
            for setting, name in names.items()
        }

    def __contains__(self, name: str) -> bool:
        """Whether a value of that name is left that was not read; null does not count."""
        return self._left.get(name) is not None

    def close(self, unused: Collection[str] = UNUSED, neutral: Mapping[str, Any] = NEUTRAL) -> None:
        """Refuses settings that were not read.

        Args:
          unused: Keys that have no effect, whatever their value.
          neutral: Keys that have no effect at this value.

        Raises:
          ValueError: for a key that is in neither, unless it is null or empty.
        """
        for name, value in self._left.items():
            if name in unused or value is None or value in ("", [], {}):
                continue
            if name not in neutral:
                raise self.wrong(name, value, "is not a setting that is known")
            if value != neutral[name]:
                raise self.wrong(name, value, f"must be {neutral[name]!r}")
