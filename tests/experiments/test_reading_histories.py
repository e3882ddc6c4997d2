"""What a recommender's config reads: how tables are written, and memory that grows with the data."""

import tracemalloc

import numpy as np
import pytest

from dpx.data import Histories
from dpx.runs import records
from experiments.dp_transformer import histories as recommender_data
from experiments.dp_transformer import ranking
from experiments.gram import one_release


def configured(source, path, **data):
    config = records.load_config(source)
    config.update({"data": {"path": str(path), "min_count": 0, **data}})
    return config


def test_a_table_is_read_as_the_config_says(tmp_path):
    rows = [(user, item, 5 - item) for user in (1, 2) for item in range(4)]
    path = tmp_path / "r.dat"
    path.write_text("".join(f"{user}::{item}::{time}\n" for user, item, time in rows))
    named = {"user": "1", "item": "2", "time": "3", "separator": "::"}
    config = configured("recommender:table", path, header=False, **named)
    assert [items.tolist() for items in recommender_data.load(config).items] == [[3, 2, 1, 0]] * 2
    config = configured("recommender:table", path, **named)
    with pytest.raises(
        ValueError, match=r"first line, 1, 0, 5, can be .* --config.data.header=True"
    ):
        recommender_data.load(config)


def test_the_year_of_amazon_ratings_is_in_the_config(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("".join(f"B00000000{n},A1USERUSERUS1,5.0,{n}\n" for n in range(3)))
    for source in ("recommender:amazon", "recommender:amazon_warm", "gram:recommender"):
        with pytest.raises(ValueError, match=r"set --config\.data\.year=2018"):
            recommender_data.load(configured(source, path))
        (items,) = recommender_data.load(configured(source, path, year=2018)).items
        assert items.tolist() == [0, 1, 2]
    # Whether a published filter is assumed follows from the form, and not from the compression.
    packed = configured("recommender:amazon", tmp_path / "a.csv.gz")
    assert not recommender_data.assumptions(packed)
    assert recommender_data.assumptions(configured("recommender:amazon", tmp_path / "a.txt"))


def test_the_filter_of_a_loader_is_an_assumption_too():
    config = records.load_config("recommender:movielens")
    for min_count in (None, 5, 1):
        config.data.min_count = min_count
        assert recommender_data.assumptions(config) == (recommender_data.K_CORE,)
    config.data.min_count = 0
    assert recommender_data.assumptions(config) == ()


@pytest.mark.parametrize("split", ["test", "validation"])
def test_the_item_that_is_asked_for_was_not_released(monkeypatch, split):
    rows = tuple(np.arange(6) + user for user in range(30))
    monkeypatch.setattr(recommender_data, "load", lambda config: Histories(rows, 40))
    last = {"test": 5, "validation": 4}[split]
    for source in ("gram:recommender", "recommender:amazon_warm", "recommender:movielens"):
        config = records.load_config(source)
        config.evaluate.split = split
        if source.startswith("gram"):
            known, _, next_items = one_release._evaluated(config)
        else:
            prepared = recommender_data.prepare(config)
            known, next_items = prepared.train, prepared.next_items
        assert next_items.tolist() == [items[last] for items in rows]
        assert all(next_items[user] not in items for user, items in enumerate(known.items))


def one_heavy_user(events=40_000, others=2_000):
    rng = np.random.default_rng(0)
    light = [rng.integers(0, 100, 5) for _ in range(others)]
    return Histories((*light, rng.integers(0, 100, events)), 100)


@pytest.mark.quick_cases("gram:recommender")
@pytest.mark.parametrize(
    "source", ["recommender:amazon_warm", "recommender:movielens", "gram:recommender"]
)
def test_memory_grows_with_the_data_whoever_has_the_longest_history(monkeypatch, source):
    histories = one_heavy_user()
    monkeypatch.setattr(recommender_data, "load", lambda config: histories)
    config = records.load_config(source)
    config.evaluate.exclude_seen = True
    tracemalloc.start()
    try:
        if source.startswith("gram"):
            found = one_release._evaluated(config)
            seen = [found.known.items[user] for user in found.users]
        else:
            found = recommender_data.prepare(config)
            seen = found.seen
        measured = ranking.evaluate(config, seen, found.next_items, lambda rows: np.ones((1, 100)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 30e6  # an array of (users, longest history) has 320 MB
    assert 0 < measured["hit@10"] < 1


def test_items_that_a_user_has_seen_are_left_out_of_the_ranking_alone():
    config = records.load_config("recommender:movielens")
    rng = np.random.default_rng(1)
    seen = [rng.integers(0, 30, rng.integers(0, 40)) for _ in range(700)]
    next_items, scores = rng.integers(0, 30, 700), rng.random((700, 30))
    hits = {}
    for exclude in (True, False):
        config.evaluate.exclude_seen = exclude
        found = ranking.evaluate(config, seen, next_items, lambda rows: scores[rows])
        better = [
            sum(
                scores[user, item] > scores[user, target]
                for item in range(30)
                if not (exclude and item in set(seen[user].tolist()) - {target})
            )
            for user, target in enumerate(next_items.tolist())
        ]
        hits[exclude] = np.mean(np.array(better) < 10)
        assert found["hit@10"] == pytest.approx(hits[exclude])
    assert hits[True] > hits[False]
