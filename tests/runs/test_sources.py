"""Configs by name and by path, experiments beside a config of one's own, and what is wrong with them."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from own_runs import go, own, plain, sweep_command

import dpx
from dpx.runs import cli, experiment, points, records, report, run, sources, sweep
from dpx.runs.experiment import Measure, Outcome

EXPERIMENT = """
import beside_mine
import dpx
from dpx.runs.experiment import Measure, Outcome, Plan

def validate(config):
    pass

def spent(config):
    return dpx.PrivacyGuarantee(
        config.epsilon, config.delta, dpx.privacy.REPLACE_ONE, "row", "test")

def plan(config):
    return Plan({"row": spent(config)}, {"epsilon": config.epsilon})

def run(config, workdir):
    released = spent(config)
    return Outcome([Measure("row", "answer", beside_mine.ANSWER)], released, {"row": released})
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a config and an experiment into a folder, changed, and returns the config's path."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_mine.py").write_text("ANSWER = 42.0\n")
    return lambda change="pass", experiment=EXPERIMENT: own(tmp_path, experiment, change)


def test_configs_are_found_by_name_from_any_folder(tmp_path, monkeypatch):
    names = sources.names()
    assert {"quickstart", "recommender", "gram"} <= set(names)
    assert not {"__init__", "common"} & set(names)
    monkeypatch.chdir(tmp_path)
    by_name = records.load_config("quickstart:tiny")
    by_path = records.load_config(f"{names['quickstart']}:tiny")
    assert by_name.to_dict() == by_path.to_dict()
    assert by_name.train.steps == 6
    with pytest.raises(FileNotFoundError, match=r"audit, .*; did you mean quickstart\?"):
        records.load_config("quikstart")
    with pytest.raises(FileNotFoundError, match=r"configs/quickstart.py: no such config file"):
        records.load_config("configs/quickstart.py")


def test_an_experiment_of_ones_own_runs_from_anywhere(write, tmp_path, monkeypatch):
    source, workdir = write(), tmp_path / "run"
    monkeypatch.chdir(tmp_path.parent)
    record = go(source, workdir)
    assert record.metrics == {"row/answer": 42.0}
    assert "| row | 1 | 42 |" in report.summarize(record)
    assert record.overrides == {}
    assert Path(record.config["experiment"]) == tmp_path / "mine.py"
    with pytest.raises(ValueError, match="leaves no model"):
        records.load(workdir)
    with pytest.raises(ValueError, match="no function sweep"):
        sweep.grid(source, [])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(
            (f"del config['{key}']", f"own.py: the config has no key '{key}'")
            for key in sources.KEYS
        ),
        ("return 3", "get_config returned int"),
        ("config.experiment = 'absent.py'", "absent.py': no such file"),
        ("config.epsilon = = 3", "own.py, line 9: invalid syntax"),
    ],
)
def test_a_wrong_config_is_named(write, change, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words) as error:
        run.check(records.load_config(write(change)))
    assert len(str(error.value).splitlines()) == 1


def test_a_config_without_its_function_or_argument_is_named(tmp_path):
    path = tmp_path / "empty.py"
    path.touch()
    with pytest.raises(ValueError, match=r"empty.py: the function get_config is missing"):
        records.load_config(str(path))
    path.write_text("def get_config(): pass")
    with pytest.raises(ValueError, match="takes no argument"):
        records.load_config(f"{path}:tiny")


@pytest.mark.parametrize("function", sources.FUNCTIONS)
def test_a_missing_function_of_an_experiment_is_named(write, function):
    source = write(experiment=EXPERIMENT.replace(f"def {function}(", "def other("))
    with pytest.raises(ValueError, match=rf"mine.py' has no function '{function}'"):
        run.check(records.load_config(source))


def test_an_outcome_that_is_none_is_named(write, tmp_path):
    source = write(experiment=EXPERIMENT.replace("return Outcome", "Outcome"))
    with pytest.raises(experiment.ContractError, match=r"run returned NoneType: let it return"):
        go(source, tmp_path / "run")


