"""Excess risk of NoisyHead along N, L, D and ε: Section 6.1 of arXiv 2504.16000 and beyond it."""

import concurrent.futures
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx import noisy_head
from dpx._validate import check_epsilon
from dpx.privacy import PrivacyGuarantee
from dpx.runs.experiment import Comparison, Measure, Outcome, Plan
from experiments import checks
from experiments.noisy_head.figures import drawer
from experiments.noisy_head.methods import (
    SIMULATED,
    TITLES,
    Cell,
    check,
    guarantees,
    make_cell,
    make_descent,
    progress,
)
from experiments.repeated import measure

AXES = ("num_prompts", "length", "dim", "epsilon")
METRICS = ("excess_risk", "test_mse")
TRIALS_PER_BATCH = 50
# Theorem 4.2 (i), up to logarithms: N⁻¹ L⁻³ ε⁻², whatever D.
CLAIMED_EXPONENTS = {"num_prompts": -1.0, "length": -3.0, "dim": 0.0, "epsilon": -2.0}


class Point(NamedTuple):
    """A point of an axis: its settings in the table, its cell, and the values of ε that are tried there."""

    axis: str
    settings: dict[str, Any]
    cell: Cell
    budgets: tuple[float, ...]

    def settings_at(self, epsilon: float) -> dict[str, Any]:
        """The settings of a private fit: where one run has several ε, the ε belongs to them."""
        if self.axis == "epsilon" or len(self.budgets) > 1:
            return {**self.settings, "epsilon": epsilon}
        return self.settings


def points(config) -> Iterator[Point]:
    """Every point of every axis; the axis of ε is one point with several ε."""
    for axis in AXES:
        values = tuple(config.axes.get(axis, ()))
        if axis == "epsilon":
            if values:
                yield Point(axis, {}, make_cell(config, num_prompts=config.num_prompts), values)
            continue
        budgets = tuple(sorted({config.epsilon, *config.get("epsilons", ())}))
        for value in values:
            sizes = {"num_prompts": config.get("num_prompts"), axis: value}
            yield Point(axis, {axis: value}, make_cell(config, **sizes), budgets)


def fits(config) -> tuple[str, ...]:
    """The names of all private fits."""
    return (*config.methods, "one_shot") if config.one_shot else tuple(config.methods)


def references(config) -> tuple[str, ...]:
    """What needs no budget; with `ridges` also ridge at that λ of them which has the least test MSE."""
    return ("zero", "ridge", *(["best_ridge"] if "ridges" in config else []))


def simulate(config, found: list[Point]) -> Iterator[dict[str, np.ndarray]]:
    """Risks of every fit and baseline at every point, over independent trials.

    Yields:
      For each point, name -> (trials, len(budgets), 2) for a private fit, (trials, 2) for `references`:
      excess risk over ridge, and test MSE, both exact.
    """
    cores = os.cpu_count() or 1

    def compiled(point):
        cell = point.cell
        batch = min(TRIALS_PER_BATCH if cell.dim <= 8 else 10, math.ceil(config.trials / cores))
        return compile_trials(config, cell, point.budgets, batch), batch

    def run_all(program, batch):
        # Surplus trials of the last batch are dropped below.
        keys = jax.random.split(
            jax.random.key(config.seed), math.ceil(config.trials / batch) * batch
        )
        return pool.map(program, keys.reshape(-1, batch))

    progress(f"compiling {len(found)} cells of {config.trials} trials")
    # Neither compilation nor one batch of trials fills the cores.
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        runs = [run_all(*program) for program in pool.map(compiled, found)]
        for number, (point, batches) in enumerate(zip(found, runs, strict=True), start=1):
            yield jax.tree.map(lambda *parts: np.concatenate(parts)[: config.trials], *batches)
            N, L, D, *_ = point.cell
            progress(f"cell {number} of {len(found)}: N = {N}, L = {L}, D = {D}")


def compile_trials(config, cell: Cell, budgets: tuple[float, ...], batch: int):
    """A compiled function from `batch` keys to the risks of as many trials; threads may share it."""
    methods = {name: _fitter(name, config, cell, budgets) for name in fits(config)}

    def draw(key):
        return cell.draw(jax.random.fold_in(key, 0))

    def one(key, features):
        reference = noisy_head.ridge(features, cell.regularization)
        gammas = {"zero": jnp.zeros_like(reference), "ridge": reference}
        if "best_ridge" in references(config):
            tried = jnp.stack([noisy_head.ridge(features, penalty) for penalty in config.ridges])
            gammas["best_ridge"] = tried[cell.risks(tried, reference)[:, 1].argmin()]
        for index, (name, fit) in enumerate(methods.items()):
            gammas[name] = fit(jax.random.fold_in(key, index + 1), features)
        return {name: cell.risks(gamma, reference) for name, gamma in gammas.items()}

    # Prompts are drawn trial by trial, which keeps the draws in the cache; all else is vectorised.
    @jax.jit
    def trials(keys):
        return jax.vmap(one)(keys, jax.lax.map(draw, keys))

    with jax.enable_x64(True):
        program = trials.lower(jax.random.split(jax.random.key(0), batch)).compile()
    return lambda keys: jax.tree.map(np.asarray, program(keys))


