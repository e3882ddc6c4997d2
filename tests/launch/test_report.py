"""What a report puts together: runs that differ in the seed alone, and what runs on the same data cost."""

import dataclasses
from pathlib import Path

import pytest

import dpx
from dpx.launch import records, report, run, sweep
from dpx.launch.experiment import Comparison, Measure, Outcome
from experiments.dp_transformer import language_model, recommender

NAME = "configs/quickstart.py:tiny"
TEXT = "text:tiny"
SYNTHETIC = "configs/recommender.py:synthetic,tiny"


def _spending(synthetic, unit="user"):
    """In place of a run: two plain releases that cost the config's budget each."""

    def run(config, workdir):
        relation = dpx.privacy.ADD_OR_REMOVE_ONE
        spent = dpx.PrivacyGuarantee(config.epsilon, config.delta, relation, unit, "test")
        releases = {"a": spent, "b": spent}
        return Outcome([Measure("a", "b", 1.0)], spent, releases, synthetic=synthetic)

    return run


def test_points_of_a_sweep_on_one_data_set_are_added_up(tmp_path, monkeypatch):
    monkeypatch.setattr(language_model, "run", _spending(synthetic=False))
    points = sweep.grid(NAME, ["epsilon=1,2", "seed=0,1"])
    assert sweep.run_points(NAME, points, tmp_path) == []
    found = records.read_all(tmp_path)
    text = report.write(tmp_path)
    assert "**Total over 4 runs on the same data**: ε = 12, δ = 8e-05" in text
    assert text.count("**Total over") == 1
    assert (tmp_path / "report.md").read_text() == text
    assert report.totals(found[:1]) == []


def test_runs_on_one_file_are_added_up_however_they_read_it(tmp_path, monkeypatch):
    monkeypatch.setattr(language_model, "run", _spending(synthetic=False))
    monkeypatch.chdir(tmp_path)
    for name in ("notes.txt", "others.txt"):
        Path(name).write_text("to be or not\n" * 600)
    Path("link.txt").symlink_to("notes.txt")
    axes = ["data.path=notes.txt,./notes.txt,link.txt", "data.limit=300,400", "data.length=16,20"]
    sweep.run_points(TEXT, sweep.grid(TEXT, axes), tmp_path / "runs")
    (words,) = report.totals(records.read_all(tmp_path / "runs"))
    assert "over 12 runs" in words
    # A path that is relative leads from the folder in which the command was given.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    sweep.run_points(TEXT, sweep.grid(TEXT, ["data.path=../notes.txt"]), tmp_path / "runs")
    (words,) = report.totals(records.read_all(tmp_path / "runs"))
    assert "over 13 runs" in words
    monkeypatch.chdir(tmp_path)
    # Runs on other files are not added to them.
    sweep.run_points(TEXT, sweep.grid(TEXT, ["data.path=others.txt"]), tmp_path / "runs")
    assert report.totals(records.read_all(tmp_path / "runs")) == [words]


def test_runs_on_one_data_set_that_cannot_be_added_up_are_named(tmp_path, monkeypatch):
    for unit, axes in (("line", ["epsilon=1,2"]), ("window", ["epsilon=3"])):
        monkeypatch.setattr(language_model, "run", _spending(False, unit))
        assert sweep.run_points(NAME, sweep.grid(NAME, axes), tmp_path) == []
    added_up, apart = report.totals(records.read_all(tmp_path))
    assert "over 2 runs" in added_up
    assert "add or remove one line, to add or remove one window" in apart


@pytest.mark.slow
def test_runs_that_differ_in_more_than_the_seed_are_no_seeds(tmp_path, monkeypatch):
    """As when the config file changed between two runs: one ε would stand for both."""
    monkeypatch.setattr(language_model, "run", _spending(synthetic=False))
    load = records.load_config
    for epsilon, seed in ((1.0, 0), (1.0, 1), (100.0, 0), (1.0, 1)):

        def changed(source, epsilon=epsilon):
            config = load(source)
            config.epsilon = epsilon
            return config

        monkeypatch.setattr(records, "load_config", changed)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        config = changed(NAME)
        config.seed = seed
        run.prepare(config, NAME, folder)
        run.execute(config, folder)
    found = records.read_all(tmp_path)
    groups = [
        [record.workdir.name for record in group] for group in records.by_seed(found).values()
    ]
    assert groups == [["0", "1"], ["2"], ["3"]]
    text = report.write(tmp_path)
    assert text.count("Mean ± standard error over 2 seeds") == 1
    assert f"## {NAME} epsilon=100.0\n" in text
    assert f"## {NAME} epsilon=1.0 (in {tmp_path / '3'})" in text
    assert "- a: ε = 100," in text


