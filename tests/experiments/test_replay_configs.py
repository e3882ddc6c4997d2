"""Every config at `tiny`, run whole on neighbouring data sets, and paid for what its noise was in fact.

Where rows share releases, each row is too; and held-out data cost nothing.

The configs are those of the folder: a new one, or a new variant, has to say here how its records change.
"""

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from all_configs import all_sources, configured, executed

from dpx import _storage as storage
from dpx import audit, noisy_head
from dpx.data import Histories
from dpx.privacy import REPLACE_ONE
from dpx.training import checkpoints
from experiments.cross_attention import kernel_regression, labelled, reader
from experiments.cross_attention import query_error as cross_attention
from experiments.cross_attention import table as own_memory
from experiments.dp_transformer import corpus as corpora
from experiments.dp_transformer import distraction, from_scratch, labelled_texts, tuned_text
from experiments.dp_transformer import documents as docs
from experiments.dp_transformer import histories as recommender_data
from experiments.gram import attention_error as gram
from experiments.gram import own_matrix
from experiments.noisy_head import texts as noisy_head_text

# What tells nothing of a record, or is named among what no guarantee covers.
IGNORED = {
    "stderr": "the progress line, which shows the training loss",
    "file/metrics.jsonl": "the training loss",
    "file/result.json": "metrics, which are compared one by one, and the time it took",
    "file/checkpoints/*": "compared as the model that is returned; the files hold times",
    "file/model/*": "likewise",
    "file/secret/*": "keys, deleted at the end, and a digest of the data",
    "file/.lock*": "held while it runs",
    "file/config.json": "holds a fingerprint of the noise seed, salted at random",
}
# Of configs that are not replayed, why nobody's record can be in what they release.
EXEMPT = {
    f"audit:{target},tiny": "it makes up its records, and itself trains on thousands of neighbours"
    for target in ("train", "fit", "recommender", "ngram")
}
TRAINING = {
    "train.steps": 3,
    "train.batch_size": 16,
    "train.microbatch_size": 8,
    "train.log_every": 3,
    "non_private.steps": 0,
}
TUNING = TRAINING | {
    "data.limit": 60,
    "data.record": "line",
    "data.test_limit": 10,
    "ngrams": (1,),
}
DROPOUT = {"data.limit": 120, "reattention.enabled": True, "model.dropout": 0.5}
CORRECTED = {"reattention.enabled": True, "reattention.budget_fraction": 0.5, "num_seeds": 1}
GRU = {
    "data.limit": 120,
    "model.kind": "gru",
    "prior.budget_fraction": 0.0,
    "model.dropout": 0.5,
}
# Changes of a config before it is replayed: rows and options that its defaults leave out.
CHANGES = {
    # Shares that are large enough to be missed where one is left out.
    "quickstart:tiny": [
        TRAINING | DROPOUT | {"reattention.budget_fraction": 0.15},
        TRAINING | GRU | {"train.sampling": "allocation"},
    ],
    "shakespeare:tiny": [TRAINING | {"model.dropout": 0.2}],
    "text:tiny": [TRAINING | {"data.limit": 120, "train.secure": True}],
    "friends:users,tiny": [
        TRAINING | DROPOUT | {"train.records_per_user": 2},
        TRAINING | GRU | {"train.sampling": "allocation", "train.secure": True},
    ],
    "friends:lines,tiny": [TRAINING | {"data.limit": 120}],
    "classify:sentences,tiny": [TRAINING | {"words.batch_size": 16}],
    "classify:newsgroups,tiny": [TRAINING | {"words.batch_size": 16}],
    "classify:reuters,tiny": [TRAINING | {"words.batch_size": 16, "train.sampling": "allocation"}],
    "classify:table,tiny": [
        TRAINING,
        TRAINING | {"comparisons": True, "words.batch_size": 16},
        TRAINING | {"comparisons": True, "words.batch_size": 16, "data.user": "who"},
    ],
    "finetune:pretrained,tiny": [
        TUNING | more
        for more in ({}, {"data.user": "who"}, {"tune.mode": "full"}, {"tune.layers": 1})
    ],
    "finetune:scratch,tiny": [TRAINING | {"data.limit": 60, "data.record": "line"}],
    "reattention:tiny": [
        {name: value for name, value in TRAINING.items() if not name.startswith("non_private")}
        | {"sequences": 4, "data.num_users": 40}
    ],
    "recommender:movielens,tiny": [TRAINING | {"model.dropout": 0.5, "num_seeds": 2}],
    "recommender:amazon,tiny": [
        TRAINING | CORRECTED | {"popularity_budget_fraction": 0.25, "choice_budget_fraction": 0.2}
    ],
    "recommender:amazon_warm,tiny": [
        TRAINING | {"num_seeds": 1, "model.dropout": 0.2, "choice_budget_fraction": 0.05}
    ],
    "recommender:movielens1m,tiny": [
        TRAINING | {"model.kind": "lstm", "model.tied": False, "train.sampling": "auto"}
    ],
    "recommender:synthetic,tiny": [
        TRAINING | {"evaluate.split": "validation", "popularity_budget_fraction": 0.0}
    ],
    "recommender:table,tiny": [TRAINING, TRAINING | {"comparisons": True}],
    "gram:recommender,tiny": [{"num_kept": 8}],
    "gram:error,tiny": [{"columns": 40, "trials": 2}],
    "cross_attention:retrieval,tiny": [
        {"regression.batch_size": 16},
        {"neighboring": "replace_one"},
    ],
    "cross_attention:sentences,tiny": [{"regression.batch_size": 16}],
    "gram:features,tiny": [{"regression.batch_size": 16}],
    "next_tokens:tiny": [{"data.limit": 40, "data.record": "line"}],
    "cross_attention:size,tiny": [{"trials": 2}],
}
pytestmark = pytest.mark.usefixtures("recording")


