"""Private cross-attention on synthetic memories: how far each mechanism's answers are from exact
attention."""

import functools
import itertools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dpx.attention
from dpx import cross_attention
from dpx._validate import check_delta, check_epsilon
from dpx.cross_attention import baselines, sketch
from dpx.cross_attention.domain import Domain
from dpx.cross_attention.features import PolynomialFeatures, smallest_degree
from dpx.launch import plotting
from dpx.launch.experiment import Outcome, measures
from dpx.privacy import (
    gaussian_noise_multiplier,
)
from dpx.training import keys as secrets

_MARKERS = "osv^Dx<>"


def validate(config) -> None:
    """Raises ValueError for a value that cannot be used."""
    check_epsilon(config.epsilon, "config.epsilon")
    check_delta(config.delta, "config.delta")
    if config.delta > 0.5:
        raise ValueError(f"config.delta={config.delta} must be at most 1/2 for the paper's trees")
    for name in ("trials", "num_queries"):
        if config[name] < 1:
            raise ValueError(f"config.{name}={config[name]} must be at least 1")
    if config.data.n < 2 or config.data.dim < 1:
        raise ValueError(
            f"config.data.n={config.data.n} must be at least 2 and dim={config.data.dim} at least 1"
        )
    if not config.data.key_bound > 0:
        raise ValueError(f"config.data.key_bound={config.data.key_bound} must be positive")
    if any(degree < 0 or degree % 2 for degree in config.degrees):
        raise ValueError(f"config.degrees={config.degrees} must be even")
    if any(count < 1 for count in config.query_counts):
        raise ValueError(f"config.query_counts={config.query_counts} must be positive")
    if min(config.tree.degree, config.tree.copies, config.tree.bins) < 1:
        raise ValueError("config.tree.degree, copies and bins must be at least 1")
    PolynomialFeatures(config.data.dim, config.tree.degree)


def plan(config) -> dict:
    """Sensitivity and noise of the sketch."""
    domain = _domain(config)
    degree = smallest_degree(-domain.largest_logit, domain.largest_logit)
    multiplier = gaussian_noise_multiplier(config.epsilon, config.delta)
    return {
        "noise_multiplier": multiplier,
        "sketch_degree": degree,
        "sketch_features": PolynomialFeatures(domain.dim, degree).num_features,
        "sketch_sensitivity": sketch.sensitivity(domain, degree),
        "sketch_noise_std": multiplier * sketch.sensitivity(domain, degree),
    }


def run(config, workdir: Path) -> Outcome:
    """Every mechanism on `trials` memories of their own."""
    keys = secrets.open_keys(config, workdir, synthetic=True)
    bound = config.data.key_bound
    options = {
        "key_bound": bound,
        "value_bound": 1.0,
        "epsilon": config.epsilon,
        "delta": config.delta,
    }
    errors, releases, seconds = {}, {}, {}

    def record(name, answers, exact, guarantee=None):
        errors.setdefault(name, []).append(float(jnp.abs(answers - exact).mean()))
        if guarantee is not None:
            releases[name] = guarantee

    for trial in range(config.trials):
        K, V, Q = _draw(config, trial)
        exact = _exact(Q, K, V)
        key = jax.random.fold_in(keys.noise, trial)
        for number, (name, build) in enumerate(_mechanisms(config).items()):
            own = jax.random.fold_in(key, number)
            built, build_seconds = _timed(functools.partial(build, own, K, V, **options))
            answers, query_seconds = _timed(functools.partial(built.query, Q))
            record(name, answers, exact, built.guarantee)
            seconds[name] = (build_seconds, query_seconds / len(Q))
        mean = baselines.mean_of_values(
            key, V, value_bound=1.0, epsilon=config.epsilon, delta=config.delta
        )
        record("dp_mean", mean.values, exact, mean.guarantee)
        record("mean", jnp.asarray(V.mean(0)), exact)
        for count in config.query_counts:
            own = jax.random.fold_in(key, 1000 + count)
            asked = Q[:count]  # the error of the first few stands for that of all
            fresh = baselines.fresh_noise(own, asked, K, V, num_queries=count, **options)
            name = f"fresh_noise_{count}_queries"
            record(name, fresh.values, exact[:count], fresh.guarantee)
    _write_seconds(workdir, config, seconds)
    return Outcome(
        measures=measures(
            {f"{name}/error": float(np.mean(found)) for name, found in errors.items()}
        ),
        headline=releases["sketch"],
        releases=releases,
        synthetic=True,
        not_covered=["the row mean and the errors, which are not private (the data are synthetic)"],
        notes="Each trial has a memory of its own, and its noise is counted once.",
    )


