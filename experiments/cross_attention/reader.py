"""A small transformer that reads a private memory: its weights are public, its memory is private sales.

The transformer is trained once on made-up memories: rows (x, y) of random functions y of three numbers x. So
it learns to answer what y is at another x, from whatever memory it is given, and its weights hold nothing of
the private one. Then each of its layers of cross-attention remembers 49,940 diamonds, with noise, and answers
what other diamonds cost. A row of the memory goes through the same public network as every other, for itself.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import dpx
from dpx.cross_attention import baselines
from dpx.nn.cross_attention import PrivateCrossAttention
from dpx.privacy import (
    REPLACE_ONE,
    gaussian_epsilon,
    gaussian_noise_multiplier,
)
from dpx.runs.experiment import Comparison, Outcome, Plan
from dpx.training import keys as secrets
from experiments import checks, guarantees
from experiments.cross_attention.kernel_regression import (
    HIGH,
    LOW,
    MAX_PRICE,
    errors_of_prices,
    load_diamonds,
)

HEADS = 4
UNIT = "row of the memory"
TITLES = {
    "reader": "transformer with a private memory",
    "exact_reader": "the same with an exact memory, not private",
    "dp_mean": "private mean",
}
NOT_COVERED = [
    "the row exact_reader, which is not private",
    "the errors, which are computed on held-out diamonds",
]


class Reader(nnx.Module):
    """Predicts y at x (m, 3) from a memory of rows (x, y), by blocks of cross-attention and an MLP each."""

    def __init__(self, dim: int, num_blocks: int, *, rngs: nnx.Rngs):
        linear = lambda width, out: nnx.Linear(width, out, rngs=rngs)  # noqa: E731
        self.row = nnx.List([linear(4, dim), linear(dim, dim)])
        self.query = nnx.List([linear(3, dim), linear(dim, dim)])
        self.norms = nnx.List([nnx.LayerNorm(dim, rngs=rngs) for _ in range(2 * num_blocks)])
        self.attention = nnx.List(
            [
                PrivateCrossAttention(
                    dim,
                    dim,
                    num_heads=HEADS,
                    head_dim=4,
                    key_bound=2.0,
                    value_bound=1.0,
                    value_domain="ball",
                    features="taylor",
                    rngs=rngs,
                )
                for _ in range(num_blocks)
            ]
        )
        self.mlps = nnx.List([linear(dim, 2 * dim) for _ in range(num_blocks)])
        self.backs = nnx.List([linear(2 * dim, dim) for _ in range(num_blocks)])
        self.head = linear(dim, 1)

    def encode(self, rows: jax.Array) -> jax.Array:
        """What a layer is given of each row, (n, 4) -> (n, dim), each for itself."""
        first, second = self.row
        return second(jax.nn.gelu(first(rows)))

    def remember(
        self, keys: secrets.Keys, rows: jax.Array, *, epsilon: float, delta: float
    ) -> None:
        """Releases the memory once for each block, out of one budget: μ² is split evenly."""
        multiplier = gaussian_noise_multiplier(epsilon, delta) * len(self.attention) ** 0.5
        own = gaussian_epsilon(multiplier, delta)
        for number, layer in enumerate(self.attention):
            key = keys.noise(f"memory of block {number}")
            layer.remember(key, self.encode(rows), epsilon=own, delta=delta)

    def guarantee(self, delta: float) -> dpx.PrivacyGuarantee:
        """Of all blocks together."""
        ledger = dpx.Ledger()
        for number, layer in enumerate(self.attention):
            ledger.spend(layer.guarantee, f"memory of block {number}")
        return ledger.guarantee(delta)

    def __call__(self, x: jax.Array, public: jax.Array | None = None) -> jax.Array:
        """y (m,) at x (m, 3): from what is remembered, or from a memory (n, 4) that is public."""
        first, second = self.query
        h = second(jax.nn.gelu(first(x)))
        encoded = None if public is None else self.encode(public)
        norms = iter(self.norms)
        for layer, wide, back in zip(self.attention, self.mlps, self.backs, strict=True):
            entered = next(norms)(h)
            h += layer(entered) if encoded is None else layer.over_public(entered, encoded)
            h += back(jax.nn.gelu(wide(next(norms)(h))))
        return self.head(h)[..., 0]


def validate(config) -> None:
    """Raises ValueError for a value that cannot be used."""
    checks.integers(config, "data.limit", "data.held_out", "model.dim", "model.num_blocks")
    about = (f"public_training.{name}" for name in ("steps", "tasks", "rows"))
    checks.integers(config, *about)
    checks.positive(config, "public_training.learning_rate")


def plan(config) -> Plan:
    """What a run will release: one budget for the memories of all blocks, and another for the mean."""
    about = config.epsilon, config.delta, "memories", UNIT
    spent = guarantees.gaussian(*about, neighboring=REPLACE_ONE)
    multiplier = gaussian_noise_multiplier(config.epsilon, config.delta)
    parameters = {"noise_multiplier_of_a_block": multiplier * config.model.num_blocks**0.5}
    return Plan({"reader": spent, "dp_mean": spent}, parameters)


def run(config, workdir: Path) -> Outcome:
    """Prices of held-out diamonds, read from the private memory and from the exact one."""
    train, test = load_diamonds(config)
    keys = secrets.open_keys(config, workdir, data=(train,))
    budget: dict[str, Any] = {"epsilon": config.epsilon, "delta": config.delta}
    reader = trained(config)
    print("the transformer is trained on made-up memories", flush=True)
    rows = _rows(train)
    reader.remember(keys, jnp.asarray(rows), **budget)
    mean = baselines.mean_of_values(keys.noise("dp_mean"), rows[:, 3:], value_bound=1.0, **budget)
    x = jnp.asarray(_rows(test)[:, :3])
    predictions = {
        "reader": reader(x),
        "exact_reader": jnp.concatenate(
            [reader(part, jnp.asarray(rows)) for part in jnp.array_split(x, 1 + len(x) // 200)]
        ),
        "dp_mean": jnp.broadcast_to(mean.values[0], len(x)),
    }
    spent = reader.guarantee(config.delta)
    releases = {"reader": spent, "dp_mean": dataclasses.replace(mean.guarantee, unit=spent.unit)}
    return Outcome(
        measures=errors_of_prices(predictions, test),
        headline=releases["reader"],
        releases=releases,
        not_covered=NOT_COVERED,
        titles=TITLES,
        headline_row="reader",
        comparisons=[Comparison("mean_absolute_error", ["dp_mean"])],
    )


def trained(config) -> Reader:
    """The transformer, trained on memories of random functions; nothing private enters."""
    about = config.public_training
    reader = Reader(config.model.dim, config.model.num_blocks, rngs=nnx.Rngs(config.seed))
    graph, params, rest = nnx.split(reader, nnx.Param, ...)
    schedule = optax.cosine_decay_schedule(about.learning_rate, about.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

    def loss(params, key):
        x, y = jax.vmap(made_up, (0, None))(jax.random.split(key, about.tasks), about.rows)
        half = about.rows // 2

        def of_task(x, y):
            memory = jnp.concatenate([x[:half], y[:half, None]], axis=1)
            return jnp.square(nnx.merge(graph, params, rest)(x[half:], memory) - y[half:]).mean()

        return jax.vmap(of_task)(x, y).mean()

    @jax.jit
    def step(params, state, key):
        updates, state = optimizer.update(jax.grad(loss)(params, key), state, params)
        return optax.apply_updates(params, updates), state

    state, key = optimizer.init(params), jax.random.key(config.seed)
    for number in range(about.steps):
        params, state = step(params, state, jax.random.fold_in(key, number))
    return nnx.merge(graph, params, rest)


def made_up(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Rows of a random function with noise: x (count, 3) and y (count,), all within ±1.

    Each coordinate of x lies about a place of its own, near or far; y is a few waves, of which some
    coordinates have more part than others, and a slope.
    """
    keys = iter(jax.random.split(key, 9))
    spread = jnp.exp(jax.random.uniform(next(keys), (3,), minval=-3.0, maxval=0.0))
    place = jax.random.uniform(next(keys), (3,), minval=-1.0, maxval=1.0) * (1 - spread)
    x = jnp.clip(
        place + spread * jax.random.truncated_normal(next(keys), -2, 2, (count, 3)) / 1.5, -1, 1
    )
    part = jnp.exp(2 * jax.random.normal(next(keys), (3,)))
    waves = 2 * part / part.max() * jax.random.normal(next(keys), (6, 3))
    shift = 2 * jnp.pi * jax.random.uniform(next(keys), (6,))
    size = jax.random.normal(next(keys), (7,))
    slope = size[6] * (part / part.sum() * jnp.sign(waves[0])) @ x.T
    y = jnp.cos(x @ waves.T + shift) @ size[:6] / 6**0.5 + slope
    noise = 0.1 * jax.random.normal(next(keys), (count,))
    return x, jnp.tanh(y + jax.random.normal(next(keys)) / 2) * 0.95 + 0.5 * noise


def _rows(sales: np.ndarray) -> np.ndarray:
    """(log carat, depth, table, price) of each sale, each within ±1 by public bounds."""
    x = np.clip(sales[:, :3], LOW, HIGH)
    carat = np.log(x[:, 0] / LOW[0]) / np.log(HIGH[0] / LOW[0])
    sides = (x[:, 1:] - LOW[1:]) / (HIGH - LOW)[1:]
    price = np.clip(sales[:, 3] / MAX_PRICE, 0, 1)
    return (2 * np.column_stack([carat, sides, price]) - 1).astype(np.float32)