def _measured(config, workdir):
    """In place of a run: a private row and a private baseline, which get better with ε."""
    rests_on = ("nobody is there twice",) if config.epsilon < 5 else ()
    spent = dpx.PrivacyGuarantee(
        config.epsilon,
        config.delta,
        dpx.privacy.ADD_OR_REMOVE_ONE,
        "user",
        "test",
        ("it is a test", *rests_on),
    )
    loss = [
        Measure("model", "loss", 1 / config.epsilon),
        Measure("base", "loss", 2 / config.epsilon),
    ]
    return Outcome(
        [*loss, Measure("model", "hit", 0.5)],
        spent,
        {"model": spent, "base": spent},
        not_covered=["the losses"],
        notes="A note.",
        titles={"model": "the model", "base": "a mean"},
        headline_row="model",
        comparisons=[Comparison("loss", ["base"])],
    )


def test_a_report_of_several_points_begins_with_what_differs_and_says_all_else_once(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(language_model, "run", _measured)
    fixed = {"train.steps": 5}
    # One of the three is that of the config, which is no override.
    points = sweep.grid(NAME, ["epsilon=1,3,16"], fixed)
    assert sweep.run_points(NAME, points, tmp_path, fixed=fixed) == []
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {
        f"epsilon={epsilon}" for epsilon in (1, 3, 16)
    }
    text = report.write(tmp_path)
    head, *others = text.split("\n## ")
    assert head.splitlines() == [
        f"## {NAME}: the model",
        "",
        "In every run: train.steps = 5.",
        "",
        "| ε | ε of all releases | loss | best private baseline in loss | hit |",
        "|---|---|---|---|---|",
        "| 1 | 2 | 1 | 2 (a mean) | 0.5 |",
        "| 3 | 6 | 0.3333 | 0.6667 (a mean) | 0.5 |",
        "| 16 | 32 | 0.0625 | 0.125 (a mean) | 0.5 |",
    ]
    assert [words.splitlines()[0] for words in others] == [
        *(f"{NAME} epsilon={epsilon}.0" for epsilon in (1, 3, 16)),
        "In all 3 of them",
    ]
    for words in ("it is a test", "the losses", "A note."):
        assert text.count(words) == 1
        assert words in others[-1]
    assert "\n\nA note." in text  # and not a line of the list above
    assert text.count("is what a row may cost on its own") == 3
    # What is not true of all stands where it is.
    assert ["nobody is there twice" in words for words in others] == [True, True, False, False]
    assert all(f"- model: ε = {epsilon}," in text for epsilon in (1, 3, 16))


def test_a_total_within_the_budget_of_the_config_needs_no_warning(tmp_path, monkeypatch):
    def run(config, workdir):
        outcome = _measured(config, workdir)
        return dataclasses.replace(outcome, composed={"model": outcome.headline})

    monkeypatch.setattr(language_model, "run", run)
    assert sweep.run_points(NAME, [{}], tmp_path) == []
    text = report.write(tmp_path)
    assert "**total of all releases**" in text
    assert "on its own" not in text


def test_totals_of_synthetic_runs_are_of_one_draw(tmp_path, monkeypatch):
    monkeypatch.setattr(recommender, "run", _spending(synthetic=True))
    axes = ["epsilon=1,2", "seed=0,1"]
    assert sweep.run_points(SYNTHETIC, sweep.grid(SYNTHETIC, axes), tmp_path) == []
    told = report.totals(records.read_all(tmp_path))
    assert len(told) == 2
    for words in told:
        assert "over 2 runs" in words
        assert "synthetic" in words
