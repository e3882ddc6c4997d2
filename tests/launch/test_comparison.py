"""Which private baseline is the best, and what a report says where a row is no better than that."""

import math

import pytest

import dpx
from dpx.launch import comparison, records, report, run
from dpx.launch.experiment import Comparison, ContractError, Measure, Outcome

TITLES = {"model": "the model", "mean": "private mean"}


def error(row, value, **settings):
    return Measure(row, "error", value, settings=settings)


def said(by, measures):
    return list(comparison.remarks(by, measures, "model", TITLES))


@pytest.mark.parametrize(("more", "best"), [(False, "mean"), (True, "zero")])
def test_the_best_baseline_follows_from_the_numbers(more, best):
    measures = [error("model", 1.0), error("zero", 3.0), error("mean", 2.0), error("exact", 0.1)]
    by = Comparison("error", ["zero", "mean"], more_is_better=more)
    assert comparison.best_baseline(by, measures) == best
    assert comparison.best_baseline(by, [error("zero", 3.0), error("mean", math.nan)]) == "zero"
    assert comparison.best_baseline(Comparison("error"), measures) == ""


def test_a_baseline_is_compared_by_its_mean_over_settings():
    measures = [error("zero", x, n=n) for n, x in enumerate((1.0, 5.0))] + [error("mean", 2.5)]
    assert comparison.best_baseline(Comparison("error", ["zero", "mean"]), measures) == "mean"


@pytest.mark.parametrize(("value", "loses"), [(1.9, False), (2.0, True), (2.1, True)])
def test_a_headline_that_is_no_better_than_the_best_baseline_says_so(value, loses):
    measures = [error("model", value), error("zero", 3.0), error("mean", 2.0)]
    words = said(Comparison("error", ["zero", "mean"]), measures)
    expected = (
        f"the model: no better than private mean, the best private baseline, by error: {value:.4g}"
    )
    assert words == ([f"{expected} against 2."] if loses else [])
    better = said(Comparison("error", ["zero", "mean"], more_is_better=True), measures)
    expected = f"the model: no better than zero, the best private baseline, by error: {value:.4g}"
    assert better == [f"{expected} against 3."]


@pytest.mark.parametrize(("value", "loses"), [(1.9, False), (2.0, False), (2.1, True)])
def test_a_row_that_training_made_worse_says_so_once(value, loses):
    measures = [error("model", value), error("mean", 2.0)]
    by = Comparison("error", ["mean"], {"model": "mean"})
    expected = (
        "the model: training made it worse than what it started from, by error: 2.1 against 2."
    )
    assert said(by, measures) == ([expected] if loses else [])


def test_where_it_loses_is_counted_over_settings():
    measures = [error("model", x, n=n, epsilon=1.0) for n, x in enumerate((1.0, 2.0, 3.0))]
    measures += [error("mean", x, n=n) for n, x in enumerate((1.5, 1.5, 1.5))]
    (words,) = said(Comparison("error", ["mean"]), measures)
    assert words.endswith("by error at 2 of 3 settings.")


def _outcome(values, **options):
    spent = dpx.PrivacyGuarantee(1.0, 1e-5, dpx.privacy.ADD_OR_REMOVE_ONE, "user", "test")
    by = Comparison("hit", ["popularity", "transitions"], {"model": "popularity"}, True)
    return Outcome(
        [Measure(row, "hit", value) for row, value in values.items()],
        spent,
        {"model": spent},
        headline_row="model",
        comparisons=[by],
        **({"titles": TITLES} | options),
    )


def test_a_report_marks_and_says_it_for_means_over_seeds(tmp_path, monkeypatch):
    found = []
    for seed, model in enumerate((0.40, 0.30)):
        config = records.load_config("configs/quickstart.py:tiny")
        config.seed, folder = seed, tmp_path / str(seed)
        records.begin(config, "configs/quickstart.py:tiny", folder)
        values = {"model": model, "popularity": 0.36, "transitions": 0.2 + seed / 2}
        run.write(_outcome(values), config, folder, 1.0)
        found.append(records.read(folder))
    alone = report.summarize(found[0])
    assert "| popularity (best private baseline) |" in alone
    assert "training made it worse" not in alone
    assert "no better" not in alone
    together = report.write(tmp_path)
    assert "| transitions (best private baseline) |" in together
    assert (
        "**the model: no better than transitions, the best private baseline, by hit: 0.35"
        in together
    )
    assert "**the model: training made it worse than what it started from, by hit: 0.35" in together


def test_a_row_that_is_none_of_the_table_is_refused():
    with pytest.raises(ContractError, match="by hit: row 'transitions' was not measured"):
        _outcome({"model": 0.4, "popularity": 0.36})


def test_a_row_with_a_title_that_a_run_left_out_is_not_compared_with():
    outcome = _outcome({"model": 0.4}, titles=dict.fromkeys(("popularity", "transitions"), "x"))
    (by,) = outcome.comparisons
    assert comparison.best_baseline(by, outcome.measures) == ""
    assert not list(comparison.remarks(by, outcome.measures, "model", outcome.titles))
    with pytest.raises(ContractError, match="by hit: row 'popularity' was not measured"):
        Outcome(
            [*outcome.measures, Measure("popularity", "loss", 1.0)],
            outcome.headline,
            outcome.releases,
            titles=outcome.titles,
            comparisons=[by],
        )
