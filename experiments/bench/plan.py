"""The plan that nobody tuned beside the best of a grid, at equal records, epochs and ε.

    python -m experiments.bench.plan
    python -m experiments.bench.plan --tasks=digits --seeds=1 --tiny

`dpx.training.plan` chooses batch, steps and sampling, gradients are normalized, and the learning rate is
found while training (`dpx.training.planning.untuned`). The grid tries batches, steps (all epochs, or half of
them), learning rates of Adam, and clipping or normalizing. Which of its points is best is chosen by the
held-out records themselves, which no private training could afford. All points are trained at once by a loop
that is written out here. It draws batches by dpx, and noise from a public seed: it measures, and releases
nothing.

Tasks: `digits`, a linear model of scikit-learn's 1,797 images (1,500 to train, accuracy in %); `surnames`, a
network that reads the three characters before, on 2,000 surnames (nats a character of 1,000 others);
`histories`, a factor model of the next of 100 items, of 2,000 users who are made up (NDCG@10 in %); and, if
asked for, `text`, a transformer of one block on 2,000 windows of TinyShakespeare, `tuning`, that transformer
once more, trained on other windows without privacy, on 2,000 surnames (nats a character of 1,000 others), and
`sentences`, the linear head of the config `classify` on features of MiniLM (accuracy in %).
"""

import functools
import itertools
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
from jax.flatten_util import ravel_pytree

import dpx
from configs import classify
from dpx.clipping.groups import NORMALIZE_GAMMA
from dpx.data import shakespeare, surnames, synthetic_histories
from dpx.nn.transformer import Transformer
from dpx.training import Poisson, planning
from experiments.dp_transformer import classifier, labelled_texts

TASKS = flags.DEFINE_list("tasks", ["digits", "surnames", "histories"], "what is learned")
SEEDS = flags.DEFINE_integer("seeds", 3, "trainings of each point", lower_bound=1)
FIRST_SEED = flags.DEFINE_integer("first_seed", 0, "the others follow it", lower_bound=0)
EPOCHS = flags.DEFINE_float("epochs", 10.0, "how often each record is used", lower_bound=1.0)
TINY = flags.DEFINE_bool("tiny", False, "one ε, two points and few records, to try that it runs")
PLAYS = flags.DEFINE_string("plays", None, "TinyShakespeare as a file; it is downloaded without")
MODEL = flags.DEFINE_string("model", None, "folder of MiniLM for sentences; its wheel by default")
EPSILONS = (1.0, 3.0, 8.0)
PUBLIC_STEPS = 2000  # of 64 windows, before tuning
HELD = 2**27  # numbers in the per-example gradients of the trainings that run at a time
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Task(NamedTuple):
    """A loss of one record, initial parameters, the records, and a metric: larger is better by `sign`.

    The grid tries Adam's learning `rates`.
    """

    loss: Callable[..., jax.Array]
    params: Any
    data: tuple
    metric: Callable[[Any], jax.Array]
    sign: int
    rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)


def digits() -> Task:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y = np.asarray(x / 16, "f4"), np.asarray(y)
    return Task(
        lambda weights, x, y: cross_entropy(x @ weights, y),
        jnp.zeros((64, 10)),
        (x[:1500], y[:1500]),
        lambda weights: 100 * jnp.mean(jnp.argmax(x[1500:] @ weights, 1) == y[1500:]),
        1,
    )


def _surnames() -> tuple[np.ndarray, np.ndarray]:
    """Tokens and mask of 3,000 surnames."""
    texts = surnames.encode(surnames.load_surnames())
    order = np.random.default_rng(0).permutation(len(texts))[:3000]
    return texts.tokens[order], texts.mask[order]


