"""Clipping on one accelerator: the whole table of a GPU from one command, in less than six minutes.

    python -m experiments.bench.accelerator
    python -m experiments.bench.accelerator --methods=auto --shapes=gpt2-small --dtypes=float32 --repeats=15
    python -m experiments.bench.accelerator --tiny   # the same on any CPU, in a minute

Each row is one gradient of one model on one batch. The ordinary step is the mean gradient, not private; the
others are `dpx.clipped_grad` by the methods that --methods names, and the noise of one step of
`dpx.privatize` for as many parameters. Programs of one model are called in turn, several calls at a time so
that launching them does not count; time is the median of the ratios of neighbours, memory is XLA's count of
temporary bytes, and the error is that of the clipped sum, against that of the first method. Products in
float32 are taken as JAX takes them by default: TensorFloat-32 on GPUs.

Rows are printed as they are found, the most wanted first, and none is begun after --seconds. A method that
refuses a loss, as two passes refuse one in bfloat16, has a row that says so.

Needs JAX, Flax, Optax, NumPy, SciPy and absl-py, and of what a machine without a package index may lack
`dp_accounting` (a wheel without dependencies of its own beyond attrs and mpmath):

    pip download --no-deps -d wheels dp-accounting      # where there is an index
    pip install --no-index --no-deps --target site wheels/*.whl && export PYTHONPATH=site:.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import app, flags

import dpx
from dpx.training import precision
from experiments.bench._steps import CLIP, clipped_sum, mean_gradient, temp_bytes
from experiments.bench.shapes import Shape, build

LEAST_MS = 30.0  # Shorter programs are called until they have taken that long.

_METHODS = flags.DEFINE_list("methods", ["auto", "vmap", "two_pass"], "Methods of clipped_grad.")
_SHAPES = flags.DEFINE_list("shapes", None, "Which shapes; all by default.")
_DTYPES = flags.DEFINE_list("dtypes", list(precision.KNOWN), "What losses compute in.")
_REPEATS = flags.DEFINE_integer("repeats", 9, "Timed turns of every program.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 300.0, "No row is begun after this.", lower_bound=0)
_TINY = flags.DEFINE_bool("tiny", False, "Models small enough for any CPU.")

SHAPES = {
    "gpt2-small": Shape(16, 768, 50_257, 512, blocks=12, heads=12),
    "recommender": Shape(64, 64, 3_416, 50),
}
TINY = {
    "gpt2-small": Shape(4, 32, 512, 32, heads=2),
    "recommender": Shape(8, 16, 100, 10, blocks=1),
}


class Programs:
    """The steps of one shape and dtype, compiled as they are asked for.

    Attributes:
      arguments: parameters and a batch of tokens.
    """

    def __init__(self, shape: Shape, dtype: str):
        loss, params, batch_of = build(shape)
        self.loss = precision.computed_in(dtype, loss)
        self.arguments = params, *batch_of(shape.batch)
        self.compiled: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}

    def step(self, name: str) -> Callable:
        """The function of (parameters, tokens) of this name."""
        if name == "ordinary step":
            return mean_gradient(self.loss)
        if name == "noise":
            key = jax.random.key(0)
            noise = dpx.privatize(
                l2_clip_norm=CLIP, noise_multiplier=1.0, expected_batch_size=64, key=key
            )
            return lambda params, tokens: noise.update(params, noise.init(params), params)[0]
        return clipped_sum(self.loss, method=name)

    def add(self, name: str) -> None:
        """Compiles a step, and calls it once."""
        start = time.perf_counter()
        self.compiled[name] = jax.jit(self.step(name)).lower(*self.arguments).compile()
        self.seconds[name] = time.perf_counter() - start
        jax.block_until_ready(self.compiled[name](*self.arguments))

    def ms(self, name: str, calls: int) -> float:
        """Milliseconds of one of several calls."""
        start = time.perf_counter()
        for _ in range(calls):
            found = self.compiled[name](*self.arguments)
        jax.block_until_ready(found)
        return 1e3 * (time.perf_counter() - start) / calls

    def flat(self, name: str) -> np.ndarray:
        """The gradient that a step returns, in one array."""
        leaves = jax.tree.leaves(self.compiled[name](*self.arguments))
        return np.concatenate([np.ravel(np.asarray(leaf, np.float32)) for leaf in leaves])


def row(programs: Programs, name: str, reference: np.ndarray | None) -> tuple[list[str], Any]:
    """The cells of one program's row, from time to compilation, and the gradient that it returns."""
    programs.add(name)
    calls = int(np.clip(LEAST_MS / max(programs.ms("ordinary step", 1), 1e-3), 1, 50))
    turns = []
    for _ in range(_REPEATS.value):
        turns.append((programs.ms("ordinary step", calls), programs.ms(name, calls)))
    ratio = statistics.median(mine / ordinary for ordinary, mine in turns)
    ordinary, memory = (temp_bytes(programs.compiled[each]) for each in ("ordinary step", name))
    result = programs.flat(name) if name not in ("ordinary step", "noise") else None
    error = ""
    if result is not None and reference is not None:
        error = f"{np.linalg.norm(result - reference) / np.linalg.norm(reference):.1e}"
    cells = [
        f"{statistics.median(mine for _, mine in turns):.2f} ms", f"{ratio:.2f}×",
        f"{memory / 2**20:.0f} MiB", f"{memory / max(ordinary, 1):.2f}×", error,
        f"{programs.seconds[name]:.1f} s",
    ]  # fmt: skip
    return cells, result


def main(argv: list[str]) -> None:
    del argv
    begin = time.perf_counter()
    shapes = TINY if _TINY.value else SHAPES
    if unknown := [name for name in _SHAPES.value or () if name not in shapes]:
        sys.exit(f"--shapes={unknown[0]} is not known: use some of {', '.join(shapes)}")
    device = jax.devices()[0]
    print(f"{device.device_kind}, JAX {jax.__version__}\n")
    print(
        "| shape (batch), computed in | step | time | | temporary memory | | error | compilation |"
    )
    print("|" + "---|" * 8)
    cases = [(name, dtype) for name in _SHAPES.value or shapes for dtype in _DTYPES.value]
    first, *others = _METHODS.value
    made: dict[tuple[str, str], Programs] = {}
    found: dict[tuple[str, str], np.ndarray | None] = {}
    # The first method of every model comes before the second one of any.
    for name in ("ordinary step", first, "noise", *others):
        for case in cases:
            if name == "noise" and case[1] != _DTYPES.value[0]:
                continue  # It is of the parameters, which are float32 whatever losses compute in.
            if time.perf_counter() - begin > _SECONDS.value:
                print(f"stopped after {_SECONDS.value:g} s: see --seconds", file=sys.stderr)
                return
            if case not in made:
                made[case] = Programs(shapes[case[0]], case[1])
            head = f"| {case[0]} ({shapes[case[0]].batch}), {case[1]} | {name} | "
            try:
                cells, result = row(made[case], name, found.get(case))
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                print(head + f"{' '.join(str(error).split())[:100]} |" + " |" * 5, flush=True)
                continue
            print(head + " | ".join(cells) + " |", flush=True)
            if found.get(case) is None:
                found[case] = result
            if name != "ordinary step":
                del made[case].compiled[name]


if __name__ == "__main__":
    app.run(main)
