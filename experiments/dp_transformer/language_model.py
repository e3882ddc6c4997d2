"""A character model trained with differential privacy: one name, or one window of a text, is one record."""

import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dpx import ngram
from dpx.data import Alphabet, Histories, Texts, shakespeare, surnames
from dpx.data import text as own
from dpx.launch.experiment import Outcome, measures
from dpx.nn.transformer import generate
from dpx.reattention import ParameterNoise
from dpx.training.keys import Keys, open_keys
from experiments.dp_transformer import models, training

NOT_COVERED = [
    "training loss and realised batch sizes (metrics.jsonl, the progress line)",
    "the row of the model without privacy",
    "the test metrics, which are computed on held-out records, and train metrics where there are any",
    "choices of hyper-parameters, the prior's share and order among them, made on training records",
]


class Corpus(NamedTuple):
    """Records to train and to test on, and what is public: how they are written, their length and name."""

    train: Texts
    test: Texts
    public: "Public"

    @property
    def vocab_size(self) -> int:
        return self.public.vocab_size

    @property
    def start(self) -> int:
        return self.public.start

    @property
    def length(self) -> int:
        return self.public.length

    @property
    def unit(self) -> str:
        return self.public.unit

    @property
    def assumptions(self) -> tuple[str, str]:
        """On which the guarantees rest."""
        return (
            f"the number of {self.unit}s, which set the split, the sampling probability, the batch size and "
            "δ, is public",
            f"the alphabet, what becomes of characters outside it, and the longest admissible {self.unit} "
            "are public",
        )

    @property
    def histories(self) -> Histories:
        """The training records as sets of tokens."""
        pairs = zip(self.train.tokens, self.train.mask, strict=True)
        return Histories(tuple(tokens[mask] for tokens, mask in pairs), self.vocab_size)


class Public(NamedTuple):
    """What a config says about records without a look at them: all that a saved model needs.

    Records that end have one token more than the alphabet, which ends them and stands before their first
    character. Windows do not end, and `start` stands before them.
    """

    alphabet: Alphabet
    length: int  # tokens of a record, its end included
    unit: str
    end: int | None
    start: int

    @property
    def vocab_size(self) -> int:
        return self.alphabet.size + (self.end is not None)

    def encode(self, texts: list[str]) -> Texts:
        """Texts as records; ValueError for one that is too long, or no window of the right length."""
        if self.end is None:
            wrong = sorted({len(text) for text in texts if len(text) != self.length})
            if wrong:
                raise ValueError(f"windows of {wrong} characters: pass {self.length} in each")
            return Texts(np.stack([self.alphabet.encode(text) for text in texts]), None)
        rows = [(repr(text), text) for text in texts]
        for place, text in rows:
            if len(self.alphabet.encode(text, place)) >= self.length:
                raise ValueError(f"{place[:60]} is too long: pass at most {self.length - 1} tokens")
        return own.encode(rows, self.alphabet, self.length - 1)

    def decode(self, tokens: np.ndarray) -> list[str]:
        """The texts of records, each up to its end."""
        if self.end is None:
            return [self.alphabet.decode(row) for row in tokens]
        rows = (row[: self.length - 1] for row in tokens)
        return [self.alphabet.decode(row[np.cumsum(row == self.end) == 0]) for row in rows]


def validate(config) -> None:
    """Raises ValueError or FileNotFoundError for a value or a file that cannot be used."""
    if config.data.kind not in ("surnames", "shakespeare", "text"):
        raise ValueError(
            f"config.data.kind={config.data.kind!r} must be 'surnames', 'shakespeare' or 'text'"
        )
    if config.data.kind == "text":
        _check_text(config.data)
    if config.data.kind == "shakespeare" and "generated" not in config.data:
        raise ValueError(
            "config.data.kind='shakespeare' needs the settings of configs/shakespeare.py"
        )
    for name in ("limit", "split_seed"):
        if config.data.get(name, 0) < 0:
            raise ValueError(f"config.data.{name}={config.data[name]} must be at least 0")
    corpus = _load(config)
    training.check_both(config, len(corpus.train))
    models.check(config, corpus.vocab_size)
    for order in (*config.ngrams, config.prior.order):
        if order not in (1, 2, 3, 4, 5):
            raise ValueError(
                f"config.ngrams and config.prior.order must be from 1 to 5, not {order}"
            )
    if not 0 <= config.prior.budget_fraction < 1:
        raise ValueError(
            f"config.prior.budget_fraction={config.prior.budget_fraction} must be in [0, 1)"
        )
    training.warn_about_delta(config.delta, len(corpus.train))


