"""A pretrained language model, tuned with differential privacy on documents, or on those of users."""

import functools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dpx import ngram, release
from dpx.data import text as own
from dpx.data.records import of_units
from dpx.nn import pretrained
from dpx.runs.experiment import Candidate, Comparison, Measure, Outcome, Plan
from dpx.training import resuming, users
from dpx.training.keys import Keys, open_keys
from experiments import checks, guarantees
from experiments.dp_transformer import (
    corpus,
    language_model_figures,
    record_probability,
    training,
    tuned_text,
    without_privacy,
)
from experiments.dp_transformer import documents as docs
from experiments.dp_transformer.documents import Documents
from experiments.dp_transformer.pieces import inputs, weight
from experiments.dp_transformer.tuned_text import Language, TunedText

NOT_COVERED = (
    "training loss and realised batch sizes (metrics.jsonl, config.log, the progress line)",
    "the row of the model tuned without privacy, how that was chosen, and the share of its gain",
    "the test metrics, which are computed on held-out records",
    "choices of hyper-parameters made on training records",
    "whatever of these records the pretraining of the model has seen",
)
TITLES = {
    "pretrained": "before tuning",
    "dp_tuned": "tuned privately",
    "tuned": "tuned without privacy",
}


def validate(config) -> None:
    """Raises ValueError, FileNotFoundError or ModuleNotFoundError for what cannot be used."""
    docs.check(config)
    tuned_text.check(config)
    for order in config.ngrams:
        if order not in (1, 2, 3):
            raise ValueError(f"config.ngrams must be from 1 to 3, not {order}")
    checks.each(config, "ngrams", least=1)
    language = tuned_text.build(config)
    train, _ = docs.load(config, language.tokenizer)
    training.check_both(config, train.num_units, users=train.users)
    training.warn_about_delta(config.delta, train.num_units, f"{docs.unit(config)}s")


def plan(config) -> Plan:
    """What a run will release, without training."""
    language, unit = tuned_text.build(config), docs.unit(config)
    train, _ = docs.load(config, language.tokenizer)
    budget = config.epsilon, config.delta
    found, guarantee = training.make_private(config.train, *budget, train.num_units, unit, ())
    counts = guarantees.gaussian(*budget, "n-gram counts", unit)
    sizes = {f"{x}_parameters": _size(getattr(language, x)) for x in ("trained", "frozen")}
    return Plan(
        {f"dp_{order}gram": counts for order in corpus.compared_ngrams(config)}
        | {"dp_tuned": guarantee},
        training.parameters(config.train, train.num_units, found, guarantee.epsilon) | sizes,
    )


def run(config, workdir: Path) -> Outcome:
    """Tunes the model privately and without privacy, and measures what held-out records cost."""
    language = tuned_text.build(config)
    train, test = docs.load(config, language.tokenizer)
    synthetic = _is_synthetic(config)
    keys = open_keys(config, workdir, synthetic=synthetic, data=_begun(config, train, test))
    unit = docs.unit(config)
    privacy, guarantee = training.make_private(
        config.train, config.epsilon, config.delta, train.num_units, unit, _assumptions(config)
    )
    characters = sum(map(len, test.texts(language.tokenizer)))
    before = TunedText(language, language.trained, config)
    measures = _measures("pretrained", untuned := before.nats(test), test, characters)
    releases = {}
    for order in corpus.compared_ngrams(config):
        row = f"dp_{order}gram"
        model, nats = _ngram(keys.noise(row), config, language, train, test, order)
        releases[row] = model.guarantee
        measures.append(Measure(row, "nats_per_character", nats / characters))

    start = inputs(language.tokenizer, train.tokens)
    planned = [config.train, *(way.section for way in without_privacy.ways(config))]
    reads = sum(section.steps * section.batch_size for section in planned)
    # Once for each record, not each time it is drawn. How many records users have is not public, and must
    # decide nothing: what is computed twice is rounded otherwise.
    if language.model().first_adapted and train.users is None and len(train) < reads:
        start = tuned_text.as_bits(tuned_text.trunk(language, train))
    tune = functools.partial(_tune, config, workdir, language, keys=keys)
    private = tune(start, train, label="dp_tuned", section=config.train, privacy=privacy)
    private.save(workdir)
    releases["dp_tuned"] = guarantee
    measures += _measures("dp_tuned", tuned_nats := private.nats(test), test, characters)
    notes = _change(tuned_nats - untuned) + "\n\n"
    notes += _samples(config, {"before tuning": before, "tuned privately": private})
    if config.non_private.steps:
        tuned, words = _tuned_without_privacy(config, tune, start, train)
        notes += f"\n\nTuning without privacy went {words}"
        measures += _measures("tuned", tuned.nats(test), test, characters)
        measures.append(Measure("dp_tuned", "share_of_gain", _share(measures)))
    return Outcome(
        measures=measures,
        headline=guarantee,
        releases=releases,
        not_covered=NOT_COVERED,
        synthetic=synthetic,
        notes=notes,
        titles=TITLES
        | {f"dp_{order}gram": f"DP {order}-gram of characters" for order in config.ngrams},
        headline_row="dp_tuned",
        comparisons=[
            Comparison(
                "nats_per_character",
                ["pretrained", *(f"dp_{order}gram" for order in config.ngrams)],
                {"dp_tuned": "pretrained"},
            )
        ],
    )


