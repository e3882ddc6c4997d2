"""What experiments tell a selection: the price of the model that a run saves, and what a record changes."""

import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
from command_line import call
from ml_collections import ConfigDict

from dpx.data import Histories, Texts
from dpx.launch import records, run
from dpx.recommend import metrics
from experiments.dp_transformer import corpus as corpora
from experiments.dp_transformer import (
    documents,
    finetune,
    histories,
    language_model,
    ranking,
    recommender,
    record_probability,
    text_model,
    training,
    tuned_text,
)

SOURCE = "configs/recommender.py:synthetic,tiny"


def tiny(**changes):
    config = records.load_config(SOURCE)
    config.update_from_flattened_dict({"num_seeds": 1, "non_private.steps": 0} | changes)
    return config


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"reattention.enabled": True},
        {"start.budget_fraction": 0.5, "popularity_budget_fraction": 0.0},
    ],
    ids=["popularity", "reattention", "start"],
)
def test_a_run_costs_what_its_candidate_says(tmp_path, monkeypatch, changes):
    monkeypatch.setattr(training, "train", lambda loss, params, **rest: params)
    config = tiny(**changes)
    planned = recommender.candidate(config)
    run.prepare(config, SOURCE, tmp_path / "run")
    record = run.execute(config, tmp_path / "run")
    stated = record.releases[planned.row]
    assert stated["event"] == str(planned.guarantee.event)
    assert stated["epsilon"] == planned.guarantee.epsilon
    assert set(stated["assumptions"]) <= {
        *planned.guarantee.assumptions,
        *record.total["assumptions"],
    }
    assert all(f"{planned.row}/{metric}" in record.metrics for metric in planned.sensitivities)
    assert all((tmp_path / "run" / name).is_file() for name in planned.files)
    assert planned.synthetic == record.private["synthetic"]
    assert ranking.ASSUMPTION in planned.guarantee.assumptions


def test_a_candidate_has_one_model():
    with pytest.raises(ValueError, match=r"--config\.num_seeds=1"):
        recommender.candidate(tiny(num_seeds=2))


@pytest.mark.slow
def test_no_user_moves_a_metric_by_more_than_is_declared():
    """Takes each of 700 users away, and with each the sum over users, divided by their public number."""
    rng = np.random.default_rng(0)
    count, items = 700, 30
    config = ConfigDict({"evaluate": {"k": 10, "exclude_seen": True}})
    model, seen = rng.normal(size=(count, items)), rng.integers(0, items, (count, 4))
    held_out = rng.integers(0, items, count)
    model[5] = np.nan  # the worst that a model can say of a user
    model[6, held_out[6]] = 1e9

    shapes = set()  # in products of several shapes a user's scores are rounded in several ways

    def by_user(users):
        def score(rows):
            shapes.add(rows.shape)
            return jnp.asarray(model[users][rows])

        return ranking.by_user(config, seen[users], held_out[users], score)

    def measured(users):
        found = ranking.means(by_user(users))
        return {name: value * len(users) / count for name, value in found.items()}

    everybody = np.arange(count)
    own, whole = by_user(everybody), measured(everybody)
    most = ranking.sensitivities(config, count)
    for user in (0, 5, 6, *rng.integers(0, count, 20)):
        for name, value in measured(np.delete(everybody, user)).items():
            moved = whole[name] - value
            assert moved == pytest.approx(own[name][user] / count, abs=1e-12)
            assert -1e-12 <= moved <= most[name]
    assert len(shapes) == 1
    for name, values in own.items():
        assert values[5] == 0
        assert values[6] == pytest.approx(1)
        assert 0.9 / count < values[6] / count <= most[name]


