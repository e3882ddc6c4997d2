"""What a training logs elsewhere: the numbers of metrics.jsonl, under names that say what nothing covers."""

import csv
import importlib
import json
import sys
import types
from importlib import machinery
from typing import Any

import pytest
import training_cases
from training_cases import killed_at

from dpx import _storage as storage
from dpx.training import AdaptiveClipNorm, trackers

COLUMNS = ["run", "step", "name", "value"]


def fit(log, workdir=None, **options):
    about = {"steps": 4, "log_every": 2, "checkpoint_every": 2}
    return training_cases.fit(log=log, workdir=workdir, **about | options)


@pytest.mark.slow
def test_a_function_gets_what_the_history_has_and_names_what_nothing_covers():
    seen = []
    evaluate = {"evaluate": lambda p: {"b": float(p["b"])}, "evaluate_every": 4}
    made = fit(lambda *entry: seen.append(entry), **evaluate)
    two, four = made.history
    assert four.evaluation is not None
    assert seen == [
        (2, {"not_covered/loss": two.loss, "epsilon": two.epsilon}),
        (4, {"not_covered/loss": four.loss, "epsilon": four.epsilon}),
        (4, {"not_covered/b": four.evaluation["b"]}),
    ]


@pytest.mark.slow
def test_an_adaptive_norm_is_paid_for_and_has_its_own_name():
    seen = []
    fit(lambda *entry: seen.append(entry), l2_clip_norm=AdaptiveClipNorm(count_noise=2.0))
    assert set(seen[-1][1]) == {"not_covered/loss", "epsilon", "l2_clip_norm"}


def rows(path):
    with path.open(newline="") as file:
        header, *found = csv.reader(file)
    assert header == COLUMNS
    return found


@pytest.mark.slow
def test_a_table_goes_on_after_a_kill_without_what_came_after_the_checkpoint(tmp_path):
    whole = tmp_path / "whole"
    expected = fit("log.csv", whole)
    with killed_at(4):
        fit("log.csv", tmp_path / "killed")
    stale = tmp_path / "killed" / "log.csv"
    with stale.open("a", newline="") as file:
        csv.writer(file).writerows([["training", 3, "epsilon", 7], ["other", 9, "epsilon", 1]])
    assert fit("log.csv", tmp_path / "killed").history == expected.history
    ours = rows(whole / "log.csv")
    assert rows(stale) == [*ours[:2], ["other", "9", "epsilon", "1"], *ours[2:]]
    assert [row[:3] for row in ours] == [
        ["training", step, name] for step in "24" for name in ("not_covered/loss", "epsilon")
    ]
    assert stale.stat().st_mode & 0o077 == 0  # losses of private data
    fit("log.csv", whole)  # finished: nothing is logged again
    assert rows(whole / "log.csv") == ours


@pytest.mark.quick_cases("trackio")
@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_services_are_given_steps_and_numbers_and_are_closed(package, monkeypatch, tmp_path):
    calls = []

    class Run:
        def log(self, numbers, step):
            calls.append((step, sorted(numbers)))

        def finish(self):
            calls.append("finished")

    module: Any = types.ModuleType(package)
    module.init = lambda **about: (calls.append(about), Run())[1]
    module.__spec__ = machinery.ModuleSpec(package, None)
    monkeypatch.setitem(sys.modules, package, module)
    fit(package, tmp_path / "run")
    names = ["epsilon", "not_covered/loss"]
    assert calls == [{"project": "dpx", "name": "run/training"}, (2, names), (4, names), "finished"]


@pytest.mark.slow
def test_tensorboard_reads_them(tmp_path):
    pytest.importorskip("tensorboardX")
    event_pb2: Any = importlib.import_module("tensorboardX.proto.event_pb2")

    fit("tensorboard", tmp_path)
    (path,) = (tmp_path / "tensorboard" / "training").iterdir()
    content, found = path.read_bytes(), []
    while content:
        length = int.from_bytes(content[:8], "little")
        event = event_pb2.Event.FromString(content[12 : 12 + length])
        found += [(event.step, value.tag) for value in event.summary.value]
        content = content[16 + length :]
    assert found == [(s, n) for s in (2, 4) for n in ("not_covered/loss", "epsilon")]


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("weights", 'must be "tensorboard", "wandb", "trackio"'),
        (3, "log=3 must be"),
        ("tensorboard", "needs a"),
        ("wandb", "needs a package: pip install wandb"),
    ],
)
def test_wrong_places_are_named_before_anything_is_drawn(log, said, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: name != "wandb" or None)
    with pytest.raises(ValueError, match=said):
        fit(log)


def test_a_file_of_ones_own_is_not_written_over(tmp_path):
    (tmp_path / "mine.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="must be no file of yours"):
        fit("mine.csv", tmp_path)
    assert (tmp_path / "mine.csv").read_text() == "a,b\n1,2\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.csv"]  # and nothing has begun


@pytest.mark.parametrize("cut", ["training", "training,", "training,2,epsi", "trai", ""])
def test_a_row_that_was_cut_off_stops_no_training(cut, tmp_path):
    """As a full disk cuts the last one."""
    table = tmp_path / "log.csv"
    table.write_text("run,step,name,value\r\nother,9,epsilon,1\r\n" + cut)
    fit("log.csv", tmp_path, steps=2)
    assert [row[:2] for row in rows(table)] == [["other", "9"], *[["training", "2"]] * 2]


def test_a_damaged_table_is_named(tmp_path):
    (tmp_path / "log.csv").write_bytes(b"run,step\xff")
    with pytest.raises(storage.StorageError, match=r"log\.csv is damaged"):
        fit("log.csv", tmp_path)


@pytest.mark.slow
def test_trainings_within_log_where_those_outside_do():
    seen = []
    with trackers.to(lambda *entry: seen.append(entry)):
        fit(None)
        fit(lambda *entry: None)
    assert [step for step, _ in seen] == [2, 4]
    assert json.dumps(seen)  # plain numbers
