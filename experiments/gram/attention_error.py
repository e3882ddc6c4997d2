"""Error of private symmetric attention from a released Gram matrix, on synthetic columns."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dpx import gram, privacy
from dpx.gram.accounting import sensitivity
from dpx.gram.columns import clipped_gram
from dpx.launch import plotting
from dpx.launch.experiment import Outcome, measures
from dpx.training import keys as secrets

FAILURE = 0.05  # of the high-probability bounds
WIDTH = 2**18  # columns made at a time
AXES = {
    "epsilon": "ε",
    "rows": "n, rows of X",
    "columns": "d, columns of X",
    "max_column_change_fraction": "β / 2α",
    "slack": "α / length of a column",
}
ROWS = {
    "gaussian": "Gaussian noise on XXᵀ",
    "sampling": "sampling, Rényi k",
    "sampling_loose": "sampling, Rényi k at t = 2αβ/η",
    "sampling_paper": "sampling, paper's k",
    "uniform": "uniform, no data",
}


def validate(config) -> None:
    """Raises ValueError for a value that cannot be used."""
    for name in ("rows", "columns", "latent_dim", "trials"):
        if config[name] < 1:
            raise ValueError(f"config.{name}={config[name]} must be at least 1")
    for name in ("logit_bound", "eta_fraction"):
        if not config[name] > 0:
            raise ValueError(f"config.{name}={config[name]} must be positive")
    if not 0 < config.max_column_change_fraction <= 1:
        raise ValueError(
            f"config.max_column_change_fraction={config.max_column_change_fraction} must be in (0, 1]"
        )
    if config.kernel not in ("exp", "cosh"):
        raise ValueError(f"config.kernel={config.kernel!r} must be 'exp' or 'cosh'")
    if not config.slack >= 1:
        raise ValueError(
            f"config.slack={config.slack} must be at least 1: below it, columns are cut"
        )


def plan(config) -> dict:
    """Sensitivity, noise and numbers of samples."""
    column_bound = config.slack * _column_length(config)
    max_column_change, eta = (
        2 * column_bound * config.max_column_change_fraction,
        config.eta_fraction * config.logit_bound,
    )
    change = sensitivity(column_bound, max_column_change, "replace_one")
    multiplier = privacy.gaussian_noise_multiplier(config.epsilon, config.delta)
    samples = partial(
        gram.max_samples,
        config.epsilon,
        config.delta,
        column_bound=column_bound,
        max_column_change=max_column_change,
        n=config.rows,
    )
    return {
        "column_bound": column_bound,
        "max_column_change": max_column_change,
        "eta": eta,
        "frobenius_sensitivity": change,
        "noise_multiplier": multiplier,
        "gaussian/noise_std": change * multiplier,
        "sampling/num_samples": samples(eta=eta),
        # η smaller by F/2αβ, so that t = F/η is the paper's bound on the change, 2αβ, over the real η.
        "sampling_loose/num_samples": samples(
            eta=eta * change / (2 * column_bound * max_column_change)
        ),
        "sampling_paper/num_samples": samples(eta=eta, calibration="paper"),
    }


def run(config, workdir: Path) -> Outcome:
    """Errors of both mechanisms, both calibrations and the uniform matrix; and their bounds."""
    planned = plan(config)
    X, n, eta = _columns(config), config.rows, planned["eta"]
    counts = {
        label: planned[f"{label}/num_samples"]
        for label in ("sampling", "sampling_loose", "sampling_paper")
        if planned[f"{label}/num_samples"] >= n
    }
    noise = secrets.open_keys(config, workdir, synthetic=True).noise
    noise_key, sampling_key, paper_key, trials_key = jax.random.split(noise, 4)
    budget = {"epsilon": config.epsilon, "delta": config.delta}
    shared = budget | {name: planned[name] for name in ("column_bound", "max_column_change")}
    releases = {"gaussian": gram.release(noise_key, X, **shared)}
    for label, key, calibration in (
        ("sampling", sampling_key, "exact"),
        ("sampling_paper", paper_key, "paper"),
    ):
        if label in counts:
            releases[label] = gram.release(
                key,
                X,
                mechanism="sampling",
                eta=eta,
                calibration=calibration,
                **shared,
            )

    exact, _ = clipped_gram(X, planned["column_bound"])
    logit_bound, noise_std = float(np.abs(exact).max()), planned["gaussian/noise_std"]
    metrics = {name: value for name, value in planned.items() if isinstance(value, int | float)}
    metrics["logit_bound"] = logit_bound
    entry_error = partial(
        gram.sampling_entry_error,
        n=n,
        diagonal_bound=logit_bound + eta,
        failure_probability=FAILURE,
    )
    bounds = {"gaussian": gram.gaussian_entry_error(noise_std, n, failure_probability=FAILURE)}
    bounds |= {label: entry_error(samples) for label, samples in counts.items()}
    with jax.enable_x64(True):
        keys = jax.random.split(trials_key, config.trials)
        errors = {
            "uniform": _uniform_errors(exact, kernel=config.kernel),
            "gaussian": _noise_errors(keys, exact, noise_std, kernel=config.kernel),
        }
        for label, samples in counts.items():
            errors[label] = _sampling_errors(keys, exact, eta, float(samples), kernel=config.kernel)
        for label, pair in errors.items():
            metrics |= _summary(label, pair)
    for label, size in bounds.items():
        known = gram.utility_bounds(n, logit_bound=logit_bound, relative_error=size / logit_bound)
        metrics[f"{label}/bound_corrected"] = known.corrected
        metrics[f"{label}/bound_paper"] = known.paper
        metrics["uniform/bound"] = known.uniform
    guarantees = {label: release.guarantee for label, release in releases.items()}
    return Outcome(
        measures=measures(metrics),
        headline=guarantees["gaussian"],
        releases=guarantees,
        synthetic=True,
        not_covered=["the errors, which are computed with the exact matrix (synthetic data)"],
        notes=_notes(config, releases),
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
def _noise_errors(keys, exact, std, *, kernel):
    noise = jax.vmap(lambda key: gram.symmetric_gaussian(key, exact.shape[0], exact.dtype))(keys)
    return _errors(exact, gram.attention(exact + std * noise, kernel=kernel), kernel)


@partial(jax.jit, static_argnames="kernel")
def _sampling_errors(keys, exact, eta, num_samples, *, kernel):
    floor = eta * jnp.eye(exact.shape[0])
    draw = partial(gram.wishart_mean, covariance=exact + floor, num_samples=num_samples)
    return _errors(exact, gram.attention(jax.vmap(draw)(keys) - floor, kernel=kernel), kernel)


def _errors(exact, released, kernel):
    """Per draw: the largest entry of the difference, and the rows' mean total variation."""
    difference = jnp.abs(released - gram.attention(exact, kernel=kernel))
    return difference.max(axis=(1, 2)), difference.sum(axis=2).mean(axis=1) / 2


