"""What a run states for each row and in all is what the noise behind it costs; held-out data cost nothing.

The runs are whole, but for training, which has two parameters, so that a run takes seconds.
"""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from all_configs import executed

from dpx import audit
from dpx.data import Histories
from dpx.launch import (
    records,
)
from experiments.dp_transformer import corpus as corpora
from experiments.dp_transformer import (
    histories as recommender_data,
)
from experiments.dp_transformer import (
    language_model,
    models,
    recommender_rows,
    text_model,
    training,
)

LEFT_OUT = ["stderr", "file/*", "result/metrics/*"]
CHANGES = {
    "train.steps": 3,
    "train.batch_size": 16,
    "train.microbatch_size": 16,
    "train.log_every": 3,
    "non_private.steps": 2,
    "non_private.batch_size": 16,
    "non_private.tried.learning_rate": (),
}


@pytest.fixture(scope="module", autouse=True)
def _recording():
    with audit.recording():
        yield


def _loss(params, *example):
    return params["slope"] * jnp.sum(example[1]) + params["bias"]


@pytest.fixture(autouse=True)
def begun(monkeypatch):
    """The models that runs begin with; two parameters are trained in their place, and none is measured."""
    found = []
    real = training.train
    tiny = {"slope": jnp.zeros(()), "bias": jnp.zeros(())}

    def train(loss_fn, params, **rest):
        real(_loss, tiny, **rest)
        if rest["privacy"] is not None:
            found.append(params)
        return params

    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr(models, "save", lambda *args, **more: None)
    monkeypatch.setattr(text_model.PrivateText, "evaluate", lambda self, records: 0.0)
    monkeypatch.setattr(text_model.PrivateText, "sample", lambda self, key, count: [""] * count)
    monkeypatch.setattr(recommender_rows, "by_user", lambda *args: {"ndcg@10": np.zeros(1)})
    return found


def users():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 12, rng.integers(4, 9)).astype(np.int32) for _ in range(60)]


CHOICE = "lead of the trained model"


def gradients(labels, row):
    return [i for i, label in enumerate(labels) if label == f"gradients of {row}"]


def of_text(labels):
    prior, tokens = labels.index("2-gram counts"), labels.index("item popularity")
    return {
        "dp_1gram": [labels.index("1-gram counts")],
        "start": [prior],
        "dp_transformer": [prior, *gradients(labels, "dp_transformer")],
        "dp_reattention": [prior, tokens, *gradients(labels, "dp_reattention")],
    }


def of_popularities(labels):
    alone, prior, tokens = [i for i, label in enumerate(labels) if label == "item popularity"]
    last = [prior, tokens, *gradients(labels, "dp_reattention"), labels.index(CHOICE)]
    return {
        "dp_popularity": [alone],
        "start": [prior],
        "dp_transformer": [prior, *gradients(labels, "dp_transformer")],
        "dp_reattention": last,
        "served": last,
    }


def of_start(labels):
    _, start, whole = [i for i, label in enumerate(labels) if label == "item popularity"]
    trained = gradients(labels, "dp_transformer")
    last = [*range(start, whole), *trained, labels.index(CHOICE)]
    return {
        "dp_popularity": [0],
        "start": [*range(start, whole)],
        "dp_transformer": last,
        "served": last,
        "transitions": list(range(whole, trained[0])),
    }


# Shares that are large enough to be missed where one is left out.
RUNS = {
    "text": (
        "configs/quickstart.py:tiny",
        {
            "data.limit": 120,
            "ngrams": (1,),
            "reattention.enabled": True,
            "reattention.budget_fraction": 0.4,
        },
        of_text,
    ),
    "recommender": (
        "configs/recommender.py:amazon,tiny",
        {
            "reattention.enabled": True,
            "reattention.budget_fraction": 0.5,
            "popularity_budget_fraction": 0.5,
            "choice_budget_fraction": 0.2,
            "data.path": "ratings.txt",
            "num_seeds": 1,
        },
        of_popularities,
    ),
    "recommender, warm": (
        "configs/recommender.py:amazon_warm,tiny",
        {"data.path": "ratings.txt", "num_seeds": 1, "choice_budget_fraction": 0.05},
        of_start,
    ),
}