def _mechanisms(config) -> dict:
    build = cross_attention.build
    tree = functools.partial(
        build, mechanism="tree", degree=config.tree.degree, copies=config.tree.copies
    )
    laplace = functools.partial(tree, noise="truncated_laplace", bins=config.tree.bins)
    degrees = {
        f"sketch_degree_{degree}": functools.partial(build, degree=degree)
        for degree in config.degrees
    }
    return {
        "sketch": build,
        "tree": functools.partial(tree, bins=config.tree.bins),
        "tree_laplace": laplace,
        "tree_paper": functools.partial(laplace, budget="paper"),
        **degrees,
    }


def _domain(config) -> Domain:
    dim, bound = config.data.dim, config.data.key_bound
    return Domain("box", dim, dim, bound, bound, 1.0, float(dim))


def _draw(config, trial: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng([config.seed, trial])
    unit = rng.random((config.data.n, config.data.dim), np.float32)
    queries = rng.random((config.num_queries, config.data.dim), np.float32)
    return config.data.key_bound * unit, 2 * unit - 1, config.data.key_bound * queries


@jax.jit
def _exact(Q, K, V) -> jax.Array:
    attend = lambda q: dpx.attention.dot_product_attention(q[None], K, V, scale=1 / K.shape[-1])[0]  # noqa: E731
    return jax.lax.map(attend, Q, batch_size=50)


def _timed(call):
    """A call's result, and its seconds the second time, without compilation."""
    jax.block_until_ready(jax.tree.leaves(call()))
    start = time.perf_counter()
    result = call()
    jax.block_until_ready(jax.tree.leaves(result))
    return result, time.perf_counter() - start


def _write_seconds(workdir: Path, config, seconds: dict) -> None:
    """Times vary from run to run, so they go beside the metrics, not into them."""
    with (workdir / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for name, (build, query) in seconds.items():
            row = {"mechanism": name, "n": config.data.n, "build_seconds": build}
            file.write(json.dumps({**row, "seconds_per_query": query}) + "\n")


# ---------------------------------------------------------------------------------------------------------
# Figures


def figures(records, folder: Path) -> list[Path]:
    """Error against whatever the runs differ in; degrees, numbers of queries and times."""
    runs = [run for run in records if run.config["experiment"] == "cross_attention.query_error"]
    if not runs:
        return []
    axes = {"data.n": "n", "data.dim": "d", "data.key_bound": "R", "epsilon": "ε"}
    paths = [
        path
        for name, label in axes.items()
        if (path := _draw_against(runs, name, label, list(axes), folder)) is not None
    ]
    largest = max(runs, key=lambda run: run.config["data"]["n"])
    paths.append(_draw_family(largest, "sketch_degree_", "", "degree s", ["mean"], folder))
    paths.append(
        _draw_family(
            largest, "fresh_noise_", "_queries", "number of queries", ["sketch", "mean"], folder
        )
    )
    if len({run.config["data"]["n"] for run in runs}) > 1:
        paths.append(_draw_seconds(runs, folder))
    return paths


def _value(run, name: str):
    return functools.reduce(lambda node, part: node[part], name.split("."), run.config)


def _names(run) -> list[str]:
    """Mechanisms, without the families that have figures of their own."""
    names = [name.split("/")[0] for name in run.metrics]
    return [n for n in names if not n.startswith(("sketch_degree_", "fresh_noise_"))]


def crossing(x: list[float], error: list[float], trivial: list[float]) -> float | None:
    """Where `error` falls below `trivial`, both interpolated on a log–log scale; None if it never does."""
    gap = np.log(error) - np.log(trivial)
    if gap[0] <= 0:
        return float(x[0])
    for i in range(1, len(x)):
        if gap[i] <= 0:
            share = gap[i - 1] / (gap[i - 1] - gap[i])
            return float(np.exp(np.log(x[i - 1]) + share * np.log(x[i] / x[i - 1])))
    return None


def _draw_against(runs, name, label, others, folder: Path) -> Path | None:
    """One panel for each setting of the other axes."""
    rest = [other for other in others if other != name]
    groups = {}
    for run in runs:
        groups.setdefault(tuple(_value(run, other) for other in rest), []).append(run)
    groups = {
        setting: sorted(group, key=lambda run: _value(run, name))
        for setting, group in sorted(groups.items())
        if len({_value(run, name) for run in group}) > 1
    }
    if not groups:
        return None
    size = (5 * len(groups), 4)
    figure, panels = plotting.pyplot().subplots(
        1, len(groups), figsize=size, squeeze=False, sharey=True, layout="constrained"
    )
    for axes, (setting, group) in zip(panels[0], groups.items(), strict=True):
        x = [_value(run, name) for run in group]
        trivial = [run.metrics["mean/error"] for run in group]
        for mechanism, marker in zip(_names(group[0]), itertools.cycle(_MARKERS), strict=False):
            error = [run.metrics[f"{mechanism}/error"] for run in group]
            where = crossing(x, error, trivial) if name == "data.n" else None
            beats = f" (beats mean from n ≈ {where:.2g})" if where and mechanism != "mean" else ""
            axes.loglog(x, error, marker=marker, label=mechanism + beats)
        axes.set(xlabel=label, ylabel="mean |error|")
        axes.set_title(
            ", ".join(f"{o.split('.')[-1]}={v:g}" for o, v in zip(rest, setting, strict=True))
        )
        axes.legend(fontsize="x-small")
    return plotting.save(figure, folder / f"error_against_{name.split('.')[-1]}.png")


def _draw_family(run, prefix, suffix, label, beside, folder: Path) -> Path:
    """Error of a family of mechanisms, numbered in their names, with others as level lines."""
    points = sorted(
        (int(name.split("/")[0].removeprefix(prefix).removesuffix(suffix)), value)
        for name, value in run.metrics.items()
        if name.startswith(prefix)
    )
    figure, axes = plotting.pyplot().subplots(figsize=(6, 4), layout="constrained")
    axes.loglog(*zip(*points, strict=True), marker="o", label=prefix.rstrip("_"))
    for name, style in zip(beside, ("--", ":"), strict=False):
        axes.axhline(run.metrics[f"{name}/error"], color="grey", linestyle=style, label=name)
    data = run.config["data"]
    axes.set(xlabel=label, ylabel="mean |error|", title=f"n={data['n']}, d={data['dim']}")
    axes.legend()
    return plotting.save(figure, folder / f"error_against_{label.replace(' ', '_')}.png")


def _draw_seconds(runs, folder: Path) -> Path:
    dim = max(run.config["data"]["dim"] for run in runs)
    rows = [
        json.loads(line)
        for run in runs
        if run.config["data"]["dim"] == dim
        for line in (run.workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    figure, panels = plotting.pyplot().subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axes, what in zip(panels, ("build_seconds", "seconds_per_query"), strict=True):
        for name in ("sketch", "tree", "tree_laplace"):
            points = sorted((row["n"], row[what]) for row in rows if row["mechanism"] == name)
            axes.loglog(*zip(*points, strict=True), marker="o", label=name)
        axes.set(xlabel="n", ylabel=what.replace("_", " "), title=f"d={dim}")
        axes.legend()
    return plotting.save(figure, folder / "seconds_against_n.png")
