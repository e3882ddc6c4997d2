"""A private retrieval classifier: which group a document is from, by attention over private documents.

A document's key is a unit vector that a public corpus defines (`labelled`), its value the one-hot vector of
its group. Attention of a held-out document gives each group a score. Scores are divided by those of the zero
query, which are the groups' shares, so that all groups weigh the same: post-processing. Beside the memory
stand what is paid for by each query (`votes`), and models that are released once as it is.
"""

import functools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import softmax

import dpx
from dpx import _storage as storage
from dpx import cross_attention
from dpx.privacy import PrivacyGuarantee, gaussian_noise_multiplier
from dpx.runs.experiment import Comparison, Measure, Outcome, Plan, compares
from dpx.training import keys as secrets
from experiments import checks, guarantees
from experiments.cross_attention import answers, labelled, rivals, votes
from experiments.cross_attention.classifiers import (
    UNIT,
    accuracy,
    check_regression,
    class_means,
    guarantee,
    logits,
    memory_scores,
    plan_regression,
    private_regression,
)
from experiments.cross_attention.votes import exact_scores, fresh_noise, nearest_votes

# What a run leaves to ask: the release, and what is public.
RELEASE, EMBEDDING, GROUPS = "memory.dpx", "embedding.npz", "groups.json"
BOUNDS: dict[str, Any] = {"key_bound": 1.0, "value_bound": 1.0, "domain": "ball", "clip": True}
LOGITS = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0)  # of exact attention, of which training data choose
TITLES = {
    "sketch": "private memory",
    "sketch_ball": "private memory, values in a ball",
    "sketch_box": "private memory, values in a box",
    "fresh_noise": "votes of all documents by attention, with noise that each query pays for",
    "nearest": "votes of the nearest documents, with noise that each query pays for",
    "class_means": "private class means",
    "logistic_regression": "private logistic regression",
    "attention": "exact attention at that temperature, not private",
    "best_attention": "exact attention at a temperature that training documents choose, not private",
    "majority": "largest group, not private",
    "pretrained": "words of a language model alone",
    "public": "words of a language model, less its mean over public documents",
    "words_sketch": "words of a language model, biased by the private memory",
    "words_logistic_regression": "words of a language model, biased by the private logistic regression",
}
ASSUMED = (
    "the public documents, which groups there are, and the encoder if there is one depend on none of the "
    "private documents"
)
NOT_COVERED = [
    "losses of the logistic regression and its realised batch sizes (the progress line)",
    "the rows attention, best_attention and majority, which are not private",
    "accuracies, which are computed on held-out documents",
    "settings of the embedding, the regression and the language model's template, which were chosen on this "
    "public data set",
    "whatever of these documents the pretraining of an encoder or a language model has seen",
]


def validate(config) -> None:
    """Raises ValueError for a value that cannot be used."""
    checks.choice(config, "neighboring", ("add_or_remove_one", "replace_one"))
    checks.integers(config, "expected_records")
    checks.each(config, "query_counts", "neighbours", least=1)
    checks.positive(config, "largest_logit")
    labelled.check(config)
    check_regression(config, labelled.size(config)[0] if _all_rows(config) else None)
    answers.check(config.language, labelled.num_groups(config))


def plan(config) -> Plan:
    """What a run will release, and what the expected error chooses from public numbers."""
    found = _expected(config)
    budget = {"epsilon": config.epsilon, "delta": config.delta}
    memory = guarantees.gaussian(
        **budget, mechanism="sketch", unit=UNIT, neighboring=config.neighboring
    )
    releases = dict.fromkeys(_memories(config), memory)
    if _all_rows(config):
        num_documents, num_asking = labelled.size(config)
        releases["class_means"] = guarantee(**budget, mechanism="class means")
        releases["logistic_regression"] = plan_regression(config, num_documents)
        voted = guarantee(**budget, mechanism="votes")
        releases |= {block.label: voted for block in votes.paid(config, num_asking)}
    parameters = {
        "noise_multiplier": gaussian_noise_multiplier(config.epsilon, config.delta),
        "degree": found.degree,
        "features": found.num_features,
        "largest_logit": 1 / found.scale,
    }
    return Plan(releases, parameters)


def _memories(config) -> dict[str, str]:
    """The memories by row, with the domains of their values: on one's own data the first alone."""
    rows = {"sketch": "simplex", "sketch_ball": "ball", "sketch_box": "box"}
    return rows if compares(config) else {"sketch": rows["sketch"]}


def _all_rows(config) -> bool:
    """Whether there are rows beside the memories: they are not built for the other relation."""
    return config.neighboring == "add_or_remove_one" and compares(config)


