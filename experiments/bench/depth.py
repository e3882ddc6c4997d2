"""What a deep model that nobody scanned costs to trace and to compile, beside its ordinary training step.

    python -m experiments.bench.depth --workdir=runs/bench_depth

A transformer of width 128 with 4, 12, 24 and 48 blocks, one after the other as most models are written. The
ordinary step (mean gradient, not private) and `dpx.clipped_grad` are traced and compiled in turn, each in a
process of its own. The CPU time of all threads is counted, because wall time says little on a busy machine,
and the least of the repeats is taken: whatever else runs makes a core slower, and none faster.

Writes depth.csv, depth.md and depth.png.
"""

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

import dpx
from dpx.runs import cli, plotting
from experiments.bench import _tables, shapes
from experiments.bench._steps import mean_gradient
from experiments.bench.shapes import Shape

STEPS = ("ordinary", "dpx")

_WORKDIR = flags.DEFINE_string("workdir", None, "Where the table and the figure go.")
_BLOCKS = flags.DEFINE_list("blocks", ["4", "12", "24", "48"], "Numbers of blocks.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Processes for every point.", lower_bound=1)


def build(step: str, blocks: int) -> tuple[Callable, tuple]:
    """A step that computes one gradient, and its arguments."""
    loss, params, batch_of = shapes.build(Shape(4, 128, 256, 32, blocks=blocks, heads=4))
    function = mean_gradient(loss) if step == "ordinary" else dpx.clipped_grad(loss, l2_clip_norm=1)
    return function, (params, *batch_of(4))


def measure(step: str, blocks: int) -> tuple[float, float]:
    """CPU seconds of tracing, and of lowering and compilation.

    Python's garbage collector is off meanwhile: it takes up to a fifth of the time, at moments of its own.
    """
    function, arguments = build(step, 1)
    jax.jit(function).lower(*arguments).compile()  # What every process does once.
    function, arguments = build(step, blocks)
    gc.collect()
    gc.disable()
    start = time.process_time()
    traced = jax.jit(function).trace(*arguments)
    middle = time.process_time()
    traced.lower().compile()
    return middle - start, time.process_time() - middle


def point(step: str, blocks: int) -> tuple[float, float]:
    """The same, in a process of its own."""
    program = f"from experiments.bench import depth; print(*depth.measure({step!r}, {blocks}))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    trace, compilation = map(float, done.stdout.split()[-2:])
    return trace, compilation


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in markdown."""
    return _tables.markdown(
        [
            {
                "blocks": f"{row['blocks']}",
                "step": row["step"],
                "trace": f"{row['trace_s']:.2f} s",
                "trace over ordinary": f"{row['trace_ratio']:.2f}",
                "compile": f"{row['compile_s']:.2f} s",
                "compile over ordinary": f"{row['compile_ratio']:.2f}",
            }
            for row in rows
        ]
    )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """CPU seconds against the number of blocks: one panel for tracing, one for compilation."""
    figure, panels = plotting.pyplot().subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    for panel, column in zip(panels, ("trace_s", "compile_s"), strict=True):
        for step in STEPS:
            mine = [row for row in rows if row["step"] == step]
            panel.plot([r["blocks"] for r in mine], [r[column] for r in mine], "o-", label=step)
        name = {"trace_s": "tracing", "compile_s": "compilation"}[column]
        panel.set(xlabel="blocks", ylabel=f"CPU seconds of {name}", xlim=(0, None), ylim=(0, None))
        panel.legend()
    plotting.save(figure, path, "Tracing and compiling a clipped step")


def main(argv: list[str]) -> None:
    del argv
    depths = [int(n) for n in _BLOCKS.value]
    if not _WORKDIR.value:
        cli.stop(ValueError("--workdir is missing: name a folder for the table and the figure"))
    rows: list[dict[str, Any]] = []
    for blocks in depths:
        found = {step: [] for step in STEPS}
        for _ in range(_REPEATS.value):
            for step in STEPS:
                found[step].append(point(step, blocks))
        for step in STEPS:
            trace, compilation = map(min, zip(*found[step], strict=True))
            row = {"blocks": blocks, "step": step, "trace_s": trace, "compile_s": compilation}
            first = rows[-1] if step != STEPS[0] else row
            row["trace_ratio"] = trace / first["trace_s"]
            row["compile_ratio"] = compilation / first["compile_s"]
            rows.append(row)
        print(f"{blocks} blocks measured", file=sys.stderr, flush=True)
    path = Path(_WORKDIR.value) / "depth.csv"
    _tables.write(path, rows, table(rows))
    draw(rows, path.with_suffix(".png"))
    print(table(rows))


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
