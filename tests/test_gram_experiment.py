"""The gram configs: tiny runs on the full code path, figures, bad values."""

import json

import numpy as np
import pytest

from configs import gram as configs
from dpx.data import synthetic_histories
from experiments import gram, item_recommender, records, run


@pytest.fixture
def amazon(tmp_path):
    lines = [
        f"{user + 1} {item + 1}"
        for user, items in enumerate(synthetic_histories(80, 6, 15, seed=2).items)
        for item in items
    ]
    path = tmp_path / "ratings.txt"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def finished(config, source, workdir):
    run.prepare(config, source, workdir)
    return run.execute(config, workdir)


def test_the_error_experiment_runs_draws_and_ranks_the_mechanisms(tmp_path):
    found = []
    for epsilon in (0.5, 5.0):
        config = configs.get_config("tiny")
        config.epsilon = epsilon
        found.append(finished(config, "configs/gram.py:tiny", tmp_path / str(epsilon)))
    for record in found:
        metrics = record.metrics
        assert metrics["gaussian/max_entry_error"] < metrics["sampling/max_entry_error"]
        assert metrics["sampling/max_entry_error"] < metrics["uniform/max_entry_error"]
        assert metrics["gaussian/max_entry_error"] < metrics["gaussian/bound_corrected"]
        assert metrics["uniform/bound"] < metrics["gaussian/bound_paper"]
    assert (
        found[1].metrics["gaussian/max_entry_error"] < found[0].metrics["gaussian/max_entry_error"]
    )
    names = {path.name for path in gram.figures(found, tmp_path)}
    assert names == {"gram_samples.png", "gram_error_epsilon.png"}


@pytest.mark.parametrize("entries", ["normal", "uniform"])
def test_the_columns_have_the_stated_moments_and_hardly_any_is_clipped(entries):
    config = configs.get_config()
    config.update({"rows": 4, "columns": 300_000, "entries": entries})
    X = gram._columns(config).astype(np.float64)
    matrix = X @ X.T
    # A diagonal entry is a mean of d squares of variance at most 2, an entry off it of at most 1 + c².
    np.testing.assert_allclose(np.diag(matrix), 0.09, atol=5 * 0.09 * (2 / 300_000) ** 0.5)
    assert np.abs(matrix - np.diag(np.diag(matrix))).max() < 0.09 / 2
    lengths = np.sqrt((X**2).sum(axis=0))
    assert np.mean(lengths > gram.plan(config)["column_bound"]) < 5e-5
    if entries == "uniform":
        draws = X / np.sqrt(0.09 / 300_000)
        assert np.abs(draws[0]).max() <= 3**0.5 * 1.0001  # the first row is not mixed


@pytest.mark.slow
def test_the_gaussian_release_is_fifty_times_more_accurate_than_the_papers(tmp_path):
    metrics = gram.run(configs.get_config(), tmp_path)["metrics"]
    ratio = metrics["sampling_paper/max_entry_error"] / metrics["gaussian/max_entry_error"]
    assert ratio > 50


def test_the_recommender_runs_and_reports(tmp_path, amazon):
    found = []
    for epsilon in (1.0, 8.0):
        config = configs.get_config("recommender,tiny")
        config.data.path, config.epsilon = amazon, epsilon
        workdir = tmp_path / str(epsilon)
        found.append(finished(config, "configs/gram.py:recommender,tiny", workdir))
        released = json.loads((workdir / "privacy.json").read_text())
        assert set(released["releases"]) == {
            label + seed
            for label in (
                "dp_popularity",
                "transitions",
                "transitions_one_round",
                "ease",
                "ease_fixed",
            )
            for seed in ("", "_seed1")
        }
        assert released["total"]["epsilon"] > epsilon
        assert not (workdir / "secret").exists()
    for row in ("transitions", "ease", "attention", "ease_fixed", "dp_popularity"):
        assert 0 <= found[0].metrics[f"{row}/ndcg@10"] <= found[0].metrics[f"{row}/hit@10"] <= 1
    assert [p.name for p in item_recommender.figures(found, tmp_path)] == [
        "item_recommender_epsilon.png"
    ]


@pytest.mark.parametrize(
    ("arg", "changed", "named"),
    [
        ("tiny", {"rows": 0}, "config.rows=0"),
        ("tiny", {"beta_fraction": 1.5}, "config.beta_fraction=1.5"),
        ("tiny", {"eta_fraction": 0.0}, "config.eta_fraction=0.0"),
        ("tiny", {"kernel": "relu"}, "config.kernel='relu'"),
        ("tiny", {"entries": "cauchy"}, "config.entries='cauchy'"),
        ("recommender", {"num_kept": 10**6}, "config.num_kept=1000000"),
        ("recommender", {"transitions.rounds": 0}, "rounds=0"),
        ("recommender", {"popularity_share": 0.0}, "config.popularity_share=0.0"),
        ("recommender", {"fixed.popularity_share": 1.0}, "config.fixed.popularity_share=1.0"),
        ("recommender", {"evaluate.split": "train"}, "split='train'"),
        ("recommender", {"data.path": None}, "config.data.path is missing"),
    ],
)
def test_bad_values_are_named(arg, changed, named, amazon):
    config = configs.get_config(arg)
    if "recommender" in arg:
        config.data.path = amazon
        config.fixed.num_kept = 5
    config.update_from_flattened_dict(changed)
    with pytest.raises(ValueError, match=named):
        records.experiment(config).validate(config)
