"""A character model trained with differential privacy: for a name, a window of a text, or a user's texts."""

import functools
from pathlib import Path

import jax
import numpy as np

from dpx import ngram
from dpx.data import Texts, split
from dpx.runs.experiment import Candidate, Comparison, Measure, Outcome, Plan
from dpx.training import resuming
from dpx.training.keys import Keys, open_keys, secret_key
from experiments import checks, guarantees
from experiments.dp_transformer import corpus as corpora
from experiments.dp_transformer import (
    language_model_figures,
    models,
    record_probability,
    text_model,
    training,
    without_privacy,
)
from experiments.dp_transformer.corpus import Corpus, compared_ngrams
from experiments.dp_transformer.pieces import inputs, weight
from experiments.dp_transformer.text_model import PrivateText

NOT_COVERED = (
    "training loss and realised batch sizes (metrics.jsonl, config.log, the progress line)",
    "the row of the model without privacy, and how it was chosen",
    "the test metrics, which are computed on held-out records, and train metrics where there are any",
    "choices of hyper-parameters, the prior's share and order among them, made on training records",
)
TITLES = {
    "dp_transformer": "DP transformer",
    "dp_reattention": "DP transformer with Re-Attention",
    "dp_gru": "DP GRU",
    "dp_lstm": "DP LSTM",
    "transformer": "transformer, not private",
    "gru": "GRU, not private",
    "lstm": "LSTM, not private",
}


def validate(config) -> None:
    """Raises ValueError or FileNotFoundError for a value or a file that cannot be used."""
    corpora.check(config)
    check(config, corpora.load(config))


def check(config, corpus: Corpus) -> None:
    """Raises ValueError for a config that these records cannot be used with."""
    training.check_both(config, corpus.train.num_units, users=corpus.train.users)
    checks.share(config, "prior.budget_fraction", budget=True)
    models.check(config, corpus.public.vocab_size)
    for order in (*config.ngrams, config.prior.order):
        if order not in (1, 2, 3, 4, 5):
            raise ValueError(
                f"config.ngrams and config.prior.order must be from 1 to 5, not {order}"
            )
    checks.each(config, "ngrams", least=1)
    starts = {way.start for way in without_privacy.ways(config)} if config.non_private.steps else ()
    counted = config.prior.budget_fraction or "exact" in starts
    for order in (*compared_ngrams(config), *([config.prior.order] if counted else ())):
        ngram.check_cells(order, corpus.public.vocab_size)
    training.warn_about_delta(config.delta, corpus.train.num_units, f"{corpus.unit}s")


def plan(config, corpus: Corpus | None = None) -> Plan:
    """What a run will release, without training."""
    corpus = corpora.load(config) if corpus is None else corpus

    about, share = (config.delta, "n-gram counts", corpus.unit), config.prior.budget_fraction
    prior = guarantees.gaussian(share * config.epsilon, *about) if share else None
    counts = guarantees.gaussian(config.epsilon, *about)
    trained, parameters = models.plan(config, corpus.train.num_units, corpus.unit, prior=prior)
    once = {} if prior is None else {"start": prior}
    ngrams = {f"dp_{order}gram": counts for order in compared_ngrams(config)}
    return Plan(ngrams | trained | once, parameters)


def run(config, workdir: Path, corpus: Corpus | None = None) -> Outcome:
    """Trains the private models and their baselines, and measures nats per character.

    The records are those that the config names, if no corpus is given.
    """
    corpus = corpora.load(config) if corpus is None else corpus
    synthetic = corpora.is_generated(config)
    keys = open_keys(config, workdir, synthetic=synthetic, data=_begun(corpus))
    measures, releases, trained = [], {}, {}
    for order in compared_ngrams(config):
        row = f"dp_{order}gram"
        model = _fit_ngram(keys.noise(row), corpus, order, config.epsilon, config.delta)
        releases[row] = model.guarantee
        measures += _measures_of_ngram(config, corpus, row, model)

    prior = _prior(config, corpus, keys.noise("prior"))
    rows, once = models.private_rows(config), {}
    if prior is not None:
        releases["start"] = prior.guarantee
        measures += _measures_of_ngram(config, corpus, "start", prior)
    for row in rows:
        correction = keys.noise("token probabilities") if row == "dp_reattention" else None
        trained[row], calibrated = _private_row(
            config, workdir, corpus, prior, row, keys, correction
        )
        releases[row], once[row] = calibrated.guarantee, calibrated.alone
        measures += _measures_of_model(config, corpus, row, trained[row])
    notes = ""
    if config.non_private.steps:
        plain, notes = _row_without_privacy(config, workdir, corpus, keys)
        measures += _measures_of_model(config, corpus, config.model.kind, plain)
    words, count = ("Three", 3) if corpus.public.end is None else ("Ten", 10)  # windows are long
    samples = trained[rows[-1]].sample(jax.random.key(config.seed), count)
    return Outcome(
        measures=measures,
        headline=releases[rows[0]],
        releases=releases,
        composed=releases | once,
        synthetic=synthetic,
        not_covered=NOT_COVERED,
        notes=f"{words} {corpus.public.record}s sampled from {rows[-1]}: "
        + ", ".join(samples)
        + notes,
        titles=TITLES
        | {f"dp_{order}gram": f"DP {order}-gram" for order in config.ngrams}
        | {"start": f"DP {config.prior.order}-gram, before training"},
        headline_row=rows[0],
        comparisons=[
            Comparison(
                "nats_per_character",
                [f"dp_{order}gram" for order in config.ngrams],
                dict.fromkeys(rows, "start"),
            )
        ],
    )