def _fitter(name, config, cell, budgets):
    if name == "one_shot":
        hyper = make_descent("repaired", config, cell).hyper
        multipliers = [noisy_head.calibrate_one_shot(e, config.delta)[0] for e in budgets]

        def fit(key, features, multiplier):
            return noisy_head.one_shot(
                key,
                features,
                hyper,
                regularization=cell.regularization,
                noise_multiplier=multiplier,
            )

    else:
        descent = make_descent(name, config, cell)
        multipliers = [descent.calibrate(epsilon, config.delta)[0] for epsilon in budgets]

        def fit(key, features, multiplier):
            return noisy_head.noisy_descent(key, features, descent, noise_multiplier=multiplier)

    def fit_all(key, features):
        keys = jax.random.split(key, len(budgets))
        return jax.vmap(fit, in_axes=(0, None, 0))(keys, features, jnp.array(multipliers))

    return fit_all


def validate(config) -> None:
    """Raises ValueError for a bad value, before anything is computed."""
    check(config)
    if not fits(config):
        raise ValueError(
            "config.methods=() without config.one_shot leaves nothing to fit: name one"
        )
    checks.choice(config, "axes", AXES)
    grids = {f"axes.{axis}": values for axis, values in config.axes.items()}
    for name, values in (grids | {"ridges": config.get("ridges", (1.0,))}).items():
        if not values or not all(value > 0 for value in values):
            raise ValueError(f"config.{name}={values} must hold positive values")
    for point in points(config):
        for epsilon in point.budgets:
            check_epsilon(epsilon, "config.epsilon")
            for name in config.methods:
                make_descent(name, config, point.cell).calibrate(epsilon, config.delta)


def plan(config) -> Plan:
    """What each fit guarantees in the last cell, and noise and sensitivities of every cell."""
    lines: dict[str, float | str] = {}
    for cell in dict.fromkeys(point.cell for point in points(config)):
        label = f"N{cell.num_prompts} L{cell.length} D{cell.dim}"
        for name in config.methods:
            descent = make_descent(name, config, cell)
            multiplier, _ = descent.calibrate(config.epsilon, config.delta)
            lines[f"{label} {name}: steps"] = descent.steps
            lines[f"{label} {name}: noise multiplier"] = multiplier
            lines[f"{label} {name}: sensitivity / N"] = descent.change / cell.num_prompts
    return Plan(_releases(config), lines)


def _releases(config) -> dict[str, PrivacyGuarantee]:
    """Of each fit at the headline ε."""
    releases = guarantees(config, list(points(config))[-1].cell)
    if config.one_shot:
        _, releases["one_shot"] = noisy_head.calibrate_one_shot(config.epsilon, config.delta)
    return releases


def run(config, workdir: Path) -> Outcome:
    """Runs every cell; see the launcher's contract for what is returned."""
    del workdir  # simulated prompts and one pass: there is nothing to log on the way
    found = list(points(config))
    measures = []
    for point, risks in zip(found, simulate(config, found), strict=True):
        for name in references(config):
            of_both = summarize(name, risks[name], point.settings)
            # The best ridge has no excess over the other one, from which it only is at a distance.
            measures += of_both[1:] if name == "best_ridge" else of_both
        for name in fits(config):
            for index, epsilon in enumerate(point.budgets):
                settings = point.settings_at(epsilon)
                measures += summarize(name, risks[name][:, index], settings)
    if "epsilon" in config.axes:
        measures += exponents(config, measures)
    releases = _releases(config)
    best = fits(config)[-1]
    return Outcome(
        measures=measures,
        headline=releases[best],
        releases=releases,
        titles=TITLES,
        headline_row=best,
        comparisons=[Comparison("excess_risk", ["zero"])],
        synthetic=True,
        not_covered=[SIMULATED],
        notes=f"Means over {config.trials} trials, and their standard errors. Ridge and zero (predicting "
        "zero) need no privacy budget: ridge is not private, and zero looks at no prompt.",
    )


def summarize(name: str, risks: np.ndarray, settings: dict[str, Any]) -> list[Measure]:
    """The mean excess risk and test MSE of (trials, 2), with their standard errors."""
    return [measure(name, metric, x, settings) for metric, x in zip(METRICS, risks.T, strict=True)]


def exponents(config, measures: list[Measure]) -> list[Measure]:
    """Fitted exponents of the excess risk along each axis, beside those of Theorem 4.2."""
    fitted = []
    for axis, name in itertools.product(config.axes, fits(config)):
        line = [
            (measure.settings[axis], measure.value)
            for measure in measures
            if measure.row == name and measure.metric == "excess_risk" and axis in measure.settings
        ]
        positions, risks = np.log(line).T
        slope = float(np.polyfit(positions, risks, 1)[0])
        fitted.append(Measure(name, "exponent", slope, settings={"axis": axis}))
    return fitted + [
        Measure("claimed", "exponent", CLAIMED_EXPONENTS[axis], settings={"axis": axis})
        for axis in config.axes
    ]


def figures(records, folder: Path) -> list[Path]:
    """Excess risk along each axis of each run."""
    words = {"excess_risk": "excess risk over ridge"}
    return [
        path
        for record in records
        for axis in record.config["axes"]
        for path in drawer(f"excess_risk_{axis}", words, x=axis, marker="epsilon")([record], folder)
    ]
