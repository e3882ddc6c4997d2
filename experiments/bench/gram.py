"""Benchmarks of the Gram release: a matrix that does not fit, and audits of its claims.

python -m experiments.bench.gram --columns=10000000     time and anonymous memory, memory-mapped X
python -m experiments.bench.gram --audit                lower bounds on ε, 10⁶ releases a side
"""

import tempfile
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from dpx import audit, gram
from dpx.runs import cli

# absl knows one flag of a name, and the tests import this module too.
if __name__ == "__main__":
    _COLUMNS = flags.DEFINE_integer(
        "columns", 10_000_000, "d of the memory-mapped X", lower_bound=1
    )
    _ROWS = flags.DEFINE_integer("rows", 32, "n of the memory-mapped X", lower_bound=1)
    _AUDIT = flags.DEFINE_bool("audit", False, "audit instead of streaming")
    _TRIALS = flags.DEFINE_integer(
        "trials", 1_000_000, "releases a side of an audit", lower_bound=1
    )

DELTA = 1e-3


def anonymous_megabytes() -> float:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return float("nan")


class Peak(threading.Thread):
    """Samples the anonymous memory until stopped."""

    def __init__(self):
        super().__init__(daemon=True)
        self.megabytes, self._stopped = 0.0, threading.Event()

    def run(self):
        while not self._stopped.wait(0.02):
            self.megabytes = max(self.megabytes, anonymous_megabytes())

    def stop(self) -> float:
        self._stopped.set()
        self.join()
        return self.megabytes


def stream(rows: int, columns: int) -> None:
    """Releases XXᵀ of a memory-mapped float32 X."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "X.npy"
        X = np.lib.format.open_memmap(path, "w+", np.float32, (rows, columns))
        rng = np.random.default_rng(0)
        for start in range(0, columns, 2**18):
            block = X[:, start : start + 2**18]
            block[...] = rng.standard_normal(block.shape, np.float32)
        X.flush()
        del X
        mapped = np.load(path, mmap_mode="r")
        before, peak = anonymous_megabytes(), Peak()
        peak.start()
        began = time.perf_counter()
        made = gram.release(
            jax.random.key(0), mapped, epsilon=0.09, delta=1e-6, column_bound=2 * rows**0.5
        )
        jax.block_until_ready(made.matrix)
        seconds = time.perf_counter() - began
        print(
            f"n={rows} d={columns} float32, {rows * columns * 4 / 1e9:.2f} GB: {seconds:.1f} s, peak "
            f"anonymous memory {peak.stop():.0f} MB ({before:.0f} MB before)"
        )
        sample = np.asarray(mapped[:, :1000], np.float64)
        print(f"diagonal / d: {float(jnp.diag(made.matrix).mean()) / columns:.4f}, "
              f"of the first 1000 columns {np.mean(sample**2):.4f}")  # fmt: skip


def audit_noise(max_column_change: float, trials: int) -> audit.Audit:
    """The lower bound on ε = 1 of additive noise, on the worst pair of columns of norm at most 1."""
    if max_column_change <= 2 / 3:  # the worst pairs of dpx.gram.accounting
        u, v = np.array([1.0, 0.0]), np.array([1 - max_column_change, 0.0])
    else:
        angle = np.arcsin(min(max_column_change, np.sqrt(2)) / 2)
        u, v = (np.array([np.cos(angle), sign * np.sin(angle)]) for sign in (1, -1))

    def log_ratio(B, made):
        squares = [jnp.sum((B - np.outer(column, column)) ** 2) for column in (u, v)]
        return (squares[1] - squares[0]) / (2 * made.noise_std**2)

    about = {"max_column_change": max_column_change}
    return _audited([u[:, None], v[:, None]], log_ratio, trials, **about)


def audit_sampling(eta: float, trials: int) -> audit.Audit:
    """The lower bound on ε = 1 of sampling, where a column of norm 1 comes in an empty direction."""
    covariances = np.diag([eta + 1.0, eta]), np.diag([eta, eta])
    inverses = [np.linalg.inv(c) for c in covariances]
    logs = [np.linalg.slogdet(c)[1] for c in covariances]

    def log_ratio(B, made):
        moved = jnp.sum((inverses[1] - inverses[0]) * (B + eta * jnp.eye(2)))
        return made.num_samples / 2 * (moved + logs[1] - logs[0])

    about = {"mechanism": "sampling", "eta": eta, "neighboring": "add_or_remove_one"}
    return _audited([np.eye(2)[:, :1], np.zeros((2, 1))], log_ratio, trials, **about)


def _audited(inputs, log_ratio, trials: int, **options) -> audit.Audit:
    """Likelihood ratios of releases of two neighbouring matrices, as their laws in real numbers have them."""

    def sample(keys, X):
        def ratio(key):
            made = gram.release(key, X, epsilon=1.0, delta=DELTA, column_bound=1.0, **options)
            return log_ratio(made.matrix, made)

        return np.asarray(jax.jit(lambda keys: jax.lax.map(ratio, keys, batch_size=2**16))(keys))

    keys = jax.random.split(jax.random.key(1), (2, trials))
    with jax.enable_x64(True):
        ratios, others = (sample(*each) for each in zip(keys, inputs, strict=True))
    return audit.epsilon_lower_bound(ratios, others, DELTA)


def main(argv):
    del argv
    if not _AUDIT.value:
        stream(_ROWS.value, _COLUMNS.value)
        return
    for max_column_change in (0.3, 1.0, 2.0):
        _report(
            f"additive noise, β={max_column_change:g}",
            lambda max_column_change=max_column_change: audit_noise(
                max_column_change, _TRIALS.value
            ),
        )
    for eta in (30.0, 300.0):
        _report(f"sampling, t=1/{eta:g}", lambda eta=eta: audit_sampling(eta, _TRIALS.value))


def _report(words: str, measure) -> None:
    began = time.perf_counter()
    bound = measure().epsilon
    seconds = time.perf_counter() - began
    print(
        f"{words}: claimed ε=1 at δ={DELTA:g}, measured ≥ {bound:.3f} (95 %, {seconds:.1f} s)",
        flush=True,
    )


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
