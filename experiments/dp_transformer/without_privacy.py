"""The row without privacy: the same model, trained in the best of a few ways, which training records choose.

The section `non_private` says how, and changes the section `train`. `non_private.tried` may hold several
values of `start`, `steps`, `learning_rate` and `l2`: each combination is then trained on a part of
the training records, and measured on the others. What wins is trained on all of them.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from dpx.training import log

STARTS = {
    "scratch": "scratch",
    "exact": "the exact form of what the private rows start from",
    "pretrained": "the model before it was tuned",
}
HELD_OUT = 0.1  # of the training records, to choose by


class Way(NamedTuple):
    """How to train: from what, and the training section."""

    start: str
    section: Any

    def __str__(self) -> str:
        about, l2 = self.section, self.section.get("l2")
        return (
            f"from {STARTS[self.start]}, in {about.steps} steps of {about.batch_size} at learning rate "
            f"{about.learning_rate:g}{f' and an l2 penalty of {l2:g}' if l2 else ''}"
        )


class Chosen(NamedTuple):
    """The way that was best, and in words what it is and was better than."""

    way: Way
    words: str


def ways(config: Any) -> list[Way]:
    """Those that `config.non_private` asks for.

    Raises:
      ValueError: for a start that is not known.
    """
    plain = {name: x for name, x in config.non_private.to_dict().items() if x is not None}
    tried = {name: values for name, values in plain.pop("tried", {}).items() if values}
    found = []
    for values in itertools.product(*tried.values()):
        section = {**config.train.to_dict(), **plain, **dict(zip(tried, values, strict=True))}
        start = section.pop("start")
        known = [name for name in STARTS if ("tune" in config) == (name == "pretrained")]
        if start not in known:
            raise ValueError(f"config.non_private.start={start!r} must be one of {known}")
        found.append(Way(start, ConfigDict(section)))
    return found


def parts(config: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Which of so many units of the training data are measured on to choose, and which are trained on."""
    order = np.random.default_rng(config.seed).permutation(count)
    held_out, rest = np.split(order, [max(1, round(HELD_OUT * count))])
    return held_out, rest


def choose(
    config: Any, measured: Callable[[Way, int], float], *, more_is_better: bool = False
) -> Chosen:
    """The best way for training records alone; the only one is not tried.

    Args:
      config: With the sections `train` and `non_private`.
      measured: Trains in a way, whose number is part of the training's label, on a part of the training
        records, and measures on the others.
      more_is_better: Of that measure.
    """
    found = ways(config)
    if len(found) == 1:
        return Chosen(found[0], f"{found[0]}.")
    values = []
    for number, way in enumerate(found):
        values.append(measured(way, number))
        log.say(f"without privacy, {way}: {values[-1]:.4g}", shown=True)
    goodness = np.array(values) if more_is_better else -np.array(values)
    best = int(np.argmax(np.nan_to_num(goodness, nan=-np.inf)))
    others = "; ".join(f"{way}: {x:.4g}" for way, x in zip(found, values, strict=True))
    return Chosen(
        found[best],
        f"{found[best]}. This is the best of what was tried by training records ({others}).",
    )
