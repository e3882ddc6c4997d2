"""Risk of NoisyHead against the number of steps T (Section 6.2 of arXiv 2504.16000)."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dpx import noisy_head
from dpx.privacy import PrivacyGuarantee
from dpx.runs.experiment import Comparison, Measure, Outcome, Plan
from experiments import checks
from experiments.noisy_head.excess_risk import summarize
from experiments.noisy_head.figures import drawer
from experiments.noisy_head.methods import (
    METHODS,
    SIMULATED,
    TITLES,
    check,
    check_some,
    make_cell,
    make_descent,
    progress,
)


def validate(config) -> None:
    """Raises ValueError for a bad value, before anything is computed."""
    check(config)
    checks.choice(config, "inits", ("zero", "sphere"))
    check_some(config, "methods", "inits", "steps_grid")
    checks.each(config, "steps_grid", least=1)
    if not methods(config):
        raise ValueError(
            f"config.steps_grid={config.steps_grid} must have a T above epsilon={config.epsilon} for the "
            "method 'paper', whose accounting needs ε/T < 1: add larger ones"
        )
    for name in methods(config):
        for descent in descents(name, config):
            descent.calibrate(config.epsilon, config.delta)


def methods(config) -> list[str]:
    """The fits that are private at one T at least."""
    return [name for name in config.methods if grid_of(name, config)]


def grid_of(name: str, config) -> tuple[int, ...]:
    """The values of T for one fit; as printed, it is private only where ε/T < 1."""
    return tuple(T for T in config.steps_grid if name != "paper" or config.epsilon < T)


def descents(name: str, config) -> list[noisy_head.Descent]:
    """The fit called `name` at each of its T."""
    cell = make_cell(config, num_prompts=config.num_prompts)
    return [make_descent(name, config, cell, steps=steps) for steps in grid_of(name, config)]


def plan(config) -> Plan:
    """What the longest descent of each fit guarantees, and noise multipliers at every T."""
    parameters = {
        f"{name}, T={descent.steps}: noise multiplier": descent.calibrate(
            config.epsilon, config.delta
        )[0]
        for name in methods(config)
        for descent in descents(name, config)
    }
    return Plan(_releases(config), parameters)


def _releases(config) -> dict[str, PrivacyGuarantee]:
    """Of the largest T of each fit: each T is a run of its own."""
    longest = {
        name: max(descents(name, config), key=lambda descent: descent.steps)
        for name in methods(config)
    }
    budget = config.epsilon, config.delta
    return {name: descent.calibrate(*budget)[1] for name, descent in longest.items()}


def run(config, workdir: Path) -> Outcome:
    """Cost of descent (no noise) and of privacy, from both initial points, at every T."""
    del workdir
    with jax.enable_x64(True):
        measures = list(_simulate(config))
    releases = _releases(config)
    return Outcome(
        measures=measures,
        headline=releases[methods(config)[-1]],
        releases=releases,
        titles=TITLES,
        headline_row=methods(config)[-1],
        comparisons=[Comparison("excess_risk", ["zero"])],
        synthetic=True,
        not_covered=[
            SIMULATED,
            "the choice of T: each point of the figure is a run of its own at the full ε, and choosing "
            "the best of them on private data would have to be paid for",
        ],
        notes=f"Means over {config.trials} trials, and their standard errors. The rows _without_noise show "
        "what stopping early costs by itself, and are not private.",
    )


def _simulate(config) -> Iterator[Measure]:
    cell = make_cell(config, num_prompts=config.num_prompts)
    keys = jax.random.split(jax.random.key(config.seed), config.trials)

    def draw(key):
        features = cell.draw(jax.random.fold_in(key, 0))
        return features, noisy_head.ridge(features, cell.regularization)

    progress(f"drawing {config.trials} trials of {cell.num_prompts} prompts")
    features, references = jax.jit(lambda keys: jax.lax.map(draw, keys))(keys)

    risks = cell.risks
    yield from summarize("zero", np.asarray(risks(jnp.zeros_like(references), references)), {})
    yield from summarize("ridge", np.asarray(risks(references, references)), {})
    of_noise = jax.vmap(jax.random.fold_in, (0, None))(keys, 1)
    for name in methods(config):
        grid = descents(name, config)
        # Prompts are simulated, and the rows are paired.
        own = jax.vmap(partial(jax.random.split, num=len(grid)))(of_noise)
        for init in config.inits:
            for row, descend in (
                (f"{name}_without_noise", free_of_noise(grid, init)),
                (name, stopped(grid, init, config.epsilon, config.delta)),
            ):
                progress(f"{row} from {init}, {len(grid)} values of T")
                every = jax.jit(
                    lambda *inputs, f=descend: jax.lax.map(
                        lambda one: risks(f(one[0], one[1]), one[2]), inputs
                    )
                )
                found = np.asarray(every(own, features, references))
                for index, descent in enumerate(grid):
                    yield from summarize(
                        row, found[:, index], {"init": init, "steps": descent.steps}
                    )


def stopped(grid: Sequence[noisy_head.Descent], init, epsilon: float, delta: float):
    """A function (keys, features) -> Γ^T of every descent, (len(grid), D, D), where they differ in T alone.

    Each T is a run of its own, with its own noise multiplier. They are run together to the largest T, and
    what a run does after its own T is thrown away: that costs one compilation and not one for each T.
    So `keys` are a key for each.
    """
    multipliers = jnp.array([descent.calibrate(epsilon, delta)[0] for descent in grid])
    steps = jnp.array([descent.steps for descent in grid])

    def descend(key, features, steps, multiplier):
        return _longest(grid, key, features, init, multiplier)[steps - 1]

    def all_steps(keys, features):
        return jax.vmap(descend, in_axes=(0, None, 0, 0))(keys, features, steps, multipliers)

    return all_steps


def free_of_noise(grid: Sequence[noisy_head.Descent], init):
    """The same without noise, where one path serves every T."""
    steps = np.array([descent.steps for descent in grid])
    return lambda keys, features: _longest(grid, keys[0], features, init, 0.0)[steps - 1]


def _longest(grid, key, features, init, multiplier):
    return noisy_head.noisy_descent(
        key,
        features,
        max(grid, key=lambda descent: descent.steps),
        noise_multiplier=multiplier,
        init=init,
        trajectory=True,
    )


figures = drawer(
    "early_stopping",
    {"excess_risk": "excess risk over ridge"},
    x="steps",
    marker="init",
    dashed=("zero", *(f"{name}_without_noise" for name in METHODS)),
)