def program(name, monkeypatch, begun, noise_seed=987654321):
    """The run as a function of what is held out, and of how many of the first records are gone."""
    source, changes, _ = RUNS[name]
    config = records.load_config(source)
    config.update_from_flattened_dict({**CHANGES, **changes, "noise_seed": noise_seed})
    corpus = corpora.load(config) if name == "text" else None

    def inject(shift, gone):
        if corpus is not None:
            train = corpus.train.take(slice(gone, None))
            test = corpus.test.take(np.roll(np.arange(len(corpus.test)), shift)[: 50 + shift])
            changed = corpus._replace(train=train, test=test)
            monkeypatch.setattr(corpora, "load", lambda config: changed)
            for measures in ("_measures_of_ngram", "_measures_of_model"):
                monkeypatch.setattr(language_model, measures, lambda *_: [])
            return
        items = [np.append(own[:-1], (own[-1] + shift) % 12) for own in users()[gone:]]
        loaded = Histories(tuple(items), 12)
        monkeypatch.setattr(recommender_data, "load", lambda config: loaded)

    def whole(held_out_and_gone, workdir):
        inject(*held_out_and_gone)
        begun.clear()
        record = executed(config, source, workdir)
        logged = [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]
        files = [path for path in workdir.rglob("*.*") if path.is_file()]
        shown = [path.name for path in files if str(noise_seed).encode() in path.read_bytes()]
        return {
            "shown": shown,
            "begun": list(begun),
            "metrics": record.metrics,
            "headline": record.privacy["epsilon"],
            "private": json.dumps(record.private),
            "logged": {x["run"]: x["epsilon"] for x in logged if x.get("epsilon")},
        }

    return whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "recommender" else pytest.mark.slow) for name in RUNS],
)
def test_rows_and_total_cost_what_is_stated_and_held_out_data_nothing(name, monkeypatch, begun):
    whole = program(name, monkeypatch, begun)
    found = audit.record(whole, (0, 0), ignore=LEFT_OUT)
    assert not [what for what in found.left if what.startswith("result/shown")]
    private = json.loads(found.left["result/private"])
    delta = private["total"]["delta"]

    def cost(indices):
        chosen = [found.releases[i] for i in indices]
        return dataclasses.replace(found, releases=chosen).epsilon(delta)

    rows = RUNS[name][2]([seen.label for seen in found.releases])
    assert rows.keys() == private["releases"].keys()
    for row, indices in rows.items():
        assert private["releases"][row]["epsilon"] == pytest.approx(cost(indices), rel=2e-3), row
    everything = cost(range(len(found.releases)))
    assert private["total"]["epsilon"] == pytest.approx(everything, rel=2e-3)
    headline = "dp_transformer" if name == "text" else "served"
    assert found.left["result/headline"] == private["releases"][headline]["epsilon"]
    for row in (row for row in rows if f"result/logged/{row}" in found.left):
        assert found.left[f"result/logged/{row}"] == private["releases"][row]["epsilon"]
    assert "result/logged/dp_transformer" in found.left
    # No row draws what another draws, and all that is drawn follows from the secret.
    assert not found.shared_keys()
    another = program(name, monkeypatch, begun, noise_seed=6)
    other = audit.record(another, (0, 0), ignore=LEFT_OUT)
    used = [{s.key for s in r.releases} | {words for _, words in r.keys} for r in (found, other)]
    assert not used[0] & used[1]
    held_out = audit.replay(whole, (0, 0), (1, 0), first=found, ignore=LEFT_OUT).check()
    assert held_out.largest_ratio == 0
    count = 120 if name == "text" else 60
    ids = np.arange(1, count)
    audit.replay(whole, (0, 0), (0, 1), ids=ids, first=found, ignore=LEFT_OUT).check()