def _check_text(data) -> None:
    if "record" not in data:
        raise ValueError("config.data.kind='text' needs the settings of configs/text.py")
    if data.path is None and not data.generated:
        raise ValueError("config.data.path is missing: give a .txt, .csv, .tsv, .jsonl or folder")
    if data.record not in own.RECORDS:
        raise ValueError(f"config.data.record={data.record!r} must be one of {own.RECORDS}")
    if data.user is not None and data.record == "window":
        raise ValueError("config.data.user makes one author a record: leave out data.record=window")
    if data.length < 1:
        raise ValueError(f"config.data.length={data.length} must be at least 1")
    if not 0 < data.held_out < 1:
        raise ValueError(f"config.data.held_out={data.held_out} must be a share in (0, 1)")
    own.alphabet(data.alphabet, data.outside)


def plan(config) -> dict:
    """The privacy parameters of a run, without training."""
    corpus = _load(config)
    prior = _prior(config, corpus, jax.random.key(0))
    beside = None if prior is None else prior.guarantee
    planned = training.plan(
        config.train, config.epsilon, config.delta, len(corpus.train), beside=beside
    )
    about = (corpus.histories, corpus.length, corpus.unit, corpus.assumptions)
    return planned | models.plan(config, *about, prior=beside)


def run(config, workdir: Path) -> Outcome:
    """Trains the private models and their baselines, and measures nats per character."""
    corpus = _load(config)
    train = corpus.train
    synthetic = _is_generated(config)
    keys = open_keys(config, workdir, synthetic=synthetic, data=(train.tokens,))
    # A key of its own for each release: noise that two of them share would cancel.
    training_key, prior_key, presence_key, second_key, plain_key, *ngram_keys = jax.random.split(
        keys.noise, 5 + len(config.ngrams)
    )
    metrics, releases = {}, {}
    for order, key in zip(config.ngrams, ngram_keys, strict=True):
        model = _fit_ngram(key, corpus, order, config.epsilon, config.delta)
        label = f"dp_{order}gram"
        releases[label] = model.guarantee
        for name, records in _measured(config, corpus):
            log_probs = model.log_prob(records.tokens)[records.mask]
            metrics[f"{label}/{name}nats_per_character"] = -log_probs.mean()

    prior = _prior(config, corpus, prior_key)
    once = {} if prior is None else {"prior": prior.guarantee}
    table = None if prior is None else np.log(prior.probabilities).astype(np.float32)
    graph, params = _build(config, corpus)
    fit = functools.partial(
        training.train,
        data=(_inputs(corpus, train.tokens), train.tokens, train.mask),
        workdir=workdir,
    )

    def measure(label, model):
        for name, records in _measured(config, corpus):
            metrics[f"{label}/{name}nats_per_character"] = model.evaluate(records)

    rows = models.private_rows(config)
    histories = corpus.histories
    # Rows that are all released share neither noise nor samples.
    *samplings, plain_sampling = (keys.sampling, *keys.sampling.spawn(2))
    for label, key, sampling in zip(rows, (training_key, second_key), samplings, strict=False):
        calibrated = models.calibrate(
            config,
            histories,
            corpus.length,
            corpus.unit,
            corpus.assumptions,
            prior=None if prior is None else prior.guarantee,
            correction_key=presence_key if label == "dp_reattention" else None,
        )
        trained = fit(
            functools.partial(_loss, corpus, graph, table, calibrated.noise),
            params,
            config=config.train,
            keys=Keys(key, sampling),
            label=label,
            privacy=calibrated.privacy,
        )
        releases[label], once[label] = calibrated.guarantee, calibrated.alone
        private = PrivateText(corpus.public, graph, table, calibrated.noise, trained)
        measure(label, private)
        more = {} if table is None else {"prior": table}
        models.save(workdir, trained, calibrated.noise, **more)
    if config.non_private.steps:
        plain_table = _exact_prior(config, corpus)
        trained = fit(
            functools.partial(_loss, corpus, graph, plain_table, None),
            params,
            config=training.without_privacy(config),
            keys=Keys(plain_key, plain_sampling),
            label=config.model.kind,
            privacy=None,
        )
        measure(config.model.kind, PrivateText(corpus.public, graph, plain_table, None, trained))
    samples = private.sample(
        jax.random.key(config.seed),
        10 if corpus.unit == "name" else 3,
    )
    count = {10: "Ten", 3: "Three"}[len(samples)]
    return Outcome(
        measures=measures(metrics),
        headline=releases[rows[0]],
        releases=releases,
        composed=releases | once,
        synthetic=synthetic,
        not_covered=NOT_COVERED,
        notes=f"{count} {corpus.unit}s sampled from {rows[-1]}: " + ", ".join(samples),
    )


