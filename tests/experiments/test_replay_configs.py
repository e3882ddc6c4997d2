"""Every config at `tiny`, run whole on neighbouring data sets, and paid for what its noise was in fact."""

import json
import os

import jax
import numpy as np
import pytest

from dpx import audit, noisy_head
from dpx.data import Histories
from dpx.launch import (
    records,
    run,
)
from experiments.cross_attention import (
    kernel_regression,
)
from experiments.cross_attention import (
    query_error as cross_attention,
)
from experiments.dp_transformer import corpus as corpora
from experiments.dp_transformer import (
    histories as recommender_data,
)
from experiments.dp_transformer import (
    models,
)
from experiments.gram import attention_error as gram
from experiments.gram import own_matrix
from experiments.noisy_head import texts as noisy_head_text

# What no guarantee covers (the `not_covered` of every run says so in words), and what tells nothing.
NOT_COVERED = {
    "stderr": "the progress line shows the training loss",
    "file/metrics.jsonl": "the training loss",
    "file/result.json": "metrics, which are compared one by one, and the time it took",
    "file/checkpoints/*": "compared as the model that is returned; the files hold times",
    "file/model/*": "likewise",
    "file/secret/*": "keys, deleted at the end, and a digest of the data",
    "file/.lock*": "held while it runs",
    "file/config.json": "holds a fingerprint of the noise seed, salted at random",
}
HELD_OUT = {"result/metrics/*": "test metrics, of the held-out items of the same users"}
EXACT_ERRORS = {"result/metrics/*": "errors, computed with the exact answer"}

TRAINING = {
    "train.steps": 3,
    "train.batch_size": 16,
    "train.microbatch_size": 8,
    "train.log_every": 3,
    "non_private.steps": 0,
    "noise_seed": 5,
}


@pytest.fixture(scope="module", autouse=True)
def _recording():
    with audit.recording():
        yield


@pytest.fixture
def saved(monkeypatch):
    """The models that a run saves."""
    found = []
    monkeypatch.setattr(
        models, "save", lambda workdir, params, errors, **more: found.append((params, errors, more))
    )
    return found


def configured(source, changes):
    config = records.load_config(source)
    config.update_from_flattened_dict(changes)
    return config


def program(config, source, inject, saved=()):
    """A whole run as a function of its data; `inject` puts them where the run looks for them."""

    def whole(data, workdir):
        inject(data)
        if saved:
            saved.clear()
        run.prepare(config, source, workdir)
        record = run.execute(config, workdir)
        return {"metrics": record.metrics, "saved": list(saved)}

    return whole


def check(whole, data, neighbours, ignore, *, paid=True):
    """Replays; returns the largest ratio."""
    ignore = {**NOT_COVERED, **ignore}
    spent = {}

    def watched(data, workdir):
        result = whole(data, workdir)
        spent.update(json.loads((workdir / "privacy.json").read_text())["total"])
        return result

    first = audit.record(watched, data, ignore=ignore)
    assert first.releases
    if first.public:  # only numbers of records are, and the guarantee says so
        assert all(what.startswith("the number of") for what in first.public)
        assert any(words.startswith("the number of") for words in spent["assumptions"])
    if paid:  # what the ledger states is what the noise that was drawn costs
        cost = first.epsilon(spent["delta"])
        assert cost == pytest.approx(spent["epsilon"], rel=5e-3)
    ratios = [
        audit.replay(whole, data, other, ids=ids, ignore=ignore, first=first).check().largest_ratio
        for other, ids in neighbours
    ]
    test = os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split(" ")[0]
    print(f"\n| {test} | {len(ratios)} | {max(ratios):.7f} |")  # python -m pytest -s
    return max(ratios)


def removed(rows, *indices):
    for index in indices:
        ids = np.delete(np.arange(len(rows)), index)
        yield [rows[i] for i in ids], ids


# ---------------------------------------------------------------------------------------------------------
# Training


def text(source, changes, monkeypatch, saved):
    config = configured(source, TRAINING | changes)
    corpus = corpora.load(config)

    def inject(rows):
        changed = corpus._replace(train=corpus.train.of(np.stack(rows)))
        monkeypatch.setattr(corpora, "load", lambda config: changed)

    return program(config, source, inject, saved), list(corpus.train.tokens[:120])


