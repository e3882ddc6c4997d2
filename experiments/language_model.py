"""A character model trained with differential privacy on names: one name is one record."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from dpx import ngram
from dpx.data import surnames
from dpx.nn.transformer import Transformer, generate
from experiments import training
from experiments.keys import open_keys

UNIT = "name"
ASSUMPTIONS = (
    "the number of names, which set the sampling probability, the batch size and δ, is public",
    "the alphabet and the longest admissible name are public",
)
NOT_COVERED = [
    "training loss and realised batch sizes (metrics.jsonl, the progress line)",
    "the non-private transformer's row",
    "the test metrics, which are computed on held-out names",
]


def validate(config) -> None:
    """Raises ValueError or FileNotFoundError for a value or a file that cannot be used."""
    train, _ = _load(config)
    training.check(config.train, len(train))
    for order in config.ngrams:
        if order not in (1, 2, 3, 4, 5):
            raise ValueError(f"config.ngrams={config.ngrams} must hold orders from 1 to 5")
    training.warn_about_delta(config.delta, len(train))


def plan(config) -> dict:
    """The privacy parameters of a run, without training."""
    train, _ = _load(config)
    return training.plan(config.train, config.epsilon, config.delta, len(train))


def run(config, workdir: Path) -> dict:
    """Trains the private transformer and its baselines, and measures nats per character."""
    train, test = _load(config)
    keys = open_keys(config, workdir)
    metrics, releases = {}, {}
    for order in config.ngrams:
        model = ngram.fit(
            jax.random.fold_in(keys.noise, order),
            train.tokens,
            train.mask,
            order=order,
            vocab_size=surnames.VOCAB_SIZE,
            start=surnames.END,
            epsilon=config.epsilon,
            delta=config.delta,
            unit=UNIT,
        )
        label = f"dp_{order}gram"
        releases[label] = model.guarantee.assuming(*ASSUMPTIONS[1:])
        metrics[f"{label}/nats_per_character"] = -model.log_prob(test.tokens)[test.mask].mean()

    graph, params = _build(config)
    loss_fn = functools.partial(_loss, graph)
    fit = functools.partial(
        training.train,
        loss_fn,
        params,
        (_inputs(train.tokens), train.tokens, train.mask),
        config.train,
        keys=keys,
        dropout_seed=config.seed,
        workdir=workdir,
    )
    privacy, guarantee = training.make_private(
        config.train, config.epsilon, config.delta, len(train), UNIT, ASSUMPTIONS
    )
    private = fit(label="dp_transformer", steps=config.train.steps, privacy=privacy)
    releases["dp_transformer"] = guarantee
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(workdir.absolute() / "model", private, force=True)
    metrics["dp_transformer/nats_per_character"] = _evaluate(graph, private, test)
    public = fit(label="transformer", steps=config.non_private_steps, privacy=None)
    metrics["transformer/nats_per_character"] = _evaluate(graph, public, test)
    samples = PrivateNames(graph, private).sample(jax.random.key(config.seed), 10)
    return {
        "metrics": metrics,
        "privacy": guarantee,
        "releases": releases,
        "not_covered": NOT_COVERED,
        "notes": "Ten names sampled from dp_transformer: " + ", ".join(samples),
    }


def load(config, workdir: Path) -> "PrivateNames":
    """The private model that a run left."""
    graph, params = _build(config)
    with ocp.StandardCheckpointer() as checkpointer:
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, params)
        return PrivateNames(
            graph, checkpointer.restore(Path(workdir).absolute() / "model", template)
        )


class PrivateNames:
    """The private transformer: samples names and scores them."""

    def __init__(self, graph, params):
        self._model = nnx.merge(graph, params)

    def sample(self, key: jax.Array, count: int) -> list[str]:
        """`count` names drawn from the model."""
        length = surnames.MAX_LETTERS + 1
        drawn = generate(self._model, key, count, length, start=surnames.END)
        return surnames.decode(np.asarray(drawn))

    def log_prob(self, names: list[str]) -> np.ndarray:
        """(n,) log-probability of each name, its end included, in nats."""
        encoded = surnames.encode(names)
        logits = self._model(jnp.asarray(_inputs(encoded.tokens)))
        picked = _picked_log_probs(logits, encoded.tokens)
        return np.asarray(jnp.where(encoded.mask, picked, 0).sum(axis=1))


@functools.lru_cache(maxsize=4)
def _names(path: str | None):
    return surnames.encode(surnames.load_surnames(path))


def _load(config):
    names = _names(config.data.path)
    train, test = surnames.split_names(names, config.data.held_out, seed=config.data.split_seed)
    if config.data.limit:
        train = surnames.Names(train.tokens[: config.data.limit])
    return train, test


def _build(config):
    model = Transformer(
        surnames.VOCAB_SIZE,
        surnames.MAX_LETTERS + 1,
        **config.model,
        rngs=nnx.Rngs(config.seed),
    )
    return nnx.split(model)


def _inputs(tokens: np.ndarray) -> np.ndarray:
    """Each token's predecessor."""
    first = np.full((len(tokens), 1), surnames.END, np.int32)
    return np.concatenate([first, tokens[:, :-1]], axis=1)


def _picked_log_probs(logits, targets):
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]


def _loss(graph, params, inputs, targets, mask, key):
    """Nats of one name, over the mean length so that the clipping norm has the same meaning for all."""
    logits = nnx.merge(graph, params)(inputs, dropout_key=key)
    return -jnp.where(mask, _picked_log_probs(logits, targets), 0).sum() / len(targets)


def _evaluate(graph, params, names: surnames.Names) -> float:
    """Nats per character, ends of names included."""

    @jax.jit
    def total(inputs, targets, mask):
        picked = _picked_log_probs(nnx.merge(graph, params)(inputs), targets)
        return -jnp.where(mask, picked, 0).sum()

    inputs = _inputs(names.tokens)
    pieces = range(0, len(names), 1000)
    nats = [total(*(a[i : i + 1000] for a in (inputs, names.tokens, names.mask))) for i in pieces]
    return float(np.sum(nats) / names.mask.sum())
