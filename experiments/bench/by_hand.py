"""What exact clipping costs at least where the ordinary program is small: two layers, clipped by hand.

    python -m experiments.bench.by_hand

The ordinary step of so small a model is a handful of kernels. By hand, it is clipped with the norms of its
factors and nothing else: no bound on rounding, no example left out whose gradient is not finite. Printed are
tracing and compilation with nothing cached (C, CPU time), and temporary memory (M), over the ordinary step.
"""

import statistics
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

import dpx
from dpx.launch import cli
from experiments.bench.models.measure import compiled

BATCH, IN, HIDDEN, OUT = 16, 32, 64, 8
CLIP = 1.0

_REPEATS = flags.DEFINE_integer("repeats", 9, "Compilations of every program.", lower_bound=1)


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Of one example."""
    hidden = jax.nn.relu(x @ params["w"] + params["b"])
    return jnp.sum((hidden @ params["v"] + params["c"]) ** 2)


def ordinary(params: dict[str, jax.Array], x: jax.Array) -> Any:
    """The mean gradient, which is not private."""
    return jax.grad(lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, x)))(params)


def by_hand(params: dict[str, jax.Array], x: jax.Array) -> Any:
    """The sum of clipped gradients, and norms, with the derivatives written out."""
    before = x @ params["w"] + params["b"]
    hidden = jax.nn.relu(before)
    by_out = 2 * (hidden @ params["v"] + params["c"])
    by_before = (by_out @ params["v"].T) * (before > 0)

    def squared(left: jax.Array, right: jax.Array) -> jax.Array:
        return (1 + jnp.sum(left**2, 1)) * jnp.sum(right**2, 1)  # Of a weight and its bias.

    norms = jnp.sqrt(squared(x, by_before) + squared(hidden, by_out))
    factors = jnp.minimum(1, CLIP / norms)[:, None]
    by_before, by_out = factors * by_before, factors * by_out
    sums = {"w": x.T @ by_before, "b": by_before.sum(0), "v": hidden.T @ by_out, "c": by_out.sum(0)}
    return sums, norms


def per_example(params: dict[str, jax.Array], x: jax.Array) -> Any:
    """The same from `vmap(grad)`."""
    gradients = jax.vmap(jax.grad(loss), (None, 0))(params, x)
    flat = [g.reshape(len(x), -1) for g in jax.tree.leaves(gradients)]
    norms = jnp.sqrt(sum(jnp.sum(g**2, 1) for g in flat))
    factors = jnp.minimum(1, CLIP / norms)
    return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), gradients), norms


def engine(params: dict[str, jax.Array], x: jax.Array) -> Any:
    """The same from `dpx.clipped_grad`."""
    found = dpx.clipped_grad(loss, l2_clip_norm=CLIP)(params, x)
    return found.grads, found.norms


def main(argv: list[str]) -> None:
    del argv
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "w": jax.random.normal(keys[0], (IN, HIDDEN)) / IN**0.5,
        "b": jnp.zeros(HIDDEN),
        "v": jax.random.normal(keys[1], (HIDDEN, OUT)) / HIDDEN**0.5,
        "c": jnp.zeros(OUT),
    }
    x = jax.random.normal(keys[2], (BATCH, IN))
    expected = per_example(params, x)
    for step in (by_hand, engine):
        for a, b in zip(*map(jax.tree.leaves, (step(params, x), expected)), strict=True):
            assert jnp.allclose(a, b, rtol=1e-3, atol=1e-5), step.__name__
    steps = {
        "ordinary": ordinary,
        "by hand": by_hand,
        "dpx": engine,
        "vmap(grad)": per_example,
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    memory: dict[str, int] = {}
    for _ in range(_REPEATS.value):  # In turn.
        for name, step in steps.items():
            _, took, memory[name] = compiled(step, params, (x,))
            seconds[name].append(took)
    least = statistics.median(seconds["ordinary"])
    print(f"ordinary: {1e3 * least:.0f} ms, {memory['ordinary'] / 1024:.1f} KiB")
    for name in list(steps)[1:]:
        ratio = statistics.median(seconds[name]) / least
        print(f"{name}: C {ratio:.2f}, M {memory[name] / memory['ordinary']:.2f}")


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
