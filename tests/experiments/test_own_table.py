"""Interactions of one's own: from a table to recommendations by its ids, without the table."""

import json

import numpy as np
import pytest
from all_configs import executed

from configs.recommender import VARIANTS, get_config
from dpx.data import synthetic_histories
from dpx.runs import records
from experiments.dp_transformer import histories as recommender_data

pytestmark = pytest.mark.slow

SOURCE = "configs/recommender.py:table,tiny"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    table = folder / "purchases.tsv"
    with table.open("w") as file:
        file.write("product\twhen\tcustomer\n")
        for user, items in enumerate(synthetic_histories(80, 6, 15, seed=2).items):
            file.writelines(f"item {item}\t{time}\tu{user}\n" for time, item in enumerate(items))
    config = records.load_config(SOURCE)
    columns = {"user": "customer", "item": "product", "time": "when", "path": str(table)}
    config.update({"data": columns, "comparisons": True, "noise_seed": 1})
    record = executed(config, SOURCE, folder / "run")
    table.unlink()
    recommender_data._loaded.cache_clear()
    return record


@pytest.mark.slow
def test_a_table_gives_the_rows_and_guarantees_of_the_other_variants(finished):
    assert {f"{row}/ndcg@10" for row in ("transitions", "start", "dp_transformer")} <= set(
        finished.metrics
    )
    rows = {"dp_popularity", "transitions", "start", "dp_transformer", "served"}
    assert set(finished.releases) == rows
    assert finished.releases["start"]["epsilon"] < finished.releases["dp_transformer"]["epsilon"]
    for spent in finished.releases.values():
        assert any("their ids" in words for words in spent["assumptions"])
        assert any("at most 300 that data.limit leaves" in words for words in spent["assumptions"])
        assert recommender_data.K_CORE not in spent["assumptions"]
    assert "follows from the number of users: 10." in finished.notes
    # The start counts once in the total, and so does the choice of what is served.
    assert finished.total["event"].count("GaussianDpEvent") == 5


def test_the_model_recommends_by_the_tables_ids_without_the_table(finished):
    model = records.load(finished.workdir)
    assert sorted(model.item_ids) == model.item_ids
    assert set(model.item_ids) <= {f"item {number}" for number in range(15)}
    history = ["item 3", "item 1"]
    found = model.recommend(history, 4, exclude_seen=True)
    assert len(set(found)) == 4
    assert set(found) <= set(model.item_ids) - set(history)
    assert found == model.recommend(np.array(history), 4, exclude_seen=True)
    assert found == model.recommend([" item 3", "item 1 "], 4, exclude_seen=True)
    assert set(model.recommend([], 99, exclude_seen=False)) == set(model.item_ids)
    with pytest.raises(ValueError, match="history holds 'item 99', which the catalogue does not"):
        model.recommend(["item 99"], exclude_seen=True)
    with pytest.raises(ValueError, match="history holds 3"):
        model.recommend([3], exclude_seen=True)
    with pytest.raises(ValueError, match="k=0"):
        model.recommend(history, 0, exclude_seen=True)


def test_a_catalogue_that_was_changed_is_refused(finished):
    path = finished.workdir / "catalogue.json"
    written = path.read_text()
    content = json.loads(written)
    content["item_ids"][0] = "another"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"catalogue\.json is damaged"):
        records.load(finished.workdir)
    path.write_text(written)


@pytest.mark.parametrize(("users", "size"), [(3, 1), (80, 10), (10**6, 8192)])
def test_the_batch_is_an_eighth_of_the_users(users, size):
    class Many:
        items = range(users)

    config = get_config("table")
    assert recommender_data.with_batch_size(config, Many).train.batch_size == size
    assert config.train.batch_size is None
    config.train.batch_size = 7
    assert recommender_data.with_batch_size(config, Many).train.batch_size == 7


def test_a_config_has_the_keys_that_its_data_read():
    keys = {variant: set(get_config(variant).data) for variant in VARIANTS}
    assert {variant for variant in VARIANTS if "path" in keys[variant]} == {
        "movielens1m",
        "amazon",
        "amazon_warm",
        "table",
    }
    first = get_config("table")
    first.data.path = "mine.csv"
    assert get_config("table").data.path is None
    assert {variant for variant in VARIANTS if "user" in keys[variant]} == {"table"}
    assert {variant for variant in VARIANTS if "min_count" not in keys[variant]} == {"synthetic"}
