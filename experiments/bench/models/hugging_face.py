"""Language models of Hugging Face."""
# pyright: reportMissingImports=false

import inspect
from typing import Any

from experiments.bench.models.building import integers, next_token, normal
from experiments.bench.models.measure import Case

VOCABULARY, LENGTH, WIDTH = 256, 24, 64
SMALL = {"vocab_size": VOCABULARY}


def hugging_face(name: str, config: str, **settings: Any) -> Case:
    """A Flax model of transformers with random weights, without dropout."""
    import transformers

    made = getattr(transformers, config)(**settings)
    model = getattr(transformers, name)(made, seed=0, input_shape=(1, LENGTH))
    tokens = integers(VOCABULARY, LENGTH)
    options = (
        {"train": False} if "train" in inspect.signature(type(model).__call__).parameters else {}
    )

    def loss(params, ids):
        return next_token(model(ids[None], params=params, **options).logits[0], ids)

    return Case(loss, model.params, (tokens,))


def encoder_decoder(name: str, config: str, **settings) -> Case:
    """A sequence-to-sequence model of transformers."""
    import transformers

    made = getattr(transformers, config)(**settings)
    model = getattr(transformers, name)(made, seed=0, input_shape=(1, LENGTH))

    def loss(params, source, target):
        out = model(source[None], decoder_input_ids=target[None], params=params, train=False)
        return next_token(out.logits[0], target)

    batch = integers(VOCABULARY, LENGTH), integers(VOCABULARY, LENGTH, seed=1)
    return Case(loss, model.params, batch)


def whisper() -> Case:
    """Speech to text: convolutions over a spectrogram, and a decoder."""
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=16, d_model=WIDTH, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
        max_source_positions=32, max_target_positions=LENGTH, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = transformers.FlaxWhisperForConditionalGeneration(
        config, seed=0, input_shape=(1, 16, 64)
    )

    def loss(params, features, ids):
        out = model(features[None], decoder_input_ids=ids[None], params=params, train=False)
        return next_token(out.logits[0], ids)

    return Case(loss, model.params, (normal(16, 64), integers(VOCABULARY, LENGTH)))


GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
BERT = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": LENGTH + 2,
}  # fmt: skip
LLAMA = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
}  # fmt: skip
T5 = {"d_model": WIDTH, "num_layers": 2, "num_heads": 4, "d_kv": 16, "d_ff": 128}
BART = {
    "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "max_position_embeddings": LENGTH,
}  # fmt: skip

CASES = {
    "FlaxGPT2, transformers": lambda: hugging_face("FlaxGPT2LMHeadModel", "GPT2Config", **SMALL, **GPT2),
    "FlaxBert, transformers": lambda: hugging_face("FlaxBertForMaskedLM", "BertConfig", **SMALL, **BERT),
    "FlaxRoberta, transformers": lambda: hugging_face(
        "FlaxRobertaForMaskedLM", "RobertaConfig", **SMALL, **BERT),
    "FlaxDistilBert, transformers": lambda: hugging_face(
        "FlaxDistilBertForMaskedLM", "DistilBertConfig", **SMALL, dim=WIDTH, n_layers=2, n_heads=4,
        hidden_dim=128, max_position_embeddings=LENGTH),
    "FlaxAlbert, one block shared, transformers": lambda: hugging_face(
        "FlaxAlbertForMaskedLM", "AlbertConfig", **SMALL, **BERT, embedding_size=32),
    "FlaxElectra, transformers": lambda: hugging_face(
        "FlaxElectraForMaskedLM", "ElectraConfig", **SMALL, **BERT, embedding_size=32),
    "FlaxLlama, transformers": lambda: hugging_face("FlaxLlamaForCausalLM", "LlamaConfig", **SMALL, **LLAMA),
    "FlaxGemma, transformers": lambda: hugging_face(
        "FlaxGemmaForCausalLM", "GemmaConfig", **SMALL, **LLAMA, head_dim=16),
    "FlaxMistral, transformers": lambda: hugging_face(
        "FlaxMistralForCausalLM", "MistralConfig", **SMALL, **LLAMA),
    "FlaxGPTNeo, transformers": lambda: hugging_face(
        "FlaxGPTNeoForCausalLM", "GPTNeoConfig", **SMALL, hidden_size=WIDTH, num_layers=2, num_heads=4,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=LENGTH, window_size=8),
    "FlaxGPTJ, transformers": lambda: hugging_face(
        "FlaxGPTJForCausalLM", "GPTJConfig", **SMALL, **GPT2, rotary_dim=8),
    "FlaxOPT, transformers": lambda: hugging_face(
        "FlaxOPTForCausalLM", "OPTConfig", **SMALL, hidden_size=WIDTH, num_hidden_layers=2,
        num_attention_heads=4, ffn_dim=128, max_position_embeddings=LENGTH, word_embed_proj_dim=WIDTH),
    "FlaxBloom, transformers": lambda: hugging_face(
        "FlaxBloomForCausalLM", "BloomConfig", **SMALL, hidden_size=WIDTH, n_layer=2, n_head=4),
    "FlaxT5, transformers": lambda: encoder_decoder(
        "FlaxT5ForConditionalGeneration", "T5Config", **SMALL, **T5, decoder_start_token_id=0),
    "FlaxBart, transformers": lambda: encoder_decoder(
        "FlaxBartForConditionalGeneration", "BartConfig", **SMALL, **BART),
    "FlaxWhisper, transformers": whisper,
}  # fmt: skip