@dataclasses.dataclass
class Case:
    """How a config is replayed.

    Attributes:
      inject: Puts data where the run looks for them.
      data: What the run works on.
      neighbours: Other data with one record more, less or replaced, and their `ids`.
      exposed: What of the result may differ, and a word that `not_covered` has to say of it.
      floor: The largest ratio is at least this, or the neighbours are not near the worst.
      paid: The total is what the noise that was drawn costs. It is not where one run draws several times
        on data that are made up for each.
      held_out: The data with other held-out ones, if a case has them.
    """

    inject: Callable[[Any], None]
    data: Any
    neighbours: list[tuple[Any, Any]]
    exposed: dict[str, str]
    floor: float
    paid: bool = True
    held_out: Any = None


class Later(list):
    """The same records to train on, with others to measure on."""


def removed(rows, *indices):
    found = []
    for index in indices:
        ids = np.delete(np.arange(len(rows)), index)
        found.append(([rows[i] for i in ids], ids))
    return found


# ---------------------------------------------------------------------------------------------------------
# Where each experiment finds its records


def whose(rows, train):
    """The users of records that are put together of each unit's."""
    return None if train.users is None else np.repeat(range(len(rows)), [len(x) for x, _ in rows])


def _texts(config, patch, module=corpora, name="load"):
    corpus = getattr(module, name)(config)

    def inject(rows):
        tokens, mask = (np.concatenate(part) for part in zip(*rows, strict=True))
        # A record is its tokens up to its end, so that a mask goes with its row.
        own = dataclasses.replace(corpus.train, tokens=tokens, users=whose(rows, corpus.train))
        assert np.array_equal(own.mask, mask)
        changed = corpus._replace(train=own)
        if isinstance(rows, Later):  # as many, since their number is public
            others = np.maximum(np.arange(corpus.test.num_units), 1)
            changed = changed._replace(test=corpus.test.take(others))
        patch.setattr(module, name, lambda config: changed)

    # All records of a unit, which is a user or one record.
    units = [corpus.train.take([number]) for number in range(min(120, corpus.train.num_units))]
    rows = [(unit.tokens, unit.mask) for unit in units]
    longest = int(np.argmax([mask.sum() for _, mask in rows]))
    rows[7] = rows[3]
    # The first, a long one, one of a pair, and a third of that pair.
    neighbours = [*removed(rows, 0, longest, 7), ([*rows, rows[3]], np.arange(len(rows) + 1))]
    exposed = {"result/metrics/*/train_*": "train metrics"} if config.train_loss else {}
    return Case(inject, rows, neighbours, exposed, 0.9, held_out=Later(rows))


