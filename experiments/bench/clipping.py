"""What exact per-example clipping costs beside an ordinary training step.

    python -m experiments.bench.clipping --workdir=runs/bench_clipping
    python -m experiments.bench.clipping --workdir=runs/bench_clipping --shapes=mlp --repeats=9

Every method computes one gradient of the same model on the same batch: the ordinary step (mean gradient, not
private), `dpx.clipped_grad`, `vmap(grad)` and jax-privacy's `clipped_grad`. On CPUs anyone is faster by
microbatches that fit the cache, so these are timed too. All clipped sums are compared before anything is
timed. Methods are timed in turn, one call each in one process; the median is reported. Memory is XLA's count
of temporary bytes in the compiled step. The largest batch under a limit comes from that count at two batch
sizes, extended as a straight line.

Writes clipping.csv, clipping.md and clipping.png; shapes measured earlier into the same workdir are kept.
"""

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax_privacy import clipping as jax_privacy

import dpx
from dpx.runs import cli, plotting
from dpx.training import precision
from experiments.bench import _tables
from experiments.bench._steps import CLIP, clipped_sum, mean_gradient, medians, temp_bytes
from experiments.bench.shapes import SHAPES, Shape, build

MANY = 10**6  # beyond which memory does not grow with the batch, as with microbatches

_WORKDIR = flags.DEFINE_string("workdir", None, "Where the table and the figure go.", required=True)
_SHAPES = flags.DEFINE_list("shapes", None, "Which shapes; all by default.")
_METHODS = flags.DEFINE_list(
    "methods", None, "Which methods beside the ordinary step; default all."
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed calls of every method.", lower_bound=5)
_BATCH = flags.DEFINE_integer(
    "batch", None, "Batch size instead of the shape's own.", lower_bound=2
)
_LARGEST = flags.DEFINE_boolean("largest", True, "Compile at twice the batch to extend memory.")
_DTYPE = flags.DEFINE_enum(
    "compute_dtype", "float32", precision.KNOWN, "What losses compute in, as in dpx.training.fit."
)
_LIMIT = flags.DEFINE_float("limit_gib", 8.0, "Memory limit of the largest batch.", lower_bound=0.1)


def methods(loss: Callable) -> dict[str, Callable]:
    """Name -> function of (params, *batch) that returns a gradient; the ordinary one first."""
    ordinary = mean_gradient(loss)

    def by_dpx(method, size=None):
        return clipped_sum(loss, method=method, microbatch_size=size)

    def by_jax_privacy(size):
        def step(params, *batch):
            return jax_privacy.clipped_grad(
                loss,
                l2_clip_norm=CLIP,
                batch_argnums=tuple(range(1, 1 + len(batch))),
                keep_batch_dim=False,
                microbatch_size=size,
            )(params, *batch)

        return step

    def by_microbatch(size):
        def step(params, *batch):
            parts = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), batch)
            zeros = jax.tree.map(jnp.zeros_like, params)

            def add(total, part):
                return jax.tree.map(jnp.add, total, ordinary(params, *part)), None

            return jax.lax.scan(add, zeros, parts)[0]

        return step

    named = {"ordinary step": ordinary, "dpx auto": by_dpx("auto")}
    for size in (8, 32):
        named[f"ordinary, microbatch {size}"] = by_microbatch(size)
        named[f"dpx, microbatch {size}"] = by_dpx("auto", size)
    named |= {"dpx two_pass": by_dpx("two_pass"), "vmap(grad)": by_dpx("vmap")}
    for size in (1, 4, 16, 64, None):
        named[f"jax-privacy, microbatch {size}" if size else "jax-privacy"] = by_jax_privacy(size)
    return named


def norm_excess(
    loss: Callable, params: Any, batch: tuple, examples: int = 8
) -> tuple[float, float]:
    """By how much norms are rounded up, relative: the median and the largest over a few examples."""
    few = tuple(x[:examples] for x in batch)
    found = np.asarray(
        jax.jit(dpx.clipped_grad(loss, l2_clip_norm=CLIP))(params, *few).norms, np.float64
    )
    gradient = jax.jit(jax.grad(loss))
    exact = []
    for example in zip(*few, strict=True):
        leaves = [np.asarray(g).ravel() for g in jax.tree.leaves(gradient(params, *example))]
        exact.append(sum(np.sum(np.square(g, dtype=np.float64)) for g in leaves) ** 0.5)
    excess = found / np.asarray(exact) - 1
    return float(np.median(excess)), float(excess.max())


def tolerance() -> float:
    """How far sums may be apart: GPUs round what they multiply to 11 bits, unless losses ask for more."""
    settings: Any = jax.config
    asked = settings.jax_default_matmul_precision
    precise = jax.default_backend() == "cpu" or asked == "highest"
    return 1e-4 if precise and _DTYPE.value == "float32" else 3e-2


