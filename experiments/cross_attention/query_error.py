"""Private cross-attention on synthetic memories: the distance of answers from exact attention."""

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx import cross_attention
from dpx.cross_attention import baselines, sketch
from dpx.cross_attention.domain import Domain
from dpx.cross_attention.features import PolynomialFeatures
from dpx.privacy import PrivacyGuarantee, gaussian_noise_multiplier
from dpx.runs.experiment import Comparison, Measure, Outcome, Plan
from dpx.training import keys as secrets
from experiments import checks, guarantees
from experiments.cross_attention import figures as drawing
from experiments.cross_attention.table import exact_attention
from experiments.repeated import measure

OWN_AXES = tuple(drawing.AXES)
TITLES = {
    "sketch": "Gaussian sketch",
    "tree": "trees, Gaussian nodes",
    "tree_laplace": "trees, truncated Laplace nodes",
    "tree_paper": "the paper's trees",
    "dp_mean": "private mean of V",
    "mean": "mean of V, not private",
    "fresh_noise": "fresh noise for each query",
}


class Cell(NamedTuple):
    """A row of the table, and where it is measured at several values of a setting, which of them."""

    row: str
    setting: str = ""
    value: int = 0

    @property
    def place(self) -> str:
        """Its name among the metrics and the releases of a run."""
        return self.measure([0.0]).place

    def measure(self, errors: list[float]) -> Measure:
        """The mean error over memories, and its standard error."""
        settings = {self.setting: self.value} if self.setting else {}
        return measure(self.row, "error", errors, settings)


def validate(config) -> None:
    """Raises ValueError for a value that cannot be used."""
    if config.delta > 0.5:
        raise ValueError(f"config.delta={config.delta} must be at most 1/2 for the paper's trees")
    checks.integers(config, "data.n", least=2)
    checks.integers(config, "trials", "num_queries", "data.dim")
    checks.integers(config, "tree.degree", "tree.copies", "tree.bins")
    checks.positive(config, "data.key_bound")
    checks.each(config, "degrees", least=0, even=True)
    checks.each(config, "query_counts", least=1)
    PolynomialFeatures(config.data.dim, config.tree.degree)


def plan(config) -> Plan:
    """What a run will release of each memory, and sensitivity and noise of the sketch."""
    domain = _domain(config)
    degree = sketch.even_degree(None, domain)
    features = PolynomialFeatures(domain.dim, degree, domain.scale)
    multiplier = gaussian_noise_multiplier(config.epsilon, config.delta)
    change = sketch.sensitivity(domain, features)
    parameters = {
        "noise_multiplier": multiplier,
        "sketch_degree": features.degree,
        "sketch_features": features.num_features,
        "sketch_sensitivity": change,
        "sketch_noise_std": multiplier * change,
    }
    about = config.epsilon, config.delta, "Gaussian mechanism", "row of (K, V)"
    gaussian = guarantees.gaussian(*about, neighboring=domain.neighboring)
    cells = [
        *_mechanisms(config),
        Cell("dp_mean"),
        *(Cell("fresh_noise", "queries", count) for count in config.query_counts),
    ]
    plain = {Cell("tree_laplace"), Cell("tree_paper")}  # truncated noise has no event
    releases = {
        cell.place: dataclasses.replace(gaussian, event=None) if cell in plain else gaussian
        for cell in cells
    }
    return Plan(releases, parameters)


def run(config, workdir: Path) -> Outcome:
    """Every mechanism on `trials` memories of their own."""
    keys = secrets.open_keys(config, workdir, synthetic=True)
    options = {
        "key_bound": config.data.key_bound,
        "value_bound": 1.0,
        "epsilon": config.epsilon,
        "delta": config.delta,
    }
    errors: dict[Cell, list[float]] = {}
    guarantees: dict[Cell, PrivacyGuarantee] = {}
    seconds = {}

    def record(cell, answers, exact, guarantee=None):
        errors.setdefault(cell, []).append(float(jnp.abs(answers - exact).mean()))
        if guarantee is not None:
            guarantees[cell] = guarantee

    for trial in range(config.trials):
        print(f"memory {trial + 1} of {config.trials}: building and asking", flush=True)
        K, V, Q = _draw(config, trial)
        exact = exact_attention(Q, K, V, 1 / K.shape[-1])

        def noise(cell, trial=trial):
            return keys.noise(f"{cell.place} of memory {trial}")

        for cell, build in _mechanisms(config).items():
            built, build_seconds = _timed(functools.partial(build, noise(cell), K, V, **options))
            answers, query_seconds = _timed(functools.partial(built.query, Q))
            record(cell, answers, exact, built.guarantee)
            if not cell.setting:
                seconds[cell.row] = (build_seconds, query_seconds / len(Q))
        mean = baselines.mean_of_values(
            noise(Cell("dp_mean")),
            V,
            value_bound=1.0,
            epsilon=config.epsilon,
            delta=config.delta,
        )
        record(Cell("dp_mean"), mean.values, exact, mean.guarantee)
        record(Cell("mean"), jnp.asarray(V.mean(0)), exact)
        for count in config.query_counts:
            asked = Q[:count]  # the error of the first few stands for that of all
            cell = Cell("fresh_noise", "queries", count)
            fresh = baselines.fresh_noise(noise(cell), asked, K, V, num_queries=count, **options)
            record(cell, fresh.values, exact[:count], fresh.guarantee)
    _write_seconds(workdir, config, seconds)
    return Outcome(
        measures=[cell.measure(found) for cell, found in errors.items()],
        headline=guarantees[Cell("sketch")],
        releases={cell.place: spent for cell, spent in guarantees.items()},
        titles=TITLES,
        headline_row="sketch",
        comparisons=[Comparison("error", ["dp_mean"])],
        synthetic=True,
        not_covered=["the row mean and the errors, which are not private (the data are synthetic)"],
        notes="Each trial has a memory of its own, and its noise is counted once.",
    )


def _mechanisms(config) -> dict[Cell, Callable]:
    build = cross_attention.build
    tree = functools.partial(
        build,
        mechanism="tree",
        degree=config.tree.degree,
        copies=config.tree.copies,
        bins=config.tree.bins,
    )
    degrees = {
        Cell("sketch", "degree", degree): functools.partial(build, degree=degree)
        for degree in config.degrees
    }
    laplace = functools.partial(tree, noise="truncated_laplace")
    return {
        Cell("sketch"): build,
        Cell("tree"): tree,
        Cell("tree_laplace"): laplace,
        Cell("tree_paper"): functools.partial(laplace, budget="paper"),
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


def _timed(call):
    """A call's result, and its seconds the second time, without compilation."""
    jax.block_until_ready(jax.tree.leaves(call()))
    start = time.perf_counter()
    result = call()
    jax.block_until_ready(jax.tree.leaves(result))
    return result, time.perf_counter() - start


def _write_seconds(workdir: Path, config, seconds: dict[str, tuple[float, float]]) -> None:
    """Times vary from run to run, so they go beside the metrics, not into them."""
    with (workdir / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for name, (build, query) in seconds.items():
            row = {"mechanism": name, "n": config.data.n, "build_seconds": build}
            file.write(json.dumps({**row, "seconds_per_query": query}) + "\n")


def figures(records, folder: Path) -> list[Path]:
    """Error against whatever the runs differ in; degrees, numbers of queries and times."""
    runs = [run for run in records if run.config["experiment"] == "cross_attention.query_error"]
    return drawing.draw(runs, folder) if runs else []