def _from_scratch(config, patch):
    return _texts(config, patch, from_scratch, "_corpus")


def _documents(config, patch):
    train, later = docs.load(config, tuned_text.build(config).tokenizer)

    def inject(rows):
        arrays = (np.concatenate(part) for part in zip(*rows, strict=True))
        found = docs.Documents(*arrays, whose(rows, train))
        patch.setattr(docs, "load", lambda config, tokenizer, **_: (found, later))

    rows = [train.take([number])[:2] for number in range(train.num_units)]
    exact = ("memory_no_noise", "frequencies_no_noise", "attention")
    exposed = {}
    if "public" in config:
        exposed = {f"result/metrics/{row}/*": f" {row}" for row in exact}
    return Case(inject, rows, removed(rows, 0, len(rows) - 1), exposed, 0.5)


def _classified(config, patch):
    train, test = labelled_texts.load(config)

    def inject(rows):
        texts, labels = (np.concatenate(part) for part in zip(*rows, strict=True))
        found = labelled_texts.Labelled(texts, labels, whose(rows, train))
        patch.setattr(labelled_texts, "load", lambda config: (found, test))

    rows = [train.take([number])[:2] for number in range(min(train.num_units, 100))]
    exposed = {"result/metrics/majority/*": "majority"}
    return Case(inject, rows, removed(rows, 0, len(rows) - 1), exposed, 0.5)


def users():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 12, rng.integers(3, 9)).astype(np.int32) for _ in range(60)]


def _histories(config, patch):
    def inject(rows):
        patch.setattr(recommender_data, "load", lambda config: Histories(tuple(rows), 12))

    rows = users()
    # Of users who leave, the held-out items leave too.
    exposed = {"result/metrics/*": "test metrics"}
    other = [np.append(own[:-1], (own[-1] + 1) % 12) for own in rows]  # of each user the last item
    return Case(inject, rows, removed(rows, 0, 59), exposed, 0.9, held_out=other)


def _sequences(config, patch):
    histories = distraction._histories(config)

    def inject(rows):
        changed = Histories(tuple(rows), histories.num_items)
        patch.setattr(distraction, "_histories", lambda config: changed)

    rows = list(histories.items)
    exposed = {"result/metrics/*": "ratios", "file/reattention.npz": "ratios"}
    return Case(inject, rows, removed(rows, 39), exposed, 0.5)


def _gram_errors(config, patch):
    X = gram._columns(config)
    other, opposite = X.copy(), X.copy()
    other[:, 7] *= -3
    opposite[:, 0] = 0
    exposed = {"result/metrics/*": "errors", "result/notes": "the notes", "stdout": "errors"}
    inject = lambda X: patch.setattr(gram, "_columns", lambda config: X)  # noqa: E731
    return Case(inject, X, [(other, None), (opposite, None)], exposed, 0.1, paid=False)


def _own_matrix(config, patch):
    # With so little noise, and entries so small, the bounds on errors follow from the matrix.
    config.update({"column_bound": 0.015, "epsilon": 1e4})
    X = np.random.default_rng(0).uniform(-0.01, 0.01, (3, 40))
    turned, far = X.copy(), X.copy()
    turned[:, 7] *= -3
    far[:, 0] = [1e6, -1e6, 0]
    inject = lambda X: patch.setattr(own_matrix, "read", lambda config: X)  # noqa: E731
    return Case(inject, X, [(turned, None), (far, None)], {}, 0.1)


def _memories(config, patch):
    data = cross_attention._draw(config, 0)
    # Timing makes each release twice, bit by bit the same: once is enough here.
    patch.setattr(cross_attention, "_timed", lambda call: (call(), 0.0))
    K, V, Q = (part.copy() for part in data)
    K[0], V[0] = 1.0, -1.0
    inject = lambda data: patch.setattr(cross_attention, "_draw", lambda *_: data)  # noqa: E731
    exposed = {"result/metrics/*": "errors"}
    return Case(inject, data, [((K, V, Q), None)], exposed, 0.05, paid=False)


