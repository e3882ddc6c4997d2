"""Kinds of Adam on noisy gradients beside the one that `fit` takes, at equal records, epochs and ε.

    python -m experiments.bench.optimizers
    python -m experiments.bench.optimizers --tasks=digits --seeds=2 --tiny

Tasks, batches, steps, sampling and normalized gradients are those of `experiments.bench.plan`. Varied are
what is left of a second moment when the noise's variance is subtracted, which is known (DP-AdamBC, Tang and
Lécuyer, arXiv:2312.14334); weight decay (AdamW); and a learning rate that is given, or linear in the noise.
Each kind has settings, and one that is best for all rows together, or best for each, is chosen by the
held-out records, which flatters it. Only the first column chooses nothing. All kinds see the same batches and
the same noise, so that the standard errors are those of differences of pairs.
"""

import math
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import dpx
from experiments.bench import plan
from experiments.bench._adam import Setting, falling, untuned

flags.adopt_module_key_flags(plan)
KINDS = flags.DEFINE_list("kinds", [], "columns of the table; all without")
RATES = (0.01, 0.03, 0.1, 0.3)
FACTORS = (1.0, 3.0, 10.0, 30.0)  # a rate over the noise of the mean gradient
FLOORS = (0.1, 1.0, 10.0)
DECAYS = (0.03, 0.3)


class Choice(NamedTuple):
    """A `Setting` that is the same at every noise."""

    rate: float = 1.0
    linear: bool = False  # the rate is multiplied by the noise
    floor: float | None = None  # a share of the noise's variance, which is then subtracted
    decay: float = 0.0

    def at(self, noise: float) -> Setting:
        """`noise` is the standard deviation of a coordinate of the mean gradient."""
        rate = self.rate * noise if self.linear else self.rate
        if self.floor is None:
            return Setting(rate, decay=self.decay)
        return Setting(rate, noise**2, self.floor * noise**2, self.decay)


class Column(NamedTuple):
    """What is compared: choices, whether the rate is found, and whether each row has its own best choice."""

    choices: list[Choice]
    found: bool = True
    each: bool = False


def columns() -> dict[str, Column]:
    given = [Choice(rate) for rate in (RATES[:2] if plan.TINY.value else RATES)]
    subtracted = [choice._replace(floor=floor) for choice in given for floor in FLOORS]
    decayed = [choice._replace(decay=decay) for choice in given for decay in DECAYS]
    known = {
        "variance subtracted": Column([Choice(floor=floor) for floor in FLOORS]),
        "AdamW": Column([Choice(decay=decay) for decay in DECAYS]),
        "one rate": Column(given, found=False),
        "rate linear in the noise": Column([Choice(c, linear=True) for c in FACTORS], found=False),
        "Adam, best rate": Column(given, found=False, each=True),
        "variance subtracted, best rate": Column(subtracted, found=False, each=True),
        "AdamW, best rate": Column(decayed, found=False, each=True),
    }
    return {name: known[name] for name in KINDS.value or known}


def trained(task: plan.Task, epsilon: float) -> dict[tuple[bool, Choice], np.ndarray]:
    """The metric (seeds,) of every choice of a column, by whether the rate is found; larger is better."""
    records = len(task.data[0])
    planned = dpx.training.plan(
        records, epsilon=epsilon, delta=0.1 / records, epochs=plan.EPOCHS.value
    )
    metrics = {}
    for optimizer, found in ((untuned, True), (falling, False)):
        choices = [Choice()] * found  # what `fit` takes is one of them
        for column in columns().values():
            choices += column.choices if column.found == found else []
        choices = list(dict.fromkeys(choices))
        if not choices:
            continue
        settings = [choice.at(planned.step_noise) for choice in choices]
        whole = plan.measured(
            task,
            planned.sampling,
            planned.batch_size,
            planned.steps,
            optimizer,
            jax.tree.map(lambda *numbers: jnp.array(numbers, jnp.float32), *settings),
            np.full(len(settings), planned.noise_multiplier),
            np.ones(len(settings), bool),
        )
        metrics |= zip(((found, x) for x in choices), task.sign * whole.T, strict=True)
    return metrics


def chosen(rows: list[np.ndarray], each: bool) -> list[int]:
    """Of the choices of a column, in rows (seeds, choices): the best of each row, or that of all together."""
    means = np.array([row.mean(0) for row in rows])
    if each:
        return means.argmax(1).tolist()
    behind = (means.max(1, keepdims=True) - means) / abs(means.max(1, keepdims=True))
    return [int(behind.mean(0).argmin())] * len(rows)


def main(argv: list[str]) -> None:
    del argv
    began = time.process_time()
    found = {}
    for name in plan.TASKS.value:
        task = plan.TASKS_BY_NAME[name]()
        if plan.TINY.value:
            task = task._replace(data=jax.tree.map(lambda x: x[:60], task.data))
        for epsilon in plan.EPSILONS[:1] if plan.TINY.value else plan.EPSILONS:
            found[name, epsilon] = trained(task, epsilon)
            print(f"<!-- {name}, {epsilon:g}: {time.process_time() - began:.0f} s -->", flush=True)
    taken, root = (True, Choice()), math.sqrt(plan.SEEDS.value)
    cells = {}
    for row, metrics in found.items():
        error = metrics[taken].std(ddof=1) / root
        cells[row] = [f"{row[0]} | {row[1]:g} | {abs(metrics[taken].mean()):.4g} ± {error:.2g}"]
    counts = ["ahead, behind by two standard errors | | "]
    for name, column in columns().items():
        whole = [np.stack([x[column.found, c] for c in column.choices], 1) for x in found.values()]
        at = chosen(whole, column.each)
        ahead = behind = 0
        for (row, metrics), values, choice in zip(found.items(), whole, at, strict=True):
            more = values[:, choice] - metrics[taken]
            error = more.std(ddof=1) / root
            ahead, behind = ahead + (more.mean() > 2 * error), behind + (more.mean() < -2 * error)
            cells[row].append(f"{more.mean():+.2g} ± {error:.1g}")
        counts.append(f"{ahead}, {behind}")
        if not column.each:
            print(f"<!-- {name}: {column.choices[at[0]]} -->")
    print(f"{plan.EPOCHS.value:g} epochs, {plan.SEEDS.value} seeds\n")
    print("| task | ε | `fit` |", " | ".join(columns()), "|\n|" + "---|" * (3 + len(columns())))
    for line in (*cells.values(), counts):
        print("|", " | ".join(line), "|")


if __name__ == "__main__":
    app.run(main)
