"""Figures say what they show, bars begin at 0, and nothing is drawn twice."""

import json

import numpy as np
import pytest
from matplotlib import pyplot
from own_runs import config_of

from dpx import _storage as storage
from dpx.runs import figures, plotting
from dpx.runs.experiment import Measure
from dpx.runs.records import Record


@pytest.fixture
def drawn(monkeypatch):
    """What is saved, by the name of the file, and left open."""
    found, save = {}, plotting.save

    def keep(figure, path, title):
        assert path.name not in found, "one file is written twice"
        found[path.name] = figure
        return save(figure, path, title)

    monkeypatch.setattr(plotting, "save", keep)
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    yield found
    monkeypatch.undo()
    pyplot.close("all")


def record(folder, source, measures, losses=(), **changed):
    """A run with these measures, and with lines of losses of these rows."""
    folder.mkdir()
    step = {"loss": 2.0, "epsilon": 1.0}
    lines = [json.dumps({"run": row, "step": n, **step}) for row in losses for n in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    storage.write_json(folder / "privacy.json", {"releases": {}})
    titles = {m.row: "the model" if m.row == "model" else "a row" for m in measures}
    about = {"measures": tuple(measures), "titles": titles, "headline_row": "model"}
    config = config_of(source, **changed).to_dict()
    return Record(folder, source, config, changed, {}, {}, 1.0, **about)


def test_a_run_of_a_language_model_has_bars_from_zero_and_its_losses_once(tmp_path, drawn):
    values = {"model": 2.2, "base": 2.3}
    measures = [Measure(row, "nats_per_character", value) for row, value in values.items()]
    found = record(tmp_path / "a", "quickstart:tiny", measures, losses=["model"])
    assert [path.name for path in figures.draw([found], tmp_path)] == ["training.png", "rows.png"]
    assert all(figure.get_suptitle() for figure in drawn.values())
    (bars,) = drawn["rows.png"].axes
    assert bars.get_xlim()[0] == 0
    assert {patch.get_width() for patch in bars.patches} == {2.2, 2.3}
    labels = [axis.get_ylabel() for figure in drawn.values() for axis in figure.axes]
    assert sum("loss" in label for label in labels) == 1


def test_an_evaluation_called_loss_is_no_loss_of_training(tmp_path, drawn):
    found = record(tmp_path / "a", "quickstart:tiny", [], losses=["model"])
    with (tmp_path / "a" / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"run": "model", "step": 2, "loss": 9.0}) + "\n")
    figures.draw([found], tmp_path)
    (line,) = drawn["training.png"].axes[0].containers
    np.testing.assert_array_equal(line.lines[0].get_ydata(), [2.0, 2.0])


@pytest.mark.slow
def test_a_sweep_along_two_axes_draws_a_line_for_each_value_of_the_other(tmp_path, drawn):
    found = []
    for epsilon in (1.0, 3.0, 8.0):
        for steps in (4, 5):
            changed = {"epsilon": epsilon, "train.steps": steps}
            measures = [Measure("model", "loss", steps / epsilon)]
            found.append(record(tmp_path / f"{len(found)}", "text:tiny", measures, **changed))
    figures.draw(found, tmp_path)
    assert set(drawn) == {"loss_against_epsilon.png", "loss_against_train.steps.png"}
    (axis,) = drawn["loss_against_epsilon.png"].axes
    assert drawn["loss_against_epsilon.png"].get_suptitle() == "loss against ε"
    words = [text.get_text() for text in axis.get_legend().get_texts()]
    assert words == ["the model, train.steps=4", "the model, train.steps=5"]


@pytest.mark.slow
def test_what_an_experiment_draws_itself_is_drawn_once(tmp_path, drawn):
    """`error_against_epsilon.png` was written by both, and stood twice in the report."""
    found = []
    for epsilon in (1.0, 3.0):
        measures = [Measure(row, "error", 0.1 / epsilon) for row in ("sketch", "tree", "mean")]
        measures += [
            Measure("sketch", "error", 0.1 / epsilon, settings={setting: value})
            for setting in ("degree", "queries")
            for value in (1, 2)
        ]
        source = "cross_attention:size,tiny"
        found.append(record(tmp_path / f"{epsilon}", source, measures, epsilon=epsilon))
    paths = figures.draw(found, tmp_path)
    assert sum(path.name == "error_against_epsilon.png" for path in paths) == 1
