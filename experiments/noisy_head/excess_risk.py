"""Excess risk of NoisyHead along N, L, D and ε: Section 6.1 of arXiv 2504.16000 and beyond it."""

import concurrent.futures
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx import noisy_head
from dpx._validate import check_delta, check_epsilon
from dpx.launch.experiment import Outcome, measures
from dpx.privacy import (
    PrivacyGuarantee,
    gaussian_noise_multiplier,
)
from experiments.noisy_head import figures as noisy_head_figures

METHODS = ("paper", "repaired", "last_iterate")
AXES = ("num_prompts", "length", "dim", "epsilon")
TRIALS_PER_BATCH = 50
# Theorem 4.2 (i), up to logarithms: N⁻¹ L⁻³ ε⁻², whatever D.
CLAIMED_EXPONENTS = {"num_prompts": -1.0, "length": -3.0, "dim": 0.0, "epsilon": -2.0}


class Cell(NamedTuple):
    """One data distribution: N prompts of L tokens in D dimensions, and the λ that goes with them."""

    num_prompts: int
    length: int
    dim: int
    regularization: float
    noise_std: float


class Method(NamedTuple):
    """A private fit in one cell: its bounds and the keyword arguments of `calibrate`."""

    hyper: noisy_head.HyperParameters
    options: dict

    def calibrate(self, epsilon: float, delta: float) -> tuple[float, PrivacyGuarantee]:
        """Noise multiplier and guarantee."""
        return noisy_head.calibrate(self.hyper, epsilon=epsilon, delta=delta, **self.options)


def make_cell(
    config, *, num_prompts: int, length: int | None = None, dim: int | None = None
) -> Cell:
    """A cell; sizes that are not set follow the paper: L = D = ⌊√N⌋ and λ = N/D."""
    length = length or config.length or math.isqrt(num_prompts)
    dim = dim or config.dim or math.isqrt(num_prompts)
    regularization = config.regularization or num_prompts / dim
    return Cell(num_prompts, length, dim, regularization, config.noise_std)


def make_method(name: str, config, cell: Cell) -> Method:
    """The fit called `name`: "paper", "repaired" or "last_iterate".

    "paper" is Algorithm 1 as printed, with (4.1). "repaired" has the same step size and steps rule, with
    exact accounting, tight sensitivity, the ridge objective and valid bounds. "last_iterate" also takes
    the step of fastest contraction, 2/(2λ + G²), and the accounting that covers Γ^T alone.
    """
    printed = name == "paper"
    choices = {
        "paper": {"accounting": "basic", "sensitivity": "paper", "objective": "paper"},
        "repaired": {"accounting": "gdp"},
        "last_iterate": {"accounting": "last_iterate"},
    }[name]
    hyper = noisy_head.hyperparameters(
        cell.num_prompts,
        cell.length,
        cell.dim,
        regularization=cell.regularization,
        noise_std=cell.noise_std,
        kappa=config.kappa,
        rule="paper" if printed else "valid",
        objective="paper" if printed else "ridge",
    )
    decay = (2 if printed else 1) * cell.regularization
    curvature = hyper.feature_radius**2
    fast = 2 / (2 * decay + curvature)
    step_size = fast
    if config.step_scale and name != "last_iterate":
        step_size = config.step_scale * cell.regularization / (cell.regularization + curvature) ** 2
    rate = decay * step_size if name == "last_iterate" else cell.regularization * step_size
    steps = config.steps or math.ceil(
        config.steps_exponent * math.log(cell.num_prompts) / -math.log1p(-rate)
    )
    options = {
        "regularization": cell.regularization,
        "step_size": step_size,
        "steps": steps,
        **choices,
    }
    return Method(hyper, options)


def cells(config) -> Iterator[tuple[str, Cell, tuple[float, ...]]]:
    """(axis, cell, its values of ε) for every point of every axis."""
    for axis in AXES:
        values = tuple(config.axes.get(axis, ()))
        if axis == "epsilon":
            if values:
                yield axis, make_cell(config, num_prompts=config.num_prompts), values
            continue
        budgets = (config.epsilon,)
        if not config.axes.get("epsilon"):
            budgets = tuple(sorted({config.epsilon, *config.epsilons}))
        for value in values:
            sizes = {"num_prompts": config.num_prompts, axis: value}
            yield axis, make_cell(config, **sizes), budgets


def fits(config) -> tuple[str, ...]:
    """The names of all private fits."""
    return (*config.methods, "one_shot") if config.one_shot else tuple(config.methods)