@pytest.mark.slow
def test_one_heavy_user_makes_nobody_else_wide(monkeypatch):
    """A row as wide as the longest history for each user would be 480 MB here, twice."""
    rng = np.random.default_rng(0)
    walks = [rng.integers(0, 10, 5) for _ in range(3000)] + [rng.integers(0, 10, 40_000)]
    monkeypatch.setattr(histories, "load", lambda config: Histories(tuple(walks), 10))
    config = tiny(**{"evaluate.k": 4, "evaluate.exclude_seen": True})
    tracemalloc.start()
    prepared = histories.prepare(config)
    found = ranking.evaluate(
        config, prepared.seen, prepared.next_items, lambda _: jnp.ones((1, 10))
    )
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100e6
    # Among equal scores an item is in the middle of what its user has not seen.
    assert config.evaluate.split == "test"
    ranks = []
    for walk in walks:
        others = set(range(10)) - set(walk[:-1].tolist()) - {int(walk[-1])}
        ranks.append(1 + len(others) / 2)
    share = np.mean(np.array(ranks) <= 4)
    assert 0.1 < share < 0.9
    assert found["hit@4"] == pytest.approx(share)


def test_a_score_that_is_not_a_number_ranks_last():
    ranks = metrics.target_ranks(jnp.array([[jnp.nan, 1.0], [2.0, jnp.nan]]), jnp.array([0, 0]))
    assert ranks.tolist() == [np.inf, 1.0]
    assert float(metrics.ndcg(ranks[:1], 10)) == 0


def text(**changes):
    config = records.load_config("configs/quickstart.py:tiny")
    config.update_from_flattened_dict({"non_private.steps": 0, "ngrams": ()} | changes)
    return config


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"reattention.enabled": True}, marks=pytest.mark.slow)],
    ids=["plain", "reattention"],
)
def test_a_language_model_costs_what_its_candidate_says(tmp_path, monkeypatch, changes):
    monkeypatch.setattr(training, "train", lambda loss, params, **rest: params)
    config = text(**changes)
    planned = language_model.candidate(config)
    run.prepare(config, "configs/quickstart.py:tiny", tmp_path / "run")
    record = run.execute(config, tmp_path / "run")
    stated = record.releases[planned.row]
    assert stated["event"] == str(planned.guarantee.event)
    assert stated["epsilon"] == planned.guarantee.epsilon
    assert f"{planned.row}/{record_probability.SCORE}" in record.metrics
    assert set(planned.sensitivities) == {record_probability.SCORE}
    assert record_probability.ASSUMPTION in planned.guarantee.assumptions


@pytest.mark.slow
def test_no_held_out_record_moves_the_score_by_more_than_is_declared(monkeypatch):
    """Takes each of 120 names away, and with each the sum over names, divided by their public number."""
    monkeypatch.setattr(text_model, "_RECORDS_AT_ONCE", 50)
    config, rng = text(), np.random.default_rng(0)
    known = corpora.public(config)
    graph, params = text_model.build(config, known)
    table = np.log(rng.dirichlet(np.ones(known.vocab_size), known.vocab_size)).astype(np.float32)
    table[known.start, 0], table[0, known.end] = 1e4, 1e4  # the name "a" is certain
    table[1] = np.nan  # the worst that a model can say of a name with a "b" in it
    model = text_model.PrivateText(known, graph, table, None, params)
    tokens = np.full((120, known.length), known.end)
    tokens[:, :4] = rng.integers(2, known.end, (120, 4))
    tokens[0, :4], tokens[1, :4] = (0, known.end, known.end, known.end), (1, 2, 3, 4)
    most = record_probability.sensitivity(120)

    def score(rows):
        own = Texts(tokens[rows], known.end)
        return model.evaluate(own)[1] * len(own) / 120

    everybody = np.arange(120)
    moved = [score(everybody) - score(np.delete(everybody, row)) for row in range(12)]
    assert 0.99 / 120 < moved[0] <= most
    assert moved[1] == 0
    assert all(0 <= change <= most for change in moved)


def documents_config(**changes):
    config = records.load_config("configs/finetune.py:tiny")
    none = {"non_private.steps": 0, "ngrams": (), "sample.count": 1, "sample.length": 1}
    config.update_from_flattened_dict(none | changes)
    return config


