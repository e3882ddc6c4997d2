"""The row without privacy is the best of a few ways, and nothing but exact training records chooses it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from all_configs import executed
from ml_collections import ConfigDict

from dpx.data import Histories, leave_last_out, synthetic_histories
from dpx.recommend import popularity, transitions
from dpx.runs import records
from dpx.training import log
from dpx.training.purposes import from_seed
from experiments.dp_transformer import corpus as corpora
from experiments.dp_transformer import histories as recommender_data
from experiments.dp_transformer import (
    language_model,
    next_item,
    ranking,
    recommender_plain,
    recommender_rows,
    text_model,
    training,
    warm_start,
    without_privacy,
)


def section(**non_private):
    plain = {"start": "scratch", "steps": 5, "batch_size": None, "tried": {}} | non_private
    train = {"steps": 9, "batch_size": 8, "learning_rate": 0.1, "warmup": 0.2}
    return ConfigDict({"train": train, "non_private": plain})


def test_ways_are_all_combinations_of_what_is_tried():
    tried = {"start": ("scratch", "exact"), "steps": (), "learning_rate": (0.1, 1.0)}
    tried["l2"] = (0.0, 0.03)
    found = without_privacy.ways(section(tried=tried, batch_size=4))
    sections = [(way.start, way.section.learning_rate, way.section.l2) for way in found]
    assert sorted(sections) == [
        (start, rate, penalty)
        for start in ("exact", "scratch")
        for rate in (0.1, 1.0)
        for penalty in (0.0, 0.03)
    ]
    assert {(way.section.steps, way.section.batch_size) for way in found} == {(5, 4)}
    words = {str(way).partition(" at learning rate ")[2] for way in found}
    assert words == {"0.1", "1", "0.1 and an l2 penalty of 0.03", "1 and an l2 penalty of 0.03"}
    (alone,) = without_privacy.ways(section())
    assert (alone.start, alone.section.batch_size, alone.section.warmup) == ("scratch", 8, 0.2)
    with pytest.raises(ValueError, match=r"config\.non_private\.start='private' must be one of"):
        without_privacy.ways(section(start="private"))


@pytest.mark.parametrize(("more", "best"), [(False, 0.3), (True, 0.1)])
def test_the_best_way_wins(more, best, capsys):
    config = section(tried={"learning_rate": (0.1, 0.2, 0.3)})
    values = {0.1: 3.0, 0.2: float("nan"), 0.3: 1.0}

    def measured(way, number):
        numbers.append(number)
        return values[way.section.learning_rate]

    numbers = []
    chosen = without_privacy.choose(config, measured, more_is_better=more)
    assert numbers == [0, 1, 2]  # labels, and so keys, of their own
    assert chosen.way.section.learning_rate == best
    assert "at learning rate 0.3: 1" in chosen.words
    assert "without privacy, " in capsys.readouterr().err
    with log.quiet():  # these numbers are of private data
        without_privacy.choose(config, measured, more_is_better=more)
    assert not capsys.readouterr().err


def test_the_only_way_is_not_tried():
    def measured(*_):
        raise AssertionError

    chosen = without_privacy.choose(section(), measured)
    assert chosen.words == "from scratch, in 5 steps of 8 at learning rate 0.1."


def complete(**non_private):
    """A config of which all sections can be checked."""
    config = section(tried={"learning_rate": (0.1, 0.2)}, **non_private)
    config.update({"seed": 0, "mesh": {"data": None, "model": 1}})
    config.train.update({"microbatch_size": 4, "log_every": 1, "checkpoint_every": 1})
    config.train.update({"l2_clip_norm": 1.0, "weight_decay": 0.0, "accountant": "pld"})
    return config


def test_a_batch_has_to_fit_into_what_is_left_where_a_way_is_chosen():
    config = complete(batch_size=30)
    training.check_both(config, 32, parted=False)
    with pytest.raises(ValueError, match=r"config\.non_private\.batch_size=30 .* for 29 records"):
        training.check_both(config, 32)
    config.non_private.tried.learning_rate = (0.1,)
    training.check_both(config, 32)
    # Of 8 users with 5 records each, one is held out.
    users = np.repeat(np.arange(8), 5)
    training.check_both(complete(batch_size=35), 8, users=users)
    with pytest.raises(ValueError, match=r"config\.non_private\.batch_size=36 .* for 35 records"):
        training.check_both(complete(batch_size=36), 8, users=users)


@pytest.mark.parametrize("privacy", [None, "some"])
def test_without_privacy_batches_are_of_records_and_not_of_users(privacy, tmp_path, monkeypatch):
    """Nobody without privacy would count a record the less, the more its user has."""
    given = {}

    def train(loss_fn, params, data, **more):
        given.update(more)
        return params, None

    monkeypatch.setattr(training.loop, "train", train)
    config = complete().train
    config.records_per_user = 2
    options = {"keys": from_seed(0), "label": "a", "workdir": tmp_path}
    users = np.repeat(np.arange(8), 5)
    training.train(None, {}, (np.zeros(40),), config, privacy=privacy, users=users, **options)
    grouped, count = given["computation"].users, given["layout"].rows
    assert (grouped is None, count) == ((True, 40) if privacy is None else (False, 8))


def test_a_penalty_has_the_optimum_of_the_penalized_loss():
    config = complete().train
    config.update({"steps": 400, "l2": 0.5})
    optimizer = training.optimizer(config)
    x = jnp.array([3.0, -1.0])
    state = optimizer.init(x)
    for _ in range(config.steps):  # the loss is ‖x − 3‖²/2, and with the penalty least at 2
        updates, state = optimizer.update(x - 3, state, x)
        x = optax.apply_updates(x, updates)
    np.testing.assert_allclose(x, [2.0, 2.0], atol=1e-2)


def test_histories_without_an_item_to_choose_by_take_the_first_way(tmp_path):
    config = records.load_config("recommender:synthetic,tiny")
    config.data.length = 3  # of which two are held out
    prepared = recommender_data.prepare(config)
    repetition = recommender_rows.Repetition(config, tmp_path, prepared, (), 0, None)
    found = recommender_plain.chosen(repetition)
    assert found.way == without_privacy.ways(config)[0]
    assert "No training history has an item to choose by" in found.words


CONFIGS = ["quickstart", "shakespeare", "text", "finetune"] + [
    f"recommender:{variant}"
    for variant in ("movielens", "movielens1m", "amazon", "amazon_warm", "synthetic")
]


@pytest.mark.parametrize("name", CONFIGS)
def test_without_privacy_as_many_records_are_read_as_with_it(name):
    config = records.load_config(name)
    private = config.train.steps * config.train.batch_size
    for way in without_privacy.ways(config):
        if config.non_private.steps:
            assert way.section.steps * way.section.batch_size >= private


@pytest.fixture
def trained(monkeypatch):
    """What trainings are given, by label; no step is taken."""
    found = {}

    def train(loss_fn, params, *, label, data, config, keys, **rest):
        found[label] = {"loss": loss_fn, "params": params, "data": data, "keys": keys}
        return params

    monkeypatch.setattr(training, "train", train)
    return found


@pytest.mark.slow
def test_a_way_is_chosen_by_training_records_that_it_was_not_trained_on(
    tmp_path, monkeypatch, trained
):
    config = records.load_config("quickstart:tiny")
    config.ngrams, config.noise_seed = (), 1
    config.non_private.tried.start = ("scratch", "exact")
    corpus = corpora.load(config)
    asked = []

    def nats(self, texts):
        asked.append(texts.tokens)
        return float(len(asked))

    monkeypatch.setattr(text_model.PrivateText, "nats", nats)
    monkeypatch.setattr(text_model.PrivateText, "evaluate", lambda self, texts: (0.0, 0.0))
    monkeypatch.setattr(language_model.models, "save", lambda *args, **more: None)
    record = executed(config, "quickstart:tiny", tmp_path / "run")

    def rows(tokens):
        return sorted(map(tuple, np.asarray(tokens).tolist()))

    first, second = asked
    for held_out, label in ((first, "transformer_tried0"), (second, "transformer_tried1")):
        used = trained[label]["data"][1]
        assert len(held_out) == round(without_privacy.HELD_OUT * len(corpus.train))
        assert rows(np.concatenate([used, held_out])) == rows(corpus.train.tokens)
    assert rows(trained["transformer"]["data"][1]) == rows(corpus.train.tokens)
    # The loss of the first was less: it started from scratch, and so does the row.
    assert trained["transformer"]["loss"].args[2] is None
    assert "was trained from scratch" in record.notes


def plain_starts(variant, tmp_path, trained, monkeypatch, **changes):
    """What the row without privacy and the private one are given, the training histories, and the config."""
    config = records.load_config(f"recommender:{variant},tiny")
    changes = {"num_seeds": 1, "noise_seed": 1, "non_private.start": "exact"} | changes
    nothing = {f"non_private.tried.{name}": () for name in ("start", "learning_rate")}
    config.update_from_flattened_dict(changes | nothing)
    histories = synthetic_histories(200, 8, 30, predictability=0.7, seed=3)
    monkeypatch.setattr(recommender_plain.recommender_data, "load", lambda config: histories)
    monkeypatch.setattr(next_item, "save", lambda *_: None)
    executed(config, f"recommender:{variant},tiny", tmp_path / "run")
    split = leave_last_out(histories)
    train = split.train_and_validation if config.data.train_on_validation else split.train
    return trained["transformer"], trained["dp_transformer"], train, config


@pytest.mark.slow
def test_a_recommender_without_privacy_starts_from_exact_counts(tmp_path, trained, monkeypatch):
    changes = {"data.path": "ratings.txt", "non_private.steps": 1, "epsilon": 2.0}
    plain, private, train, config = plain_starts(
        "amazon_warm", tmp_path, trained, monkeypatch, **changes
    )
    of_plain, of_private = plain["loss"].args[2], private["loss"].args[2]
    expected = warm_start.exact(train, config)
    np.testing.assert_array_equal(of_plain.weights, expected.weights)
    np.testing.assert_array_equal(of_plain.items, expected.items)
    assert len(of_plain.items) == train.num_items
    assert of_private.weights.shape != of_plain.weights.shape or not np.allclose(
        of_private.weights, of_plain.weights, atol=0.1
    )


@pytest.mark.slow
def test_a_recommender_without_privacy_has_an_exact_bias(tmp_path, trained, monkeypatch):
    plain, private, train, config = plain_starts("synthetic", tmp_path, trained, monkeypatch)
    exact = recommender_plain.best_popularity(config, train)
    bias = np.asarray(plain["params"]["output_bias"].get_value())
    np.testing.assert_allclose(bias, exact - exact.max(), rtol=1e-5)
    other = np.asarray(private["params"]["output_bias"].get_value())
    assert np.abs(other - bias).max() > 0.1


@pytest.mark.slow
def test_the_exact_start_is_the_limit_of_the_private_one():
    histories = synthetic_histories(300, 8, 25, predictability=0.7, seed=1)
    config = records.load_config("recommender:amazon_warm")
    found = warm_start.exact(histories, config)
    options = {"rounds": 1, "position_weight": 0.0, "num_kept": histories.num_items}
    limit = transitions.fit(jax.random.key(0), histories, epsilon=1e8, delta=1e-5, **options)
    mine, its = np.argsort(found.items), np.argsort(limit.items)
    np.testing.assert_allclose(
        found.weights[np.ix_(mine, mine)], limit.weights[np.ix_(its, its)], atol=0.02
    )
    assert found.prior.sum() == pytest.approx(config.start.pseudo_counts, rel=1e-5)


@pytest.mark.parametrize("late", [True, False])
def test_popularity_is_counted_in_the_way_that_training_histories_say(late):
    """Where users come to an item last, later items count more; else they are counted alike."""
    rng = np.random.default_rng(0)
    config = records.load_config("recommender:synthetic")
    config.popularity_age_decay, config.evaluate.k = 0.1, 1
    early, after = (0, 1) if late else (1, 0)
    walks = [[early, early + 2, *rng.integers(4, 9, 2), after] for _ in range(40)]
    walks = [[*walk, after, after] for walk in walks] + [[early, 5, 6, 7, 5]] * 45
    histories = Histories(tuple(np.array(walk, np.int32) for walk in walks), 10)
    found = recommender_plain.best_popularity(config, histories)
    (weighted,) = popularity.statistic(histories, age_decay=0.1).sums
    values = {}
    known = leave_last_out(histories)
    for name, counted in (
        ("alike", popularity.count),
        ("later", lambda h: popularity.statistic(h, age_decay=0.1).sums[0]),
    ):
        scores = np.argsort(-counted(known.train_and_validation))
        values[name] = float(np.mean(known.test == scores[0]))
    best = max(values, key=lambda name: values[name])
    expected = popularity.count(histories) if best == "alike" else weighted
    assert np.corrcoef(np.expm1(found), expected)[0, 1] == pytest.approx(1, abs=1e-6)


def test_metrics_are_means_over_users():
    values = {"ndcg@10": np.array([0.0, 1.0, 0.5]), "hit@10": np.array([0.0, 1.0, 1.0])}
    assert ranking.means(values) == {"ndcg@10": 0.5, "hit@10": 2 / 3}
