"""What a private step of fine-tuning costs beside an ordinary one: time, memory, and the largest batch.

    python -m experiments.dp_transformer.finetune_steps
    python -m experiments.dp_transformer.finetune_steps --tuned=full --activations=float32
    python -m experiments.dp_transformer.finetune_steps --model=random --batch=4 --length=16 --timed_calls=3

Both steps are gradients of the same batch of random tokens: the mean one, and the sum of clipped ones. They
are timed one call each in turn, by CPU time of the process; what is printed is the median of the ratios of
neighbours. Memory is XLA's count of the compiled step: what it is given, returns and needs in between. The
largest batch is what --gib have room for, beside that of per-example gradients by `vmap` and of jax-privacy:
from the bytes of --batch and of twice as many examples, of which nothing is run.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import dpx
from dpx.runs import cli, records
from experiments.dp_transformer import tuned_text

_MODEL = flags.DEFINE_enum("model", "pretrained", ["pretrained", "random"], "As config.model.kind.")
_TUNED = flags.DEFINE_multi_enum("tuned", tuned_text.MODES, tuned_text.MODES, "As tune.mode.")
_ACTIVATIONS = flags.DEFINE_enum(
    "activations", "bfloat16", ["bfloat16", "float32"], "As config.model.dtype."
)
_BATCH = flags.DEFINE_integer("batch", 8, "Examples of a step.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 64, "Tokens of an example.", lower_bound=2)
_REPEATS = flags.DEFINE_integer("timed_calls", 5, "Timed calls of every step.", lower_bound=1)
_GIB = flags.DEFINE_float("gib", 8.0, "The room for the largest batch; 0 leaves it out.")


def steps(
    mode: str, kind: str, activations: str
) -> tuple[dict[str, Callable], tuple[Any, Any], int]:
    """Functions (trained, frozen, tokens) -> gradient by name, what they are given, and the vocabulary."""
    config = records.load_config("finetune" if kind == "pretrained" else "finetune:tiny")
    config.update({"tune": {"mode": mode}, "model": {"dtype": activations}})
    language = tuned_text.build(config)

    def loss(trained: Any, frozen: Any, tokens: jax.Array) -> jax.Array:
        mask = jnp.ones(len(tokens) - 1, bool)
        return tuned_text.loss(language, trained, frozen, tokens[:-1], tokens[1:], mask, None)

    def ordinary(trained: Any, frozen: Any, tokens: jax.Array) -> Any:
        over = jax.vmap(loss, (None, None, 0))
        return jax.grad(lambda trained: over(trained, frozen, tokens).mean())(trained)

    def clipped(method: str) -> Callable:
        def step(trained: Any, frozen: Any, tokens: jax.Array) -> Any:
            gradient = dpx.clipped_grad(
                lambda both, tokens: loss(both[0], both[1], tokens),
                l2_clip_norm=(1.0, None),
                wrt=(True, False),
                method=method,
            )
            return gradient((trained, frozen), tokens).grads[0]

        return step

    found = {"ordinary": ordinary, "dpx": clipped("auto"), "vmap": clipped("vmap")}
    try:
        from jax_privacy import clipping
    except ModuleNotFoundError:
        pass
    else:

        def other(trained: Any, frozen: Any, tokens: jax.Array) -> Any:
            def batched(trained: Any, tokens: jax.Array) -> jax.Array:
                return loss(trained, frozen, tokens[0])

            return clipping.clipped_grad(batched, l2_clip_norm=1.0, batch_argnums=1)(
                trained, tokens
            )

        found["jax-privacy"] = other
    return found, (language.trained, language.frozen), language.tokenizer.vocab_size


def compiled(step: Callable, given: tuple, vocabulary: int, batch: int, length: int):
    """The step for a batch of that size, its tokens, and the bytes that it needs."""
    shape = (batch, length + 1)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, vocabulary, shape))
    found = jax.jit(step).lower(*given, tokens).compile()
    stats = found.memory_analysis()
    sizes = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    return found, tokens, sum(getattr(stats, size) for size in sizes)


def seconds(step: Callable, *arguments: Any) -> float:
    """CPU time of one call."""
    start = time.process_time()
    jax.block_until_ready(step(*arguments))
    return time.process_time() - start


def largest(step: Callable, given: tuple, vocabulary: int) -> int:
    """How many examples fit, on a straight line through the bytes of two sizes of batches."""
    batch = _BATCH.value
    one, two = (
        compiled(step, given, vocabulary, size, _LENGTH.value)[2] for size in (batch, 2 * batch)
    )
    return max(0, int(batch + (_GIB.value * 2**30 - one) * batch / (two - one)))


def main(argv: list[str]) -> None:
    """Measures and prints a few lines."""
    del argv
    for mode in _TUNED.value:
        all_steps, given, vocabulary = steps(mode, _MODEL.value, _ACTIVATIONS.value)
        both = {
            name: compiled(all_steps[name], given, vocabulary, _BATCH.value, _LENGTH.value)
            for name in ("ordinary", "dpx")
        }
        times = []
        for repeat in range(_REPEATS.value + 1):
            own = [seconds(step, *given, tokens) for step, tokens, _ in both.values()]
            times += [own] if repeat else []  # the first calls touch their memory first
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        ratio = statistics.median(mine / plain for plain, mine in times)
        plain, mine = (memory / 2**30 for *_, memory in both.values())
        print(
            f"{mode}: {medians[1]:.2f} s against {medians[0]:.2f} s of CPU, ratio {ratio:.3f}; "
            f"{mine:.2f} GiB against {plain:.2f} GiB, ratio {mine / plain:.3f}",
            flush=True,
        )
        if _GIB.value > 0:
            room = {name: largest(step, given, vocabulary) for name, step in all_steps.items()}
            shown = ", ".join(f"{name} {batch}" for name, batch in room.items())
            print(f"{mode}: largest batch in {_GIB.value:g} GiB: {shown}", flush=True)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
