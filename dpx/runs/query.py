"""Queries the private model that a finished run left.

dpx sample --workdir=RUN [--count=10] [--seed=0]
dpx recommend --workdir=RUN --history=ITEM,ITEM,... [--k=10] [--noexclude_seen]
dpx predict --workdir=RUN --text=TEXT [--text=TEXT ...]
dpx ask --workdir=RUN --text=TEXT [--text=TEXT ...]
"""

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from absl import flags

from dpx.runs import cli, records

_TEXT = "TEXT, once or several times"


def model_of(workdir: Path, verb: str) -> Any:
    """The private model that a finished run left; raises ValueError if it has no method of that name."""
    model = records.load(workdir)
    if not hasattr(model, verb):
        can = [name for name in ("sample", "recommend", "predict", "ask") if hasattr(model, name)]
        instead = f"use dpx {can[0]}" if can else "use another --workdir"
        raise ValueError(f"--workdir={workdir} holds a model that does not {verb}: {instead}")
    return model


def _start(answers: Callable[[], Iterable[object]]) -> None:
    """The command line that prints each of these answers of the model of --workdir."""
    flags.DEFINE_string("workdir", None, "folder of a finished run")

    @cli.OneLine(ValueError)
    def main() -> None:
        for answer in answers():
            print(answer)

    cli.start(main)


def _sample() -> Iterable[str]:
    flag = flags.FLAGS
    return model_of(cli.run_folder(), "sample").sample(jax.random.key(flag.seed), flag.count)


def _recommend() -> Iterable[object]:
    flag = flags.FLAGS
    if flag.history is None:
        raise ValueError("--history is missing: use --history=ITEM,ITEM,..., in time order")
    words = next(csv.reader([flag.history]), [])
    model = model_of(cli.run_folder(), "recommend")
    return model.recommend(words, k=flag.k, exclude_seen=flag.exclude_seen)


def _predict() -> Iterable[str]:
    texts = cli.given("text", _TEXT)
    for odds in model_of(cli.run_folder(), "predict").predict(texts):
        best = sorted(odds.items(), key=lambda pair: -pair[1])
        yield ", ".join(f"{label} {share:.3f}" for label, share in best)


def _ask() -> Iterable[str]:
    texts = cli.given("text", _TEXT)
    for answer in model_of(cli.run_folder(), "ask").ask(texts):
        yield ", ".join(f"{name} {x:.4g}" for name, x in answer.items())


def start_sample() -> None:
    """The command line of `dpx sample`."""
    flags.DEFINE_integer("count", 10, "number of texts", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "another seed draws other texts", lower_bound=0)
    _start(_sample)


def start_recommend() -> None:
    """The command line of `dpx recommend`."""
    flags.DEFINE_string("history", None, "the items of a user, in time order, with commas between")
    flags.DEFINE_integer("k", 10, "number of items to recommend", lower_bound=1)
    flags.DEFINE_bool("exclude_seen", True, "leave out the items of the history")
    _start(_recommend)


def start_predict() -> None:
    """The command line of `dpx predict`, which prints the labels of each text with their probabilities."""
    flags.DEFINE_multi_string("text", [], "a text to classify")
    _start(_predict)


def start_ask() -> None:
    """The command line of `dpx ask`, which prints what a released memory answers to each text."""
    flags.DEFINE_multi_string("text", [], "a text to ask, or the numbers of a query: 0.1,0.2")
    _start(_ask)
