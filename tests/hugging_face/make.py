"""Writes tiny random models as `transformers` saves them, with what they compute: python make.py.

Each folder has config.json, model.safetensors and reference.safetensors, which holds tokens, mask and outputs
in float32: logits of decoders, hidden states of encoders, classes of classifiers. `llama_lora` and
`gpt2_lora` are adapters as `peft` saves them, with the logits of model and adapters together.

Made with torch 2.14.1, transformers 5.24.0 and peft 0.21.2, which are needed for this alone.
"""

import json
from pathlib import Path

import peft
import torch
import transformers as hf
from safetensors.torch import save_file

HERE = Path(__file__).parent
BERT = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 20, "max_position_embeddings": 16,
}  # fmt: skip
DISTILBERT = {
    "vocab_size": 40, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 20,
    "max_position_embeddings": 16,
}  # fmt: skip
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_inner": 20, "n_positions": 16}
SHARED = BERT | {"num_key_value_heads": 2, "attn_implementation": "eager"}
STRETCHED = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
ROBERTA = BERT | {"max_position_embeddings": 18, "pad_token_id": 1}
KINDS = ["sliding_attention", "full_attention"]
GEMMA = SHARED | {"head_dim": 8, "sliding_window": 3, "layer_types": KINDS}
GEMMA |= {"query_pre_attn_scalar": 16}
LABELS = {"num_labels": 3}
WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
# The names of the class of a model and of its configuration in `transformers`, and its settings.
MODELS = {
    "bert": ("BertModel", "Bert", BERT),
    "roberta": ("RobertaModel", "Roberta", ROBERTA),
    "distilbert": ("DistilBertModel", "DistilBert", DISTILBERT),
    "bert_classifier": ("BertForSequenceClassification", "Bert", BERT | LABELS),
    "roberta_classifier": ("RobertaForSequenceClassification", "Roberta", ROBERTA | LABELS),
    "distilbert_classifier": ("DistilBertForSequenceClassification", "DistilBert", DISTILBERT),
    "gpt2": ("GPT2LMHeadModel", "GPT2", GPT2),
    "llama": ("LlamaForCausalLM", "Llama", SHARED),
    "llama3_rope": (
        "LlamaForCausalLM",
        "Llama",
        SHARED | {"tie_word_embeddings": True, "rope_parameters": STRETCHED},
    ),
    "llama_biased": (
        "LlamaForCausalLM",
        "Llama",
        SHARED | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    ),
    "mistral": ("MistralForCausalLM", "Mistral", SHARED | {"sliding_window": 3, "head_dim": 8}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2", SHARED | {"tie_word_embeddings": True}),
    "qwen2_windows": ("Qwen2ForCausalLM", "Qwen2", SHARED | WINDOW),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3", SHARED | {"head_dim": 8}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3Text", GEMMA),
}
ADAPTERS = {
    "llama_lora": ("llama", {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "gpt2_lora": (
        "gpt2",
        {"target_modules": ["c_attn", "mlp.c_proj"], "use_rslora": True, "layers_to_transform": [1],
         "fan_in_fan_out": True},
    ),
}  # fmt: skip


def reference(model, folder: Path) -> None:
    """Saves what a model computes, in float32."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 40, (2, 10), generator=generator)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 6:] = 0
    with torch.no_grad():
        found = model.eval().float()(input_ids=tokens, attention_mask=mask)
    outputs = found.logits if hasattr(found, "logits") else found.last_hidden_state
    arrays = {"tokens": tokens.int(), "mask": mask.int(), "outputs": outputs.contiguous()}
    save_file(arrays, folder / "reference.safetensors")


def main() -> None:
    """Writes all folders."""
    for number, (name, (kind, config, settings)) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        model = getattr(hf, kind)(getattr(hf, f"{config}Config")(**settings))
        with torch.no_grad():
            for parameter in model.parameters():  # none is all ones or zeros, so that each counts
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(HERE / name)
        reference(model, HERE / name)
    for name, (base, settings) in ADAPTERS.items():
        torch.manual_seed(99)
        model = hf.AutoModelForCausalLM.from_pretrained(HERE / base)
        config = peft.LoraConfig(
            r=2, lora_alpha=6, task_type="CAUSAL_LM", init_lora_weights=False, **settings
        )
        tuned = peft.get_peft_model(model, config)
        tuned.save_pretrained(HERE / name)
        path = HERE / name / "adapter_config.json"
        named = json.loads(path.read_text()) | {"base_model_name_or_path": base}
        path.write_text(json.dumps(named, indent=2) + "\n")
        reference(tuned, HERE / name)
    for extra in [*HERE.glob("*/generation_config.json"), *HERE.glob("*/README.md")]:
        extra.unlink()


if __name__ == "__main__":
    main()
