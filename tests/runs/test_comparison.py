"""Which private baseline is the best, and what a report says where a row is no better than that."""

import math

import pytest
from own_runs import plain, written

from dpx.runs import comparison, report
from dpx.runs.experiment import Comparison, ContractError, Measure, Outcome

TITLES = {"model": "the model", "mean": "private mean"}
BASELINES = ["zero", "mean"]


def error(row, value, **settings):
    return Measure(row, "error", value, settings=settings)


def said(by, measures):
    return list(comparison.remarks(by, measures, "model", TITLES))


@pytest.mark.parametrize(("more", "best"), [(False, "mean"), (True, "zero")])
def test_the_best_baseline_follows_from_the_numbers(more, best):
    measures = [error("model", 1.0), error("zero", 3.0), error("mean", 2.0), error("exact", 0.1)]
    by = Comparison("error", BASELINES, more_is_better=more)
    assert comparison.best_baseline(by, measures) == best
    assert comparison.best_baseline(by, [error("zero", 3.0), error("mean", math.nan)]) == "zero"
    assert comparison.best_baseline(Comparison("error"), measures) == ""


def test_a_baseline_is_compared_by_its_mean_over_settings():
    measures = [error("zero", x, n=n) for n, x in enumerate((1.0, 5.0))] + [error("mean", 2.5)]
    assert comparison.best_baseline(Comparison("error", BASELINES), measures) == "mean"


@pytest.mark.parametrize("value", [1.9, 2.0, 2.1])
def test_a_row_that_is_no_better_than_the_best_baseline_or_its_start_says_so_once(value):
    measures = [error("model", value), error("zero", 3.0), error("mean", 2.0)]
    beaten = f"the model: no better than {{}}, the best private baseline, by error: {value:.4g}"
    words = said(Comparison("error", BASELINES), measures)
    assert words == [f"{beaten.format('private mean')} against 2."] * (value >= 2.0)
    words = said(Comparison("error", BASELINES, more_is_better=True), measures)
    assert words == [f"{beaten.format('zero')} against 3."]
    words = said(Comparison("error", ["mean"], {"model": "mean"}), measures)
    worse = "the model: training made it worse than what it started from, by error: 2.1 against 2."
    assert words == [worse] * (value > 2.0)


def test_where_it_loses_is_counted_over_settings():
    measures = [error("model", x, n=n, epsilon=1.0) for n, x in enumerate((1.0, 2.0, 3.0))]
    measures += [error("mean", x, n=n) for n, x in enumerate((1.5, 1.5, 1.5))]
    (words,) = said(Comparison("error", ["mean"]), measures)
    assert words.endswith("by error at 2 of 3 settings.")


def outcome_of(values, titles=TITLES, more=()):
    by = Comparison("hit", ["popularity", "transitions"], {"model": "popularity"}, True)
    measures = [*(Measure(row, "hit", value) for row, value in values.items()), *more]
    about = {"headline_row": "model", "comparisons": [by], "titles": titles}
    return Outcome(measures, plain(), {"model": plain()}, **about)


def test_a_report_marks_and_says_it_for_means_over_seeds(tmp_path):
    found = []
    for seed, model in enumerate((0.40, 0.30)):
        values = {"model": model, "popularity": 0.36, "transitions": 0.2 + seed / 2}
        found.append(written(tmp_path / str(seed), outcome_of(values), seed=seed))
    alone = report.summarize(found[0])
    assert "| popularity (best private baseline) |" in alone
    assert "training made it worse" not in alone
    assert "no better" not in alone
    together = report._section(found, "both")
    assert "| transitions (best private baseline) |" in together
    for words in (
        "no better than transitions, the best private baseline",
        "training made it worse than what it started from",
    ):
        assert f"**the model: {words}, by hit: 0.35" in together


def test_rows_that_a_comparison_names_are_of_the_table_or_have_a_title():
    with pytest.raises(ContractError, match="by hit: row 'transitions' was not measured"):
        outcome_of({"model": 0.4, "popularity": 0.36})
    titles = dict.fromkeys(("popularity", "transitions"), "x")
    outcome = outcome_of({"model": 0.4}, titles)
    (by,) = outcome.comparisons
    assert comparison.best_baseline(by, outcome.measures) == ""
    assert not list(comparison.remarks(by, outcome.measures, "model", titles))
    with pytest.raises(ContractError, match="by hit: row 'popularity' was not measured"):
        outcome_of({"model": 0.4}, titles, [Measure("popularity", "loss", 1.0)])
