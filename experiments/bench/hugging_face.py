"""Models there and back again: how far `transformers` and `peft` are from dpx on each other's files.

    python -m experiments.bench.hugging_face
    python -m experiments.bench.hugging_face --load=FOLDER

The first needs torch, transformers and peft (experiments/bench/hugging_face_requirements.txt). Tiny random
models of each family are saved by transformers and read by dpx. Adapters are put on them there, and made
random. They are written by `dpx.nn.peft.save` and read by peft, and merged by `dpx.nn.pretrained.save` and
read by transformers. What is printed is the largest difference of any output, in float32. The second prints
what it takes to load a model, a folder or a GGUF file, in bfloat16.
"""

import importlib.util
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from dpx.nn import lora, peft, pretrained
from dpx.runs import cli

_LOAD = flags.DEFINE_string("load", None, "A model to load, in place of all that.")
REQUIREMENTS = "experiments/bench/hugging_face_requirements.txt"
BERT = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 20, "max_position_embeddings": 16,
}  # fmt: skip
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_inner": 20, "n_positions": 16}
SHARED = BERT | {"num_key_value_heads": 2, "attn_implementation": "eager"}
WINDOW = {"sliding_window": 4}
# By family: classes of its config and its model, settings, modules with adapters, whether there is a shift.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], Any, bool]] = {
    "BERT": ("BertConfig", "BertModel", BERT, ("query", "attention.output.dense"), False),
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", GPT2, ("c_attn", "mlp.c_proj"), False),
    "GPT-2, shift": ("GPT2Config", "GPT2LMHeadModel", GPT2, ("c_attn",), True),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", SHARED, "all-linear", False),
    "Llama, shift": ("LlamaConfig", "LlamaForCausalLM", SHARED, ("q_proj", "down_proj"), True),
    "Mistral": ("MistralConfig", "MistralForCausalLM", SHARED | WINDOW, "all-linear", False),
    "Qwen 2": ("Qwen2Config", "Qwen2ForCausalLM", SHARED, "all-linear", False),
    "Qwen 3": ("Qwen3Config", "Qwen3ForCausalLM", SHARED | {"head_dim": 8}, "all-linear", False),
    "Gemma 3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        SHARED | WINDOW | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "all-linear",
        False,
    ),
}
TOKENS = np.random.default_rng(0).integers(3, 40, (2, 12))


def outputs(model: Any) -> np.ndarray:
    """What a model of torch gives for the tokens: logits, or hidden states."""
    torch = importlib.import_module("torch")
    with torch.no_grad():
        found = model.eval()(input_ids=torch.tensor(TOKENS))
    return (found.logits if hasattr(found, "logits") else found.last_hidden_state).numpy()


def tuned(folder: Path, modules: Any, shift: bool) -> Any:
    """The model in a folder, with random adapters on its last layer."""
    model = pretrained.load(folder)
    lora.attach(model, target_modules=modules, rank=2, alpha=6.0, layers=1, shift=shift)
    graph, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)
    rng = np.random.default_rng(1)
    trained = jax.tree.map(lambda x: 0.2 * rng.normal(size=x.shape).astype("f4"), trained)
    return nnx.merge(graph, trained, frozen)


def differences(name: str, folder: Path) -> dict[str, float]:
    """The largest difference of any output of one family, for each of three ways."""
    torch, hf = importlib.import_module("torch"), importlib.import_module("transformers")
    config, kind, settings, modules, shift = FAMILIES[name]
    torch.manual_seed(0)
    base = getattr(hf, kind)(getattr(hf, config)(**settings))
    with torch.no_grad():
        for parameter in base.parameters():  # scales and biases too
            parameter.add_(0.1 * torch.randn_like(parameter))
    base.save_pretrained(folder / "base")
    expected = outputs(base)
    found = {
        "read": np.abs(
            np.asarray(pretrained.load(folder / "base")(jnp.asarray(TOKENS))) - expected
        ).max()
    }
    model = tuned(folder / "base", modules, shift)
    own = np.asarray(model(TOKENS))
    assert np.abs(own - expected).max() > 0.01  # adapters change outputs
    peft.save(model, folder / "adapters", base=str(folder / "base"))
    theirs = importlib.import_module("peft").PeftModel.from_pretrained(base, folder / "adapters")
    found["adapters"] = np.abs(outputs(theirs) - own).max()
    if not shift or "GPT" in name:
        source = pretrained.open_checkpoint(folder / "base")
        pretrained.save(model, folder / "merged", source=source)
        merged = getattr(hf, kind).from_pretrained(folder / "merged")
        found["merged"] = np.abs(outputs(merged) - own).max()
    return {way: float(value) for way, value in found.items()}


def loaded(path: str) -> str:
    """What it takes to load a model: CPU time, and memory that is no file's."""
    start = time.process_time()
    model = pretrained.load(path, param_dtype=jnp.bfloat16)
    seconds = time.process_time() - start
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))) / 2**20
    status = Path("/proc/self/status").read_text(encoding="ascii")
    anonymous = int(status.partition("RssAnon:")[2].split()[0]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return (
        f"{seconds:.1f} s of CPU; parameters {size:.0f} MiB, anonymous memory {anonymous:.0f} MiB, resident "
        f"at the peak {peak:.0f} MiB, the mapped file included"
    )


def main(argv: list[str]) -> None:
    """Prints a line for each family, or one about a model."""
    del argv
    if _LOAD.value:
        print(loaded(_LOAD.value))
        return
    for name in ("torch", "transformers", "peft"):
        if importlib.util.find_spec(name) is None:
            cli.stop(ValueError(f"{name} is missing: pip install -r {REQUIREMENTS}"))
    print(
        "| | read by dpx | adapters read by peft | merged, read by transformers |\n|---|---|---|---|"
    )
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            found = differences(name, Path(folder))
        cells = (f"{found[w]:.1e}" if w in found else "" for w in ("read", "adapters", "merged"))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