def _own_memory(config, patch):
    rng = np.random.default_rng(0)
    K, V = rng.uniform(0, 1, (60, 2)), rng.uniform(-1, 1, (60, 1))
    far, opposite = (K.copy(), V.copy()), (K.copy(), V.copy())
    far[0][0], far[1][0] = 1e30, -1e30
    opposite[0][59], opposite[1][59] = 0.0, -np.sign(V[59])
    inject = lambda data: patch.setattr(own_memory, "_load", lambda config: data)  # noqa: E731
    neighbours = [(far, None), (opposite, None)]
    return Case(inject, (K, V), neighbours, {"result/metrics/*": "errors"}, 0.3)


def _sales(config, patch):
    exact = ("attention", "best_attention", "mean", "linear_regression")
    return _diamonds(kernel_regression, exact, patch)


def _read_sales(config, patch):
    return _diamonds(reader, ("exact_reader",), patch)


def _diamonds(where, exact, patch):
    rng = np.random.default_rng(0)
    low = [0.2, 50, 50, 300]
    rows = rng.uniform(low, [5, 75, 80, 19_000], (60, 4))
    test = rng.uniform(low, [5, 75, 80, 19_000], (10, 4))
    extreme, other = rows.copy(), rows.copy()
    extreme[0], other[59] = [1e6, -1e6, 1e6, 1e9], rows[0]
    inject = lambda x: patch.setattr(where, "load_diamonds", lambda config: (x, test))  # noqa: E731
    exposed = {f"result/metrics/{row}/*": row for row in exact}
    return Case(inject, rows, [(extreme, None), (other, None)], exposed, 0.3)


def _labelled(config, patch):
    found = labelled.load(config)

    def inject(rows):
        keys, labels = (np.array(part) for part in zip(*rows, strict=True))
        changed = found._replace(keys=keys, labels=labels)
        patch.setattr(labelled, "load", lambda config: changed)
        patch.setattr(labelled, "size", lambda config: (len(rows), len(found.truth)))

    groups = min(3, found.num_groups)
    rows = [(key, label % groups) for key, label in zip(found.keys, found.labels, strict=True)][
        :120
    ]
    # A document along an axis, as long as any, is the worst for what is rounded, and the only one of its
    # group the worst for what is divided by how many there are.
    rows[5] = (np.eye(config.dim, dtype=np.float32)[0], found.num_groups - 1)
    exact = ("attention", "best_attention", "majority")
    if "components" in config:
        exact = ("exact", "*/exact")
    exposed = {f"result/metrics/{row}/*": row.removeprefix("*/") for row in exact}
    if "components" in config:
        exposed |= {"result/metrics/components=*/captured": "captured shares"}
    neighbours = removed(rows, 0, 5, 119)
    if config.get("neighboring") == "replace_one":
        turned = [(-rows[0][0], (rows[0][1] + 1) % found.num_groups), *rows[1:]]
        twice = [rows[0], rows[0], *rows[2:]]
        neighbours = [(turned, None), (twice, None)]
    return Case(inject, rows, neighbours, exposed, 0.5)


def _prompts(config, patch):
    """One prompt of every simulated trial is replaced by an extreme one."""
    draw = noisy_head.sample_features

    def inject(scale):
        jax.clear_caches()

        def drawn(*arguments, **options):
            found = draw(*arguments, **options)
            if scale == 0:
                return found
            query, context, target = found
            return noisy_head.Features(
                query.at[0].set(scale), context.at[0].set(-1.0), target.at[0].set(-scale)
            )

        patch.setattr(noisy_head, "sample_features", drawn)

    # Several trials would run side by side, and pass the door in any order.
    config.trials = 1
    exposed = {"result/metrics/*": "simulated", "file/notes.md": "simulated"}
    neighbours = [(1e3, None), (1.0, None)]
    return Case(inject, 0.0, neighbours, exposed, 0.0, paid=False)