@pytest.mark.slow
def test_a_tuned_model_costs_what_its_candidate_says(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "train", lambda loss, params, **rest: params)
    config = documents_config(**{"data.record": "line"})
    planned = finetune.candidate(config)
    run.prepare(config, "configs/finetune.py:tiny", tmp_path / "run")
    record = run.execute(config, tmp_path / "run")
    stated = record.releases[planned.row]
    assert stated["event"] == str(planned.guarantee.event)
    assert stated["epsilon"] == planned.guarantee.epsilon
    assert stated["unit"] == planned.guarantee.unit == "line"
    score = record.metrics[f"{planned.row}/{record_probability.SCORE}"]
    assert 1 / 500 < score < 1 / 100  # new weights give each of 257 bytes about even odds
    assert planned.sensitivities == {record_probability.SCORE: record_probability.sensitivity(20)}
    assert record_probability.ASSUMPTION in planned.guarantee.assumptions


@pytest.mark.slow
def test_no_held_out_document_moves_the_score_by_more_than_is_declared(monkeypatch):
    """Takes some of 120 documents away, and with each the sum over documents, divided by their number."""
    config, rng = documents_config(), np.random.default_rng(0)
    language = tuned_text.build(config)
    vocabulary = language.tokenizer.vocab_size
    table = np.log(rng.dirichlet(np.ones(vocabulary), vocabulary)).astype(np.float32)
    table[language.tokenizer.start, 0], table[0, 0] = 1e4, 1e4  # zeros are certain
    table[1] = np.nan  # the worst that a model can say of a document with a one in it
    monkeypatch.setattr(
        tuned_text,
        "_score",
        lambda graph, trained, frozen, before, tokens, mask: np.asarray(
            tuned_text._nats(jnp.asarray(table)[before], tokens, mask).sum(axis=1)
        ),
    )
    model, (count, length) = tuned_text.TunedText(language, language.trained, config), (120, 4)
    tokens = rng.integers(2, vocabulary, (count, length)).astype(np.int32)
    tokens[0], tokens[1] = 0, (1, 2, 3, 4)
    held_out = documents.Documents(tokens, np.arange(length) <= rng.integers(0, 4, (count, 1)))
    held_out.mask[1] = True

    def score(rows):
        own = held_out.take(rows)
        (*_, found) = finetune._measures("dp_tuned", model.nats(own), own, 1)
        return found.value * len(rows) / count

    everybody, most = np.arange(count), record_probability.sensitivity(count)
    moved = [score(everybody) - score(np.delete(everybody, row)) for row in range(12)]
    assert 0.99 / count < moved[0] <= most
    assert moved[1] == 0
    assert all(0 <= change <= most for change in moved)


def test_a_document_that_leaves_changes_the_nats_of_no_other_one(monkeypatch):
    config, shapes, score = documents_config(**{"data.test_limit": 37}), [], tuned_text._score
    monkeypatch.setattr(
        tuned_text, "_score", lambda *given: (shapes.append(given[-1].shape), score(*given))[1]
    )
    language = tuned_text.build(config)
    _, test = documents.load(config, language.tokenizer)
    model = tuned_text.TunedText(language, language.trained, config)
    without = model.nats(test.take(np.delete(np.arange(len(test)), 3)))
    np.testing.assert_array_equal(np.delete(model.nats(test), 3), without)
    assert len(set(shapes)) == 1  # a program of another shape may round in another way


@pytest.mark.slow
def test_the_recommender_that_is_selected_recommends(tmp_path):
    axes = ("num_seeds=1", "non_private.steps=0", "train.learning_rate=1e-3,1e-2")
    ended = call(
        "sweep",
        f"--config={SOURCE}",
        f"--workdir={tmp_path}",
        *(f"--set={axis}" for axis in axes),
        "--select=hit@10",
        "--trials=geometric:2",
        "--workers=2",
    )
    assert ended.returncode == 0, ended.stderr
    (record,) = records.read_all(tmp_path)
    assert record.workdir.name == "selected"
    assert set(record.metrics) == {"served/hit@10"}
    trained = [records.load(path.parent) for path in tmp_path.rglob("private_trials/*/result.json")]
    chosen = records.load(tmp_path / "selected").recommend([1, 2], k=20, exclude_seen=False)
    assert chosen in [one.recommend([1, 2], k=20, exclude_seen=False) for one in trained]


def test_a_record_of_no_token_leaves_the_score_a_number():
    found = record_probability.score(np.array([0.0, -2.0]), np.array([0, 2]))
    np.testing.assert_allclose(found, (1 + np.exp(-1)) / 2)
