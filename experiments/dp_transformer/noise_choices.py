"""Ways to clip and to draw noise, at equal ε: each is trained with several seeds and stands in a table.

python -m experiments.dp_transformer.noise_choices --task=digits --epsilon=3 --seeds=5
python -m experiments.dp_transformer.noise_choices --task=surnames --epsilon=8 --choice=noise
python -m experiments.dp_transformer.noise_choices --task=shakespeare --path=input.txt --choice=noise

Tasks: `digits`, a network of one hidden layer on scikit-learn's 1,797 images (accuracy in %, 450 held out),
and a transformer of one block on 80,799 `surnames` of the census (8,000 held out), on TinyShakespeare in
windows of 32 characters (the last tenth held out) or on synthetic `histories` of 12 items (20,000 users,
4,000 held out), in nats a character or an item.
"""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from flax import nnx

import dpx
from dpx.data import Texts, shakespeare, synthetic_histories
from dpx.data import surnames as names
from dpx.data.records import split
from dpx.nn.transformer import Transformer
from dpx.training import AdaptiveClipNorm

TASKS = ("digits", "surnames", "shakespeare", "histories")
TASK = flags.DEFINE_enum("task", "digits", TASKS, "what is learned")
PATH = flags.DEFINE_string("path", None, "TinyShakespeare as a file; it is downloaded without")
EPSILON = flags.DEFINE_float("epsilon", 3.0, "ε of every training")
SEEDS = flags.DEFINE_integer("seeds", 3, "trainings of each kind")
CHOICE = flags.DEFINE_enum("choice", "clip", ("clip", "noise", "sampling"), "what is varied")
DELTA = 1e-5
# What is varied, as arguments of `dpx.training.fit`.
CLIPS = {f"fixed, C = {clip:g}": {"l2_clip_norm": clip} for clip in (0.1, 0.3, 1.0, 3.0, 10.0)}
ADAPTIVE = {
    f"adaptive from {start:g}, γ = {quantile:g}": {
        "l2_clip_norm": AdaptiveClipNorm(start=start, quantile=quantile)
    }
    for start, quantile in ((0.1, 0.5), (10.0, 0.5), (10.0, 0.2))
}
NORMALIZED = {"normalized": {"l2_clip_norm": 1.0, "normalize": True}}
SAMPLINGS = {
    name: {"sampling": name} | NORMALIZED["normalized"] for name in ("poisson", "allocation")
}
BANDS = {"digits": (2, 4, 8), "surnames": (4, 16), "shakespeare": (4, 16), "histories": (4, 16)}


class Task(NamedTuple):
    """What is learned: a loss, a model for each seed, records, settings, and a metric of the model."""

    loss: Callable[..., jax.Array]
    model: Callable[[int], Any]
    data: tuple
    settings: dict[str, Any]
    metric: Callable[[Any], Any]


def digits() -> Task:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        (pixels / 16 - 0.3).astype("f4"), labels, random_state=0
    )

    def model(seed: int) -> nnx.Module:
        rngs = nnx.Rngs(seed)
        return nnx.Sequential(
            nnx.Linear(64, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 10, rngs=rngs)
        )

    def loss(model, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y)

    # Steps of Adam do not depend on the unit of the gradients, so that no clipping norm is favoured. Sums of
    # gradients are what banded noise is made for: the steps of SGD. Its bands need small batches.
    settings: dict[str, Any] = {"batch_size": 256, "steps": 200, "optimizer": optax.adam(5e-3)}
    if CHOICE.value == "noise":
        settings |= {"batch_size": 64, "steps": 400, "optimizer": optax.sgd(0.05, momentum=0.9)}
    return Task(
        loss,
        model,
        (train_x, train_y),
        settings,
        lambda model: 100 * float((model(test_x).argmax(1) == test_y).mean()),
    )


def surnames() -> Task:
    texts = names.encode(names.load_surnames())
    return _next_token(*split(texts, 8000, seed=0), names.VOCAB_SIZE, names.END)