ROW = plain(unit="row", relation=dpx.privacy.REPLACE_ONE)
USER = plain(relation=dpx.privacy.REPLACE_ONE)
MEASURES = [Measure("a", "error", 1.0)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"releases": {}}, "releases={} must hold a guarantee"),
        ({"composed": {}}, "composed={} must hold a guarantee"),
        ({"releases": {"a": ROW, "b": plain(unit="row")}}, "b is about ADD_OR_REMOVE_ONE row"),
        ({"composed": {"a": ROW, "b": USER}}, "release b is about REPLACE_ONE user"),
        ({"headline": USER}, "the headline about REPLACE_ONE user"),
        ({"measures": [Measure("a", "error", np.float32(1))]}, "measure a/error: .*float32"),
        ({"measures": [Measure("a", "error", 1.0, np.float32(1))]}, "measure a/error: .*float32"),
        ({"measures": [Measure("a", "e", 1.0, settings={"k": np.int64(3)})]}, "k=3/a/e: .*int64"),
        ({"measures": MEASURES * 2}, "several measures are called a/error"),
        ({"not_covered": "losses"}, "not_covered='losses' must be a list"),
    ],
)
def test_an_outcome_that_no_record_could_state_is_named(changes, words):
    with pytest.raises(experiment.ContractError, match=words):
        Outcome(**{"measures": MEASURES, "headline": ROW, "releases": {"a": ROW}, **changes})


def test_a_sweep_has_no_noise_seed(write):
    """Two releases with the same noise would show the data by their difference."""
    source = write("config.noise_seed = 12345678")
    words = r"sets config.noise_seed, under which all 2 points"
    with pytest.raises(ValueError, match=words) as error:
        sweep.grid(source, ["epsilon=1,4"])
    assert "12345678" not in str(error.value)
    assert sweep.grid(source, ["epsilon=4"]) == [{"epsilon": 4}]


def test_a_sweep_checks_each_point_once(write, tmp_path, monkeypatch):
    checked, check = [], run.check
    monkeypatch.setattr(run, "check", lambda config: (checked.append(config.seed), check(config)))
    sweep_command(monkeypatch, write(), tmp_path / "sweep", set=["seed=1,2"])
    assert checked == [1, 2]
    assert len(records.read_all(tmp_path / "sweep")) == 2


def test_paths_may_begin_at_the_home_folder(tmp_path, monkeypatch, capsys):
    """Shells leave the ~ of `--config.data.path=~/notes.txt` to the program."""
    monkeypatch.setenv("HOME", str(tmp_path))
    given, found = "~/notes.txt", str(tmp_path / "notes.txt")
    assert points.point_config("text:tiny", {"data.path": given}).data.path == found
    path = tmp_path / "own.py"
    shipped = "from configs.text import get_config as text"
    changed = f"config = text(arg)\n    config.data.path = {given!r}\n    return config"
    path.write_text(f"{shipped}\n\n\ndef get_config(arg=''):\n    {changed}\n")
    assert sources.load_config(str(path)).data.path == found
    flag = dict.fromkeys(("distributed", "coordinator", "processes", "process"))
    config = sources.load_config("text:tiny")
    config.data.path = given
    monkeypatch.setattr(run.flags, "FLAGS", SimpleNamespace(config=config, dry_run=True, **flag))

    def refuse(config):
        raise ValueError(config.data.path)

    monkeypatch.setattr(run, "check", refuse)
    with pytest.raises(SystemExit):
        run.main()
    assert capsys.readouterr().err == f"error: {found}\n"


def test_a_workdir_of_an_unknown_user_is_a_folder(monkeypatch):
    monkeypatch.setattr(cli.flags, "FLAGS", SimpleNamespace(workdir="~nobody.such/run"))
    assert cli.workdir("DIR") == Path("~nobody.such/run")
