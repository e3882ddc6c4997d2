"""Attention that noisy keys draw, measured, and what Re-Attention makes of it.

This is Table 1 of the paper on Phantom Clipping and Re-Attention (arXiv 2405.18194); its Equation 15,
which is E[S_i] against key variance for a fixed query, on synthetic keys and on a transformer trained
with DP on synthetic histories, whose parameters get fresh noise 200 times; and its Figure 10, maps of
attention.

    python -m experiments.run   --config=configs/reattention.py --workdir=runs/reattention
    python -m experiments.sweep --config=configs/reattention.py --workdir=runs/reattention_sweep

For one noisy synthetic key at logit variance 1 expect E[S]/S of 1.57 without and 0.98 with Re-Attention.
The three ε of the sweep took 83 s on one core. The tables are in experiments/dp_transformer/README.md.
"""

from ml_collections import ConfigDict

from configs import common
from configs.common import begin, parse_arg, reattention, training

MEANINGS = common.MEANINGS | {
    "table.samples": "draws of Table 1's samples",
    "table.stds": "standard deviations in Table 1",
    "one_key.dim": "dimensions of the synthetic keys",
    "one_key.length": "keys, of which one is noisy",
    "one_key.samples": "draws of its noise",
    "one_key.logit_variances": "variances of its logit",
    "data.length": "items of a history",
    "draws": "draws of fresh noise in the same parameters",
    "sequences": "histories that attention is measured on",
    "noise_scale": "that noise, as a multiple of effective_noise_std",
}


def get_config(arg: str = "") -> ConfigDict:
    _, tiny = parse_arg(arg)
    config = ConfigDict(
        {
            **begin("dp_transformer.distraction", epsilon=8.0, delta=1e-5),
            "table": {"samples": 1_000_000, "stds": (0.01, 0.1, 1.0)},
            "one_key": {
                "dim": 16,
                "length": 10,
                "samples": 100_000,
                "logit_variances": (0.0, 0.5, 1.0, 2.0, 4.0, 8.0),
            },
            "data": {"num_users": 5000, "length": 16, "num_items": 200},
            "draws": 200,
            "sequences": 200,
            "noise_scale": 1.0,
            "model": {
                "kind": "transformer",
                "dim": 32,
                "num_heads": 1,
                "num_blocks": 2,
                "tied": True,
                "embed_std": 0.1,
                "dropout": 0.0,
            },
            "reattention": reattention(enabled=True),
            **training(
                steps=100,
                batch_size=512,
                microbatch_size=128,
                compute_dtype="float32",
                learning_rate=3e-3,
            ),
        }
    )
    if tiny:
        config.update(
            {
                "table": {"samples": 1000},
                "one_key": {"samples": 200},
                "data": {"num_users": 200, "length": 8, "num_items": 20},
                "draws": 4,
                "sequences": 20,
                "model": {"dim": 8, "num_blocks": 1},
                "train": {"steps": 2, "batch_size": 32, "microbatch_size": 32},
            }
        )
    return config


def sweep(arg: str = "") -> dict[str, list]:
    parse_arg(arg)
    return {"epsilon": [5.0, 8.0, 10.0]}
