"""A character model trained with differential privacy on names: one name is one record."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dpx import ngram
from dpx.data import surnames
from dpx.nn.transformer import Transformer, generate
from experiments import training
from experiments.keys import Keys, open_keys

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
    for order in (*config.ngrams, config.prior.order):
        if order not in (1, 2, 3, 4, 5):
            raise ValueError(
                f"config.ngrams and config.prior.order must be from 1 to 5, not {order}"
            )
    if not 0 <= config.prior.share < 1:
        raise ValueError(f"config.prior.share={config.prior.share} must be in [0, 1)")
    training.warn_about_delta(config.delta, len(train))


def plan(config) -> dict:
    """The privacy parameters of a run, without training."""
    train, _ = _load(config)
    prior = _prior(config, train, jax.random.key(0))
    beside = None if prior is None else prior.guarantee
    return training.plan(config.train, config.epsilon, config.delta, len(train), beside=beside)


def run(config, workdir: Path) -> dict:
    """Trains the private transformer and its baselines, and measures nats per character."""
    train, test = _load(config)
    keys = open_keys(config, workdir)
    # A key of its own for each release: noise that two of them share would cancel.
    training_key, prior_key, *ngram_keys = jax.random.split(keys.noise, 2 + len(config.ngrams))
    metrics, releases = {}, {}
    for order, key in zip(config.ngrams, ngram_keys, strict=True):
        model = _fit_ngram(key, train, order, config.epsilon, config.delta)
        label = f"dp_{order}gram"
        releases[label] = model.guarantee
        metrics[f"{label}/nats_per_character"] = -model.log_prob(test.tokens)[test.mask].mean()

    prior = _prior(config, train, prior_key)
    private, guarantee = training.make_private(
        config.train,
        config.epsilon,
        config.delta,
        len(train),
        UNIT,
        ASSUMPTIONS,
        beside=None if prior is None else prior.guarantee,
    )
    graph, params = _build(config)
    fit = functools.partial(
        training.train,
        data=(_inputs(train.tokens), train.tokens, train.mask),
        keys=Keys(training_key, keys.sampling),
        dropout_seed=config.seed,
        workdir=workdir,
    )
    table = None if prior is None else np.log(prior.probabilities).astype(np.float32)
    trained = fit(
        functools.partial(_loss, graph, table),
        params,
        config=config.train,
        label="dp_transformer",
        privacy=private,
    )
    releases["dp_transformer"] = guarantee
    content = {"params": trained, "prior": np.zeros(0) if table is None else table}
    training.save_model(workdir, content)
    metrics["dp_transformer/nats_per_character"] = _evaluate(graph, table, trained, test)
    if config.non_private.steps:
        public = fit(
            functools.partial(_loss, graph, None),
            params,
            config=training.without_privacy(config),
            label="transformer",
            privacy=None,
        )
        metrics["transformer/nats_per_character"] = _evaluate(graph, None, public, test)
    samples = PrivateNames(graph, table, trained).sample(jax.random.key(config.seed), 10)
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
    contexts = surnames.VOCAB_SIZE ** (config.prior.order - 1)
    shape = (contexts, surnames.VOCAB_SIZE) if config.prior.share else (0,)
    template = {"params": params, "prior": np.zeros(shape, np.float32)}
    saved = training.load_model(workdir, template)
    table = np.asarray(saved["prior"]) if config.prior.share else None
    return PrivateNames(graph, table, saved["params"])


class PrivateNames:
    """The private transformer: samples names and scores them."""

    def __init__(self, graph, table, params):
        self._logits = jax.jit(lambda inputs: _logits(graph, table, params, inputs, None))

    def sample(self, key: jax.Array, count: int) -> list[str]:
        """`count` names drawn from the model."""
        length = surnames.MAX_LETTERS + 1
        drawn = generate(self._logits, key, count, length, start=surnames.END)
        return surnames.decode(np.asarray(drawn))

    def log_prob(self, names: list[str]) -> np.ndarray:
        """(n,) log-probability of each name, its end included, in nats."""
        encoded = surnames.encode(names)
        logits = self._logits(jnp.asarray(_inputs(encoded.tokens)))
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


def _fit_ngram(key, names: surnames.Names, order: int, epsilon: float, delta: float) -> ngram.NGram:
    model = ngram.fit(
        key,
        names.tokens,
        names.mask,
        order=order,
        vocab_size=surnames.VOCAB_SIZE,
        start=surnames.END,
        epsilon=epsilon,
        delta=delta,
        unit=UNIT,
    )
    return model._replace(guarantee=model.guarantee.assuming(ASSUMPTIONS[1]))


def _prior(config, names: surnames.Names, key) -> ngram.NGram | None:
    """The n-gram model from which the private transformer starts, for a share of its budget."""
    if config.prior.share == 0:
        return None
    epsilon = config.prior.share * config.epsilon
    return _fit_ngram(key, names, config.prior.order, epsilon, config.delta)


def _logits(graph, table, params, inputs, key):
    """The transformer's logits, added to the prior's log-probabilities where there is a prior."""
    logits = nnx.merge(graph, params)(inputs, dropout_key=key)
    if table is None:
        return logits
    context = jnp.zeros_like(inputs)
    length, reach = inputs.shape[-1], round(np.log(len(table)) / np.log(surnames.VOCAB_SIZE))
    for back in reversed(range(reach)):
        before = [(0, 0)] * (inputs.ndim - 1) + [(back, 0)]
        shifted = jnp.pad(inputs, before, constant_values=surnames.END)[..., :length]
        context = context * surnames.VOCAB_SIZE + shifted
    return logits + jnp.asarray(table)[context]


def _loss(graph, table, params, inputs, targets, mask, key):
    """Nats of one name over the width, not its length, so that a character counts the same in all."""
    logits = _logits(graph, table, params, inputs, key)
    return -jnp.where(mask, _picked_log_probs(logits, targets), 0).sum() / len(targets)


def _evaluate(graph, table, params, names: surnames.Names) -> float:
    """Nats per character, ends of names included."""

    @jax.jit
    def total(inputs, targets, mask):
        picked = _picked_log_probs(_logits(graph, table, params, inputs, None), targets)
        return -jnp.where(mask, picked, 0).sum()

    inputs = _inputs(names.tokens)
    pieces = range(0, len(names), 1000)
    nats = [total(*(a[i : i + 1000] for a in (inputs, names.tokens, names.mask))) for i in pieces]
    return float(np.sum(nats) / names.mask.sum())