def windows() -> Task:
    texts = shakespeare.encode(shakespeare.load_shakespeare(PATH.value), 32)
    train, test = shakespeare.split_windows(texts, len(texts) // 10)
    return _next_token(train, test, shakespeare.VOCAB_SIZE, shakespeare.START)


def histories() -> Task:
    walks = synthetic_histories(24_000, 12, 100)
    return _next_token(*split(Texts(np.stack(walks.items), None), 4000, seed=0), 101, 100)


def _next_token(train: Texts, test: Texts, vocab_size: int, start: int) -> Task:
    """A transformer that predicts each token of a record; `start` stands before the first."""

    def model(seed: int) -> Transformer:
        size = train.tokens.shape[1]
        rngs = nnx.Rngs(seed)
        return Transformer(vocab_size, size, dim=32, num_heads=2, num_blocks=1, rngs=rngs)

    def losses(model, tokens, mask):
        before = jnp.pad(tokens[..., :-1], [(0, 0)] * (tokens.ndim - 1) + [(1, 0)])
        before = before.at[..., 0].set(start)
        found = optax.softmax_cross_entropy_with_integer_labels(model(before), tokens)
        return jnp.where(mask, found, 0)

    def loss(model, tokens, mask):
        return losses(model, tokens, mask).sum() / tokens.shape[-1]

    held_out = jnp.asarray(test.tokens), jnp.asarray(test.mask)

    @nnx.jit
    def metric(model):
        return losses(model, *held_out).sum() / held_out[1].sum()

    settings: dict[str, Any] = {"batch_size": 1024, "steps": 200, "microbatch_size": 128}
    settings["optimizer"] = optax.adam(optax.cosine_decay_schedule(5e-3, 200))
    return Task(loss, model, (train.tokens, train.mask), settings, metric)


def trained(task: Task, name: str, seed: int, **choice: Any) -> dpx.training.Trained:
    settings = {"epsilon": EPSILON.value, "delta": DELTA, "key": jax.random.key(1000 + seed)}
    settings["sampling"] = "poisson"  # which goes with all other choices
    settings["label"] = name.replace(",", "")  # rows do not share their noise
    return dpx.training.fit(
        task.loss, task.model(seed), task.data, **settings | task.settings | choice
    )


def table(task: Task, choices: dict[str, dict[str, Any]]) -> None:
    print("|  | held out | last clipping norm | seconds of CPU |\n|---|---|---|---|")
    for name, choice in choices.items():
        began = time.process_time()
        found = [trained(task, name, seed, **choice) for seed in range(SEEDS.value)]
        seconds = (time.process_time() - began) / SEEDS.value
        values = np.array([float(task.metric(each.params)) for each in found])
        error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        norms = [each.history[-1].l2_clip_norm for each in found]
        norm = "" if None in norms else f"{np.mean(norms):.3g}"  # type: ignore[arg-type]
        print(
            f"| {name} | {values.mean():.4g} ± {error:.2g} | {norm} | {seconds:.0f} |", flush=True
        )


def main(argv: list[str]) -> None:
    del argv
    tasks = (digits, surnames, windows, histories)
    make: dict[str, Callable[[], Task]] = dict(zip(TASKS, tasks, strict=True))
    print(f"{TASK.value}, ε = {EPSILON.value:g}, δ = {DELTA:g}, {SEEDS.value} seeds")
    choices: dict[str, dict[str, Any]] = CLIPS | ADAPTIVE | NORMALIZED
    if CHOICE.value == "sampling":
        choices = SAMPLINGS
    if CHOICE.value == "noise":
        choices = {"independent": NORMALIZED["normalized"]}
        for bands in BANDS[TASK.value]:
            choices[f"banded, b = {bands}"] = {"noise": "banded", "bands": bands} | NORMALIZED[
                "normalized"
            ]
    table(make[TASK.value](), choices)


if __name__ == "__main__":
    app.run(main)
