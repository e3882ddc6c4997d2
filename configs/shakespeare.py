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

from ml_collections import ConfigDict, config_dict

from configs import common
from configs.common import mesh, non_private, parse_arg, reattention

MEANINGS = common.MEANINGS | {
    "data.path": "the text; it is downloaded by default",
    "data.length": "characters of a window, which is a record",
    "data.held_out": "share of the text to measure on, its end",
    "data.generated": "characters of a text that nobody wrote, in place of a file; 0 for none",
}


def get_config(arg: str = "") -> ConfigDict:
    _, tiny = parse_arg(arg)
    config = ConfigDict(
        {
            "experiment": "dp_transformer.language_model",
            "epsilon": 8.0,
            "delta": 1e-5,
            "seed": 0,
            "noise_seed": config_dict.placeholder(int),
            "comparisons": True,
            "data": {
                "kind": "shakespeare",
                "path": config_dict.placeholder(str),
                "length": 64,
                "held_out": 0.1,
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
            "reattention": reattention(enabled=True, max_tokens=24),
            "mesh": mesh(),
            "log": config_dict.placeholder(str),
            "train": {
                "steps": 150,
                "batch_size": 512,
                "microbatch_size": 64,
                "compute_dtype": "float32",
                "learning_rate": 3e-3,
                "warmup": 0.1,
                "weight_decay": 1e-5,
                "l2_clip_norm": 1.0,
                "normalize": True,
                "accountant": "pld",
                "sampling": "poisson",  # or "allocation", or "auto" for the one with less noise
                "secure": False,
                "log_every": 25,
                "checkpoint_every": 50,
            },
            "non_private": non_private(
                steps=0, learning_rate=3e-3, tried={"start": ("scratch", "exact")}
            ),
            "prior": {"order": 4, "budget_fraction": 0.8},
            "ngrams": (1, 2, 3, 4),
            "train_loss": True,
        }
    )
    if tiny:
        config.update(
            {
                "data": {"length": 16, "generated": 4000},
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