def _summary(label: str, errors) -> dict[str, float]:
    summary = {}
    for name, values in zip(("max_entry_error", "total_variation"), errors, strict=True):
        values = np.asarray(values)
        summary[f"{label}/{name}"] = float(values.mean())
        if len(values) > 1:
            summary[f"{label}/{name}_se"] = float(values.std(ddof=1) / np.sqrt(len(values)))
    return summary


def _notes(config, releases) -> str:
    lines = [f"Errors are means over {config.trials} draws of each release's noise."]
    if "sampling_paper" not in releases:
        lines.append("The paper's calibration admits no number of samples k ≥ n here.")
    return " ".join(lines)


# ---------------------------------------------------------------------------------------------------------
# Figures


def figures(records, folder: Path) -> list[Path]:
    """Error along every swept axis, error against its bounds, and the numbers of samples."""
    paths = [_draw_samples(records[0].config, folder / "gram_samples.png")]
    for axis in AXES:
        rest = [name for name in AXES if name != axis]
        first = records[0].config
        line = [r for r in records if all(r.config[name] == first[name] for name in rest)]
        if len({r.config[axis] for r in line}) > 1:
            line.sort(key=lambda r: r.config[axis])
            paths.append(_draw_axis(line, axis, folder / f"gram_error_{axis}.png"))
    return paths


