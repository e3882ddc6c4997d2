"""Figures say what they show, bars begin at 0, and nothing is drawn twice."""

import json

import pytest
from matplotlib import pyplot

from dpx.launch import figures, plotting, records
from dpx.launch.experiment import Measure
from dpx.launch.records import Record


@pytest.fixture
def drawn(monkeypatch):
    """What is saved, by the name of the file, and left open."""
    found = {}
    save = plotting.save

    def keep(figure, path, title):
        assert path.name not in found, "one file is written twice"
        found[path.name] = figure
        return save(figure, path, title)

    monkeypatch.setattr(plotting, "save", keep)
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    yield found
    monkeypatch.undo()
    pyplot.close("all")


def record(folder, source, values, losses=(), **changed):
    config = records.load_config(source)
    config.update_from_flattened_dict(changed)
    folder.mkdir()
    lines = [
        {"run": row, "step": step, "loss": 2.0, "epsilon": 1.0} for row in losses for step in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    records.storage.write_json(folder / "privacy.json", {"releases": {}})
    measures = tuple(Measure(row, metric, value) for (row, metric), value in values.items())
    title = {"titles": {"model": "the model"}, "headline_row": "model"}
    return Record(
        folder, source, config.to_dict(), changed, {}, {}, 1.0, measures=measures, **title
    )


def axes_of(drawn):
    return {name: figure.axes for name, figure in drawn.items()}


def test_a_run_of_a_language_model_has_bars_from_zero_and_its_losses_once(tmp_path, drawn):
    values = {("model", "nats_per_character"): 2.2, ("base", "nats_per_character"): 2.3}
    found = record(tmp_path / "a", "quickstart:tiny", values, losses=["model"])
    paths = figures.draw([found], tmp_path)
    assert [path.name for path in paths] == ["training.png", "rows.png"]
    assert all(figure.get_suptitle() for figure in drawn.values())
    (bars,) = axes_of(drawn)["rows.png"]
    assert bars.get_xlim()[0] == 0
    assert {patch.get_width() for patch in bars.patches} == {2.2, 2.3}
    curves = [
        axis for axes in axes_of(drawn).values() for axis in axes if "loss" in axis.get_ylabel()
    ]
    assert len(curves) == 1


@pytest.mark.slow
def test_a_sweep_along_two_axes_draws_a_line_for_each_value_of_the_other(tmp_path, drawn):
    points = [(epsilon, steps) for epsilon in (1.0, 3.0, 8.0) for steps in (4, 5)]
    found = [
        record(
            tmp_path / f"{number}",
            "text:tiny",
            {("model", "loss"): steps / epsilon},
            **{"epsilon": epsilon, "train.steps": steps},
        )
        for number, (epsilon, steps) in enumerate(points)
    ]
    figures.draw(found, tmp_path)
    assert set(drawn) == {"loss_against_epsilon.png", "loss_against_train.steps.png"}
    (axis,) = drawn["loss_against_epsilon.png"].axes
    assert drawn["loss_against_epsilon.png"].get_suptitle() == "loss against ε"
    words = [text.get_text() for text in axis.get_legend().get_texts()]
    assert words == ["the model, train.steps=4", "the model, train.steps=5"]


@pytest.mark.slow
def test_what_an_experiment_draws_itself_is_drawn_once(tmp_path, drawn):
    """`error_against_epsilon.png` was written by both, and stood twice in the report."""
    rows = ("sketch", "tree", "mean")
    values = {(row, "error"): 0.1 for row in rows}
    found = []
    for epsilon in (1.0, 3.0):
        one = record(tmp_path / f"{epsilon}", "cross_attention:size,tiny", values, epsilon=epsilon)
        settings = [
            Measure("sketch", "error", 0.1 / epsilon, settings={setting: value})
            for setting in ("degree", "queries")
            for value in (1, 2)
        ]
        scaled = [Measure(m.row, m.metric, m.value / epsilon) for m in one.measures]
        about = {"measures": (*scaled, *settings), "titles": dict.fromkeys(rows, "a row")}
        found.append(records.dataclasses.replace(one, **about))
    paths = figures.draw(found, tmp_path)
    assert sum(path.name == "error_against_epsilon.png" for path in paths) == 1
