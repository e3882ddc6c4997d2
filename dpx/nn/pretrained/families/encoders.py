"""The families BERT, RoBERTa and DistilBERT, as settings of one encoder."""

from typing import Any

from dpx.nn.pretrained.families.family import Family
from dpx.nn.pretrained.file_settings import NEUTRAL, UNUSED, Keys
from dpx.nn.pretrained.settings import EncoderSettings

_BERT = {
    "embed": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "query": "encoder.layer.{}.attention.self.query",
    "key": "encoder.layer.{}.attention.self.key",
    "value": "encoder.layer.{}.attention.self.value",
    "out": "encoder.layer.{}.attention.output.dense",
    "attention_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "up": "encoder.layer.{}.intermediate.dense",
    "down": "encoder.layer.{}.output.dense",
    "mlp_norm": "encoder.layer.{}.output.LayerNorm",
    "pooler": "pooler.dense",
    "head": "classifier",
}
_ROBERTA = _BERT | {"pooler": "classifier.dense", "head": "classifier.out_proj"}
_DISTILBERT = {
    "embed": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "norm": "embeddings.LayerNorm",
    "query": "transformer.layer.{}.attention.q_lin",
    "key": "transformer.layer.{}.attention.k_lin",
    "value": "transformer.layer.{}.attention.v_lin",
    "out": "transformer.layer.{}.attention.out_lin",
    "attention_norm": "transformer.layer.{}.sa_layer_norm",
    "up": "transformer.layer.{}.ffn.lin1",
    "down": "transformer.layer.{}.ffn.lin2",
    "mlp_norm": "transformer.layer.{}.output_layer_norm",
    "pooler": "pre_classifier",
    "head": "classifier",
}
_NEUTRAL = {**NEUTRAL, "directionality": "bidi", "position_embedding_type": "absolute"}
_POOLER = ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")
_UNUSED = {*UNUSED, "tie_word_embeddings", "tie_weights_", *(f"pooler_{name}" for name in _POOLER)}


def _labels(keys: Keys) -> int:
    """The number of classes of the head, or 0 without a head. Files leave out the default, which is 2."""
    (architecture,) = keys.read("architectures")
    if not architecture.endswith("ForSequenceClassification"):
        return 0
    names = keys.read("id2label", None)
    return keys.size("num_labels", 2 if names is None else len(names))


def _bert(keys: Keys, family: str) -> EncoderSettings:
    settings: dict[str, Any] = {
        "vocab_size": keys.size("vocab_size"),
        "context_length": keys.size("max_position_embeddings"),
        "dim": keys.size("hidden_size"),
        "num_layers": keys.size("num_hidden_layers"),
        "num_heads": keys.size("num_attention_heads"),
        "mlp_dim": keys.size("intermediate_size"),
        "activation": keys.activation("hidden_act"),
        "norm_epsilon": keys.number("layer_norm_eps"),
        "types": keys.size("type_vocab_size"),
        "labels": _labels(keys),
    }
    if family == "roberta":
        padding = keys.read("pad_token_id", 1)
        if not isinstance(padding, int) or not 0 <= padding < settings["context_length"] - 1:
            raise keys.wrong("pad_token_id", padding, "must be a token before the last position")
        settings["padding"] = padding
        settings["context_length"] -= padding + 1
    keys.close(_UNUSED, _NEUTRAL)
    return EncoderSettings(**settings, family=family)


def _distilbert(keys: Keys, family: str) -> EncoderSettings:
    settings = {
        "vocab_size": keys.size("vocab_size"),
        "context_length": keys.size("max_position_embeddings"),
        "dim": keys.size("dim"),
        "num_layers": keys.size("n_layers"),
        "num_heads": keys.size("n_heads"),
        "mlp_dim": keys.size("hidden_dim"),
        "activation": keys.activation("activation"),
        "labels": _labels(keys),
    }
    keys.close(_UNUSED, _NEUTRAL)
    return EncoderSettings(**settings, types=0, head_activation="relu", family=family)


def _family(settings: Any, modules: dict[str, str], name: str, *unused: str) -> Family:
    kinds = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification")
    architectures = tuple(f"{name}{kind}" for kind in kinds)
    buffers = r"embeddings\.position_ids"
    return Family(settings, modules, architectures, f"{name.lower()}.", (buffers, *unused))


FAMILIES: dict[str, Family] = {
    "bert": _family(_bert, _BERT, "Bert", r"pooler\..*", r"cls\..*"),
    "roberta": _family(_bert, _ROBERTA, "Roberta", r"pooler\..*", r"lm_head\..*"),
    "distilbert": _family(_distilbert, _DISTILBERT, "DistilBert", r"vocab_\w+\..*"),
}