def candidate(config) -> Candidate:
    """The private model that a run saves, and how far a held-out record changes its score."""
    corpus, key = corpora.load(config), secret_key()
    prior = _prior(config, corpus, key)  # whose counts nobody sees
    correction = key if config.reattention.enabled else None
    calibrated = _calibrated(config, corpus, prior, correction, record_probability.ASSUMPTION)
    return Candidate(
        row=models.private_rows(config)[-1],
        guarantee=calibrated.guarantee,
        sensitivities={
            record_probability.SCORE: record_probability.sensitivity(corpus.test.num_units)
        },
        synthetic=corpora.is_generated(config),
        data=resuming.digest(_begun(corpus)),
    )


def _begun(corpus: Corpus) -> list[np.ndarray]:
    """What a run that resumes has to find unchanged; by the held-out records a selection scores."""
    texts = corpus.train, corpus.test
    return [x for part in texts for x in (part.tokens, part.users) if x is not None]


load = text_model.load


def _calibrated(
    config, corpus: Corpus, prior: ngram.NGram | None, correction_key, *assumptions: str
) -> models.Calibrated:
    """The training that starts from a prior, where there is one: see `models.calibrate`."""
    return models.calibrate(
        config,
        corpus.histories,
        corpus.public.length,
        corpus.unit,
        (*corpus.assumptions, *assumptions),
        prior=None if prior is None else prior.guarantee,
        correction_key=correction_key,
    )


def _private_row(config, workdir, corpus: Corpus, prior, row: str, keys: Keys, correction_key):
    """A private model that starts from the prior, saved in the run's folder, and what it costs."""
    calibrated = _calibrated(config, corpus, prior, correction_key)
    table = None if prior is None else np.log(prior.probabilities).astype(np.float32)
    noise, privacy = calibrated.noise, calibrated.privacy
    model = _train(config, workdir, corpus, table, noise, config.train, keys, row, privacy)
    more = {} if table is None else {"prior": table}
    models.save(workdir, model.params, noise, **more)
    return model, calibrated


def _row_without_privacy(config, workdir, corpus: Corpus, keys: Keys) -> tuple[PrivateText, str]:
    """The same model with neither noise nor clipping, and in words how it was trained."""
    kind = config.model.kind

    def trained(way: without_privacy.Way, train: Texts, label: str) -> PrivateText:
        table, about = None, {"vocab_size": corpus.public.vocab_size, "start": corpus.public.start}
        if way.start == "exact":  # the n-gram model of exact counts
            exact = ngram.without_privacy(
                train.tokens, train.mask, order=config.prior.order, **about
            )
            table = np.log(exact).astype(np.float32)
        part = corpus._replace(train=train)
        return _train(config, workdir, part, table, None, way.section, keys, label, None)

    def measured(way: without_privacy.Way, number: int) -> float:
        count = max(1, round(without_privacy.HELD_OUT * corpus.train.num_units))
        rest, held_out = split(corpus.train, count, seed=config.seed)
        return trained(way, rest, f"{kind}_tried{number}").nats(held_out)

    chosen = without_privacy.choose(config, measured)
    about = f"\n\nThe {kind} without privacy was trained {chosen.words}"
    return trained(chosen.way, corpus.train, kind), about


def _train(
    config, workdir, corpus: Corpus, table, noise_std, section, keys: Keys, label: str, privacy
) -> PrivateText:
    graph, params = text_model.build(config, corpus.public)
    train = corpus.train
    params = training.train(
        functools.partial(text_model.loss, corpus.public, graph, table, noise_std),
        params,
        data=(inputs(corpus.public, train.tokens), train.tokens, train.mask),
        config=section,
        keys=keys,
        label=label,
        workdir=workdir,
        privacy=privacy,
        mesh=config.mesh,
        users=train.users,
        weight_fn=weight,
    )
    return PrivateText(corpus.public, graph, table, noise_std, params)


def _measures_of_ngram(config, corpus: Corpus, row: str, model: ngram.NGram) -> list[Measure]:
    return [
        Measure(row, name, -float(model.log_prob(records.tokens)[records.mask].mean()))
        for name, records in _measured(config, corpus)
    ]


def _measures_of_model(config, corpus: Corpus, row: str, model: PrivateText) -> list[Measure]:
    """Nats per character, and how probable held-out records are, by which a selection scores."""
    (name, test), *train = _measured(config, corpus)
    nats, probability = model.evaluate(test)
    more = [Measure(row, label, model.nats(records)) for label, records in train]
    return [Measure(row, name, nats), *more, Measure(row, record_probability.SCORE, probability)]


def _measured(config, corpus: Corpus):
    """The metric on test records and, where asked for, on training records."""
    train = [("train_nats_per_character", corpus.train)] if config.train_loss else []
    return [("nats_per_character", corpus.test), *train]


def _fit_ngram(key, corpus: Corpus, order: int, epsilon: float, delta: float) -> ngram.NGram:
    model = ngram.fit(
        key,
        corpus.train.tokens,
        corpus.train.mask,
        order=order,
        vocab_size=corpus.public.vocab_size,
        start=corpus.public.start,
        epsilon=epsilon,
        delta=delta,
        unit=corpus.unit,
        users=corpus.train.users,
    )
    return model._replace(guarantee=model.guarantee.assuming(*corpus.assumptions))


def _prior(config, corpus: Corpus, key) -> ngram.NGram | None:
    """The n-gram model from which the private models start, for a share of their budget."""
    if config.prior.budget_fraction == 0:
        return None
    epsilon = config.prior.budget_fraction * config.epsilon
    return _fit_ngram(key, corpus, config.prior.order, epsilon, config.delta)


figures = language_model_figures.draw
