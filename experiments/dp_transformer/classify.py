"""A private classifier of texts: an encoder with a head, beside simpler answers and one without privacy."""

import functools
import json
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from dpx import _storage
from dpx.data.newsgroups import tokenize
from dpx.data.records import of_units
from dpx.privacy import PrivacyGuarantee
from dpx.runs import plotting
from dpx.runs.experiment import Comparison, Measure, Outcome, Plan, compares
from dpx.training import users
from dpx.training.keys import Keys, open_keys
from experiments import checks
from experiments.cross_attention.classifiers import class_sums, guarantee, nearest_mean
from experiments.dp_transformer import (
    classifier,
    corpus,
    feature_center,
    labelled_texts,
    training,
    without_privacy,
)
from experiments.dp_transformer.classifier import Classifier, PrivateClassifier
from experiments.dp_transformer.labelled_texts import Labelled, unit

CONFUSION = "confusion.json"
TITLES = {
    "dp_classifier": "private classifier",
    "classifier": "classifier, without privacy",
    "dp_prototypes": "nearest private class mean of the features",
    "dp_words": "private logistic regression on words",
    "majority": "largest class, not private",
}
NOT_COVERED = [
    "training losses and realised batch sizes (metrics.jsonl, config.log, the progress line)",
    "the rows classifier and majority, which are not private, and how the first was chosen",
    "the test metrics and the confusion matrix, which are computed on held-out texts",
    "choices of hyper-parameters made on training texts",
    "whatever of these texts the pretraining of the encoder has seen",
]


def validate(config) -> None:
    """Raises ValueError, FileNotFoundError or ModuleNotFoundError for what cannot be used."""
    labelled_texts.check(config)
    classifier.check(config)
    feature_center.check(config)
    classifier.build(config)
    train, _ = labelled_texts.load(config)
    training.check_both(config, train.num_units, users=train.users)
    checks.integers(config, "words.dim")
    if compares(config):
        training.check(words_section(config), train.num_units, name="config.words")
    training.warn_about_delta(config.delta, train.num_units, f"{unit(config)}s")


def plan(config) -> Plan:
    """What a run will release, without training."""
    train, _ = labelled_texts.load(config)
    found, headline = _private(config, config.train, train, (), _center(config, ()))
    releases = {"dp_classifier": headline}
    if compares(config):
        means = guarantee(config.epsilon, config.delta, "class means", unit(config))
        _, words = _private(config, words_section(config), train, ())
        releases |= {"dp_prototypes": means, "dp_words": words}
    return Plan(
        releases, training.parameters(config.train, train.num_units, found, headline.epsilon)
    )