def simulate(config, points) -> list[dict[str, np.ndarray]]:
    """Risks of every fit and baseline at every point, over independent trials.

    Returns:
      For each point, name -> (trials, len(budgets), 2) for a private fit, (trials, 2) for "zero" and "ridge":
      excess risk over ridge, and test MSE, both exact.
    """
    cores = os.cpu_count() or 1

    def compiled(point):
        _, cell, budgets = point
        batch = min(TRIALS_PER_BATCH if cell.dim <= 8 else 10, math.ceil(config.trials / cores))
        return compile_trials(config, cell, budgets, batch), batch

    def run_all(program, batch):
        # Surplus trials of the last batch are dropped below.
        keys = jax.random.split(
            jax.random.key(config.seed), math.ceil(config.trials / batch) * batch
        )
        return pool.map(program, keys.reshape(-1, batch))

    # Neither compilation nor one batch of trials fills the cores.
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        runs = [run_all(*program) for program in pool.map(compiled, points)]
        return [
            jax.tree.map(lambda *parts: np.concatenate(parts)[: config.trials], *batches)
            for batches in runs
        ]


def compile_trials(config, cell: Cell, budgets: tuple[float, ...], batch: int):
    """A compiled function from `batch` keys to the risks of as many trials; threads may share it."""
    methods = {name: _fitter(name, config, cell, budgets) for name in fits(config)}

    def draw(key):
        sizes = (cell.num_prompts, cell.length, cell.dim)
        return noisy_head.sample_features(
            jax.random.fold_in(key, 0), *sizes, noise_std=cell.noise_std
        )

    def one(key, features):
        reference = noisy_head.ridge(features, cell.regularization)
        gammas = {"zero": jnp.zeros_like(reference), "ridge": reference}
        for index, (name, fit) in enumerate(methods.items()):
            gammas[name] = fit(jax.random.fold_in(key, index + 1), features)
        return {
            name: jnp.stack(
                [
                    noisy_head.population_risk(
                        gamma, cell.length, reference=reference, noise_std=cell.noise_std
                    ),
                    noisy_head.population_risk(gamma, cell.length, noise_std=cell.noise_std),
                ],
                axis=-1,
            )
            for name, gamma in gammas.items()
        }

    # Prompts are drawn trial by trial, which keeps the draws in the cache; all else is vectorised.
    @jax.jit
    def trials(keys):
        return jax.vmap(one)(keys, jax.lax.map(draw, keys))

    with jax.enable_x64(True):
        program = trials.lower(jax.random.split(jax.random.key(0), batch)).compile()
    return lambda keys: jax.tree.map(np.asarray, program(keys))


def _fitter(name, config, cell, budgets):
    if name == "one_shot":
        hyper = make_method("repaired", config, cell).hyper
        multipliers = [gaussian_noise_multiplier(epsilon, config.delta) for epsilon in budgets]

        def fit(key, features, multiplier):
            return noisy_head.one_shot(
                key,
                features,
                hyper,
                regularization=cell.regularization,
                noise_multiplier=multiplier,
            )

    else:
        method = make_method(name, config, cell)
        multipliers = [method.calibrate(epsilon, config.delta)[0] for epsilon in budgets]
        options = {key: value for key, value in method.options.items() if key != "accounting"}

        def fit(key, features, multiplier):
            return noisy_head.noisy_descent(
                key, features, method.hyper, noise_multiplier=multiplier, **options
            )

    def fit_all(key, features):
        keys = jax.random.split(key, len(budgets))
        return jax.vmap(fit, in_axes=(0, None, 0))(keys, features, jnp.array(multipliers))

    return fit_all


def check(config) -> None:
    """Raises ValueError for a bad value of what all simulations share."""
    check_epsilon(config.epsilon, "config.epsilon")
    check_delta(config.delta, "config.delta")
    for name in ("trials", "num_prompts", "length", "dim", "steps"):
        if config[name] is not None and config[name] < 1:
            raise ValueError(f"config.{name}={config[name]} must be at least 1")
    for name in ("regularization", "step_scale", "steps_exponent", "kappa"):
        if config[name] is not None and not config[name] > 0:
            raise ValueError(f"config.{name}={config[name]} must be positive")
    if not config.noise_std >= 0:
        raise ValueError(f"config.noise_std={config.noise_std} must be at least 0")
    check_choices(config, "methods", METHODS)


def check_choices(config, name: str, known: tuple[str, ...]) -> None:
    """Raises ValueError unless `config[name]` holds names that are known."""
    for chosen in config[name]:
        if chosen not in known:
            raise ValueError(f"config.{name} has {chosen!r}: use {', '.join(known)}")


def validate(config) -> None:
    """Raises ValueError for a bad value, before anything is computed."""
    check(config)
    if not fits(config):
        raise ValueError(
            "config.methods=() without config.one_shot leaves nothing to fit: name one"
        )
    check_choices(config, "axes", AXES)
    for axis, values in config.axes.items():
        if not values or not all(value > 0 for value in values):
            raise ValueError(f"config.axes.{axis}={values} must hold positive values")
    for _, cell, budgets in cells(config):
        for epsilon in budgets:
            check_epsilon(epsilon, "config.epsilon")
            for name in config.methods:
                make_method(name, config, cell).calibrate(epsilon, config.delta)


