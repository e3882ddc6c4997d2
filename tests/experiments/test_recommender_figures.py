"""The recommender's figures from hand-made records."""

import json

from configs.recommender import get_config
from dpx.launch.experiment import Measure
from dpx.launch.records import Record
from experiments.dp_transformer import recommender, recommender_figures


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


def test_runs_of_one_setting_are_averaged_and_one_run_has_its_own_error(tmp_path):
    runs = [record(tmp_path / f"{number}", epsilon=e) for number, e in enumerate((5.0, 8.0))]
    value, error = recommender_figures.mean(runs[:1], "start", "ndcg@10")
    assert (round(value, 9), round(error, 9)) == (2.5, 0.1)
    value, error = recommender_figures.mean(runs, "start", "ndcg@10")
    assert (round(value, 9), round(error, 9)) == (2.65, 0.15)
    assert recommender_figures.mean(runs, "absent", "ndcg@10") is None


def drawn(found, folder):
    paths = recommender.figures(found, folder)
    for path in paths:
        assert path.stat().st_size > 1000
    return sorted(path.name for path in paths)


def test_a_run_that_was_evaluated_draws_curves(tmp_path):
    assert drawn([record(tmp_path / "a", curves=True)], tmp_path) == ["recommender_curves_8_a.png"]


def test_a_grid_draws_a_heat_map_even_with_holes(tmp_path):
    cells = [(256, 1e-3), (256, 1e-2), (1024, 1e-3)]
    found = [
        record(tmp_path / f"{number}", **{"train.batch_size": batch, "train.learning_rate": rate})
        for number, (batch, rate) in enumerate(cells)
    ]
    assert drawn(found, tmp_path) == ["recommender_grid_8.png"]


def test_sharing_draws_bars(tmp_path):
    found = [
        record(tmp_path / f"{number}", **{"model.tied": tied, "model.dim": dim})
        for number, (tied, dim) in enumerate([(True, 64), (False, 64), (False, 32)])
    ]
    assert drawn(found, tmp_path) == ["recommender_sharing.png"]


def test_a_single_run_draws_nothing(tmp_path):
    assert drawn([record(tmp_path / "a")], tmp_path) == []
