"""What a report puts together: runs that differ in the seed alone, and what runs on the same data cost."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

from own_runs import plain, written

from dpx.runs import records, report, sweep
from dpx.runs.experiment import Comparison, Measure, Outcome
from experiments.dp_transformer import language_model, recommender

NAME = "configs/quickstart.py:tiny"
TEXT = "text:tiny"


def spending(config, workdir=None, unit="user", **options):
    """In place of a run: two plain releases that cost the config's budget each."""
    spent = plain(config.epsilon, config.delta, unit)
    return Outcome([Measure("a", "b", 1.0)], spent, {"a": spent, "b": spent}, **options)


def run_grid(source, folder, *axes, fixed=None, **options):
    grid = sweep.grid(source, list(axes), fixed or {})
    assert sweep.run_points(source, grid, folder, fixed=fixed or {}, **options) == []
    return records.read_all(folder)


def test_points_of_a_sweep_on_one_data_set_are_added_up(tmp_path, monkeypatch):
    monkeypatch.setattr(language_model, "run", spending)
    found = run_grid(NAME, tmp_path, "epsilon=1,2", "seed=0,1")
    text = report.write(tmp_path)
    assert "**Total over 4 runs on the same data**: ε = 12, δ = 8e-05" in text
    assert text.count("**Total over") == 1
    assert (tmp_path / "report.md").read_text() == text
    assert report.totals(found[:1]) == []


def test_runs_on_one_file_are_added_up_however_they_read_it(tmp_path, monkeypatch):
    monkeypatch.setattr(language_model, "run", spending)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("notes.txt", "others.txt"):
        Path(name).write_text("to be or not\n" * 600)
    Path("link.txt").symlink_to("notes.txt")
    runs = tmp_path / "runs"
    axes = ["data.path=notes.txt,./notes.txt,link.txt", "data.limit=300,400", "data.length=16,20"]
    (words,) = report.totals(run_grid(TEXT, runs, *axes))
    assert "over 12 runs" in words
    # A path that is relative leads from the folder in which the command was given.
    monkeypatch.chdir(tmp_path / "elsewhere")
    (words,) = report.totals(run_grid(TEXT, runs, "data.path=../notes.txt"))
    assert "over 13 runs" in words
    monkeypatch.chdir(tmp_path)
    # Runs on other files are not added to them.
    assert report.totals(run_grid(TEXT, runs, "data.path=others.txt")) == [words]


def test_runs_that_differ_in_more_than_the_seed_are_no_seeds(tmp_path):
    """As when the config file changed between two runs: one ε would stand for both."""
    found = []
    for number, (epsilon, seed) in enumerate(((1.0, 0), (1.0, 1), (100.0, 0), (1.0, 1))):
        outcome = spending(SimpleNamespace(epsilon=epsilon, delta=1e-5))
        found.append(written(tmp_path / str(number), outcome, epsilon=epsilon, seed=seed))
    groups = [[r.workdir.name for r in group] for group in records.by_seed(found).values()]
    assert groups == [["0", "1"], ["2"], ["3"]]
    titles = [*records.by_seed(found)]
    assert titles[1:] == ["test epsilon=100.0", f"test epsilon=1.0 (in {tmp_path / '3'})"]
    assert "- a: ε = 100," in report.summarize(found[2])


def measured(config, workdir):
    """In place of a run: a private row and a private baseline, which get better with ε."""
    spent = plain(config.epsilon, config.delta)
    if config.epsilon < 5:
        spent = spent.assuming("nobody is there twice")
    return Outcome(
        [
            Measure("model", "loss", 1 / config.epsilon),
            Measure("base", "loss", 2 / config.epsilon),
            Measure("model", "hit", 0.5),
        ],
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
    monkeypatch.setattr(language_model, "run", measured)
    # One of the three is that of the config, which is no override.
    run_grid(NAME, tmp_path, "epsilon=1,3,16", fixed={"train.steps": 5})
    names = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert names == {f"epsilon={epsilon}" for epsilon in (1, 3, 16)}
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
        outcome = measured(config, workdir)
        return dataclasses.replace(outcome, composed={"model": outcome.headline})

    monkeypatch.setattr(language_model, "run", run)
    run_grid(NAME, tmp_path, "seed=0")
    text = report.write(tmp_path)
    assert "**total of all releases**" in text
    assert "on its own" not in text


def test_totals_of_synthetic_runs_are_of_one_draw(tmp_path, monkeypatch):
    def run(config, workdir):
        return spending(config, synthetic=True)

    monkeypatch.setattr(recommender, "run", run)
    told = report.totals(
        run_grid("recommender:synthetic,tiny", tmp_path, "epsilon=1,2", "seed=0,1")
    )
    assert ["over 2 runs" in words and "synthetic" in words for words in told] == [True, True]
