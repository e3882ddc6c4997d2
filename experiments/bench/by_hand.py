"""What exact clipping costs at least where the ordinary program is small: models clipped by hand.

    python -m experiments.bench.by_hand

The ordinary step of so small a model is a handful of kernels. By hand, it is clipped with the norms of its
factors and nothing else: no bound on rounding, no example left out whose gradient is not finite. Printed are
tracing and compilation with nothing cached (C, CPU time), and temporary memory (M), over the ordinary step.
"""

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags

import dpx
from dpx.runs import cli
from experiments.bench._steps import CLIP, compiled, mean_gradient

BATCH = 16

Params = dict[str, jax.Array]
Sums = tuple[Any, jax.Array]

_REPEATS = flags.DEFINE_integer("repeats", 9, "Compilations of every program.", lower_bound=1)


def layers_loss(params: Params, x: jax.Array) -> jax.Array:
    """Of one vector, with one hidden layer."""
    hidden = jax.nn.relu(x @ params["w"] + params["b"])
    return jnp.sum((hidden @ params["v"] + params["c"]) ** 2)


def clipped_layers(params: Params, x: jax.Array) -> Sums:
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


def sequence_loss(params: Params, x: jax.Array) -> jax.Array:
    """Of one sequence of vectors, with one linear layer."""
    return jnp.sum((x @ params["w"] + params["b"]) ** 2)


def clipped_sequences(params: Params, x: jax.Array) -> Sums:
    """The same of one layer, whose squared norm is a sum of products of inner products."""
    by_out = 2 * (x @ params["w"] + params["b"])
    lefts = jnp.einsum("bti,bsi->bts", x, x)
    rights = jnp.einsum("bto,bso->bts", by_out, by_out)
    norms = jnp.sqrt(jnp.sum((1 + lefts) * rights, (1, 2)))  # Of a weight and its bias.
    by_out = jnp.minimum(1, CLIP / norms)[:, None, None] * by_out
    return {"w": jnp.einsum("bti,bto->io", x, by_out), "b": by_out.sum((0, 1))}, norms


class Case(NamedTuple):
    """A loss of (params, one example), its clipping by hand of (params, examples), and shapes."""

    loss: Callable[[Params, jax.Array], jax.Array]
    by_hand: Callable[[Params, jax.Array], Sums]
    params: dict[str, tuple[int, ...]]
    example: tuple[int, ...]


CASES = {
    "one hidden layer": Case(
        layers_loss, clipped_layers, {"w": (32, 64), "b": (64,), "v": (64, 8), "c": (8,)}, (32,)
    ),
    "one layer, a sequence": Case(
        sequence_loss, clipped_sequences, {"w": (64, 64), "b": (64,)}, (24, 64)
    ),
}


def steps(case: Case) -> dict[str, Callable]:
    """What is compared, by name: functions of (params, examples)."""

    def engine(params: Params, x: jax.Array) -> Sums:
        found = dpx.clipped_grad(case.loss, l2_clip_norm=CLIP)(params, x)
        return found.grads, found.norms

    def per_example(params: Params, x: jax.Array) -> Sums:
        gradients = jax.vmap(jax.grad(case.loss), (None, 0))(params, x)
        flat = [g.reshape(len(x), -1) for g in jax.tree.leaves(gradients)]
        norms = jnp.sqrt(sum(jnp.sum(g**2, 1) for g in flat))
        factors = jnp.minimum(1, CLIP / norms)
        return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), gradients), norms

    return {
        "ordinary": mean_gradient(case.loss),
        "by hand": case.by_hand,
        "dpx": engine,
        "vmap(grad)": per_example,
    }


def measure(name: str, case: Case) -> None:
    """Compares and prints."""
    keys = iter(jax.random.split(jax.random.key(0), 1 + len(case.params)))
    x = jax.random.normal(next(keys), (BATCH, *case.example))
    params = {
        k: jax.random.normal(next(keys), shape) / shape[0] ** 0.5
        for k, shape in case.params.items()
    }
    every = steps(case)
    expected = every["vmap(grad)"](params, x)
    for step in ("by hand", "dpx"):
        for a, b in zip(*map(jax.tree.leaves, (every[step](params, x), expected)), strict=True):
            assert jnp.allclose(a, b, rtol=1e-3, atol=1e-5), step
    seconds: dict[str, list[float]] = {step: [] for step in every}
    memory: dict[str, int] = {}
    for _ in range(_REPEATS.value):  # In turn.
        for step, function in every.items():
            _, took, memory[step] = compiled(function, params, (x,))
            seconds[step].append(took)
    least = statistics.median(seconds["ordinary"])
    print(f"{name}, the ordinary step: {1e3 * least:.0f} ms, {memory['ordinary'] / 1024:.1f} KiB")
    for step in list(every)[1:]:
        ratio = statistics.median(seconds[step]) / least
        print(f"  {step}: C {ratio:.2f}, M {memory[step] / memory['ordinary']:.2f}")


def main(argv: list[str]) -> None:
    del argv
    for name, case in CASES.items():
        measure(name, case)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
