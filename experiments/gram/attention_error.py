"""Error of private symmetric attention from a released Gram matrix, on synthetic columns."""

import dataclasses
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dpx import gram, privacy
from dpx._validate import check_decay
from dpx.gram.accounting import Columns
from dpx.gram.attend import KERNELS
from dpx.runs.experiment import Comparison, Measure, Outcome, Plan
from dpx.training import keys as secrets
from experiments import checks
from experiments.gram import error_figures
from experiments.gram.error_figures import ERRORS, FAILURE
from experiments.repeated import measure

OWN_AXES = tuple(error_figures.AXES)
WIDTH = 2**18  # columns made at a time


def validate(config) -> None:
    """Raises ValueError for a value that cannot be used."""
    checks.integers(config, "rows", "columns", "latent_dim", "trials")
    checks.positive(config, "logit_bound", "eta_fraction")
    check_decay(config.max_column_change_fraction, "config.max_column_change_fraction")
    checks.choice(config, "kernel", KERNELS)
    if not config.slack >= 1:
        raise ValueError(
            f"config.slack={config.slack} must be at least 1: below it, columns are cut"
        )


def plan(config) -> Plan:
    """What a run will release, from the configuration alone."""
    numbers = _numbers(config)
    bounds = numbers["column_bound"], numbers["max_column_change"], "replace_one"
    gaussian = gram.planned_guarantee(config.epsilon, config.delta, *bounds)
    sampled = dataclasses.replace(gaussian, event=None)  # no accountant knows it
    rows = [row for row in _counts(config, numbers) if row != "sampling_loose"]
    return Plan({"gaussian": gaussian} | dict.fromkeys(rows, sampled), numbers)


def _counts(config, numbers: dict) -> dict[str, int]:
    """The numbers of samples by row, where the calibration admits n or more."""
    rows = ("sampling", "sampling_loose", "sampling_paper")
    found = {row: numbers[f"{row}/num_samples"] for row in rows}
    return {row: count for row, count in found.items() if count >= config.rows}


def _numbers(config) -> dict:
    """Sensitivity, noise and numbers of samples, from the configuration alone."""
    column_bound = config.slack * _column_length(config)
    max_column_change = 2 * column_bound * config.max_column_change_fraction
    eta = config.eta_fraction * config.logit_bound
    change = gram.frobenius_sensitivity(column_bound, max_column_change)
    multiplier = privacy.gaussian_noise_multiplier(config.epsilon, config.delta)
    bounds = column_bound, max_column_change, "replace_one"
    rounded = gram.rounded_sensitivity(config.rows, *bounds)
    samples = partial(
        gram.max_samples,
        config.epsilon,
        config.delta,
        column_bound=column_bound,
        max_column_change=max_column_change,
        n=config.rows,
    )
    # η smaller by F/2αβ, so that t = F/η is the paper's bound on the change, 2αβ, over the real η.
    loose = eta * change / (2 * column_bound * max_column_change)
    return {
        "column_bound": column_bound,
        "max_column_change": max_column_change,
        "eta": eta,
        "frobenius_sensitivity": change,
        "noise_multiplier": multiplier,
        "gaussian/noise_std": rounded * multiplier,
        "sampling/num_samples": samples(eta=eta),
        "sampling_loose/num_samples": samples(eta=loose),
        "sampling_paper/num_samples": samples(eta=eta, calibration="paper"),
    }


