"""What each trick for XLA's compiler for CPUs gains, of those in `dpx.clipping.xla_cpu`.

    python -m experiments.bench.tuning
    python -m experiments.bench.tuning --tricks=rows --turns=15

One clipped gradient is compiled with and without a trick, on a shape where it matters. Both programs are
called in turn, and what is printed is the median of the ratios of neighbours without over with: CPU time of a
call, XLA's temporary bytes, and CPU time of tracing and compilation. Above 1 the trick gains.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

import dpx
from dpx.clipping import xla_cpu
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
        name, problem = PROBLEMS[trick]
        loss, params, batch = problem()
        gradient = dpx.clipped_grad(loss, l2_clip_norm=1.0)
        made, seconds, every = [], [], xla_cpu.TRICKS
        for used in (every, every - {trick}):
            xla_cpu.TRICKS = used
            jax.clear_caches()
            start = time.process_time()
            step: Any = jax.jit(lambda p, *b: gradient(p, *b).grads)  # noqa: B023
            made.append(step.lower(params, *batch).compile())
            seconds.append(time.process_time() - start)
        xla_cpu.TRICKS = every
        ratios = []
        for turn in range(_TURNS.value + 1):
            times = []
            for program in made:
                start = time.process_time()
                jax.block_until_ready(program(params, *batch))
                times.append(time.process_time() - start)
            if turn:
                ratios.append(times[1] / times[0])
        size = [program.memory_analysis().temp_size_in_bytes for program in made]
        print(
            f"| {trick} | {name} | {statistics.median(ratios):.2f} | {size[1] / size[0]:.2f} | "
            f"{seconds[1] / seconds[0]:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    app.run(main)
