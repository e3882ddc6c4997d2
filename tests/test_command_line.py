"""What a user can get wrong on a command line ends in one line, status 2, before anything is written."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dpx.data import surnames
from experiments import records, report, run, sweep

ROOT = Path(__file__).parents[1]


def call(module, *arguments):
    return subprocess.run(
        [sys.executable, "-m", f"experiments.{module}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        ("run", ["--config=configs/absent.py"], "configs/absent.py: no such config file"),
        ("run", ["--config=configs/quickstart.py:bogus"], "'bogus' is not known: use one of tiny"),
        ("run", ["--config=configs/quickstart.py:tiny", "--config.nope=3"], "no key 'nope'"),
        ("run", ["--config=configs/quickstart.py:tiny", "--noconfig.tied"], "no key 'tied'"),
        ("run", ["--config=configs/quickstart.py:tiny", "--config.epsilon=a"], "epsilon=a"),
        ("sweep", ["--config=configs/quickstart.py:bogus"], "'bogus' is not known: use one of tiny"),
        ("bench_gram", ["--columns=0"], "columns"),
        ("bench_noisy_head", ["--nope"], "nope"),
    ],
)  # fmt: skip
def test_bad_arguments_end_in_one_line(module, arguments, words):
    ended = call(module, *arguments)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr


def test_help_is_no_failure():
    ended = call("run", "--help")
    assert ended.returncode == 0
    assert "--workdir" in ended.stdout


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem
)
def test_every_experiment_has_a_plan(path):
    module = records.config_module(str(path))
    if hasattr(module, "get_config"):
        for variant in getattr(module, "VARIANTS", ("tiny",)):
            assert records.experiment(module.get_config(variant)).plan


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 3}, "num_heads=3"),
        ({"dim": 0}, "dim=0"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"dropout": 2.0}, "dropout=2"),
        ({"mlp_dim": 0}, "mlp_dim=0"),
        ({"mlp_dim": -1}, "mlp_dim=-1"),
        ({"kind": "gru", "num_blocks": 0}, "num_blocks=0"),
    ],
)
def test_models_are_checked_before_anything_runs(changes, words):
    config = records.load_config("configs/quickstart.py:tiny")
    config.update({"model": changes})
    with pytest.raises(ValueError, match=words):
        run.check(config)


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        ("epsilon=[1", "'\\[1' is not a value"),
        ("epsilon=1,", "empty value in --set=epsilon=1,"),
        ("epsilon=", "empty value"),
        ("epsilon", "key=v1,v2"),
        ("experiment=foo", "fixed by the config file"),
        ("nope=1", "no key 'nope'"),
    ],
)
def test_bad_axes_are_named(axis, words):
    with pytest.raises(ValueError, match=words):
        sweep.grid("configs/quickstart.py:tiny", [axis])


def test_a_sweep_without_a_usable_folder_ends_in_one_line(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    source = "--config=configs/noisy_head.py:low_dim,tiny"
    ended = call("sweep", source, f"--workdir={blocked}", "--set=seed=0,1")
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    taken = tmp_path / "sweep" / "seed=1"
    taken.mkdir(parents=True)
    (taken / "something").write_text("else")
    ended = call("sweep", source, f"--workdir={taken.parent}", "--set=seed=0,1")
    assert ended.returncode == 2
    assert "seed=1 is not empty" in ended.stderr


def test_a_sweep_whose_points_all_fail_lists_them(tmp_path, monkeypatch, capsys):
    def failing(config, workdir):
        raise RuntimeError("planted")

    monkeypatch.setattr(run, "execute", failing)
    source = "configs/noisy_head.py:low_dim,tiny"
    flag = SimpleNamespace(config=source, workdir=str(tmp_path), set=[])
    monkeypatch.setattr(sweep.flags, "FLAGS", flag)
    with pytest.raises(SystemExit) as ended:
        sweep.main([])
    assert ended.value.code == 1
    assert "3 of 3 points failed:\n  seed=0: RuntimeError: planted" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_ends_in_one_line(tmp_path, monkeypatch, capsys):
    def refused(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(report, "write", refused)
    monkeypatch.setattr(report.flags, "FLAGS", SimpleNamespace(workdir=str(tmp_path)))
    with pytest.raises(SystemExit) as ended:
        report.main([])
    assert ended.value.code == 2
    assert "Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Smith!", "Smith", "a" * 14])
def test_names_that_cannot_be_encoded_are_named(name):
    with pytest.raises(ValueError, match="at most 13 letters a–z"):
        surnames.encode(["smith", name])
    assert np.all(surnames.encode(["smith"]).tokens[0, 5:] == surnames.END)