def candidate(config) -> Candidate:
    """The private model that a run saves, and how far a held-out document changes its score."""
    train, test = docs.load(config, tuned_text.build(config).tokenizer)
    _, guarantee = training.make_private(
        config.train,
        config.epsilon,
        config.delta,
        train.num_units,
        docs.unit(config),
        (*_assumptions(config), record_probability.ASSUMPTION),
    )
    return Candidate(
        row="dp_tuned",
        guarantee=guarantee,
        sensitivities={record_probability.SCORE: record_probability.sensitivity(test.num_units)},
        synthetic=_is_synthetic(config),
        data=resuming.digest(_begun(config, train, test)),
    )


def _begun(config, train: Documents, test: Documents) -> tuple[np.ndarray, ...]:
    """What a run that resumes has to find unchanged; by the held-out documents a selection scores."""
    return (*train.arrays, *test.arrays, *tuned_text.model_files(config))


load, public_files = tuned_text.load, tuned_text.model_files


figures = functools.partial(language_model_figures.draw, unit="token")


def _is_synthetic(config) -> bool:
    return config.data.path is None and bool(config.data.generated)


def _assumptions(config) -> tuple[str, ...]:
    unit = docs.unit(config)
    return (
        corpus.PUBLIC_NUMBER.format(unit),
        "the pretrained model and its tokenizer are public, and depend on none of the records",
        *([users.ASSUMPTION] if unit == "user" else []),
    )


def _tuned_without_privacy(
    config, tune, start: np.ndarray, train: Documents
) -> tuple[TunedText, str]:
    """The model tuned with neither noise nor clipping, and in words how."""
    held_out, rest = without_privacy.parts(config, train.num_units)
    plain = functools.partial(tune, privacy=None)

    def measured(way: without_privacy.Way, number: int) -> float:
        rows, _ = of_units(train.users, rest)
        part = start[rows], train.take(rest)
        asked = train.take(held_out)
        tuned = plain(*part, label=f"tuned_tried{number}", section=way.section)
        return float(tuned.nats(asked, None).sum() / asked.mask.sum())

    chosen = without_privacy.choose(config, measured)
    return plain(start, train, label="tuned", section=chosen.way.section), chosen.words


def _tune(
    config,
    workdir,
    language: Language,
    start: np.ndarray,
    train: Documents,
    *,
    keys: Keys,
    label: str,
    section,
    privacy,
) -> TunedText:
    trained = training.train(
        functools.partial(tuned_text.loss, language),
        language.trained,
        data=(start, train.tokens, train.mask),
        config=section,
        keys=keys,
        label=label,
        workdir=workdir,
        privacy=privacy,
        mesh=config.mesh,
        users=train.users,
        weight_fn=weight,
        frozen=language.frozen,
    )
    return TunedText(language, trained, config)


def _change(nats: np.ndarray) -> str:
    """Whether tuning changed anything: small changes may be lost where activations are rounded."""
    largest = np.abs(nats).max()
    if largest > 0:
        return f"Tuning changed what a held-out record costs by at most {largest:.3g} nats."
    return (
        "Tuning changed nothing: every held-out record costs what it did before. Train longer, or use "
        "--config.model.dtype=float32."
    )


def _measures(row: str, nats: np.ndarray, test: Documents, characters: int) -> list[Measure]:
    lengths = test.mask.sum(axis=1)
    score = record_probability.score(-nats, lengths, test.users)
    return [
        Measure(row, "nats_per_token", float(nats.sum() / lengths.sum())),
        Measure(row, "nats_per_character", float(nats.sum() / characters)),
        Measure(row, record_probability.SCORE, score),
    ]


def _share(measures: list[Measure]) -> float:
    """What part of the nats that tuning without privacy saves, private tuning saves."""
    found = {m.row: m.value for m in measures if m.metric == "nats_per_token"}
    gain = found["pretrained"] - found["tuned"]
    return (found["pretrained"] - found["dp_tuned"]) / gain if gain else math.nan


def _ngram(key, config, language: Language, train: Documents, test: Documents, order: int):
    """A DP n-gram model of the characters that the tokens stand for, and the nats that test texts cost."""
    known = own.alphabet("ascii", "replace")
    longest = 6 * config.data.length  # more characters of a training text are not counted
    table: dict[str, Any] = {"order": order, "vocab_size": known.size + 1, "start": known.size}

    def counted(block: Documents) -> tuple[np.ndarray, ...]:
        return (*_encode(known, block.texts(language.tokenizer), longest), *block.arrays[2:])

    pieces = {str(i): train.take(slice(i, i + 500)) for i in range(0, train.num_units, 500)}
    model = ngram.fit(
        key,
        release.Blocks(pieces, read=counted),
        None,
        **table,
        l2_clip_norm=math.sqrt(longest),
        epsilon=config.epsilon,
        delta=config.delta,
        unit=docs.unit(config),
    )
    model = model._replace(guarantee=model.guarantee.assuming(*_assumptions(config)))
    tokens, mask = _encode(known, test.texts(language.tokenizer))
    return model, -float(model.log_prob(tokens)[mask].sum())


def _encode(known: own.Alphabet, texts: list[str], longest: int | None = None):
    """Characters as tokens and their mask, (n, L)."""
    tokens, mask = pretrained.padded([known.encode(text)[:longest] for text in texts])
    return np.where(mask, tokens, known.size), mask


def _samples(config, models: dict[str, TunedText]) -> str:
    key, found = jax.random.key(config.seed), []
    for when, model in models.items():
        drawn = model.sample(key, config.sample.count)
        found.append(
            f"Samples {when}:\n\n" + "\n".join(f"- {' '.join(text.split())}" for text in drawn)
        )
    return "\n\n".join(found)


def _size(state) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(state))
