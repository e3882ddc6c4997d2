"""TinyShakespeare by characters: plain attention, Re-Attention and DP n-grams.

One record is a window of 64 characters; windows do not overlap, and neighbours add or remove one. The
last tenth of the text is the test set, and δ = 1e-5 < 1/15,685. This is Appendix D of the paper on
Phantom Clipping and Re-Attention (arXiv 2405.18194) at a size that fits a CPU: d = 64, 2 blocks of 4
heads. Both transformers start from a DP 4-gram model, which gets most of the budget.

    python -m experiments.run --config=configs/shakespeare.py --workdir=runs/shakespeare \\
        --config.data.path=tinyshakespeare.txt
    python -m experiments.sweep --config=configs/shakespeare.py --workdir=runs/shakespeare_sweep

Without a path the text is downloaded. `--config.prior.budget_fraction=0` trains from scratch. At ε = 8
expect 1.99 nats per character after four and a half minutes of one core; the table is in
experiments/dp_transformer/README.md.
"""

from typing import Any

from ml_collections import ConfigDict, config_dict

from configs import text
from configs.common import parse_arg

MEANINGS = text.MEANINGS | {
    "data.path": "the text; it is downloaded by default",
    "data.length": "characters of a window, which is a record",
    "data.held_out": "share of the text to measure on, its end",
}


def get_config(arg: str = "") -> ConfigDict:
    _, tiny = parse_arg(arg)
    config: Any = text.get_config(arg)
    config.comparisons = config.reattention.enabled = config.train_loss = True
    config.data = {
        "kind": "shakespeare",
        "path": config_dict.placeholder(str),
        "length": 16 if tiny else 64,
        "held_out": 0.1,
        "limit": 0,
        "generated": 4000 if tiny else 0,
    }
    del config.train.records_per_user
    if not tiny:
        config.prior.order, config.ngrams = 4, (1, 2, 3, 4)
    return config


def sweep(arg: str = "") -> dict[str, list]:
    parse_arg(arg)
    return {"epsilon": [5.0, 8.0, 10.0], "seed": [0]}