def run(config, workdir: Path) -> Outcome:
    """Trains the classifier privately and without privacy, and what stands beside it."""
    train, test = labelled_texts.load(config)
    model = classifier.build(config)
    synthetic = config.data.kind == "generated"
    tokens, asked = (part.tokens(model.tokenizer, model.length) for part in (train, test))
    untuned = classifier.untuned(config, model.start)
    read_features = classifier.features_of(untuned)
    features, to_ask = read_features(train.texts), read_features(test.texts)
    counted = [hashed(train.texts, config.words.dim)] if compares(config) else []
    begun = [*tokens, *counted, train.labels, *classifier.model_files(config)]
    begun += [] if train.users is None else [train.users]
    keys = open_keys(config, workdir, synthetic=synthetic, data=tuple(begun))
    if model.start:
        trunk = classifier.trunk_of(untuned)
        tokens, asked = (trunk(train.texts), tokens[1]), (trunk(test.texts), asked[1])
    train_one = functools.partial(_train, config, workdir, keys)

    around = _center(config, _assumptions(config))
    privacy, headline = _private(config, config.train, train, _assumptions(config), around)
    if around is not None:
        key = keys.noise("center")
        model = model._replace(center=feature_center.private(key, config, features, train.users))
    read = functools.partial(_read, model)
    texts = read(tokens, features)
    private = train_one(model, texts, train, "dp_classifier", config.train, privacy)
    private.save(workdir)
    releases = {"dp_classifier": headline}
    rows = {"dp_classifier": private.logits(*read(asked, to_ask))}
    notes = ""
    if config.non_private.steps:
        exact = model
        if around is not None:
            exact = model._replace(center=feature_center.exact(features, train.users))
        texts = _read(exact, tokens, features)
        chosen = _without_privacy(config, train_one, exact, texts, train)
        plain = train_one(exact, texts, train, "classifier", chosen.way.section, None)
        rows["classifier"] = plain.logits(*_read(exact, asked, to_ask))
        notes = f"Without privacy the classifier was trained {chosen.words}"
    if compares(config):
        budget = {"epsilon": config.epsilon, "delta": config.delta, "unit": unit(config)}
        features, to_ask = (
            x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
            for x in (features, to_ask)
        )
        weights = shares(train, len(model.labels))
        sums, noise, spent = class_sums(keys.noise("dp_prototypes"), features, weights, **budget)
        releases["dp_prototypes"] = spent.assuming(*_assumptions(config))
        rows["dp_prototypes"] = nearest_mean(to_ask, sums, noise)
        words = model._replace(mode="probe", trained=_head(config.words.dim, len(model.labels)))
        section = words_section(config)
        privacy, spent = _private(config, section, train, _assumptions(config))
        trained = train_one(words, counted, train, "dp_words", section, privacy)
        releases["dp_words"] = spent
        rows["dp_words"] = trained.logits(hashed(test.texts, config.words.dim))
    rows["majority"] = np.bincount(train.labels, minlength=len(model.labels)) * np.ones(
        (len(test), 1)
    )
    counts = confusion(rows["dp_classifier"], test.labels).tolist()
    found = {"labels": list(model.labels), "counts": counts}
    _storage.write_text(workdir / CONFUSION, json.dumps(found), mode=_storage.PRIVATE)
    return Outcome(
        measures=[m for row, logits in rows.items() for m in _measures(row, logits, test.labels)],
        headline=headline,
        releases=releases,
        not_covered=NOT_COVERED,
        synthetic=synthetic,
        notes=notes,
        titles=TITLES,
        headline_row="dp_classifier",
        comparisons=[Comparison("accuracy", ["dp_prototypes", "dp_words"], more_is_better=True)],
    )


load, public_files = classifier.load, classifier.model_files


def figures(records, folder: Path) -> list[Path]:
    """The confusion matrix of the last run's private classifier."""
    record = records[-1]
    path = record.workdir / CONFUSION
    if not path.is_file():
        return []
    found = json.loads(path.read_text())
    shares = np.array(found["counts"], float)
    shares /= np.maximum(shares.sum(axis=1, keepdims=True), 1)
    side = 2.2 + 0.45 * len(shares)
    figure, axis = plotting.pyplot().subplots(figsize=(side + 0.8, side), layout="constrained")
    drawn = axis.imshow(shares, vmin=0, vmax=1, cmap="Blues")
    figure.colorbar(drawn, label="share of the texts of a label")
    places = range(len(shares))
    axis.set_xticks(places, found["labels"], rotation=90)
    axis.set_yticks(places, found["labels"])
    axis.set_xlabel("what the private classifier says")
    axis.set_ylabel("label")
    if len(shares) <= 10:
        for at in np.ndindex(shares.shape):
            color = "white" if shares[at] > 0.5 else "black"
            axis.text(at[1], at[0], f"{shares[at]:.2f}", ha="center", va="center", color=color)
    return [plotting.save(figure, folder / "confusion.png", record.title())]


def words_section(config) -> Any:
    """The training section of the regression on words: that of the model, but for what it says itself."""
    section = config.train.copy_and_resolve_references()
    section.update({name: config.words[name] for name in ("steps", "batch_size", "learning_rate")})
    return section


def hashed(texts: Any, dim: int) -> np.ndarray:
    """(n, dim) counts of words, log(1 + count), in hashed places, scaled to entries of mean square one.

    Nothing is learned from the texts: inverse document frequencies would have to be paid for.
    """
    found = np.zeros((len(texts), dim), np.float32)
    for row, text in zip(found, texts, strict=True):
        for word, count in Counter(tokenize(text)).items():
            row[zlib.crc32(word.encode()) % dim] += np.log1p(count)
        row *= np.sqrt(dim / max(float(np.square(row).sum()), 1e-12))
    return found


