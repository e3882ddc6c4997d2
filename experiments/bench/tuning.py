"""What each trick for XLA's compiler for CPUs gains, of those in `dpx.clipping.xla_cpu`.

    python -m experiments.bench.tuning
    python -m experiments.bench.tuning --tricks=rows --turns=15

One clipped gradient is compiled with and without a trick, on a shape where it matters. Both programs are
called in turn, and what is printed is the median of the ratios of neighbours without over with: CPU time of a
call, XLA's temporary bytes, and CPU time of tracing and compilation. Above 1 the trick gains.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from dpx.clipping import xla_cpu
from experiments.bench._steps import clipped_sum, compiled, in_turn
from experiments.bench.shapes import SHAPES, Shape, build

_TRICKS = flags.DEFINE_list("tricks", sorted(xla_cpu.TRICKS), "Which tricks.")
_TURNS = flags.DEFINE_integer("turns", 5, "Timed turns of every pair.", lower_bound=1)

# (the loss of one example, parameters, a batch)
Problem = tuple[Callable, Any, tuple]


def of_shape(name: str) -> Problem:
    """A shape of the benchmark of clipping."""
    loss, params, batch_of = build(SHAPES[name])
    return loss, params, batch_of(SHAPES[name].batch)


def under_remat() -> Problem:
    """Six residual blocks under `jax.checkpoint`."""

    @jax.checkpoint
    def block(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return x + jnp.sin(jnp.tanh(x @ a)) @ b

    def loss(pairs: Any, x: jax.Array) -> jax.Array:
        for pair in pairs:
            x = block(x, *pair)
        return jnp.mean(jax.nn.log_softmax(x)[:, 0])

    pairs = [(jnp.ones((128, 512)) / 100, jnp.ones((512, 128)) / 100)] * 6
    return loss, pairs, (jnp.ones((16, 128, 128)),)


def images() -> Problem:
    """Six convolutions whose features come before places, as in Equinox."""

    def loss(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
        x = jnp.tile(x, (16, 1, 1))[None]
        for kernel in kernels:
            x = jnp.tanh(jax.lax.conv(x, kernel, (1, 1), "SAME"))
        return jnp.mean(x**2)

    kernels = [jax.random.normal(jax.random.key(i), (16, 16, 3, 3)) / 12 for i in range(6)]
    return loss, kernels, (jax.random.normal(jax.random.key(6), (64, 1, 28, 28)),)


def batches_of_one() -> Problem:
    """GPT-2's two blocks at width 64 and 24 tokens, given each text as a batch of one."""
    shape = Shape(128, 64, 256, 24, heads=4)
    loss, params, batch_of = build(shape)

    def of_batch(params: Any, tokens: jax.Array) -> jax.Array:
        return jax.vmap(loss, (None, 0))(params, tokens[None]).mean()

    return of_batch, params, batch_of(shape.batch)


PROBLEMS: dict[str, tuple[str, Callable[[], Problem]]] = {
    "rows": ("recommender, all positions", functools.partial(of_shape, "recommender M=3416 all")),
    "kept": ("blocks under remat", under_remat),
    "ordered": ("six convolutions", images),
    "squeezed": ("a small GPT-2, texts as batches of one", batches_of_one),
}


def main(argv: list[str]) -> None:
    del argv
    print("| trick | shape | time | temporary memory | compilation |\n|---|---|---|---|---|")
    for trick in _TRICKS.value:
        about, problem = PROBLEMS[trick]
        loss, params, batch = problem()
        every = xla_cpu.TRICKS
        used = compiled(clipped_sum(loss), params, batch)
        xla_cpu.TRICKS = every - {trick}
        left = compiled(clipped_sum(loss), params, batch)
        xla_cpu.TRICKS = every
        programs = {"used": used.program, "left": left.program}
        calls = {name: functools.partial(each, params, *batch) for name, each in programs.items()}
        times = in_turn(calls, _TURNS.value, clock=time.process_time)
        print(
            f"| {trick} | {about} | {np.median(times['left'] / times['used']):.2f} | "
            f"{left.temp_bytes / used.temp_bytes:.2f} | {left.seconds / used.seconds:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    app.run(main)