def run(config, workdir: Path) -> Outcome:
    """The accuracy of each classifier on held-out documents."""
    data, workdir = labelled.load(config), Path(workdir)
    # The votes for held-out documents are released too.
    begun = (data.keys, data.labels, data.queries, *labelled.public_files(config))
    begun += tuple(answers.model_files(config.language))
    synthetic = labelled.synthetic(config)
    keys = secrets.open_keys(config, workdir, synthetic=synthetic, data=begun)
    budget = {"epsilon": config.epsilon, "delta": config.delta}
    values = np.eye(data.num_groups, dtype=np.float32)[data.labels]
    found = _expected(config)
    print(
        f"documents are embedded; degree {found.degree}, logits up to {1 / found.scale:g}",
        flush=True,
    )
    memories: dict[str, Any] = {
        name: cross_attention.build(
            keys.noise(name),
            data.keys,
            values,
            degree=found.degree,
            scale=found.scale,
            value_domain=value_domain,
            neighboring=config.neighboring,
            expected_records=config.expected_records,
            **BOUNDS,
            **budget,
        )
        for name, value_domain in _memories(config).items()
    }
    dpx.save(memories["sketch"], workdir / RELEASE)
    assert data.embedding is not None
    data.embedding.save(workdir / EMBEDDING)
    storage.write_json(workdir / GROUPS, {"groups": list(data.names)})
    releases = {name: memory.guarantee for name, memory in memories.items()}
    measures = [
        Measure(name, "accuracy", accuracy(memory_scores(memory, data.queries), data.truth))
        for name, memory in memories.items()
    ]
    shares = values.mean(0)
    exact = exact_scores(data, values, 1 / found.scale)
    scores = {"attention": exact / shares}
    told: dict[str, Any] = {"sketch": functools.partial(memory_scores, memories["sketch"])}
    if _all_rows(config):
        means, releases["class_means"] = class_means(
            keys.noise("class_means"), data.keys, values, **budget
        )
        trained = private_regression(config, keys, data)
        releases["logistic_regression"] = trained.guarantee
        scores["class_means"] = data.queries @ means.T
        scores["logistic_regression"] = logits(trained.params, data.queries)
        told["logistic_regression"] = lambda keys: softmax(logits(trained.params, keys), axis=1)
        more, spent = _paid(config, keys, data, values, exact)
        measures += more
        releases |= spent
    releases = {label: spent.assuming(ASSUMED) for label, spent in releases.items()}
    composed = dict(releases)
    if config.language.kind != "none":
        scores |= answers.in_words(config.language, data, told)
        releases |= {f"words_{row}": releases[row] for row in told}
    measures += [Measure(name, "accuracy", accuracy(s, data.truth)) for name, s in scores.items()]
    logit = best_logit(data, values, config.seed)
    best = accuracy(exact_scores(data, values, logit), data.truth)
    majority = float((data.truth == shares.argmax()).mean())
    measures += [
        Measure("best_attention", "accuracy", best),
        Measure("majority", "accuracy", majority),
    ]
    return Outcome(
        measures=measures,
        headline=releases["sketch"],
        releases=releases,
        composed=composed,  # the rows of words read the releases of other rows
        not_covered=NOT_COVERED,
        titles=TITLES,
        headline_row="sketch",
        comparisons=[
            Comparison("accuracy", ["class_means", "logistic_regression"], more_is_better=True)
        ],
        synthetic=synthetic,
        notes=f"Degree {found.degree}, logits up to {1 / found.scale:g}, chosen by the expected error.",
    )


def _paid(
    config, keys: secrets.Keys, data: labelled.Documents, values: np.ndarray, exact: np.ndarray
) -> tuple[list[Measure], dict[str, PrivacyGuarantee]]:
    """The accuracies of votes that each query pays for, and what each block of queries cost."""
    cast = {None: exact, **nearest_votes(data, values, config.neighbours)}
    scores: dict[str, list[float]] = defaultdict(list)
    rows, releases = {}, {}
    for block in votes.paid(config, len(data.truth)):
        noisy, releases[block.label] = fresh_noise(
            keys.noise(block.label),
            cast[block.neighbours][block.part],
            block.num_queries,
            change=block.change,
            epsilon=config.epsilon,
            delta=config.delta,
        )
        row = block.measure(0.0).place
        # Without the groups' exact shares, which are private.
        scores[row].append(accuracy(noisy, data.truth[block.part]))
        rows[row] = block
    return [row.measure(float(np.mean(scores[name]))) for name, row in rows.items()], releases


def best_logit(data: labelled.Documents, values: np.ndarray, seed: int) -> float:
    """Of `LOGITS`, the one that classifies a tenth of the private documents best from the others."""
    order = np.random.default_rng(seed).permutation(len(data.keys))
    asking, rest = np.split(order, [max(1, len(order) // 10)])
    part = data._replace(keys=data.keys[rest], queries=data.keys[asking])
    found = {
        logit: accuracy(exact_scores(part, values[rest], logit), data.labels[asking])
        for logit in LOGITS
    }
    return max(found, key=lambda logit: found[logit])


class Memory(NamedTuple):
    """The released memory of a finished run, with the public embedding of texts and the groups' names."""

    sketch: cross_attention.Sketch
    embedding: labelled.TextEmbedding
    names: list[str]

    def ask(self, texts: Sequence[str]) -> list[dict[str, float]]:
        """For each text what the memory gives each group, as shares of one; without the private data.

        Where noise leaves no group anything, all have the same share.
        """
        scores = np.maximum(memory_scores(self.sketch, self.embedding(texts)), 0)
        scores += scores.sum(1, keepdims=True) <= 0
        shares = scores / scores.sum(1, keepdims=True)
        return [dict(zip(self.names, row, strict=True)) for row in shares.tolist()]


figures, public_files = rivals.draw, labelled.public_files


def load(config, workdir: Path) -> Memory:
    """The released memory of a finished run; the private file is not read."""
    workdir = Path(workdir)
    names = storage.read_json(workdir / GROUPS)["groups"]
    return Memory(
        dpx.load(workdir / RELEASE), labelled.load_public(config, workdir / EMBEDDING), names
    )


def _expected(config) -> cross_attention.ExpectedError:
    logit = config.largest_logit
    chosen: dict[str, Any] = {"features": "auto"} if logit is None else {"degree": config.degree}
    bounds: dict[str, Any] = {name: bound for name, bound in BOUNDS.items() if name != "clip"}
    return cross_attention.expected_error(
        config.expected_records,
        config.dim,
        labelled.num_groups(config),
        value_domain="simplex",
        neighboring=config.neighboring,
        epsilon=config.epsilon,
        delta=config.delta,
        scale=None if logit is None else 1 / logit,
        **bounds,
        **chosen,
    )