def shares(train: Labelled, num_labels: int) -> np.ndarray:
    """(n, labels) what each text counts to the class of its label: one, or its share of its user's texts.

    So a user adds the mean of what the user's texts would add, whose norm is at most that of one text.
    """
    of_labels = np.eye(num_labels)[train.labels]
    if train.users is None:
        return of_labels
    return of_labels / np.bincount(train.users)[train.users, None]


def _assumptions(config) -> tuple[str, ...]:
    of = unit(config)
    return (
        corpus.PUBLIC_NUMBER.format(of),
        "the labels that there are, the model before training and its tokenizer are public, and depend on "
        "none of the records",
        *([users.ASSUMPTION] if of == "user" else []),
    )


def _private(config, section, train: Labelled, assumptions: tuple[str, ...], beside=None):
    return training.make_private(
        section,
        config.epsilon,
        config.delta,
        train.num_units,
        unit(config),
        assumptions,
        beside=beside,
        beside_label=feature_center.LABEL,
    )


def _center(config, assumptions: tuple[str, ...]) -> PrivacyGuarantee | None:
    return feature_center.guarantee(config, unit(config), assumptions)


def _read(model: Classifier, tokens: tuple[np.ndarray, ...], features: np.ndarray):
    """What the loss takes of texts: tokens or `trunk` and mask, or of a frozen encoder centered features."""
    return (np.asarray(model.centered(features)),) if model.mode == "probe" else tokens


def _head(dim: int, labels: int) -> dict[str, np.ndarray]:
    return {"weights": np.zeros((dim, labels), np.float32), "bias": np.zeros(labels, np.float32)}


def _train(
    config, workdir, keys: Keys, model: Classifier, texts, train: Labelled, label, section, privacy
) -> PrivateClassifier:
    trained = training.train(
        functools.partial(classifier.loss, model),
        model.trained,
        data=(*texts, train.labels),
        config=section,
        keys=keys,
        label=label,
        workdir=workdir,
        privacy=privacy,
        mesh=config.mesh,
        users=train.users,
        frozen=(model.frozen, model.center),
    )
    return PrivateClassifier(model, trained)


def _without_privacy(
    config, train_one, model: Classifier, texts, train: Labelled
) -> without_privacy.Chosen:
    held_out, rest = without_privacy.parts(config, train.num_units)
    (asked, _), (kept, _) = (of_units(train.users, part) for part in (held_out, rest))

    def measured(way: without_privacy.Way, number: int) -> float:
        part = tuple(x[kept] for x in texts)
        label = f"classifier_tried{number}"
        found = train_one(model, part, train.take(rest), label, way.section, None)
        said = found.logits(*(x[asked] for x in texts))
        return float((said.argmax(1) == train.labels[asked]).mean())

    return without_privacy.choose(config, measured, more_is_better=True)


def _measures(row: str, logits: np.ndarray, truth: np.ndarray) -> list[Measure]:
    counts = confusion(logits, truth)
    right = counts.diagonal()
    f1 = 2 * right / np.maximum(counts.sum(0) + counts.sum(1), 1)
    found = {"accuracy": right.sum() / counts.sum(), "macro_f1": f1.mean()}
    if row in ("dp_classifier", "classifier"):
        found["calibration_error"] = calibration_error(logits, truth)
    return [Measure(row, metric, float(value)) for metric, value in found.items()]


def calibration_error(logits: np.ndarray, truth: np.ndarray, bins: int = 15) -> float:
    """The expected calibration error (Guo et al., arXiv 1706.04599): how far confidence is from accuracy.

    Texts fall into `bins` bins of equal width by the probability of what is said; the distances between the
    mean probability and the share that is right are weighted by the bins' sizes.
    """
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    confidence = (odds / odds.sum(axis=1, keepdims=True)).max(axis=1)
    right = logits.argmax(1) == truth
    bin_of = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = np.bincount(bin_of, right - confidence, bins)
    return float(np.abs(gaps).sum() / len(truth))


def confusion(logits: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """(labels, labels) counts of texts, by label and by what is said."""
    counts = np.zeros((logits.shape[1],) * 2, int)
    np.add.at(counts, (truth, logits.argmax(1)), 1)
    return counts