def names() -> Task:
    tokens, there = _surnames()
    size, dim, hidden = surnames.VOCAB_SIZE, 8, 32
    normal = np.random.default_rng(1).normal
    params = {
        "embed": jnp.float32(normal(size=(3, size, dim)) / math.sqrt(3 * dim)),
        "in": jnp.float32(normal(size=(dim, hidden)) / math.sqrt(dim)),
        "out": jnp.zeros((hidden, size)),
        "bias": jnp.zeros(size),
    }

    def losses(params, tokens, there):
        before = jnp.pad(tokens, (3, 0), constant_values=surnames.END)
        read = sum(params["embed"][i][before[2 - i : len(before) - 1 - i]] for i in range(3))
        scores = jnp.tanh(read @ params["in"]) @ params["out"] + params["bias"]
        return jnp.where(there, cross_entropy(scores, tokens), 0)

    held = tokens[2000:], there[2000:]
    return Task(
        lambda params, *name: losses(params, *name).sum() / tokens.shape[1],
        params,
        (tokens[:2000], there[:2000]),
        lambda params: jax.vmap(losses, (None, 0, 0))(params, *held).sum() / held[1].sum(),
        -1,
    )


def text() -> Task:
    windows = _windows()
    return _characters(_transformer(), windows, np.ones(windows.shape, bool))


def tuning() -> Task:
    graph, params = _transformer()
    rows = jnp.asarray(_windows()[3000:])
    moves = optax.adam(optax.linear_schedule(5e-3, 0.0, PUBLIC_STEPS))

    @jax.jit
    def read(params):
        def step(state, number):
            chosen = jax.random.randint(jax.random.key(number), (64,), 0, len(rows))

            def loss(params):
                return jax.vmap(_losses, (None, None, 0))(graph, params, rows[chosen]).mean()

            updates, inner = moves.update(jax.grad(loss)(state[0]), state[1])
            return (optax.apply_updates(state[0], updates), inner), None

        return jax.lax.scan(step, (params, moves.init(params)), jnp.arange(PUBLIC_STEPS))[0][0]

    tokens, there = _surnames()
    # What ends a name ends a line.
    letters = np.array([shakespeare.ALPHABET.index(x) for x in surnames.ALPHABET + "\n"])
    return _characters((graph, read(params)), letters[tokens], there)


def _windows() -> np.ndarray:
    windows = shakespeare.encode(shakespeare.load_shakespeare(PLAYS.value), 32).tokens
    return np.random.default_rng(0).permutation(windows)


def _transformer() -> tuple[Any, Any]:
    shape: dict[str, Any] = {"dim": 32, "num_heads": 2, "num_blocks": 1}
    return nnx.split(Transformer(shakespeare.VOCAB_SIZE, 32, **shape, rngs=nnx.Rngs(0)))


def _losses(graph, params, tokens):
    before = jnp.pad(tokens[:-1], (1, 0), constant_values=shakespeare.START)
    return cross_entropy(nnx.merge(graph, params)(before), tokens)


def _characters(model: tuple[Any, Any], tokens: np.ndarray, there: np.ndarray) -> Task:
    """The characters of 2,000 records, and of the 1,000 that follow them."""
    graph, params = model
    held, counted = tokens[2000:3000], there[2000:3000]

    def metric(params):
        found = jax.vmap(_losses, (None, None, 0))(graph, params, held)
        return jnp.where(counted, found, 0).sum() / counted.sum()

    return Task(
        lambda params, own, there: jnp.where(there, _losses(graph, params, own), 0).mean(),
        params,
        (tokens[:2000], there[:2000]),
        metric,
        -1,
        (0.001, 0.003, 0.01, 0.03),
    )


def histories() -> Task:
    items = np.stack(synthetic_histories(3000, 12, 100).items)
    params = {
        "from": jnp.float32(np.random.default_rng(1).normal(size=(100, 16)) / 4),
        "to": jnp.zeros((16, 100)),
        "bias": jnp.zeros(100),
    }

    def scores(params, items):
        return params["from"][items] @ params["to"] + params["bias"]

    def ndcg(params):
        found, target = scores(params, items[2000:, -2]), items[2000:, -1]
        own = jnp.take_along_axis(found, target[:, None], 1)
        rank = (found > own).sum(1)
        return 100 * jnp.where(rank < 10, 1 / jnp.log2(rank + 2), 0).mean()

    return Task(
        lambda params, items: cross_entropy(scores(params, items[:-2]), items[1:-1]).mean(),
        params,
        (items[:2000],),
        ndcg,
        1,
    )


