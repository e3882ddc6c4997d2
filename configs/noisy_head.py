"""NoisyHead (arXiv 2504.16000): private in-context regression by linear attention.

    python -m experiments.run --config=configs/noisy_head.py:low_dim --workdir=runs/low_dim

variant         figure of the paper                            what to expect
low_dim         1: excess risk against N, five ε, D = 5        at N = 4000, ε = 1: paper 0.033, one-shot 1e-6
high_dim        2: the same with D = L = ⌊√N⌋                  at N = 1000, ε = 1: paper 1e-7
useful          none: λ so small that ridge beats zero         one-shot has that ridge's MSE at N = 100,000
rates           Theorem 4.2: exponents of N, L, D and ε        fitted slopes beside the claimed ones
early_stopping  3: risk against T, Γ⁰ = 0 and random           a minimum from a random Γ⁰ only
robustness      4: one corrupted prompt, α = c Nᵖ              flat ridge; NoisyHead worse with the paper's R
text            5: risk against T on texts or own prompts      needs --config.data.path

`text` reads a folder of text files, or a table with a column of texts, as configs/text.py does. It also takes
prompts of your own: an .npz file with the arrays x (N, L+1, D) and y (N, L+1), an .npy file (N, L+1, D+1)
whose last column is y, or, with `--config.data.source=arrays`, a .csv file of such columns with
`--config.length` + 1 lines for each prompt (`data.header` and `data.separator` say how it is written, where
that is not clear). `response_clip` and `feature_radius` bound |y| and ‖Z‖_F; choose them without looking at
the data. On your own data one fit is released, the longest descent, unless `--config.comparisons=True` asks
for those that it is compared with.

    python -m experiments.run --config=configs/noisy_head.py:text --workdir=runs/own \\
        --config.data.path=prompts.npz

In Sections 6.1 and 6.2 λ is so large that ridge has almost the test MSE of predicting zero, which is
perfectly private; the tables say so. They are in experiments/noisy_head/README.md, with the time that
each variant takes.
"""

from typing import Any

from ml_collections import ConfigDict, config_dict

from configs import common
from configs.common import begin, parse_arg, table

VARIANTS = ("low_dim", "high_dim", "useful", "rates", "early_stopping", "robustness", "text")

MEANINGS = common.MEANINGS | {
    "num_prompts": "N, prompts",
    "length": "L, labelled tokens of a prompt; ⌊√N⌋ by default",
    "dim": "D, dimensions of a token; ⌊√N⌋ by default",
    "regularization": "λ; N/D by default",
    "ridges": "values of λ, of which ridge takes the best in a trial, without privacy",
    "noise_std": "of the responses",
    "kappa": "κ, with which a bound may fail",
    "step_scale": "η = step_scale λ/(λ+G²)²; by default the step of fastest contraction",
    "methods": 'fits: "paper", "repaired", "last_iterate"',
    "one_shot": "also the one-shot release",
    "axes.num_prompts": "values of N along which it is measured",
    "axes.length": "values of L",
    "axes.dim": "values of D",
    "axes.epsilon": "values of ε",
    "epsilons": "values of ε beside epsilon",
    "steps": "T; by default log N^steps_exponent / −log(1−λη)",
    "steps_exponent": "the power of N in that",
    "steps_grid": "values of T",
    "inits": 'where descent starts: "zero" or "sphere"',
    "mu": "μ, by which the attacked prompt's tokens move",
    "scales": "c, where α = c Nᵖ is how far its responses move",
    "powers": "p",
    "where": 'which of them: "context", "all" or "query"',
    "data.source": '"path", "arrays" (a table of prompts) or "sklearn" (fetches 20 Newsgroups)',
    "data.path": "texts or prompts",
    "data.public_path": "public texts for document frequencies; none without it",
    "test_fraction": "share of the prompts to measure on",
    "typical_tokens": "t₀ of the response (log(1+tokens) − log(1+t₀)) / log_spread",
    "log_spread": "of that",
    "response_clip": "|y| at most; chosen without looking at the data",
    "feature_radius": "‖Z‖_F at most",
    "step_fraction": "step size, as a share of the largest that contracts",
}


def get_config(arg: str = "") -> ConfigDict:
    """The settings of one variant; `tiny` shrinks them to seconds."""
    variant, tiny = parse_arg(arg, VARIANTS)
    config: Any = ConfigDict(begin("noisy_head.excess_risk", epsilon=1.0, delta=1e-5))
    if variant == "text":
        config.update(_text())
    else:
        config.update(_simulated() | _of_a_figure()[variant])
    if tiny:
        if "epsilons" in config:
            config.epsilons = config.epsilons[:2]
        config.update(({} if variant == "text" else {"trials": 2}) | _TINY[variant])
        if variant == "rates":
            del config.axes.num_prompts, config.axes.dim  # every shape is compiled for itself
    return config


