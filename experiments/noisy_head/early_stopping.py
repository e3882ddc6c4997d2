"""Risk of NoisyHead against the number of steps T (Section 6.2 of arXiv 2504.16000)."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dpx import noisy_head
from dpx.launch.experiment import Outcome, measures
from dpx.privacy import PrivacyGuarantee
from experiments.noisy_head import figures as noisy_head_figures
from experiments.noisy_head.excess_risk import Method, check, check_choices, make_cell, make_method


def validate(config) -> None:
    """Raises ValueError for a bad value, before anything is computed."""
    check(config)
    check_choices(config, "inits", ("zero", "sphere"))
    for name in ("methods", "inits", "steps_grid"):
        if not config[name]:
            raise ValueError(f"config.{name}=() leaves nothing to run: name at least one")
    if min(config.steps_grid) < 1:
        raise ValueError(f"config.steps_grid={config.steps_grid} must be at least 1 throughout")
    for name in config.methods:
        for steps in grid_of(name, config):
            at_steps(name, config, steps).calibrate(config.epsilon, config.delta)
    _headline(config)


def grid_of(name: str, config) -> tuple[int, ...]:
    """The T of one fit; as printed, it is private only where ε/T < 1."""
    return tuple(T for T in config.steps_grid if name != "paper" or config.epsilon < T)


def at_steps(name: str, config, steps: int) -> Method:
    """The fit called `name` for exactly T steps."""
    cell = make_cell(config, num_prompts=config.num_prompts)
    method = make_method(name, config, cell)
    return Method(method.hyper, {**method.options, "steps": int(steps)})


def _headline(config) -> tuple[str, PrivacyGuarantee]:
    """The last fit at the largest T, and its guarantee."""
    name, last = config.methods[-1], max(config.steps_grid)
    _, guarantee = at_steps(name, config, last).calibrate(config.epsilon, config.delta)
    return f"{name}, T={last}", guarantee


def plan(config) -> dict:
    """Noise multipliers at every T."""
    return {
        f"{name}, T={steps}: noise multiplier": at_steps(name, config, steps).calibrate(
            config.epsilon, config.delta
        )[0]
        for name in config.methods
        for steps in grid_of(name, config)
    }


def run(config, workdir: Path) -> Outcome:
    """Cost of descent (no noise) and of privacy, from both initial points, at every T."""
    del workdir
    with jax.enable_x64(True):
        metrics = _simulate(config)
    label, guarantee = _headline(config)
    return Outcome(
        measures=measures(metrics),
        headline=guarantee,
        releases={label: guarantee},
        synthetic=True,
        not_covered=[
            "the prompts are simulated: the guarantee is what the method would give",
            "the choice of T: each point of the figure is a run of its own at the full ε, and choosing "
            "the best of them on private data would have to be paid for",
        ],
        notes=table(config, metrics),
    )


def _simulate(config) -> dict[str, float]:
    cell = make_cell(config, num_prompts=config.num_prompts)
    keys = jax.random.split(jax.random.key(config.seed), config.trials)

    def draw(key):
        sizes = (cell.num_prompts, cell.length, cell.dim)
        features = noisy_head.sample_features(
            jax.random.fold_in(key, 0), *sizes, noise_std=cell.noise_std
        )
        return features, noisy_head.ridge(features, cell.regularization)

    features, references = jax.jit(lambda keys: jax.lax.map(draw, keys))(keys)

    def risk(gamma, reference):
        return noisy_head.population_risk(
            gamma, cell.length, reference=reference, noise_std=cell.noise_std
        )

    metrics = {}
    for name in config.methods:
        grid = grid_of(name, config)
        if not grid:
            continue
        fits = [at_steps(name, config, steps) for steps in grid]
        for init in config.inits:
            for kind, descend in (
                ("descent", free_of_noise(fits, init)),
                ("private", stopped(fits, init, config.epsilon, config.delta)),
            ):
                every = jax.jit(
                    lambda *inputs, f=descend: jax.lax.map(
                        lambda one: risk(f(jax.random.fold_in(one[0], 1), one[1]), one[2]), inputs
                    )
                )
                costs = np.mean(every(keys, features, references), axis=0)
                for steps, cost in zip(grid, costs, strict=True):
                    metrics[f"{name}/{init}/{kind}/T{steps}"] = float(cost)
    zero = risk(jnp.zeros((cell.dim, cell.dim)), references)
    metrics["zero/excess_risk"] = float(np.mean(zero))
    metrics["zero/test_mse"] = 1 + cell.noise_std**2
    ridge = noisy_head.population_risk(references, cell.length, noise_std=cell.noise_std)
    metrics["ridge/test_mse"] = float(np.mean(ridge))
    return metrics


def stopped(fits: list[Method], init, epsilon: float, delta: float):
    """A function (key, features) -> Γ^T of every fit, (len(fits), D, D), where fits differ in T alone.

    Each T is a run of its own, with its own noise multiplier. They are run together to the largest T, and
    what a run does after its own T is thrown away: that costs one compilation and not one for each T.
    """
    multipliers = jnp.array([fit.calibrate(epsilon, delta)[0] for fit in fits])
    steps = jnp.array([fit.options["steps"] for fit in fits])

    def descend(key, features, steps, multiplier):
        return _longest(fits, key, features, init, multiplier)[steps - 1]

    def all_steps(key, features):
        keys = jax.random.split(key, len(fits))
        return jax.vmap(descend, in_axes=(0, None, 0, 0))(keys, features, steps, multipliers)

    return all_steps


def free_of_noise(fits: list[Method], init):
    """The same without noise: one path serves every T."""
    steps = np.array([fit.options["steps"] for fit in fits])
    return lambda key, features: _longest(fits, key, features, init, 0.0)[steps - 1]


def _longest(fits, key, features, init, multiplier):
    options = {**fits[0].options, "steps": max(fit.options["steps"] for fit in fits)}
    del options["accounting"]
    return noisy_head.noisy_descent(
        key,
        features,
        fits[0].hyper,
        noise_multiplier=multiplier,
        init=init,
        trajectory=True,
        **options,
    )


def table(config, metrics: dict[str, float]) -> str:
    """Excess risk at every T, in markdown."""
    series = [
        f"{name}/{init}/{kind}"
        for name in config.methods
        for init in config.inits
        for kind in ("descent", "private")
    ]
    rows = [f"| T | {' | '.join(series)} |", "|---" * (len(series) + 1) + "|"]
    for steps in config.steps_grid:
        values = [f"{metrics.get(f'{one}/T{steps}', math.nan):.3g}" for one in series]
        rows.append(f"| {steps} | {' | '.join(values)} |")
    rows.append(
        f"\npredicting zero: excess {metrics['zero/excess_risk']:.3g}, "
        f"test MSE {metrics['zero/test_mse']:.4g}; ridge: test MSE {metrics['ridge/test_mse']:.4g}"
    )
    return "\n".join(rows)


def figures(records, folder: Path) -> list[Path]:
    """Both costs against T."""
    return [
        path
        for record in records
        for path in noisy_head_figures.curves(
            record, folder, xlabel="steps T", ylabel="excess risk over ridge", name="early_stopping"
        )
    ]