def sentences() -> Task:
    config: Any = classify.get_config()
    config.model.update({"path": MODEL.value, "read_layers": 1})
    train, test = labelled_texts.load(config)
    model = classifier.build(config)
    x, held = (
        classifier.frozen_features(model, *texts.tokens(model.tokenizer, model.length))
        for texts in (train, test)
    )

    def logits(head, x):
        return x @ head["weights"] + head["bias"]

    return Task(
        lambda head, x, y: cross_entropy(logits(head, x), y),
        model.trained,
        (x, train.labels),
        lambda head: 100 * jnp.mean(jnp.argmax(logits(head, held), 1) == test.labels),
        1,
    )


TASKS_BY_NAME = {
    "digits": digits,
    "surnames": names,
    "histories": histories,
    "text": text,
    "tuning": tuning,
    "sentences": sentences,
}


class Point(NamedTuple):
    """A way to train: a batch, steps and sampling, and what is not of one shape: how fast, and the norm."""

    batch: float
    steps: int
    rate: float
    normalize: bool

    def __str__(self) -> str:
        norm = "normalized" if self.normalize else "clipped"
        return f"{self.steps:,} × {self.batch:.4g}, rate {self.rate:g}, {norm}"


def adam(steps: int, rate: Any) -> optax.GradientTransformation:
    """Adam whose learning rate falls to zero over all steps."""
    return optax.adam(optax.linear_schedule(rate, 0.0, steps))


def untuned(steps: int, rate: Any) -> optax.GradientTransformation:
    """What `fit` takes: there is no rate to be given."""
    del rate
    return planning.untuned(steps)


