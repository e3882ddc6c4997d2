"""What random allocation saves of the noise of every training on a page of results. Nothing is trained.

    python -m experiments.dp_transformer.samplings

Noise multipliers at the same budget, steps and expected batch sizes, by Poisson sampling and by random
allocation, of which `sampling="auto"` takes the smaller. What a training starts from is paid out of its
budget first, as in its config. The numbers of records are those of the data on the pages; they are public.
"""

import importlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from absl import app
from ml_collections import ConfigDict

import dpx
from dpx.training import Allocation, Poisson
from experiments import guarantees
from experiments.dp_transformer import feature_center, recommender_rows
from experiments.dp_transformer.training import make_private


class Training(NamedTuple):
    """A training on a page: its config, what the page's command changes, its records, and its budgets.

    Without a config it is that of a call of `fit`, with the section of that name.
    """

    name: str
    config: str
    records: int
    epsilons: tuple[float, ...]
    changed: Mapping[str, Any] = MappingProxyType({})
    section: str = "train"


def of_fit(name: str, records: int, epsilons: tuple[float, ...], *, batch_size: int) -> Training:
    """The training of a call of `fit` with 200 steps."""
    return Training(
        name, "", records, epsilons, {"fit": {"steps": 200, "batch_size": batch_size}}, "fit"
    )


TRAININGS = [
    Training("surnames, the quickstart", "quickstart", 80_799, (1, 3, 8)),
    Training("TinyShakespeare", "shakespeare", 15_685, (5, 8, 10)),
    Training("Friends, speakers", "friends:users", 799, (3, 8)),
    Training("Friends, lines", "friends:lines", 56_226, (3, 8)),
    Training("tuning", "finetune", 11_293, (3, 8), {"train": {"batch_size": 512}}),
    Training("tuning", "finetune", 11_293, (1, 8)),
    Training("tuning", "finetune", 11_293, (8,), {"train": {"batch_size": 2048, "steps": 24}}),
    Training("the same from scratch", "finetune:scratch", 11_293, (8,)),
    Training("classification, head", "classify", 8484, (1, 3, 8)),
    Training("MovieLens small", "recommender:movielens", 671, (8,)),
    Training("Amazon Games, from scratch", "recommender:amazon", 31_013, (5, 8, 10)),
    Training(
        "Amazon Games, 100 epochs", "recommender:amazon", 31_013, (8,), {"train": {"steps": 1514}}
    ),
    Training("Amazon Games, from a release", "recommender:amazon_warm", 31_013, (5, 8, 10)),
    Training("synthetic histories", "recommender:synthetic", 1000, (8,), {"train": {"steps": 150}}),
    Training(
        "synthetic histories", "recommender:synthetic", 30_000, (8,), {"train": {"steps": 150}}
    ),
    Training("attention distraction", "reattention", 5000, (5, 8, 10)),
    Training(
        "newsgroups, regression",
        "cross_attention:retrieval",
        11_293,
        (1, 3, 8),
        section="regression",
    ),
    of_fit("digits", 1347, (1, 3, 8), batch_size=256),
    of_fit("surnames, a small transformer", 80_799, (2, 8), batch_size=1024),
    of_fit("histories, a small transformer", 20_000, (2, 8), batch_size=1024),
]


def load(training: Training) -> Any:
    """The config of a training."""
    config = ConfigDict({"epsilon": 0.0, "delta": 1e-5, "fit": {"steps": 0, "batch_size": 0}})
    if training.config:
        name, _, arg = training.config.partition(":")
        config = importlib.import_module(f"configs.{name}").get_config(arg)
    config.update(dict(training.changed))
    return config


def noise(training: Training, config: Any, sampling: str) -> float:
    """The noise multiplier of a training, at the budget of its config."""
    budget = config.epsilon, config.delta
    if training.section != "train":
        section = config[training.section]
        about = {"sampling_probability": section.batch_size / training.records}
        return dpx.calibrate_dpsgd(*budget, **about, steps=section.steps, sampling=sampling)
    config.train.sampling = sampling
    if training.config.startswith("recommender"):
        return recommender_rows.plan(config, training.records, ()).parameters["noise_multiplier"]
    start = None
    if config.get("prior") and config.prior.budget_fraction:
        spent = config.prior.budget_fraction * config.epsilon
        start = guarantees.gaussian(spent, config.delta, "n-gram counts", "record")
    if config.get("center_budget_fraction"):
        start = feature_center.guarantee(config, "record", ())
    found, _ = make_private(config.train, *budget, training.records, "record", (), beside=start)
    return found.noise_multiplier


def row(training: Training) -> str:
    """A line of the table; the smaller multiplier of each pair is bold."""
    config = load(training)
    section = config[training.section]
    poisson, allocation, saved = [], [], []
    for epsilon in training.epsilons:
        config.epsilon = float(epsilon)
        pair = [noise(training, config, x.name) for x in (Poisson, Allocation)]
        shown = [f"**{x:.3f}**" if x == min(pair) else f"{x:.3f}" for x in pair]
        poisson.append(shown[0])
        allocation.append(shown[1])
        saved.append(f"{100 * (1 - pair[1] / pair[0]):.1f}")

    def cell(values: Iterable[Any]) -> str:
        return " / ".join(map(str, values))

    epochs = section.steps * section.batch_size / training.records
    about = f"{section.steps:,} × {section.batch_size:,} of {training.records:,}"
    cells = [about, f"{epochs:.3g}", *map(cell, (training.epsilons, poisson, allocation, saved))]
    return f"| {training.name} | {' | '.join(cells)} |"


def main(argv: list[str]) -> None:
    del argv
    print("| training | steps × batch | epochs | ε | σ, Poisson | σ, allocation | less, in % |")
    print("|---|---|---|---|---|---|---|")
    for training in TRAININGS:
        print(row(training), flush=True)


if __name__ == "__main__":
    app.run(main)