def plan(config) -> dict:
    """Noise multipliers and sensitivities at the headline ε, for every cell."""
    lines: dict[str, float | str] = {}
    for axis, cell, _ in cells(config):
        label = f"N{cell.num_prompts} L{cell.length} D{cell.dim}"
        for name in config.methods:
            method = make_method(name, config, cell)
            lines[f"{label} {name}: steps"] = method.options["steps"]
            lines[f"{label} {name}: noise multiplier"] = method.calibrate(
                config.epsilon, config.delta
            )[0]
            kind = method.options.get("sensitivity", "tight")
            lines[f"{label} {name}: sensitivity / N"] = (
                noisy_head.gradient_sensitivity(method.hyper, kind) / cell.num_prompts
            )
        if axis == "epsilon":
            break
    return lines


def run(config, workdir: Path) -> Outcome:
    """Runs every cell; see the launcher's contract for what is returned."""
    del workdir  # simulated prompts and one pass: there is nothing to log on the way
    points = list(cells(config))
    metrics: dict[str, float] = {}
    for (axis, cell, budgets), risks in zip(points, simulate(config, points), strict=True):
        for name, values in risks.items():
            for index, epsilon in enumerate(budgets if values.ndim == 3 else (None,)):
                series = values if epsilon is None else values[:, index]
                label = _label(axis, cell, epsilon, name)
                spread = np.std(series[:, 0], ddof=1) if len(series) > 1 else 0.0
                metrics[f"{label}/excess_risk"] = float(np.mean(series[:, 0]))
                metrics[f"{label}/excess_risk_std"] = float(spread)
                metrics[f"{label}/test_mse"] = float(np.mean(series[:, 1]))
    if config.axes.get("epsilon"):
        metrics |= slopes(config, metrics)
    _, guarantee = make_method(
        "last_iterate", config, make_cell(config, num_prompts=config.num_prompts)
    ).calibrate(config.epsilon, config.delta)
    return Outcome(
        measures=measures(metrics),
        headline=guarantee,
        releases={"last_iterate": guarantee},
        synthetic=True,
        not_covered=["the prompts are simulated: the guarantee is what the method would give"],
        notes=table(config, metrics),
    )


def slopes(config, metrics: dict[str, float]) -> dict[str, float]:
    """Fitted exponents of the excess risk along each axis, beside those of Theorem 4.2."""
    fitted = {}
    for axis, name in itertools.product(config.axes, fits(config)):
        points = [
            (
                _position(axis, cell, epsilon),
                metrics[f"{_label(axis, cell, epsilon, name)}/excess_risk"],
            )
            for where, cell, budgets in cells(config)
            if where == axis
            for epsilon in budgets
        ]
        positions, risks = np.log(points).T
        fitted[f"slope/{axis}/{name}"] = float(np.polyfit(positions, risks, 1)[0])
        fitted[f"slope/{axis}/claimed"] = CLAIMED_EXPONENTS[axis]
    return fitted


def table(config, metrics: dict[str, float]) -> str:
    """Excess risk and test MSE at every cell and ε, in markdown."""
    names = fits(config)
    columns = [f"{name} {what}" for name in ("zero", "ridge", *names) for what in ("excess", "MSE")]
    rows = [f"| N | L | D | ε | {' | '.join(columns)} |", "|---" * (len(columns) + 4) + "|"]
    for axis, cell, budgets in cells(config):
        for epsilon in budgets:
            row = [str(cell.num_prompts), str(cell.length), str(cell.dim), f"{epsilon:g}"]
            for name in ("zero", "ridge", *names):
                label = _label(axis, cell, None if name in ("zero", "ridge") else epsilon, name)
                row += [f"{metrics[f'{label}/{what}']:.3g}" for what in ("excess_risk", "test_mse")]
            rows.append(f"| {' | '.join(row)} |")
    for axis in config.axes if config.axes.get("epsilon") else ():
        found = [f"{name} {metrics[f'slope/{axis}/{name}']:.2f}" for name in names]
        rows.append(
            f"\nexponent of {axis}: claimed {CLAIMED_EXPONENTS[axis]:g}; {', '.join(found)}"
        )
    return "\n".join(rows)


def figures(records, folder: Path) -> list[Path]:
    """Excess risk along each axis, with two standard deviations of the paper's fit."""
    return [path for record in records for path in noisy_head_figures.along_axes(record, folder)]


def _position(axis: str, cell: Cell, epsilon: float) -> float:
    return epsilon if axis == "epsilon" else getattr(cell, axis)


def _label(axis: str, cell: Cell, epsilon: float | None, name: str) -> str:
    budget = "" if epsilon is None else f"epsilon{epsilon:g}/"
    position = "" if axis == "epsilon" else f"{axis}{_position(axis, cell, 0)}/"
    return f"{position}{budget}{name}"
