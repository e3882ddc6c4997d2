"""Your own text, by characters: a transformer that starts from a DP n-gram model.

    python -m experiments.run --config=configs/text.py --workdir=runs/text --config.data.path=notes.txt
    python -m experiments.run --config=configs/text.py --workdir=runs/reviews \\
        --config.data.path=reviews.csv --config.data.column=review --config.data.user=author

The path is a .txt file or a folder of them, or a table (.csv, .tsv, .jsonl, .parquet, or Orange's .tab) of
which data.column holds the text, or else the first column that is called text, content, body or article. One
record is a line, a document (a file, or a row of a table) or a window of data.length characters. What is
longer than data.length characters is cut. The alphabet is "ascii", "bytes" or the characters themselves;
others are refused, replaced by one stand-in, or dropped.

With data.user the unit is the author, and not the record: a step draws up to train.records_per_user records
of each author that it samples, batch sizes and data.limit count authors, and an author's n-grams are clipped
together. data.held_out is a share of the authors.

`--config.comparisons=True` adds the n-gram models of `ngrams`, each of which costs the whole budget again.
"""

from ml_collections import ConfigDict, config_dict

from configs import common
from configs.common import begin, non_private, parse_arg, reattention, training

MEANINGS = common.MEANINGS | {
    "data.alphabet": 'the characters there are: "ascii", "bytes", or the characters themselves',
    "data.outside": 'what happens to others: "replace", "drop" or "refuse"',
    "data.held_out": "share of the records, or of the users, to measure on",
    "data.generated": "characters of a text that nobody wrote, in place of a file; 0 for none",
}


def get_config(arg: str = "") -> ConfigDict:
    _, tiny = parse_arg(arg)
    config = ConfigDict(
        {
            **begin("dp_transformer.language_model", epsilon=8.0, delta=1e-5),
            "comparisons": config_dict.placeholder(bool),
            "data": {
                "kind": "text",
                "path": config_dict.placeholder(str),
                "column": config_dict.placeholder(str),
                "user": config_dict.placeholder(str),
                "record": "line",
                "alphabet": "ascii",
                "outside": "replace",
                "length": 64,
                "held_out": 0.1,
                "split_seed": 0,
                "limit": 0,
                "generated": 0,
            },
            "model": {
                "kind": "transformer",
                "dim": 64,
                "num_heads": 4,
                "num_blocks": 2,
                "tied": True,
                "dropout": 0.0,
            },
            "reattention": reattention(max_tokens=24),
            **training(
                steps=150,
                batch_size=512,
                records_per_user=4,
                microbatch_size=64,
                compute_dtype="float32",
                learning_rate=3e-3,
            ),
            "non_private": non_private(
                steps=0, learning_rate=3e-3, tried={"start": ("scratch", "exact")}
            ),
            "prior": {"order": 3, "budget_fraction": 0.8},
            "ngrams": (1, 2, 3),
            "train_loss": False,
        }
    )
    if tiny:
        config.update(
            {
                "data": {"length": 16, "generated": 12000},
                "model": {"dim": 16, "num_heads": 2, "num_blocks": 1},
                "train": {
                    "steps": 4,
                    "batch_size": 32,
                    "microbatch_size": 32,
                    "log_every": 2,
                    "checkpoint_every": 2,
                },
                "ngrams": (1, 2),
                "prior": {"order": 2},
            }
        )
    return config


def sweep(arg: str = "") -> dict[str, list]:
    parse_arg(arg)
    return {"epsilon": [5.0, 8.0, 10.0], "seed": [0]}
