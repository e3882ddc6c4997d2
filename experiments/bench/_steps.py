"""What benchmarks compare: an ordinary gradient and a private one, compiled alone and timed in turn."""

import functools
import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import dpx

CLIP = 1.0


def mean_gradient(loss: Callable) -> Callable:
    """The ordinary step, a function of (params, *batch), of the loss of one example."""

    def gradient(params: Any, *batch: Any) -> Any:
        def mean(params: Any) -> jax.Array:
            return jax.vmap(functools.partial(loss, params))(*batch).mean()

        return jax.grad(mean)(params)

    return gradient


def clipped_sum(loss: Callable, **options: Any) -> Callable:
    """The sum of gradients clipped to `CLIP`, with the options of `dpx.clipped_grad`."""
    clipped = dpx.clipped_grad(loss, l2_clip_norm=CLIP, **options)
    return lambda params, *batch: clipped(params, *batch).grads


class Compiled(NamedTuple):
    """A program, the CPU seconds of its compilation, and XLA's count of temporary bytes."""

    program: Callable
    seconds: float
    temp_bytes: int


def compiled(step: Callable, params: Any, batch: tuple) -> Compiled:
    """Traces and compiles, with nothing traced before."""
    jax.clear_caches()
    gc.collect()
    start = time.process_time()
    program = jax.jit(step).lower(params, *batch).compile()
    return Compiled(program, time.process_time() - start, temp_bytes(program))


def temp_bytes(program: Any) -> int:
    """What XLA allocates beside arguments and results."""
    return program.memory_analysis().temp_size_in_bytes


def in_turn(
    calls: dict[str, Callable[[], Any]],
    repeats: int,
    *,
    warm: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, np.ndarray]:
    """Seconds (repeats,) of each call: one turn of all after the other, of which `warm` do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warm + repeats):
        for name, call in calls.items():
            began = clock()
            jax.block_until_ready(call())
            seconds[name].append(clock() - began)
    return {name: np.array(found[warm:]) for name, found in seconds.items()}


def medians(
    calls: dict[str, Callable[[], Any]], repeats: int, *, warm: int = 1
) -> dict[str, float]:
    """The median seconds of each call, in turn."""
    found = in_turn(calls, repeats, warm=warm)
    return {name: float(np.median(seconds)) for name, seconds in found.items()}
