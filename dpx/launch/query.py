"""Queries the private model that a finished run left.

dpx sample --workdir=RUN [--count=10] [--seed=0]
dpx recommend --workdir=RUN --history=ITEM,ITEM,... [--k=10] [--noexclude_seen]
dpx predict --workdir=RUN --text=TEXT [--text=TEXT ...]
dpx ask --workdir=RUN --text=TEXT [--text=TEXT ...]
"""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import flags

from dpx.launch import cli, records


def _sample(argv: list[str]) -> None:
    del argv
    flag = flags.FLAGS
    try:
        for text in model_of(_workdir(), "sample").sample(jax.random.key(flag.seed), flag.count):
            print(text)
    except (ValueError, *cli.EXPECTED) as error:
        cli.stop(error)


def _recommend(argv: list[str]) -> None:
    del argv
    flag = flags.FLAGS
    try:
        if flag.history is None:
            raise ValueError("--history is missing: use --history=ITEM,ITEM,..., in time order")
        model = model_of(_workdir(), "recommend")
        words = next(csv.reader([flag.history]), [])
        for item in model.recommend(words, k=flag.k, exclude_seen=flag.exclude_seen):
            print(item)
    except (ValueError, *cli.EXPECTED) as error:
        cli.stop(error)


def _predict(argv: list[str]) -> None:
    del argv

    def line(odds: dict[str, float]) -> str:
        best = sorted(odds.items(), key=lambda pair: -pair[1])
        return ", ".join(f"{label} {share:.3f}" for label, share in best)

    _answer("predict", line)


def _ask(argv: list[str]) -> None:
    del argv
    _answer("ask", lambda answer: ", ".join(f"{name} {x:.4g}" for name, x in answer.items()))


def _answer(verb: str, line: Callable[[dict[str, float]], str]) -> None:
    """Prints a line for what the model of a run answers to each --text."""
    flag = flags.FLAGS
    try:
        if not flag.text:
            raise ValueError("--text is missing: use --text=TEXT, once or several times")
        for answer in getattr(model_of(_workdir(), verb), verb)(flag.text):
            print(line(answer))
    except (ValueError, *cli.EXPECTED) as error:
        cli.stop(error)


def _workdir() -> Path:
    return cli.workdir("RUN, the folder of a finished run")


def model_of(workdir: Path, verb: str) -> Any:
    """The private model that a finished run left; raises ValueError if it has no method of that name."""
    model = records.load(workdir)
    if not hasattr(model, verb):
        can = [name for name in ("sample", "recommend", "predict", "ask") if hasattr(model, name)]
        instead = f"use dpx {can[0]}" if can else "use another --workdir"
        raise ValueError(f"--workdir={workdir} holds a model that does not {verb}: {instead}")
    return model


def start_sample() -> None:
    """The command line of `dpx sample`."""
    flags.DEFINE_string("workdir", None, "folder of a finished run")
    flags.DEFINE_integer("count", 10, "number of texts", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "another seed draws other texts", lower_bound=0)
    cli.start(_sample)


def start_recommend() -> None:
    """The command line of `dpx recommend`."""
    flags.DEFINE_string("workdir", None, "folder of a finished run")
    flags.DEFINE_string("history", None, "the items of a user, in time order, with commas between")
    flags.DEFINE_integer("k", 10, "number of items to recommend", lower_bound=1)
    flags.DEFINE_bool("exclude_seen", True, "leave out the items of the history")
    cli.start(_recommend)


def start_predict() -> None:
    """The command line of `dpx predict`, which prints the labels of each text with their probabilities."""
    flags.DEFINE_string("workdir", None, "folder of a finished run")
    flags.DEFINE_multi_string("text", [], "a text to classify")
    cli.start(_predict)


def start_ask() -> None:
    """The command line of `dpx ask`, which prints what a released memory answers to each text."""
    flags.DEFINE_string("workdir", None, "folder of a finished run")
    flags.DEFINE_multi_string("text", [], "a text to ask, or the numbers of a query: 0.1,0.2")
    cli.start(_ask)
