"""Clipping of models that recompute activations (`jax.checkpoint`) against an ordinary step.

    python -m experiments.bench.remat --workdir=runs/bench_remat
    python -m experiments.bench.remat --workdir=runs/bench_remat --models="nnx.remat" --repeats=15

Every model is a Llama: RMSNorm, causal attention, a gated MLP, a head of its own or tied to the embedding.
Beside the mean gradient of the same batch (not private) `dpx.clipped_grad` is timed, one call each in turn,
by CPU time of the process; what is reported is the median of the ratios of neighbours. Memory is XLA's count
of temporary bytes in the compiled step, and compilation is CPU time from tracing on, the second time. The sum
is compared with that of `vmap(grad)` before anything is timed, at a threshold that nothing exceeds.

Writes remat.csv and remat.md.
"""

import csv
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from flax import linen as nn
from flax import nnx

import dpx
from dpx.launch import cli

COLUMNS = ("model", "method", "time", "memory", "compile", "mib", "error")

_WORKDIR = flags.DEFINE_string("workdir", None, "Where the table goes.", required=True)
_MODELS = flags.DEFINE_list("models", None, "Which models; all by default.")
_METHOD = flags.DEFINE_string("method", None, "A method of clipping instead of each model's own.")
_REPEATS = flags.DEFINE_integer("repeats", 9, "Timed calls of every step.", lower_bound=3)
_BLOCKS = flags.DEFINE_integer("blocks", 6, "Blocks of every model.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 8, "Examples in the batch.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 64, "Tokens of an example.", lower_bound=2)
_DIM = flags.DEFINE_integer("dim", 128, "Width of the model.", lower_bound=32)
_VOCABULARY = flags.DEFINE_integer("vocabulary", 512, "Tokens there are.", lower_bound=2)

HEADS = 4