def load(config, workdir: Path) -> "PrivateText":
    """The private model that a run left: with Re-Attention, if the config has it. Reads no private data."""
    corpus = _public(config)
    graph, params = _build(config, corpus)
    more = {}
    if config.prior.budget_fraction:
        shape = (corpus.vocab_size ** (config.prior.order - 1), corpus.vocab_size)
        more = {"prior": np.zeros(shape, np.float32)}
    params, noise_std, *saved = models.load(config, workdir, params, corpus.vocab_size, **more)
    table = np.asarray(saved[0]) if saved else None
    return PrivateText(corpus, graph, table, noise_std, params)


class PrivateText:
    """A trained character model: samples records and scores them."""

    def __init__(self, corpus: Public, graph, table, noise_std: ParameterNoise | None, params):
        self._corpus = corpus
        self._logits = jax.jit(
            lambda inputs: _logits(corpus, graph, table, noise_std, params, inputs, None)
        )

    def sample(self, key: jax.Array, count: int) -> list[str]:
        """`count` records drawn from the model."""
        corpus = self._corpus
        drawn = generate(self._logits, key, count, corpus.length, start=corpus.start)
        return corpus.decode(np.asarray(drawn))

    def log_prob(self, texts: list[str]) -> np.ndarray:
        """(n,) log-probability of each text, with its end where records end, in nats.

        Raises:
          ValueError: for a text that is too long, a window that is not as long as those the model was
            trained on, or a character outside a strict alphabet.
        """
        records = self._corpus.encode(texts)
        picked = self._picked(records)
        return np.asarray(jnp.where(records.mask, picked, 0).sum(axis=1))

    def evaluate(self, records) -> float:
        """Nats per character, ends of names included."""
        pieces = range(0, len(records), 500)
        parts = [records.of(records.tokens[start : start + 500]) for start in pieces]
        nats = [jnp.where(part.mask, self._picked(part), 0).sum() for part in parts]
        return -float(np.sum(nats) / records.mask.sum())

    def _picked(self, records) -> jax.Array:
        logits = self._logits(jnp.asarray(_inputs(self._corpus, records.tokens)))
        return _picked_log_probs(logits, records.tokens)


@functools.lru_cache(maxsize=4)
def _text(path: str | None) -> str:
    return shakespeare.load_shakespeare(path)


@functools.lru_cache(maxsize=4)
def _names(path: str | None):
    return surnames.encode(surnames.load_surnames(path))


def _is_generated(config) -> bool:
    return config.data.path is None and bool(config.data.get("generated"))


def _public(config) -> Public:
    """What the config says about its records; reads no file."""
    data = config.data
    if data.kind == "surnames":
        end, length = surnames.END, surnames.MAX_LETTERS + 1
        return Public(Alphabet(surnames.ALPHABET), length, "name", end, end)
    if data.kind == "shakespeare":
        known = Alphabet(shakespeare.ALPHABET)
        return Public(known, data.length, "window", None, shakespeare.START)
    known = own.alphabet(data.alphabet, data.outside)
    unit = data.record if data.user is None else "user"
    if unit == "window":
        return Public(known, data.length, unit, None, 0)
    return Public(known, data.length + 1, unit, known.size, known.size)


def _load(config) -> Corpus:
    data, public = config.data, _public(config)
    if data.kind == "surnames":
        train, test = surnames.split_names(_names(data.path), data.held_out, seed=data.split_seed)
    elif data.kind == "shakespeare":
        generate_it = data.generated and data.path is None
        text = _generated(data.generated, config.seed) if generate_it else _text(data.path)
        windows = shakespeare.encode(text, data.length)
        train, test = shakespeare.split_windows(windows, round(data.held_out * len(windows)))
    else:
        records = _own_texts(config, public)
        held_out = max(1, round(data.held_out * len(records)))
        train, test = own.split(records, held_out, seed=data.split_seed)
    if data.limit:
        train = train.of(train.tokens[: data.limit])
    return Corpus(train, test, public)


