"""Compares one case with `vmap(grad)`, and measures it beside the ordinary step."""

import contextlib
import io
import re
import statistics
import time
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dpx
from dpx.clipping import ClippingWarning
from dpx.clipping import params as clipping_params
from experiments.bench._steps import compiled

TOLERANCE = 1e-5  # of sums, for a model that computes in float32
NARROW_TOLERANCE = 5e-3  # for one that computes in bfloat16, float16 or int8
LEAST_MS = 20.0  # Shorter programs are called until they have taken that long.


class Case(NamedTuple):
    """A model to clip.

    Attributes:
      loss: (params, *example) -> scalar loss of one example.
      params: its parameters, in the framework's own form.
      batch: arrays with a leading axis of examples.
      options: of `dpx.clipped_grad`.
      narrow: whether it computes in less than float32.
      method: of `dpx.clipped_grad`.
    """

    loss: Callable[..., jax.Array]
    params: Any
    batch: tuple
    options: Mapping[str, Any] = types.MappingProxyType({})
    narrow: bool = False
    method: str = "auto"


class Steps(NamedTuple):
    """Functions of (parameter arrays, *batch): the ordinary step, and one gradient for each example.

    `clipped` makes such a function from a method and a threshold. Arrays are arguments, so that no compiler
    computes with their values.
    """

    ordinary: Callable
    per_example: Callable
    clipped: Callable[[str, float], Callable]
    leaves: list[jax.Array]


def steps(case: Case) -> Steps:
    """What is compared."""
    flat = clipping_params.flatten(case.params, case.options.get("wrt"))
    in_turn = case.options.get("microbatch_size") == 1  # JAX cannot vectorise such a loss.

    def loss(leaves, example):
        return case.loss(flat.rebuild(leaves, flat.constants), *example)

    def over_examples(function, batch):
        if in_turn:
            return jax.lax.map(function, batch)
        return jax.vmap(function)(batch)

    def ordinary(leaves, *batch):
        def mean(leaves):
            return over_examples(lambda example: loss(leaves, example), batch).mean()

        return jax.grad(mean)(leaves)

    def clipped(method, clip):
        gradient = dpx.clipped_grad(case.loss, l2_clip_norm=clip, method=method, **case.options)

        def step(leaves, *batch):
            found = gradient(flat.rebuild(leaves, flat.constants), *batch)
            return jax.tree.leaves(found.grads), found.norms

        return step

    def per_example(leaves, *batch):
        return over_examples(lambda example: jax.grad(loss)(leaves, example), batch)

    return Steps(ordinary, per_example, clipped, flat.leaves)


def norms_of(gradients: list) -> np.ndarray:
    """The norm of each example's gradient, in float64."""
    squares = [np.square(np.asarray(g, np.float64).reshape(len(g), -1)).sum(1) for g in gradients]
    return np.sqrt(np.sum(squares, axis=0))


def errors(gradients: list, found: tuple[list, Any], clip: float) -> tuple[float, float, float]:
    """Of the sum, relative; and by how much norms exceed the exact ones, at least and at most.

    The sum is compared with that of the gradients of `vmap(grad)`, added up in float64 with the clip
    factors that follow from the norms that were found, because these are rounded up.
    """
    sums, norms = found[0], np.asarray(found[1], np.float64)
    factors = np.minimum(1, clip / np.maximum(norms, 1e-30))
    off = whole = 0.0
    for each, gradient in zip(sums, gradients, strict=True):
        expected = np.tensordot(factors, np.asarray(gradient, np.float64), 1)
        off += np.square(np.asarray(each, np.float64) - expected).sum()
        whole += np.square(expected).sum()
    excess = norms / np.maximum(norms_of(gradients), 1e-30) - 1
    return float(np.sqrt(off / max(whole, 1e-60))), float(excess.min()), float(excess.max())