def _draw_axis(records, axis: str, path: Path) -> Path:
    plt = plotting.pyplot()
    figure, panels = plt.subplots(1, 3, figsize=(15, 4), constrained_layout=True)
    for panel, name in zip(panels, ("max_entry_error", "total_variation"), strict=False):
        for label, words in ROWS.items():
            found = [r for r in records if f"{label}/{name}" in r.metrics]
            x = [r.config[axis] for r in found]
            y = [r.metrics[f"{label}/{name}"] for r in found]
            bar = [r.metrics.get(f"{label}/{name}_se", 0.0) for r in found]
            panel.errorbar(x, y, yerr=bar, marker="o", markersize=3, label=words)
        panel.set(ylabel=name.replace("_", " "), title="error of the attention matrix")
    bounds = panels[2]
    for style, label in (("C0", "gaussian"), ("C1", "sampling")):
        for dash, name in (
            ("-", "max_entry_error"),
            ("--", "bound_corrected"),
            (":", "bound_paper"),
        ):
            found = [r for r in records if f"{label}/{name}" in r.metrics]
            x, y = [r.config[axis] for r in found], [r.metrics[f"{label}/{name}"] for r in found]
            bounds.plot(x, y, style + dash, label=f"{label}: {name.replace('_', ' ')}")
    x = [r.config[axis] for r in records]
    bounds.plot(x, [r.metrics["uniform/bound"] for r in records], "k--", label="uniform: bound")
    bounds.set(
        ylabel="max entry error", title=f"bounds, each holding with probability {1 - FAILURE:g}"
    )
    for panel in panels:
        panel.set(xscale="log", yscale="log", xlabel=AXES[axis])
        panel.set_xticks(x, [f"{value:g}" for value in x])
        panel.minorticks_off()
    figure.legend(
        *panels[0].get_legend_handles_labels(), fontsize=8, ncols=5, loc="outside upper left"
    )
    bounds.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return plotting.save(figure, path)


def _draw_samples(config, path: Path) -> Path:
    plt = plotting.pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True, sharey=True)
    ratios = np.geomspace(1e-6, 0.5, 60)
    lines = [(panels[0], epsilon, 1e-6, f"ε={epsilon:g}") for epsilon in (0.09, 1.0, 8.0)]
    lines += [(panels[1], 1.0, delta, f"δ={delta:g}") for delta in (1e-3, 1e-6, 1e-9)]
    change = gram.frobenius_sensitivity(1.0, 2.0)
    for number, (panel, epsilon, delta, words) in enumerate(lines):
        for dash, calibration in (("-", "exact"), ("--", "paper")):
            admitted = [
                gram.max_samples(
                    epsilon,
                    delta,
                    column_bound=1.0,
                    eta=change / t,
                    n=config["rows"],
                    calibration=calibration,
                )
                for t in ratios
            ]
            shown = np.where(np.array(admitted) > 0, admitted, np.nan)
            panel.plot(ratios, shown, f"C{number % 3}{dash}", label=f"{words}, {calibration}")
    for panel, fixed in zip(panels, ("δ=1e-06", "ε=1"), strict=True):
        panel.set(
            xscale="log", yscale="log", xlabel="t = F/η", title=f"{fixed}, n={config['rows']}"
        )
        panel.legend(fontsize=7)
    panels[0].set_ylabel("largest k")
    return plotting.save(figure, path)