TEXTS = {
    "quickstart": (
        "configs/quickstart.py:tiny",
        {"data.limit": 120, "reattention.enabled": True, "model.dropout": 0.5},
    ),
    "quickstart, GRU": (
        "configs/quickstart.py:tiny",
        {
            "data.limit": 120,
            "model.kind": "gru",
            "prior.budget_fraction": 0.0,
            "model.dropout": 0.5,
        },
    ),
    "shakespeare": ("configs/shakespeare.py:tiny", {"model.dropout": 0.2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_texts(name, monkeypatch, saved):
    whole, rows = text(*TEXTS[name], monkeypatch, saved)
    train_metrics = {"result/metrics/*/train_*": "computed on training records, and said to be"}
    assert check(whole, rows, removed(rows, 0), train_metrics) > 0.9


@pytest.mark.slow
def test_texts_on_many_neighbours(monkeypatch, saved):
    whole, rows = text(*TEXTS["quickstart"], monkeypatch, saved)
    longest = int(np.argmax([np.count_nonzero(row) for row in rows]))
    rows[7] = rows[3]
    neighbours = [*removed(rows, 60, 119, longest, 7), ([*rows, rows[3]], np.arange(121))]
    assert check(whole, rows, neighbours, {}) > 0.9


def users():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 12, rng.integers(3, 9)).astype(np.int32) for _ in range(60)]


RECOMMENDERS = {
    "movielens": {"model.dropout": 0.5, "num_seeds": 2},
    "amazon": {"reattention.enabled": True, "data.path": "ratings.txt", "num_seeds": 1},
    "amazon_warm": {"data.path": "ratings.txt", "num_seeds": 1, "model.dropout": 0.2},
    "movielens1m": {"data.path": "ml-1m", "model.kind": "lstm", "model.tied": False},
    "synthetic": {"evaluate.split": "validation"},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", RECOMMENDERS)
def test_recommenders(variant, monkeypatch, saved):
    source = f"configs/recommender.py:{variant},tiny"
    config = configured(source, TRAINING | RECOMMENDERS[variant])

    def inject(rows):
        monkeypatch.setattr(recommender_data, "load", lambda config: Histories(tuple(rows), 12))

    rows = users()
    whole = program(config, source, inject, saved)
    assert check(whole, rows, removed(rows, 0), HELD_OUT) > 0.9


@pytest.mark.slow
def test_one_release_recommenders(monkeypatch):
    source = "configs/gram.py:recommender,tiny"
    changes = {"data.path": "ratings.txt", "noise_seed": 5, "num_kept": 8}
    config = configured(source, changes)

    def inject(rows):
        monkeypatch.setattr(recommender_data, "load", lambda config: Histories(tuple(rows), 12))

    rows = users()
    whole = program(config, source, inject)
    assert check(whole, rows, removed(rows, 0, 59), HELD_OUT) > 0.9


@pytest.mark.slow
def test_reattention(monkeypatch, saved):
    from experiments.dp_transformer import distraction as reattention

    source = "configs/reattention.py:tiny"
    changes = {k: v for k, v in TRAINING.items() if not k.startswith("non_private")}
    config = configured(source, changes | {"sequences": 4, "data.num_users": 40})
    histories = reattention._histories(config)

    def inject(rows):
        changed = Histories(tuple(rows), histories.num_items)
        monkeypatch.setattr(reattention, "_histories", lambda config: changed)

    rows = list(histories.items)
    whole = program(config, source, inject, saved)
    shown = {
        "result/metrics/*": "ratios of attention on the training sequences (synthetic)",
        "file/reattention.npz": "likewise",
    }
    assert check(whole, rows, removed(rows, 39), shown) > 0.5


# ---------------------------------------------------------------------------------------------------------
# One-shot releases, and NoisyHead


@pytest.mark.slow
def test_gram_errors(monkeypatch):
    source = "configs/gram.py:tiny"
    config = configured(source, {"columns": 40, "trials": 2, "noise_seed": 5})
    X = gram._columns(config)

    def inject(X):
        monkeypatch.setattr(gram, "_columns", lambda config: X)

    other = X.copy()
    other[:, 7] *= -3
    opposite = X.copy()
    opposite[:, 0] = 0
    whole = program(config, source, inject)
    ignore = EXACT_ERRORS | {"file/notes.md": "the same", "stdout": "the same"}
    assert check(whole, X, [(other, None), (opposite, None)], ignore, paid=False) > 0.1


def test_own_gram_matrix(monkeypatch):
    source = "configs/gram.py:table,tiny"
    changes = {"data.path": "X.npy", "column_bound": 1.5, "noise_seed": 5}
    config = configured(source, changes)

    def inject(X):
        monkeypatch.setattr(own_matrix, "read", lambda config: X)

    X = np.random.default_rng(0).uniform(-1, 1, (3, 40))
    turned, far = X.copy(), X.copy()
    turned[:, 7] *= -3
    far[:, 0] = [1e6, -1e6, 0]
    whole = program(config, source, inject)
    assert check(whole, X, [(turned, None), (far, None)], {}) > 0.1


@pytest.mark.slow
def test_cross_attention(monkeypatch):
    source = "configs/cross_attention.py:tiny"
    config = configured(source, {"noise_seed": 5})
    data = cross_attention._draw(config, 0)
    # Timing makes each release twice, bit by bit the same: once is enough here.
    monkeypatch.setattr(cross_attention, "_timed", lambda call: (call(), 0.0))

    def inject(data):
        monkeypatch.setattr(cross_attention, "_draw", lambda config, trial: data)

    K, V, Q = (part.copy() for part in data)
    K[0], V[0] = 1.0, -1.0
    whole = program(config, source, inject)
    assert check(whole, data, [((K, V, Q), None)], EXACT_ERRORS, paid=False) > 0.05


@pytest.mark.slow
def test_diamonds(monkeypatch):
    source = "configs/cross_attention.py:diamonds,tiny"
    config = configured(source, {"noise_seed": 5})
    rng = np.random.default_rng(0)
    low = [0.2, 50, 50, 300]
    rows = rng.uniform(low, [5, 75, 80, 19_000], (60, 4))
    test = rng.uniform(low, [5, 75, 80, 19_000], (10, 4))

    def inject(train):
        monkeypatch.setattr(kernel_regression, "load_diamonds", lambda config: (train, test))

    extreme, other = rows.copy(), rows.copy()
    extreme[0], other[59] = [1e6, -1e6, 1e6, 1e9], rows[0]
    whole = program(config, source, inject)
    exact = {
        f"result/metrics/{row}/*": "not private" for row in ("attention", "best_attention", "mean")
    }
    exact |= {"result/metrics/linear_regression/*": "not private"}
    neighbours = [(extreme, None), (other, None)]
    assert check(whole, rows, neighbours, exact) > 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [
        "low_dim",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("high_dim", "useful", "rates", "early_stopping", "robustness")
        ),
    ],
)
def test_noisy_heads(variant, monkeypatch):
    """One prompt of every simulated trial is replaced by an extreme one."""
    source = f"configs/noisy_head.py:{variant},tiny"
    # Several trials would run side by side, and pass the door in any order.
    config = configured(source, {"trials": 1, "noise_seed": 5})
    draw = noisy_head.sample_features

    def inject(scale):
        def drawn(*arguments, **options):
            found = draw(*arguments, **options)
            if scale == 0:
                return found
            query, context, target = found
            return noisy_head.Features(
                query.at[0].set(scale), context.at[0].set(-1.0), target.at[0].set(-scale)
            )

        monkeypatch.setattr(noisy_head, "sample_features", drawn)

    whole = program(config, source, inject)

    def uncached(scale, workdir):
        jax.clear_caches()
        return whole(scale, workdir)

    ignore = {**NOT_COVERED, **EXACT_ERRORS, "file/notes.md": "tables of errors"}
    first = audit.record(uncached, 0.0, ignore=ignore)
    for scale in (1e3, 1.0):
        found = audit.replay(uncached, 0.0, scale, ignore=ignore, first=first)
        # Trials of one setting are paired on purpose, so keys may serve several of them: nobody's data.
        assert found.largest_ratio <= 1 + 1e-6
        assert not found.differences


@pytest.mark.slow
def test_noisy_head_on_texts(monkeypatch):
    source = "configs/noisy_head.py:text,tiny"
    rng = np.random.default_rng(0)

    def prompts(count):
        x = rng.random((count, config.length + 1, config.dim))
        return noisy_head.Prompts(x, rng.uniform(-1, 1, (count, config.length + 1)))

    config = configured(source, {"noise_seed": 5, "data.path": "."})
    train, test = prompts(30), prompts(5)

    def inject(train):
        monkeypatch.setattr(noisy_head_text, "read", lambda config: (train, test))

    other = noisy_head.Prompts(train.x.copy(), train.y.copy())
    other.x[0], other.y[0] = 1e3, -1e3
    whole = program(config, source, inject)
    ignore = {
        **NOT_COVERED,
        "result/metrics/*": "risks, computed for research beside ridge without noise",
        "file/notes.md": "a table of them",
    }
    found = audit.replay(whole, train, other, ignore=ignore).check()
    assert found.largest_ratio > 0.01
