"""How fast private cross-attention is built and queried, and in how much memory.

    python -m experiments.bench.cross_attention [--rows=1000000] [--queries=200000]

Builds the sketch of a memory of `rows` keys in d = 4 dimensions at degree 8, asks it for `queries` answers at
a time, and builds Gaussian trees over a tenth of the rows in d = 2. Prints seconds with and without
compilation, answers per second next to exact attention's, and the peak memory of the process.
"""

import resource
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import dpx.attention
from dpx import cross_attention
from dpx.runs import cli
from experiments.bench._steps import in_turn

_ROWS = flags.DEFINE_integer("rows", 1_000_000, "rows of the memory", lower_bound=10)
_QUERIES = flags.DEFINE_integer("queries", 200_000, "queries in a batch", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "timed calls; the median counts", lower_bound=1)
OPTIONS: dict[str, Any] = {"key_bound": 1.0, "value_bound": 1.0, "epsilon": 1.0, "delta": 1e-6}


def seconds(call, repeats: int) -> tuple[float, float]:
    """Of the first call, and the median of the others."""
    first, *others = in_turn({"call": call}, repeats + 1, warm=0)["call"]
    return first, float(np.median(others))


def peak_mib() -> float:
    """Largest resident memory of the process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(_):
    rng, n, m = np.random.default_rng(0), _ROWS.value, _QUERIES.value
    K = rng.random((n, 4), np.float32)
    V, Q = 2 * K - 1, rng.random((m, 4), np.float32)
    key, before = jax.random.key(0), peak_mib()
    build = lambda: cross_attention.build(key, K, V, degree=8, **OPTIONS)  # noqa: E731
    first, again = seconds(build, 2)
    print(
        f"sketch of {n} x 4, degree 8: {first:.1f} s with compilation, {again:.1f} s without; "
        f"peak memory {peak_mib():.0f} MiB, {before:.0f} before"
    )
    query, built = jax.jit(lambda built, Q: built.query(Q)), build()
    _, took = seconds(lambda: query(built, Q), _REPEATS.value)
    exact = jax.jit(
        lambda Q: dpx.attention.dot_product_attention(
            Q, jnp.asarray(K), jnp.asarray(V), scale=1 / 4
        )
    )
    _, slow = seconds(lambda: exact(Q[:20]), 1)
    print(f"queries: {m / took:.3g} a second; exact attention {20 / slow:.3g}")
    few, rows = rng.random((n // 10, 2), np.float32), rng.random((n // 10, 2), np.float32)
    first, again = seconds(
        lambda: cross_attention.build(key, few, rows, mechanism="tree", **OPTIONS), 2
    )
    print(f"trees over {n // 10} x 2: {first:.1f} s with compilation, {again:.1f} s without")


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