@functools.partial(jax.jit, static_argnames=("task", "optimizer"))
def trained(task, start, data, batches, batch, optimizer, settings, noises, normalize, key):
    """The metric (n,) of n trainings on the same batches, by their optimizers' settings and noise."""
    flat, rebuild = ravel_pytree(start)

    def one(setting, noise, normalize):
        moves = optimizer(len(batches[0]), setting)

        def step(state, now):
            number, indices, mask = now
            params, inner = state
            rows = jax.tree.map(lambda x: x[indices], data)
            of_one = lambda flat, *row: task.loss(rebuild(flat), *row)  # noqa: E731
            grads = jax.vmap(jax.grad(of_one), (None, *(0 for _ in rows)))(params, *rows)
            norms = jnp.linalg.norm(grads, axis=1)
            lengths = jnp.where(normalize, norms + NORMALIZE_GAMMA, jnp.maximum(norms, 1))
            total = (mask / lengths) @ grads
            total += noise * jax.random.normal(jax.random.fold_in(key, number), total.shape)
            updates, inner = moves.update(total / batch, inner, params)
            return (params + updates, inner), None

        state = flat, moves.init(flat)
        (params, _), _ = jax.lax.scan(step, state, (jnp.arange(len(batches[0])), *batches))
        return task.metric(rebuild(params))

    size = batches[0].shape[1] * len(flat)
    each = settings, noises, normalize
    return jax.lax.map(lambda own: one(*own), each, batch_size=max(1, HELD // size))


def measured(
    task: Task,
    sampling: Any,
    batch: float,
    steps: int,
    optimizer: Callable[[int, Any], optax.GradientTransformation],
    settings: Any,
    noises: Any,
    normalize: Any,
) -> np.ndarray:
    """The metric (seeds, n) of n trainings that share batches, and so their size and sampling."""
    records = len(task.data[0])
    shared = {"sampling_probability": batch / records, "steps": steps}
    seeds, drawn = range(FIRST_SEED.value, FIRST_SEED.value + SEEDS.value), []
    for seed in seeds:
        secret = np.random.SeedSequence([seed, 2**40])
        drawn.append(list(sampling.batches(records, **shared, seed=secret)))
    # All seeds have one shape, so that they are compiled once.
    size = max(len(mask) for pairs in drawn for _, mask in pairs)
    bare, found = task._replace(data=(), params=()), []
    of_each = settings, jnp.asarray(noises), jnp.asarray(normalize)
    for seed, pairs in zip(seeds, drawn, strict=True):
        batches = [np.zeros((steps, size), dtype) for dtype in (np.int32, bool)]
        for step, pair in enumerate(pairs):
            for whole, part in zip(batches, pair, strict=True):
                whole[step, : len(part)] = part
        about = task.params, task.data, tuple(batches), batch, optimizer
        found.append(trained(bare, *about, *of_each, jax.random.key(seed)))
    return np.array(found)


def grid(records: int, rates: tuple[float, ...]) -> list[list[Point]]:
    """The points, those of one shape together."""
    batches = [records] if TINY.value else [records, records / 4, records / 16]
    rates = rates[:2] if TINY.value else rates
    return [
        [Point(batch, round(share * EPOCHS.value * records / batch), *choice) for choice in both]
        for batch in batches
        for share in ((1,) if TINY.value else (1, 0.5))
        for both in [list(itertools.product(rates, (True, False)))]
    ]


def main(argv: list[str]) -> None:
    del argv
    epsilons = EPSILONS[:1] if TINY.value else EPSILONS
    print(f"{EPOCHS.value:g} epochs, {SEEDS.value} seeds\n")
    print("| task | ε | the plan | metric | best of a grid | metric | behind by |")
    print("|---|---|---|---|---|---|---|")
    for name in TASKS.value:
        task = TASKS_BY_NAME[name]()
        if TINY.value:
            task = task._replace(data=jax.tree.map(lambda x: x[:60], task.data))
        records, began = len(task.data[0]), time.process_time()
        delta = 0.1 / records
        rows: dict[float, list[tuple[float, Point]]] = {epsilon: [] for epsilon in epsilons}
        for points in grid(records, task.rates):
            multipliers = [
                dpx.calibrate_dpsgd(
                    epsilon,
                    delta,
                    sampling_probability=points[0].batch / records,
                    steps=points[0].steps,
                )
                for epsilon in epsilons
            ]
            rates, normalize = (jnp.array([p[i] for p in points] * len(epsilons)) for i in (2, 3))
            shape = points[0].batch, points[0].steps
            noises = np.repeat(multipliers, len(points))
            metrics = measured(task, Poisson(), *shape, adam, rates, noises, normalize).mean(0)
            for epsilon, values in zip(epsilons, metrics.reshape(-1, len(points)), strict=True):
                rows[epsilon] += zip(values.tolist(), points, strict=True)
        for epsilon in epsilons:
            chosen = dpx.training.plan(records, epsilon=epsilon, delta=delta, epochs=EPOCHS.value)
            shape, noise = (chosen.batch_size, chosen.steps), [chosen.noise_multiplier]
            nothing = jnp.zeros(1)
            metric = measured(task, chosen.sampling, *shape, untuned, nothing, noise, [True]).mean()
            best, at = max(rows[epsilon], key=lambda row: task.sign * row[0])
            behind = 100 * task.sign * (best - metric) / best
            print(
                f"| {name} | {epsilon:g} | {chosen.steps:,} × {chosen.batch_size:g} | {metric:.4g} | {at} | "
                f"{best:.4g} | {behind:.1f} % |",
                flush=True,
            )
        print(
            f"<!-- {name}: {len(rows[epsilons[0]])} points, {time.process_time() - began:.0f} s -->"
        )


if __name__ == "__main__":
    app.run(main)