def sweep(arg: str = "") -> dict[str, list]:
    """What to vary beyond what one run varies already."""
    variant, _ = parse_arg(arg, VARIANTS)
    return {
        "useful": {"regularization": [0.001, 0.003, 0.01]},
        "robustness": {"where": ["context", "all", "query"]},
        "text": {"epsilon": [0.5, 1.0, 2.0, 4.0]},
    }.get(variant, {"seed": [0, 1, 2]})


def _simulated() -> dict:
    """What all experiments on simulated prompts have."""
    return {
        "trials": 500,
        "length": config_dict.placeholder(int),
        "dim": config_dict.placeholder(int),
        "regularization": config_dict.placeholder(float),
        "noise_std": 0.0,
        "kappa": 1.0,
        "step_scale": config_dict.placeholder(float),
        "methods": ("paper", "last_iterate"),
    }


def _of_a_figure() -> dict[str, dict]:
    """What a variant has beside that."""
    by_rule = {"steps": config_dict.placeholder(int), "steps_exponent": 2.5}
    low = {"dim": 5, "regularization": 5.0, "step_scale": 3.17 / 5, "one_shot": True}
    return {
        "low_dim": by_rule
        | low
        | {
            "epsilons": (0.2, 0.4, 0.6, 0.8, 1.0),
            "axes": {"num_prompts": (1000, 1500, 2000, 2500, 3000, 3500, 4000)},
        },
        "high_dim": {
            "step_scale": 0.07,
            "steps": 5,
            "epsilons": (0.01, 0.05, 0.1, 0.5, 1.0),
            "axes": {"num_prompts": (500, 600, 700, 800, 900, 1000)},
            "one_shot": False,  # it would protect D⁴ = 1e6 numbers: see useful and rates
        },
        "useful": {
            "dim": 5,
            "length": 63,
            "regularization": 0.003,
            "ridges": (1e-3, 3e-4, 1e-4, 3e-5),
            "steps": 300,
            "epsilons": (0.2, 1.0, 4.0),
            "axes": {"num_prompts": (4000, 20_000, 100_000)},
            "one_shot": True,
            "trials": 20,
        },
        "rates": by_rule
        | low
        | {
            "epsilon": 4.0,
            "length": 64,
            "num_prompts": 8000,
            "axes": {
                "num_prompts": (4000, 8000, 16_000, 32_000),
                "length": (32, 64, 128, 256),
                "dim": (2, 4, 6, 8),
                "epsilon": (2.0, 4.0, 8.0, 16.0),
            },
            "trials": 50,
        },
        "early_stopping": {
            "experiment": "noisy_head.early_stopping",
            "epsilon": 0.8,
            "num_prompts": 1000,
            "step_scale": 0.02 / 3,
            "methods": ("paper", "repaired"),
            "inits": ("zero", "sphere"),
            "steps_grid": (1, *range(20, 481, 20)),
            "trials": 5,
        },
        "robustness": {
            "experiment": "noisy_head.robustness",
            "epsilon": 0.5,
            "delta": 1e-2,
            "num_prompts": 5000,
            "length": 500,
            "dim": 5,
            "regularization": 0.01,
            "step_scale": 0.7,
            "steps": 9,  # ⌈log N⌉
            "methods": ("paper", "repaired"),
            "mu": 1.0,
            "scales": (2.0, 4.0),
            "powers": (2.0, 2.02, 2.04, 2.06, 2.08, 2.1),
            "where": "context",
            "trials": 50,
        },
    }


def _text() -> dict:
    names = ("path", "public_path", "column")
    own = {name: config_dict.placeholder(str) for name in names}
    return {
        "experiment": "noisy_head.texts",
        "comparisons": config_dict.placeholder(bool),  # rows that cost the budget again
        "data": {"source": "path", **own, **table()},
        "dim": 30,
        "length": 30,
        "test_fraction": 0.2,
        "typical_tokens": 120.0,
        "log_spread": 1.0,
        "response_clip": 2.0,
        "feature_radius": 0.5,
        "regularization": 0.01,
        "step_fraction": 0.5,
        "steps_grid": (1, 12, 23, 34, 45, 56, 67, 78, 89, 100),
    }


_TINY = {
    "low_dim": {"axes": {"num_prompts": (64,)}},
    "high_dim": {"axes": {"num_prompts": (64,)}},
    "useful": {"axes": {"num_prompts": (64,)}, "length": 8, "steps": 10},
    "rates": {"axes": {"length": (8, 16), "epsilon": (2.0, 4.0)}, "num_prompts": 64, "length": 8},
    "early_stopping": {"num_prompts": 64, "steps_grid": (1, 20)},
    "robustness": {"num_prompts": 64, "length": 8, "powers": (2.0,)},
    "text": {"dim": 5, "length": 3, "steps_grid": (2, 8)},
}