def run(config, workdir: Path) -> Outcome:
    """Errors of both mechanisms, both calibrations and the uniform matrix; and their bounds."""
    planned = _numbers(config)
    _progress(f"drawing {config.columns} columns")
    X, n, eta = _columns(config), config.rows, planned["eta"]
    counts = _counts(config, planned)
    noise = secrets.open_keys(config, workdir, synthetic=True).noise
    _progress("releasing XXᵀ")
    release = partial(
        gram.release,
        epsilon=config.epsilon,
        delta=config.delta,
        column_bound=planned["column_bound"],
        max_column_change=planned["max_column_change"],
    )
    total = gram.statistic(X, column_bound=planned["column_bound"])
    guarantees = {"gaussian": release(noise("gaussian"), total).guarantee}
    if "sampling" in counts:
        sampled = release(noise("sampling"), X, mechanism="sampling", eta=eta)
        guarantees["sampling"] = sampled.guarantee
    if "sampling_paper" in counts:
        printed = release(noise("sampling_paper"), X, eta=eta, **gram.as_printed())
        guarantees["sampling_paper"] = printed.guarantee
    composed = dict(guarantees)
    if (
        "sampling_loose" in counts
    ):  # fewer samples than are admissible, of which no matrix is released
        words = f"mean of {counts['sampling_loose']} Gaussian outer products, exact calibration at t = 2αβ/η"
        guarantees["sampling_loose"] = dataclasses.replace(guarantees["sampling"], mechanism=words)

    exact = total.sums[0] * Columns(planned["column_bound"]).worth
    logit_bound, noise_std = float(np.abs(exact).max()), planned["gaussian/noise_std"]
    _progress(f"{config.trials} draws of each row's noise")
    with jax.enable_x64(True):
        keys = jax.random.split(noise("draws of the errors"), config.trials)
        released = jax.vmap(lambda key: release(key, total).matrix)(keys)
        released = gram.attention(released, kernel=config.kernel)
        errors = {"gaussian": _errors(exact, released, config.kernel)}
        for row, samples in counts.items():
            errors[row] = _sampling_errors(keys, exact, eta, float(samples), kernel=config.kernel)
        errors["uniform"] = _uniform_errors(exact, kernel=config.kernel)
    measures = [
        measure(row, metric, np.asarray(values))
        for row, found in errors.items()
        for metric, values in zip(ERRORS, found, strict=True)
    ]
    entry_errors = {
        "gaussian": gram.gaussian_entry_error(noise_std, n, failure_probability=FAILURE)
    }
    for row, samples in counts.items():
        entry_errors[row] = gram.sampling_entry_error(
            samples, n, diagonal_bound=logit_bound + eta, failure_probability=FAILURE
        )
    for row, size in entry_errors.items():
        known = gram.utility_bounds(n, logit_bound=logit_bound, relative_error=size / logit_bound)
        measures.append(Measure(row, "bound", known.corrected))
        measures.append(Measure(row, "bound_paper", known.paper))
    measures.append(Measure("uniform", "bound", known.uniform))
    measures += [Measure(row, "num_samples", samples) for row, samples in counts.items()]
    return Outcome(
        measures=measures,
        headline=guarantees["gaussian"],
        releases=guarantees,
        composed=composed,
        titles=error_figures.ROWS,
        headline_row="gaussian",
        comparisons=[Comparison("max_entry_error", ["uniform"])],
        synthetic=True,
        not_covered=[
            "the errors, bounds and numbers in the notes, computed with the exact matrix (synthetic data)"
        ],
        notes=_notes(config, planned, logit_bound, counts),
    )


def _column_length(config) -> float:
    """Length of every column, with which the largest entry of XXᵀ is about logit_bound.

    The scale comes from columns of the same law that are not X's own, so α stays public.
    """
    others = next(_directions(config, 2, WIDTH))
    largest = np.abs(others @ others.T).max() / WIDTH
    return float(np.sqrt(config.logit_bound / (config.columns * largest)))


def _columns(config) -> np.ndarray:
    """X, (n, d) float32, with independent columns of equal length."""
    X, start = np.empty((config.rows, config.columns), np.float32), 0
    length = np.float32(_column_length(config))
    for block in _directions(config, 1, config.columns):
        X[:, start : start + block.shape[1]] = length * block
        start += block.shape[1]
    return X


def _directions(config, stream: int, columns: int):
    """Blocks of float32 columns of length 1: a random linear map of normal latent vectors, rescaled.

    The rows of the map have length 1; the fewer latent dimensions, the more the rows of X are correlated.
    """
    root = np.random.default_rng([config.seed, 0]).normal(size=(config.rows, config.latent_dim))
    root = (root / np.linalg.norm(root, axis=1, keepdims=True)).astype(np.float32)
    rng = np.random.default_rng([config.seed, stream])
    for start in range(0, columns, WIDTH):
        shape = (config.latent_dim, min(WIDTH, columns - start))
        block = root @ rng.standard_normal(shape, np.float32)
        yield block / np.linalg.norm(block, axis=0)


@partial(jax.jit, static_argnames="kernel")
def _uniform_errors(exact, *, kernel):
    return _errors(exact, jnp.full((1, *exact.shape), 1 / exact.shape[0]), kernel)


@partial(jax.jit, static_argnames="kernel")
def _sampling_errors(keys, exact, eta, num_samples, *, kernel):
    floor = eta * jnp.eye(exact.shape[0])
    draw = partial(gram.wishart_mean, covariance=exact + floor, num_samples=num_samples)
    return _errors(exact, gram.attention(jax.vmap(draw)(keys) - floor, kernel=kernel), kernel)


def _errors(exact, released, kernel):
    """Per draw: the largest entry of the difference, and the rows' mean total variation."""
    difference = jnp.abs(released - gram.attention(exact, kernel=kernel))
    return difference.max(axis=(1, 2)), difference.sum(axis=2).mean(axis=1) / 2


def _notes(config, planned: dict, logit_bound: float, counts: dict) -> str:
    lines = [
        f"Errors of the attention matrix are means over {config.trials} draws of each release's noise, and "
        "their standard errors; bound is what the largest entry error stays below with probability "
        f"{1 - FAILURE:g}. The largest entry of XXᵀ is {logit_bound:.4g}, α is "
        f"{planned['column_bound']:.4g}, the Frobenius sensitivity "
        f"{planned['frobenius_sensitivity']:.4g}, and the noise on the diagonal has standard deviation "
        f"{planned['gaussian/noise_std']:.4g}."
    ]
    if "sampling_paper" not in counts:
        lines.append("The paper's calibration admits no number of samples k ≥ n here.")
    return " ".join(lines)


def _progress(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


figures = error_figures.draw