def _own_prompts(config, patch):
    rng = np.random.default_rng(0)

    def prompts(count):
        x = rng.random((count, config.length + 1, config.dim))
        return noisy_head.Prompts(x, rng.uniform(-1, 1, (count, config.length + 1)))

    train, test = prompts(30), prompts(5)
    other = noisy_head.Prompts(train.x.copy(), train.y.copy())
    other.x[0], other.y[0] = 1e3, -1e3
    inject = lambda x: patch.setattr(noisy_head_text, "read", lambda config: (x, test))  # noqa: E731
    exposed = {"result/metrics/*": "every risk", "file/notes.md": "every risk"}
    # What the last iterate costs is less than what all of its steps do.
    return Case(inject, train, [(other, None)], exposed, 0.01, paid=False)


MAKERS = {
    _texts: ("quickstart", "shakespeare", "text", "friends:users", "friends:lines"),
    _from_scratch: ("finetune:scratch",),
    _documents: ("finetune:pretrained", "next_tokens"),
    _classified: [f"classify:{x}" for x in ("table", "sentences", "reuters", "newsgroups")],
    _sequences: ("reattention",),
    _gram_errors: ("gram:error",),
    _own_matrix: ("gram:table",),
    _histories: (
        "gram:recommender",
        *(f"recommender:{x}" for x in ("movielens", "movielens1m", "amazon", "amazon_warm")),
        *("recommender:synthetic", "recommender:table"),
    ),
    _labelled: ("gram:features", "cross_attention:retrieval", "cross_attention:sentences"),
    _sales: ("cross_attention:diamonds",),
    _read_sales: ("cross_attention:reader",),
    _own_memory: ("cross_attention:table",),
    _memories: [f"cross_attention:{x}" for x in ("size", "epsilon", "bound")],
    _own_prompts: ("noisy_head:text",),
    _prompts: [
        f"noisy_head:{x}"
        for x in ("low_dim", "high_dim", "useful", "rates", "early_stopping", "robustness")
    ],
}
CASES = {
    f"{name}{',' if ':' in name else ':'}tiny": make
    for make, names in MAKERS.items()
    for name in names
}


# ---------------------------------------------------------------------------------------------------------
# Which releases each row of a table rests on, by their labels in the order in which they are made


CHOICE = "lead of the trained model"


def all_of(labels, *names):
    return [[i for i, label in enumerate(labels) if label == name] for name in names]


def of_text(labels):
    (alone, prior), *names = all_of(labels, "2-gram counts", "1-gram counts", "item popularity")
    plain, corrected = all_of(labels, "gradients of dp_transformer", "gradients of dp_reattention")
    return {
        "dp_1gram": names[0],
        "dp_2gram": [alone],
        "start": [prior],
        "dp_transformer": [prior, *plain],
        "dp_reattention": [prior, *names[1], *corrected],
    }


def of_popularities(labels):
    (alone, prior, tokens), chosen = all_of(labels, "item popularity", CHOICE)
    plain, corrected = all_of(labels, "gradients of dp_transformer", "gradients of dp_reattention")
    last = [prior, tokens, *corrected, *chosen]
    return {
        "dp_popularity": [alone],
        "start": [prior],
        "dp_transformer": [prior, *plain],
        "dp_reattention": last,
        "served": last,
    }


def of_start(labels):
    (_, start, whole), chosen = all_of(labels, "item popularity", CHOICE)
    (trained,) = all_of(labels, "gradients of dp_transformer")
    last = [*range(start, whole), *trained, *chosen]
    return {
        "dp_popularity": [0],
        "start": [*range(start, whole)],
        "dp_transformer": last,
        "served": last,
        "transitions": [*range(whole, trained[0])],
    }


# Of the first changes of a config, with the row of the headline.
ROWS = {
    "quickstart:tiny": (of_text, "dp_transformer"),
    "recommender:amazon,tiny": (of_popularities, "served"),
    "recommender:amazon_warm,tiny": (of_start, "served"),
}