# So large that sums do not depend on how far norms are rounded up.
CLIP = 1e6


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of arrays (L, D) with `HEADS` heads."""
    q, k, v = (x.reshape(x.shape[0], HEADS, -1) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(q.shape[0], -1)


def block(x: jax.Array, layer: Callable[[str, int, jax.Array], jax.Array], norm: Any) -> jax.Array:
    """One block of a Llama; `layer` is (name, width, array) -> array without a bias."""
    dim = x.shape[-1]
    h = norm("attention", x)
    x = x + layer("o", dim, attend(*(layer(name, dim, h) for name in "qkv")))
    h = norm("mlp", x)
    gated = jax.nn.silu(layer("gate", 3 * dim, h)) * layer("up", 3 * dim, h)
    return x + layer("down", dim, gated)


class Block(nnx.Module):
    """`block` in NNX."""

    def __init__(self, dim: int, rngs: nnx.Rngs):
        widths = dict.fromkeys("qkvo", (dim, dim))
        widths |= {"gate": (dim, 3 * dim), "up": (dim, 3 * dim), "down": (3 * dim, dim)}
        for name, (n, m) in widths.items():
            setattr(self, name, nnx.Linear(n, m, use_bias=False, rngs=rngs))
        self.attention, self.mlp = (nnx.RMSNorm(dim, rngs=rngs) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        """(L, D) -> (L, D)."""
        return block(
            x, lambda name, _, x: getattr(self, name)(x), lambda name, x: getattr(self, name)(x)
        )


class Llama(nnx.Module):
    """A Llama in NNX, its blocks a "loop" or a "scan", rematerialised or not; `tied` has no own head."""

    def __init__(self, layers: str, remat: bool, tied: bool = False, policy: Any = None):
        rngs, dim = nnx.Rngs(0), _DIM.value
        self.remat, self.policy = remat, policy
        self.embed = nnx.Embed(_VOCABULARY.value, dim, rngs=rngs)
        self.norm = nnx.RMSNorm(dim, rngs=rngs)
        self.head = None if tied else nnx.Linear(dim, _VOCABULARY.value, use_bias=False, rngs=rngs)
        if layers == "scan":
            stacked = nnx.vmap(lambda rngs: Block(dim, rngs))
            self.blocks: Block | nnx.List[Block] = stacked(rngs.split(_BLOCKS.value))
        else:
            self.blocks = nnx.List([Block(dim, rngs) for _ in range(_BLOCKS.value)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens (L,) -> logits (L, vocabulary)."""

        def apply(each: Block, x: jax.Array) -> jax.Array:
            return each(x)

        apply = nnx.remat(apply, policy=self.policy) if self.remat else apply
        x = self.embed(tokens)
        if isinstance(self.blocks, Block):
            scanned = nnx.scan(apply, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            x = scanned(self.blocks, x)
        else:
            for each in self.blocks:
                x = apply(each, x)
        x = self.norm(x)
        return self.embed.attend(x) if self.head is None else self.head(x)


class LinenBlock(nn.Module):
    """`block` in Linen, as a scan takes it."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """(L, D) -> (L, D)."""

        def layer(name: str, width: int, x: jax.Array) -> jax.Array:
            return nn.Dense(width, use_bias=False, name=name)(x)

        return block(x, layer, lambda name, x: nn.RMSNorm(name=name)(x)), None


class LinenLlama(nn.Module):
    """A Llama in Linen, blocks rematerialised and scanned."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens (L,) -> logits (L, vocabulary)."""
        scanned = nn.scan(
            nn.remat(LinenBlock, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=_BLOCKS.value,
        )
        x = nn.Embed(_VOCABULARY.value, _DIM.value)(tokens)
        x, _ = scanned()(x, None)
        return nn.Dense(_VOCABULARY.value, use_bias=False)(nn.RMSNorm()(x))


def of_nnx(*arguments: Any, **options: Any) -> tuple[Callable, Any]:
    """(parameters, tokens) -> logits, and the parameters, of a `Llama`."""
    graph, params = nnx.split(Llama(*arguments, **options))
    return lambda params, tokens: nnx.merge(graph, params)(tokens), params


def of_linen() -> tuple[Callable, Any]:
    """The same of a `LinenLlama`."""
    model = LinenLlama()
    return model.apply, model.init(jax.random.key(0), jnp.zeros(_LENGTH.value, int))


def of_jax() -> tuple[Callable, Any]:
    """The same in plain JAX: `jax.lax.scan` over `jax.checkpoint`."""
    rng, dim, words = np.random.default_rng(0), _DIM.value, _VOCABULARY.value
    widths = dict.fromkeys("qkvo", (dim, dim))
    widths |= {"gate": (dim, 3 * dim), "up": (dim, 3 * dim), "down": (3 * dim, dim)}

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)

    blocks = {name: normal(_BLOCKS.value, *shape) for name, shape in widths.items()}
    blocks |= {name: jnp.ones((_BLOCKS.value, dim)) for name in ("attention", "mlp")}
    params = {"embed": normal(words, dim), "blocks": blocks, "head": normal(dim, words)}

    def logits(params: Any, tokens: jax.Array) -> jax.Array:
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def body(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            def norm(name: str, x: jax.Array) -> jax.Array:
                return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * p[name]

            return block(x, lambda name, _, x: x @ p[name], norm), None

        x, _ = jax.lax.scan(body, params["embed"][tokens], params["blocks"])
        return x @ params["head"]

    return logits, params


# Name -> (logits of one example and parameters, the method of clipping).
MODELS: dict[str, tuple[Callable[[], tuple[Callable, Any]], str]] = {
    "nnx.remat": (lambda: of_nnx("loop", True), "auto"),
    "nnx.remat tied": (lambda: of_nnx("loop", True, tied=True), "auto"),
    "nnx.remat dots_saveable": (
        lambda: of_nnx("loop", True, policy=jax.checkpoint_policies.dots_saveable),
        "auto",
    ),
    "nnx.scan of nnx.remat": (lambda: of_nnx("scan", True), "auto"),
    "nn.scan of nn.remat": (of_linen, "auto"),
    "lax.scan of jax.checkpoint": (of_jax, "auto"),
    "no remat": (lambda: of_nnx("loop", False), "two_pass"),
    "nnx.scan": (lambda: of_nnx("scan", False), "two_pass"),
}


def steps(logits: Callable, method: str) -> dict[str, Callable]:
    """Name -> function of (parameters, tokens) that returns a gradient; the ordinary one first."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        found = logits(params, tokens[:-1])
        return optax.softmax_cross_entropy_with_integer_labels(found, tokens[1:]).mean()

    def ordinary(params: Any, tokens: jax.Array) -> Any:
        return jax.grad(lambda p: jax.vmap(loss, (None, 0))(p, tokens).mean())(params)

    clipped = dpx.clipped_grad(loss, l2_clip_norm=CLIP, method=method)
    oracle = dpx.clipped_grad(loss, l2_clip_norm=CLIP, method="vmap")
    return {
        "ordinary step": ordinary,
        method: lambda *arguments: clipped(*arguments).grads,
        "vmap": lambda *arguments: oracle(*arguments).grads,
    }


def measure(name: str) -> dict[str, Any]:
    """The row of one model."""
    build, method = MODELS[name]
    logits, params = build()
    tokens = np.random.default_rng(0).integers(
        0, _VOCABULARY.value, (_BATCH.value, _LENGTH.value + 1)
    )
    tokens = jnp.asarray(tokens)
    compiled, seconds, results = {}, {}, {}
    for each, step in steps(logits, _METHOD.value or method).items():
        for _ in range(2):  # The first compilation in a process takes longer.
            jax.clear_caches()
            start = time.process_time()
            compiled[each] = jax.jit(step).lower(params, tokens).compile()
            seconds[each] = time.process_time() - start
        results[each] = np.concatenate(
            [np.ravel(x) for x in jax.tree.leaves(compiled[each](params, tokens))]
        )
    ordinary, mine, oracle = compiled
    error = np.linalg.norm(results[mine] - results[oracle]) / np.linalg.norm(results[oracle])
    if error > 1e-5:
        raise RuntimeError(f"{name}: {mine} differs by {error:.1e} from per-example gradients.")
    ratios = []
    for _ in range(_REPEATS.value):
        times = []
        for each in (ordinary, mine):
            start = time.process_time()
            jax.block_until_ready(compiled[each](params, tokens))
            times.append(time.process_time() - start)
        ratios.append(times[1] / times[0])
    bytes_, own = (compiled[each].memory_analysis().temp_size_in_bytes for each in (ordinary, mine))
    return {
        "model": name, "method": mine, "time": statistics.median(ratios), "memory": own / bytes_,
        "compile": seconds[mine] / seconds[ordinary], "mib": bytes_ / 2**20, "error": error,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in markdown."""
    head = ("model", "method", "time", "temp memory", "compile", "ordinary step", "error")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        ratios = " | ".join(f"{row[key]:.2f}×" for key in ("time", "memory", "compile"))
        rest = f"{row['mib']:.1f} MiB | {row['error']:.0e}"
        lines.append(f"| {row['model']} | {row['method']} | {ratios} | {rest} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    del argv
    names = _MODELS.value or list(MODELS)
    if unknown := [name for name in names if name not in MODELS]:
        cli.stop(ValueError(f"--models={unknown[0]} is not known: use some of {', '.join(MODELS)}"))
    workdir = Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in names:
        rows.append(measure(name))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    with (workdir / "remat.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    (workdir / "remat.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