def _own_texts(config, public: Public) -> Texts:
    data = config.data
    if data.path is None:
        texts = [(f"line {n}", t) for n, t in enumerate(_lines(data.generated, config.seed))]
    else:
        texts = own.load_texts(data.path, record=data.record, column=data.column, user=data.user)
    if public.end is None:
        return own.encode_windows(texts, public.alphabet, public.length)
    return own.encode(texts, public.alphabet, data.length)


def _lines(length: int, seed: int) -> list[str]:
    return _generated(length, seed).splitlines()


def _generated(length: int, seed: int) -> str:
    """Lines of words drawn by Zipf's law: a text that belongs to nobody."""
    words = ["to", "be", "or", "not", "the", "question", "whether", "Nobler", "in", "mind;"]
    odds = 1 / np.arange(1, len(words) + 1)
    drawn = np.random.default_rng(seed).choice(words, length, p=odds / odds.sum())
    lines = (" ".join(drawn[i : i + 8]) for i in range(0, length, 8))
    return "\n".join(lines)[:length]


def _measured(config, corpus: Corpus):
    """Test records, and where asked for training records, with the prefix of their metric."""
    return [("", corpus.test), *([("train_", corpus.train)] if config.train_loss else [])]


def _build(config, corpus: Corpus | Public):
    return nnx.split(models.build(config, corpus.vocab_size, corpus.length, config.seed))


def _inputs(corpus: Corpus | Public, tokens: np.ndarray) -> np.ndarray:
    """Each token's predecessor."""
    first = np.full((len(tokens), 1), corpus.start, np.int32)
    return np.concatenate([first, tokens[:, :-1]], axis=1)


def _picked_log_probs(logits, targets):
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]


def _fit_ngram(key, corpus: Corpus, order: int, epsilon: float, delta: float) -> ngram.NGram:
    model = ngram.fit(
        key,
        corpus.train.tokens,
        corpus.train.mask,
        order=order,
        vocab_size=corpus.vocab_size,
        start=corpus.start,
        epsilon=epsilon,
        delta=delta,
        unit=corpus.unit,
    )
    return model._replace(guarantee=model.guarantee.assuming(corpus.assumptions[1]))


def _prior(config, corpus: Corpus, key) -> ngram.NGram | None:
    """The n-gram model from which the private models start, for a share of their budget."""
    if config.prior.budget_fraction == 0:
        return None
    epsilon = config.prior.budget_fraction * config.epsilon
    return _fit_ngram(key, corpus, config.prior.order, epsilon, config.delta)


def _exact_prior(config, corpus: Corpus) -> np.ndarray | None:
    """The same start for the model without privacy: log-probabilities of the n-gram model of exact counts."""
    if config.prior.budget_fraction == 0:
        return None
    train, shape = corpus.train, {"vocab_size": corpus.vocab_size, "start": corpus.start}
    exact = ngram.without_privacy(train.tokens, train.mask, order=config.prior.order, **shape)
    return np.log(exact).astype(np.float32)


def _logits(corpus: Corpus | Public, graph, table, noise_std, params, inputs, key):
    """The model's logits, added to the prior's log-probabilities where there is a prior."""
    correction = {} if noise_std is None else {"noise_std": noise_std}
    logits = nnx.merge(graph, params)(inputs, dropout_key=key, **correction)
    if table is None:
        return logits
    vocab_size = corpus.vocab_size
    context = jnp.zeros_like(inputs)
    length, reach = inputs.shape[-1], round(np.log(len(table)) / np.log(vocab_size))
    for back in reversed(range(reach)):
        before = [(0, 0)] * (inputs.ndim - 1) + [(back, 0)]
        shifted = jnp.pad(inputs, before, constant_values=corpus.start)[..., :length]
        context = context * vocab_size + shifted
    return logits + jnp.asarray(table)[context]


def _loss(corpus: Corpus | Public, graph, table, noise_std, params, inputs, targets, mask, key):
    """Nats of one record over the width, not its length, so that a character counts the same in all."""
    logits = _logits(corpus, graph, table, noise_std, params, inputs, key)
    return -jnp.where(mask, _picked_log_probs(logits, targets), 0).sum() / len(targets)
