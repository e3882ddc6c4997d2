"""The recommender's figures from hand-made records, and means over runs."""

import json

import pytest

from configs.recommender import get_config
from dpx.runs.experiment import Measure
from dpx.runs.records import Record
from experiments.dp_transformer import recommender
from experiments.repeated import measure, over_runs


def record(workdir, curves=False, **changed):
    config = get_config("amazon_warm")
    config.update_from_flattened_dict(changed)
    workdir.mkdir(parents=True)
    measures = [
        Measure(row, name, 0.01 * number + 0.001 * config.epsilon, 0.001)
        for number, row in enumerate(("dp_popularity", "transitions", "start", "dp_transformer"))
        for name in ("ndcg@10", "hit@10")
    ]
    if curves:
        with (workdir / "metrics.jsonl").open("w") as file:
            for seed in ("", "_seed1", "_seed2"):
                for step in (10, 20, 30):
                    entry = {"run": f"dp_transformer{seed}", "step": step}
                    file.write(json.dumps(entry | {"loss": 1.0}) + "\n")
                    file.write(json.dumps(entry | {"ndcg@10": 0.02, "hit@10": step / 100}) + "\n")
    return Record(workdir, "", config.to_dict(), changed, {}, {}, 1.0, measures=tuple(measures))


def test_runs_of_one_setting_are_averaged_and_one_run_has_its_own_error():
    one, two = Measure("start", "ndcg@10", 0.025, 0.001), Measure("start", "ndcg@10", 0.028)
    assert over_runs([one]) == (0.025, 0.001)
    assert over_runs([two]) == (0.028, 0.0)
    assert over_runs([one, two]) == pytest.approx((0.0265, 0.0015))
    assert measure("row", "metric", [1.0]).error is None
    assert measure("row", "metric", [1.0, 3.0]) == Measure("row", "metric", 2.0, 1.0)


GRID = [(256, 1e-3), (256, 1e-2), (1024, 1e-3)]  # with a hole


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        ([{"curves": True}], ["recommender_curves_8_0.png"]),
        (
            [{"train.batch_size": size, "train.learning_rate": rate} for size, rate in GRID],
            ["recommender_grid_8.png"],
        ),
        (
            [{"model.tied": x, "model.dim": d} for x, d in ((True, 64), (False, 64), (False, 32))],
            ["recommender_sharing.png"],
        ),
        ([{}], []),
    ],
    ids=["curves", "grid", "sharing", "a single run"],
)
def test_what_runs_allow_is_drawn(runs, names, tmp_path):
    found = [record(tmp_path / f"{number}", **run) for number, run in enumerate(runs)]
    drawn = recommender.figures(found, tmp_path)
    assert [path.name for path in drawn] == names
    assert all(path.stat().st_size > 1000 for path in drawn)