def fallback(case: Case) -> tuple[float, str]:
    """The share of parameter elements without a rule, and the primitives because of which."""
    with contextlib.redirect_stdout(io.StringIO()):
        rows = dpx.explain_clipping(
            case.loss, case.params, *case.batch, wrt=case.options.get("wrt")
        ).rows
    sizes = [(int(np.prod(row.shape)), row) for row in rows]
    names: set[str] = set()
    for _, row in sizes:
        if not row.has_rule:
            inside = re.search(r"no rule for (.*)\)", row.rule)
            names |= set(inside[1].split(", ")) if inside else {"axes split differently"}
    missing = sum(size for size, row in sizes if not row.has_rule)
    return missing / sum(size for size, _ in sizes), ", ".join(sorted(names))


def cpu_ms(program: Callable, leaves: list, batch: tuple, calls: int) -> float:
    """CPU milliseconds of one call: other processes count less in them than in wall time.

    A call before them is not timed. After a program that takes much memory it would pay for giving that back.
    """
    jax.block_until_ready(program(leaves, *batch))
    start = time.process_time()
    for _ in range(calls):
        jax.block_until_ready(program(leaves, *batch))
    return 1e3 * (time.process_time() - start) / calls


def measure(case: Case, repeats: int, compilations: int = 1, copies: int = 1) -> dict[str, Any]:
    """One row of the table, without the name.

    Args:
      case: the model; its batch is taken `copies` times.
      repeats: timed turns of every program.
      compilations: of both steps in turn.
      copies: more of them make a step that is long enough to tell.

    Raises:
      Exception: whatever the framework, JAX or dpx raise; ArithmeticError for a wrong result.
    """
    every = steps(case)
    leaves, batch = every.leaves, jax.tree.map(lambda x: jnp.concatenate([x] * copies), case.batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClippingWarning)
        share, names = fallback(case)
        oracle = compiled(every.per_example, leaves, batch).program(leaves, *batch)
        clip = float(np.median(norms_of(oracle)))
        programs, slower = {}, []
        for _ in range(compilations):
            programs["ordinary"] = compiled(every.ordinary, leaves, batch)
            programs["dpx"] = compiled(every.clipped(case.method, clip), leaves, batch)
            slower.append(programs["dpx"].seconds / programs["ordinary"].seconds)
        programs["vmap"] = compiled(every.clipped("vmap", clip), leaves, batch)
    error, least, excess = errors(oracle, programs["dpx"].program(leaves, *batch), clip)
    tolerance = NARROW_TOLERANCE if case.narrow else TOLERANCE
    if not error <= tolerance:
        raise ArithmeticError(f"the sum differs from vmap(grad) by {error:.1e}")
    if not least >= -tolerance:
        raise ArithmeticError(f"a norm is below that of vmap(grad) by {-least:.1e}")
    # What holds every gradient may take a thousand times as long, and is timed once.
    slow = cpu_ms(programs["vmap"].program, leaves, batch, 1)
    first = cpu_ms(programs["ordinary"].program, leaves, batch, 1)
    calls = int(np.clip(LEAST_MS / max(first, 1e-3), 1, 200))
    turns = [
        {name: cpu_ms(programs[name].program, leaves, batch, calls) for name in ("ordinary", "dpx")}
        for _ in range(repeats)
    ]
    ordinary = programs["ordinary"]
    ms = statistics.median(turn["ordinary"] for turn in turns)

    def memory(name: str) -> float:
        return programs[name].temp_bytes / max(ordinary.temp_bytes, 1)

    return {
        "error": error,
        "norm_excess": excess,
        "ms": ms,
        "time": statistics.median(turn["dpx"] / turn["ordinary"] for turn in turns),
        "compile": statistics.median(slower),
        "memory": memory("dpx"),
        "vmap_time": slow / ms,
        "vmap_memory": memory("vmap"),
        "temp_mib": ordinary.temp_bytes / 2**20,
        "parameters": sum(leaf.size for leaf in leaves),
        "no_rule": share,
        "primitives": names,
    }
