"""What Re-Attention costs: forward pass, and private training step, over those of the plain transformer.

    python -m experiments.bench.reattention

The recommender's size (d = 64, 2 blocks, 50 positions), logits at the last position and at all. Plain and
corrected calls alternate in one process; medians, and the median of the ratios of neighbouring calls.
"""

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

import dpx
from dpx import reattention
from dpx.nn.transformer import Transformer
from dpx.runs import cli
from experiments.bench._steps import in_turn

_ITEMS = flags.DEFINE_integer("items", 3416, "M.", lower_bound=2)
_BATCH = flags.DEFINE_integer("batch", 128, "Sequences in a call.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 15, "Timed calls of each.", lower_bound=3)
_STEPS = flags.DEFINE_boolean("steps", True, "Also time the clipped gradient.")


def _time(calls, repeats: int) -> tuple[float, float, float]:
    """Medians of both calls in ms, and of their ratio."""
    plain, corrected = (1e3 * each for each in in_turn(calls, repeats).values())
    return float(np.median(plain)), float(np.median(corrected)), float(np.median(corrected / plain))


def main(argv):
    del argv
    items, length = _ITEMS.value, 50
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, items, (_BATCH.value, length)))
    mask = jnp.ones(tokens.shape, bool)
    probabilities = np.minimum(1, 5 / np.arange(1, items + 1))
    embedding, rest = (
        jnp.asarray(reattention.effective_noise_std(0.6, 1024, p)) for p in (probabilities, None)
    )
    noise_std = reattention.ParameterNoise(embedding, rest)
    graph, params = nnx.split(Transformer(items, length, rngs=nnx.Rngs(0)))

    def forward(noise, last_only, params, tokens, mask):
        return nnx.merge(graph, params)(tokens, mask=mask, last_only=last_only, noise_std=noise)

    def loss(noise, last_only, params, tokens, mask):
        logits = forward(noise, last_only, params, tokens, mask)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[-len(logits) :, None], 1)
        return -picked.mean()

    def bind(function, noise, last_only):
        jitted = jax.jit(lambda *arguments: function(noise, last_only, *arguments))
        return lambda: jitted(params, tokens, mask)

    def clipped(noise, last_only, params, *batch):
        def own(params, *example):
            return loss(noise, last_only, params, *example)

        return dpx.clipped_grad(own, l2_clip_norm=1.0)(params, *batch)

    print("| what | positions | plain ms | Re-Attention ms | ratio |\n|---|---|---|---|---|")
    parts = [("forward", forward), *([("clipped gradient", clipped)] if _STEPS.value else [])]
    for name, function in parts:
        for last_only in (True, False):
            both = {"plain": None, "corrected": noise_std}
            calls = {name: bind(function, noise, last_only) for name, noise in both.items()}
            plain, corrected, ratio = _time(calls, _REPEATS.value)
            where = "last" if last_only else "all"
            print(f"| {name} | {where} | {plain:.1f} | {corrected:.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
