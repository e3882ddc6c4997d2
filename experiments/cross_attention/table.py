"""A private memory from a file: released once under secret keys, saved, and queried without limit."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dpx
from dpx import cross_attention
from dpx._validate import check_choice, check_delta, check_epsilon, check_integer, check_positive
from dpx.cross_attention import Domain, sketch
from dpx.cross_attention.features import Features
from dpx.data.arrays import load_array, load_columns
from dpx.launch.experiment import Comparison, Measure, Outcome
from dpx.privacy import gaussian_noise_multiplier
from dpx.training import keys as secrets

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
    "the errors and both rows of means, which are computed on the private rows: keep them to yourself",
)
_MEANS = 20  # draws of the private mean's noise


def validate(config) -> None:
    """Raises ValueError or FileNotFoundError for a value or a file that cannot be used."""
    check_epsilon(config.epsilon, "config.epsilon")
    check_delta(config.delta, "config.delta")
    check_integer(config.num_queries, "config.num_queries")
    for name in ("key_bound", "value_bound"):
        if config[name] is None:
            raise ValueError(
                f"config.{name} is missing: use --config.{name}=BOUND, a number that is known without "
                "looking at the data"
            )
    for name in ("key_bound", "value_bound", "query_bound", "temperature"):
        if config[name] is not None:
            check_positive(config[name], f"config.{name}")
    for name in ("domain", "value_domain"):
        check_choice(config[name], f"config.{name}", ("box", "ball"))
    check_choice(config.features, "config.features", ("taylor", "random"))
    if config.features == "taylor" and config.num_features is not None:
        raise ValueError(
            f"config.num_features={config.num_features} is for random features: leave it out, or use "
            "--config.features=random"
        )
    if config.num_features is not None:
        check_integer(config.num_features, "config.num_features")
    _features(config, _domain(config, *_load(config)))


def plan(config) -> dict:
    """The noise of the sketch, which follows from what is public."""
    domain = _domain(config, *_load(config))
    features = _features(config, domain)
    multiplier = gaussian_noise_multiplier(config.epsilon, config.delta)
    return {"noise_multiplier": multiplier, "features": features.num_features}


def run(config, workdir: Path) -> Outcome:
    """Releases the memory, saves it beside the run, and compares its answers with exact attention."""
    K, V = _load(config)
    keys = secrets.open_keys(config, workdir, data=(K, V))
    domain = _domain(config, K, V)
    print(f"releasing a memory of {domain.dim} + {domain.value_dim} columns", flush=True)
    memory = sketch.build(
        keys.noise,
        K,
        V,
        domain=domain,
        features=_features(config, domain),
        epsilon=config.epsilon,
        delta=config.delta,
        clip=True,
    )
    dpx.save(memory, Path(workdir) / RELEASE)
    Q = _queries(config, domain)
    inside = domain.enter(K, V, clip=True)
    exact = _exact(Q, *inside, 1 / domain.scale)
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


def load(config, workdir: Path) -> cross_attention.Sketch:
    """The released memory of a finished run; the private file is not read."""
    del config
    return dpx.load(Path(workdir) / RELEASE)


def _load(config) -> tuple[np.ndarray, np.ndarray]:
    """K (n, d) and V (n, d_v)."""
    path = config.data.path
    if path is None:
        raise ValueError(
            "config.data.path is missing: use --config.data.path=FILE, a .csv, .tsv, .npy or .npz file"
        )
    K, V = (_part(path, name, config.data[name]) for name in ("key", "value"))
    if len(K) != len(V):
        raise ValueError(
            f"{path}: {config.data['key']} has {len(K)} rows and {config.data['value']} has {len(V)}: "
            "give each key one value"
        )
    return K, V


def _part(path: str, name: str, where: str) -> np.ndarray:
    if not where:
        raise ValueError(
            f"config.data.{name} is missing: use --config.data.{name}=a,b with columns of {path}, or the "
            "name of an array in an .npz file"
        )
    if Path(path).suffix.lower() != ".npz":
        return load_columns(path, [column.strip() for column in where.split(",")])
    array = load_array(path, where)
    array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"{path}: array {where!r} has shape {array.shape}: save (rows, columns)")
    return array


def _domain(config, K, V) -> Domain:
    return Domain.declare(
        K,
        V,
        key_bound=config.key_bound,
        value_bound=config.value_bound,
        query_bound=config.query_bound,
        domain=config.domain,
        scale=config.temperature,
        value_domain=config.value_domain,
    )


def _features(config, domain: Domain) -> Features:
    options = {} if config.num_features is None else {"num_features": config.num_features}
    return sketch.choose_features(domain, config.features, **options)


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
def _exact(Q, K, V, scale) -> jax.Array:
    def attend(q):
        return dpx.attention.dot_product_attention(q[None], K, V, scale=scale)[0]

    return jax.lax.map(attend, Q, batch_size=50)
