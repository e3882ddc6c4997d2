"""Plans a training before anything is spent: batch size, number of steps, and noise.

dpx plan --records=60000 --epsilon=3 [--delta=1e-6] [--epochs=20] [--workdir=DIR]

It uses these numbers and no records. The table has several batch sizes for one number of epochs, and an arrow
at the plan that `dpx.training.fit` takes for these epochs. A figure is drawn in `--workdir`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from dpx.runs import cli, plotting
from dpx.training import Plan, plan, planning

_COLUMNS = (
    *("batch", "steps", "sampling", "noise multiplier"),
    *("noise of a step", "noise of the training", ""),
)
_WORDS = """
Noise is the standard deviation of a coordinate of the mean gradient, for gradients of norm 1: of a step, and
of the mean of all steps, beside the least that there is. The rule is: as many steps as keep that of a step at
most at {noise:g}, but from {least:,} to {most:,} of them. More epochs cost no privacy, only time.

    dpx.training.fit(
        loss, params, data, epsilon={0.epsilon:g}, delta={0.delta:g}, epochs={epochs:g}, key=dpx.secret_key()
    )
"""


def beside(chosen: Plan) -> Iterator[Plan]:
    """Yields plans with as many epochs and other batch sizes, the largest first; `chosen` is among them."""
    sizes = {chosen.num_records, chosen.batch_size, max(1, chosen.batch_size // 4)}
    sizes.add(min(4 * chosen.batch_size, chosen.num_records))
    given: Any = {"epsilon": chosen.epsilon, "delta": chosen.delta, "epochs": chosen.epochs}
    for size in sorted(sizes, reverse=True):
        same = size == chosen.batch_size
        yield chosen if same else plan(chosen.num_records, **given, batch_size=size)


def table(plans: Sequence[Plan], chosen: Plan) -> str:
    """The plans as a table, with an arrow at the chosen one."""
    rows = [("", *_COLUMNS)]
    rows += [
        (
            "->" if each == chosen else "",
            f"{each.batch_size:,.5g}",
            f"{each.steps:,}",
            each.sampling.name,
            f"{each.noise_multiplier:.4g}",
            f"{each.step_noise:.3g}",
            f"{each.training_noise:.3g}",
            f"{each.training_noise / each.least_noise:.2f} of the least",
        )
        for each in plans
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def draw(plans: Sequence[Plan], chosen: Plan, folder: Path) -> Path:
    """Draws the noise of the training against the number of steps; returns the path of plan.png."""
    figure, axis = plotting.pyplot().subplots(figsize=(6.4, 4))
    most = max(each.steps for each in plans)
    for factor in (1 / 4, 1, 4):
        epochs = factor * chosen.epochs
        steps = np.geomspace(max(1.0, epochs), max(4.0 * most, 2 * epochs), 100)
        noise = [planning.inflation(chosen, epochs, each) for each in steps]
        style = {"label": f"{epochs:.4g} epochs", "linestyle": "-" if factor == 1 else "--"}
        axis.loglog(steps, noise, **style)
    for each in plans:
        ratio = each.training_noise / each.least_noise
        same = each == chosen
        label = f"the plan: {each.steps:,} steps of {each.batch_size:,g}" if same else None
        axis.loglog(each.steps, ratio, "ko", markersize=9 if same else 5, label=label)
    axis.set(xlabel="steps", ylabel="noise of the training over the least", ylim=(0.9, 10))
    axis.set_yticks([1, 2, 5, 10], ["1", "2", "5", "10"])
    axis.legend()
    title = f"{chosen.num_records:,} records, ε = {chosen.epsilon:g}, δ = {chosen.delta:g}"
    folder.mkdir(parents=True, exist_ok=True)
    return plotting.save(figure, folder / "plan.png", f"{title}: points are exact, lines limits")


@cli.OneLine(ValueError)
def _main() -> None:
    flag = flags.FLAGS
    records, epsilon = cli.given("records", "60000"), cli.given("epsilon", "3")
    delta = 0.1 / records if flag.delta is None else flag.delta
    if flag.workdir and not plotting.available():
        raise ValueError(f"--workdir={flag.workdir} needs matplotlib: install the extra [plots]")
    chosen = plan(records, epsilon=epsilon, delta=delta, epochs=flag.epochs)
    plans = list(beside(chosen))
    print(f"{records:,} records, ε = {epsilon:g}, δ = {delta:g}\n\n{table(plans, chosen)}")
    rule = {
        "noise": planning.STEP_NOISE,
        "least": planning.LEAST_STEPS,
        "most": planning.MOST_STEPS,
    }
    print(_WORDS.format(chosen, epochs=flag.epochs, **rule))
    if flag.workdir:
        print(draw(plans, chosen, cli.workdir("DIR")))


def start() -> None:
    """The command line of `dpx plan`."""
    flags.DEFINE_integer("records", None, "number of private records", lower_bound=1)
    flags.DEFINE_float("epsilon", None, "ε, the whole budget")
    flags.DEFINE_float("delta", None, "δ; by default a tenth of one over the number of records")
    flags.DEFINE_float("epochs", 20.0, "how often each record is used")
    flags.DEFINE_string("workdir", None, "folder for the figure; without it none is drawn")
    cli.start(_main)