def measure(name: str, shape: Shape) -> list[dict[str, Any]]:
    """One row for every method on one shape."""
    loss, params, batch_of = build(shape)
    loss = precision.computed_in(_DTYPE.value, loss)
    size = _BATCH.value or shape.batch
    batch, double = batch_of(size), batch_of(2 * size)
    wanted = _METHODS.value
    excess = norm_excess(loss, params, batch)
    rows, compiled, reference = [], {}, None
    for method, step in methods(loss).items():
        if wanted and method not in wanted and method != "ordinary step":
            continue
        tail = method.rsplit(" ", 1)[-1]
        if tail.isdigit() and size % int(tail):
            continue
        start = time.perf_counter()
        program = jax.jit(step).lower(params, *batch).compile()
        seconds = time.perf_counter() - start
        temp = temp_bytes(program)
        largest: int | str = ""
        if _LARGEST.value:
            doubled = temp_bytes(jax.jit(step).lower(params, *double).compile())
            largest = size * int((_LIMIT.value * 2**30 - temp) / max(doubled - temp, 1) + 1)
            largest = largest if largest < MANY else f"over {MANY}"
        result = jax.block_until_ready(program(params, *batch))
        error = ""
        if not method.startswith("ordinary"):
            flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result)])
            reference = flat if reference is None else reference
            error = float(np.linalg.norm(flat - reference) / np.linalg.norm(reference))
            # What is clipped is smaller where norms are rounded up.
            if error > tolerance() + excess[1]:
                raise RuntimeError(f"{name}: {method} differs by {error:.1e} from dpx.")
        compiled[method] = program
        rows.append(
            {"shape": name, "method": method, "batch": size, "temp_mib": temp / 2**20,
             "largest_batch": largest, "compile_s": seconds, "error": error}
        )  # fmt: skip
        print(f"{name}: {method} compiled in {seconds:.1f} s", file=sys.stderr, flush=True)

    calls = {name: functools.partial(each, params, *batch) for name, each in compiled.items()}
    seconds = medians(calls, _REPEATS.value, warm=0)
    print(f"{name}: norms rounded up by {excess[0]:.1e}, at most {excess[1]:.1e}", file=sys.stderr)
    for row in rows:
        if row["method"].startswith("dpx"):
            row["norm_excess"], row["largest_norm_excess"] = excess
        row["ms"] = 1e3 * seconds[row["method"]]
        for ratio, value in (
            ("time_ratio", "ms"), ("memory_ratio", "temp_mib"), ("compile_ratio", "compile_s")
        ):  # fmt: skip
            row[ratio] = row[value] / rows[0][value]
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in markdown."""
    return _tables.markdown(
        [
            {
                "shape (batch)": f"{row['shape']} ({row['batch']})",
                "method": row["method"],
                "time": f"{float(row['ms']):.0f} ms",
                "time over ordinary": f"{float(row['time_ratio']):.2f}×",
                "temp memory": f"{float(row['temp_mib']):.0f} MiB",
                "memory over ordinary": f"{float(row['memory_ratio']):.2f}×",
                f"largest batch in {_LIMIT.value:g} GiB": str(row["largest_batch"]),
                "compile": f"{float(row['compile_s']):.1f} s ({float(row['compile_ratio']):.1f}×)",
            }
            for row in rows
        ]
    )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Time against memory, both over the ordinary step: one panel for every shape."""
    plt = plotting.pyplot()
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    columns = min(3, len(shapes))
    grid = (-(-len(shapes) // columns), columns)
    size = (4.4 * columns, 3.6 * grid[0])
    figure, panels = plt.subplots(*grid, figsize=size, squeeze=False, layout="constrained")
    for panel in panels.flat[len(shapes) :]:
        panel.axis("off")
    for shape, panel in zip(shapes, panels.flat, strict=False):
        for row in rows:
            if row["shape"] == shape:
                x, y = float(row["time_ratio"]), float(row["memory_ratio"])
                ours = row["method"].startswith("dpx")
                panel.plot(x, y, "o", color="C3" if ours else "C0")
                panel.annotate(row["method"], (x, y), (4, 4), textcoords="offset points", size=7)
        panel.set(title=shape, xlabel="time / ordinary step", ylabel="temp memory / ordinary step")
        panel.set(xscale="log", yscale="log")
        panel.axhline(1, color="0.8", zorder=0)
        panel.axvline(1, color="0.8", zorder=0)
    plotting.save(figure, path, "Clipping, over the ordinary step")


def main(argv: list[str]) -> None:
    del argv
    names = _SHAPES.value or list(SHAPES)
    if unknown := [name for name in names if name not in SHAPES]:
        cli.stop(ValueError(f"--shapes={unknown[0]} is not known: use some of {', '.join(SHAPES)}"))
    path = Path(_WORKDIR.value) / "clipping.csv"
    rows = [row for row in _tables.read(path) if row["shape"] not in names]
    for name in names:
        rows += measure(name, SHAPES[name])
        _tables.write(path, rows, table(rows))
    draw(rows, path.with_suffix(".png"))
    print(table(rows))


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