def check_rows(source, found, left):
    """Each row costs what is stated, in the record and in the log of its training."""
    delta, stated = left["total"]["delta"], left["releases"]
    of_rows, main = ROWS[source]
    rows = of_rows([seen.label for seen in found.releases])
    assert rows.keys() == stated.keys()
    for row, indices in rows.items():
        chosen = [found.releases[i] for i in indices]
        cost = dataclasses.replace(found, releases=chosen).epsilon(delta)
        assert stated[row]["epsilon"] == pytest.approx(cost, rel=2e-3), row
    assert left["headline"] == stated[main]["epsilon"]
    spent = {line["run"]: line["epsilon"] for line in left["logged"] if line.get("epsilon")}
    assert "dp_transformer" in spent
    assert all(spent[row] == stated[row]["epsilon"] for row in spent.keys() & stated.keys())


# ---------------------------------------------------------------------------------------------------------
# The replay


def test_every_config_is_replayed_or_has_a_reason():
    assert {*CASES, *EXEMPT} == {*all_sources()}
    assert not {*CASES} & {*EXEMPT}
    assert {*CHANGES} <= {*CASES}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "changes"),
    [
        pytest.param(source, changes, id=f"{source}{number or ''}")
        for source in CASES
        for number, changes in enumerate(CHANGES.get(source, [{}]))
    ],
)
def test_a_record_moves_each_release_by_what_it_declares(source, changes, tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(checkpoints, "save_model", lambda _, model: saved.append(model))
    config = configured(source, tmp_path, noise_seed=987654321, **changes)
    case = CASES[source](config, monkeypatch)
    left = {}

    def whole(data, workdir):
        case.inject(data)
        saved.clear()
        record = executed(config, source, workdir)
        left.update(record.private, shown=sys.stderr.getvalue(), headline=record.privacy["epsilon"])
        files = [path for path in workdir.rglob("*.*") if path.is_file()]
        assert not [path for path in files if b"987654321" in path.read_bytes()]
        log = workdir / "metrics.jsonl"
        left["logged"] = storage.read_lines(log) if log.exists() else []
        return {"metrics": record.metrics, "saved": list(saved), "notes": record.notes}

    ignore = {**IGNORED, **case.exposed}
    first = audit.record(whole, case.data, ignore=ignore)
    total, relation = left["total"], left["total"]["neighboring"]
    assert first.releases
    for word in case.exposed.values():
        assert any(word in words for words in left["not_covered"]), word
    if "  loss " in left["shown"]:
        assert any("loss" in words for words in left["not_covered"])
    if first.public:  # only numbers of records are, and the guarantee says so
        assert all(what.startswith("the number of") for what in first.public)
        assert any(words.startswith("the number of") for words in total["assumptions"])
    if case.paid:  # what the ledger states is what the noise that was drawn costs
        replaced = {"neighboring": REPLACE_ONE} if relation == "replace_one" else {}
        cost = first.epsilon(total["delta"], **replaced)
        assert cost == pytest.approx(total["epsilon"], rel=5e-3)
    if source in ROWS and changes is CHANGES[source][0]:
        check_rows(source, first, left)
        later = audit.replay(whole, case.data, case.held_out, ignore=ignore, first=first)
        assert not [x for x in later.differences if not x.startswith("result/metrics/")]
        assert all(x.ratio == 0 for x in later.compared if x.label != CHOICE)
    ratios = [
        audit.replay(whole, case.data, other, ids=ids, ignore=ignore, first=first)
        for other, ids in case.neighbours
    ]
    if config.experiment.startswith("noisy_head") and not case.paid:
        # Trials of one setting are paired on purpose, so keys may serve several of them: nobody's data.
        for found in ratios:
            assert not found.differences
            assert found.largest_ratio <= 1 + 1e-6
    else:
        for found in ratios:
            found.check()
    largest = max(found.largest_ratio for found in ratios)
    assert largest >= case.floor
    if case.paid:  # and the noise follows from the secret
        config.noise_seed = 6
        keys = [
            {seen.key for seen in found.releases}
            for found in (first, audit.record(whole, case.data))
        ]
        assert not keys[0] & keys[1]
    test = os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split(" ")[0]
    print(f"\n| {test} | {len(ratios)} | {largest:.7f} |")  # python -m pytest -s
