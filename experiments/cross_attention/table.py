"""A private memory from a file: released once under secret keys, saved, and queried without limit."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dpx
from dpx import cross_attention
from dpx.cross_attention import Domain, sketch
from dpx.cross_attention.features import Features
from dpx.cross_attention.sketch import expected
from dpx.data.arrays import load_array, load_columns
from dpx.privacy import gaussian_noise_multiplier
from dpx.runs.experiment import Comparison, Measure, Outcome, Plan
from dpx.training import keys as secrets
from dpx.training import log
from experiments import checks, guarantees

RELEASE = "memory.dpx"
_NOTES = (
    f"`{RELEASE}` holds the released memory and its guarantee: `dpx.load(path).query(Q)` answers any number "
    "of queries without the private data. Errors are means over random queries within the declared bound."
)
_TITLES = {
    "sketch": "released memory",
    "zero": "zero",
    "dp_mean": "mean of V for the whole budget, simulated",
    "mean": "mean of V, not private",
}
_NOT_COVERED = (
    "the errors and the rows mean and dp_mean, which are computed on the private rows: keep them to yourself",
    "how many rows were moved into the domain, which stderr says",
)
_DOMAINS = {"key": "domain", "value": "value_domain"}
_MEANS = 20  # draws of the private mean's noise


def validate(config) -> None:
    """Raises ValueError or FileNotFoundError for a value or a file that cannot be used."""
    checks.integers(config, "num_queries")
    for name in ("key_bound", "value_bound"):
        if config[name] is None:
            raise ValueError(
                f"config.{name} is missing: use --config.{name}=BOUND, a number that is known without "
                "looking at the data"
            )
    checks.positive(config, "key_bound", "value_bound", "query_bound", "temperature")
    checks.choice(config, "domain", ("ball", "box"))
    checks.choice(config, "value_domain", ("box", "ball", "simplex"))
    checks.choice(config, "features", ("auto", "taylor", "random"))
    for name, least, kind in (("num_features", 1, "random"), ("degree", 0, "taylor")):
        if config[name] is not None and config.features != kind:
            raise ValueError(
                f"config.{name}={config[name]} is for {kind} features: leave it out, or use "
                f"--config.features={kind}"
            )
        checks.integers(config, name, least=least)
    _chosen(config, *_load(config))


def plan(config) -> Plan:
    """The sketch, and its noise, which follow from what is public."""
    K, V = _load(config)
    domain, features = _chosen(config, K, V)
    multiplier = gaussian_noise_multiplier(config.epsilon, config.delta)
    found = expected.simulated(domain, features, len(K), multiplier)
    about = config.epsilon, config.delta, "sketch", "row of (K, V)"
    spent = guarantees.gaussian(*about, neighboring=domain.neighboring)
    parameters = {
        "noise_multiplier": multiplier,
        "kind_of_features": found.features,
        "degree": found.degree,
        "features": found.num_features,
        "temperature": found.scale,
        "expected_error": found.error,
        "expected_error_of_the_mean": found.mean_error,
        "told_apart": found.told_apart,
    }
    return Plan({"sketch": spent}, parameters)


def run(config, workdir: Path) -> Outcome:
    """Releases the memory, saves it beside the run, and compares its answers with exact attention."""
    K, V = _load(config)
    keys = secrets.open_keys(config, workdir, data=(K, V))
    domain, features = _chosen(config, K, V)
    print(
        f"releasing a memory of {domain.dim} + {domain.value_dim} columns: {features.num_features} features, "
        f"temperature {domain.scale:.4g}",
        flush=True,
    )
    multiplier = gaussian_noise_multiplier(config.epsilon, config.delta)
    expected.warn_before(domain, features, len(K), multiplier, 1, None)
    memory = sketch.build(
        keys.noise("sketch"),
        K,
        V,
        domain=domain,
        features=features,
        epsilon=config.epsilon,
        delta=config.delta,
        clip=True,
    )
    dpx.save(memory, Path(workdir) / RELEASE)
    Q = _queries(config, domain)
    inside = domain.enter(K, V, clip=True)
    for name, rows, clipped in (("key", K, inside[0]), ("value", V, inside[1])):
        moved = ~np.isclose(rows, clipped).all(axis=-1)
        if moved.any():
            log.say(
                f"{moved.sum()} of {len(rows)} {name}s lie outside what config.{name}_bound and the domain "
                f"{config[_DOMAINS[name]]!r} allow, and were moved inside",
                shown=True,
            )
    exact = exact_attention(Q, *inside, 1 / domain.scale)
    answers = {
        "sketch": memory.query(Q),
        "zero": jnp.zeros(1),
        "dp_mean": _private_means(config, domain, inside[1]),
        "mean": inside[1].mean(0),
    }
    return Outcome(
        measures=[
            Measure(row, "error", float(jnp.abs(found - exact).mean()))
            for row, found in answers.items()
        ],
        headline=memory.guarantee,
        releases={"sketch": memory.guarantee},
        not_covered=_NOT_COVERED,
        titles=_TITLES,
        headline_row="sketch",
        comparisons=[Comparison("error", ["zero", "dp_mean"])],
        notes=_NOTES,
    )


class Memory(NamedTuple):
    """The released memory of a finished run."""

    sketch: cross_attention.Sketch

    def ask(self, queries: Sequence[str]) -> list[dict[str, float]]:
        """For each query, its numbers with commas between, the answer by the numbers of its columns."""
        rows = []
        for query in queries:
            try:
                rows.append([float(number) for number in query.split(",")])
            except ValueError:
                rows.append([])
            if len(rows[-1]) != self.sketch.domain.dim:
                raise ValueError(
                    f"--text={query!r} must be {self.sketch.domain.dim} numbers with commas between, as this "
                    "memory has keys"
                )
        answers = np.asarray(self.sketch.query(np.array(rows)))
        return [{str(i + 1): float(x) for i, x in enumerate(answer)} for answer in answers]


def load(config, workdir: Path) -> Memory:
    """The released memory of a finished run; the private file is not read."""
    del config
    return Memory(dpx.load(Path(workdir) / RELEASE))


def _load(config) -> tuple[np.ndarray, np.ndarray]:
    """K (n, d) and V (n, d_v)."""
    path = config.data.path
    if path is None:
        raise ValueError(
            "config.data.path is missing: use --config.data.path=FILE, a .csv, .tsv, .jsonl, .parquet, "
            ".npy or .npz file"
        )
    K, V = (_part(path, name, config.data) for name in ("key", "value"))
    if len(K) != len(V):
        raise ValueError(
            f"{path}: {config.data['key']} has {len(K)} rows and {config.data['value']} has {len(V)}: "
            "give each key one value"
        )
    return K, V


def _part(path: str, name: str, data) -> np.ndarray:
    where, written = data[name], {"header": data.header, "separator": data.separator}
    if not where:
        raise ValueError(
            f"config.data.{name} is missing: use --config.data.{name}=a,b with columns of {path}, or the "
            "name of an array in an .npz file"
        )
    if Path(path).suffix.lower() != ".npz":
        try:
            return load_columns(path, [column.strip() for column in where.split(",")], **written)
        except ValueError as error:
            raise ValueError(f"{error} (--config.data.{name}={where})") from None
    array = load_array(path, where, **written)
    array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"{path}: array {where!r} has shape {array.shape}: save (rows, columns)")
    return array


def _chosen(config, K, V) -> tuple[Domain, Features]:
    """The domain with its temperature and the features, from shapes, bounds and the budget alone.

    Raises:
      ValueError: for features that take more memory than there may be; it names the flags to set.
    """
    auto, any_scale = config.features == "auto", config.temperature is None
    domain = Domain.declare(
        K,
        V,
        key_bound=config.key_bound,
        value_bound=config.value_bound,
        query_bound=config.query_bound,
        domain=config.domain,
        scale=math.sqrt(np.shape(K)[1]) if any_scale else config.temperature,
        value_domain=config.value_domain,
    )
    if auto:
        multiplier = gaussian_noise_multiplier(config.epsilon, config.delta)
        domain, features, _ = expected.choose(domain, len(K), multiplier, any_scale=any_scale)
        return domain, features
    names = {"taylor": "degree", "random": "num_features"}
    number = config[names[config.features]]
    options = {} if number is None else {names[config.features]: number}
    try:
        features = sketch.choose_features(domain, config.features, **options)
        expected.check_size(features, domain)
    except ValueError as error:
        raise ValueError(
            f"{error}: set --config.features=auto, which chooses all of them, or --config.degree=2, a larger "
            f"--config.temperature ({domain.scale:.4g} now) or --config.features=random"
        ) from error
    return domain, features


def _queries(config, domain: Domain) -> np.ndarray:
    """Queries (m, d), uniform in the declared domain."""
    rng = np.random.default_rng(config.seed)
    shape = (config.num_queries, domain.dim)
    if domain.kind == "box":
        return rng.uniform(0, domain.query_bound, shape).astype(np.float32)
    directions = rng.normal(size=shape)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    radii = domain.query_bound * rng.random((config.num_queries, 1)) ** (1 / domain.dim)
    return (radii * directions).astype(np.float32)


def _private_means(config, domain: Domain, V: jax.Array) -> jax.Array:
    """(draws, 1, d_v): what `baselines.mean_of_values` would answer; none is released."""
    multiplier = gaussian_noise_multiplier(config.epsilon, config.delta)
    draws = np.random.default_rng(config.seed).normal(size=(_MEANS, 1, domain.value_dim))
    noise = multiplier * 2 * domain.value_norm / len(V) * draws
    return domain.nearest_values(V.mean(0) + jnp.asarray(noise))


@jax.jit
def exact_attention(Q, K, V, scale) -> jax.Array:
    """Answers (m, d_v) of attention that is not private."""

    def attend(q):
        return dpx.attention.dot_product_attention(q[None], K, V, scale=scale)[0]

    return jax.lax.map(attend, Q, batch_size=50)
