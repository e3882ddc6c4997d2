"""`--distributed`: one run in several processes on one machine."""

import os
import socket
import subprocess

import jax
import numpy as np
import pytest
from command_line import ROOT, call, command
from xla_flags import CHEAP, on_devices

from dpx import _processes
from dpx import _storage as storage
from dpx.runs import cli, records

CONFIG = (
    "--config=configs/text.py:tiny",
    "--config.data.generated=0",
    "--config.ngrams=(1,)",
    "--config.noise_seed=7",
    "--config.train.batch_size=8",
)


def ended(*flags, second=(), folders=(ROOT, ROOT), status=0):
    """What two processes of the same flags say, each in its folder; the second has more of them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = (*flags, "--distributed", f"--coordinator={address}")
    given = [command("run", *flags, "--processes=2", f"--process={n}") for n in range(2)]
    given[1] += second
    env = os.environ | on_devices(1, CHEAP) | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen(each, cwd=folder, env=env, **pipes)
        for each, folder in zip(given, folders, strict=True)
    ]
    said = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [status] * 2, said[0][1][-3000:]
    return said


@pytest.mark.slow
def test_two_processes_leave_the_records_of_one(tmp_path):
    (tmp_path / "lines.txt").write_text((ROOT / "README.md").read_text().replace("|", "\n"))
    config = (*CONFIG, f"--config.data.path={tmp_path / 'lines.txt'}")
    (first, _), (second, errors) = ended(*config, f"--workdir={tmp_path / 'two'}")
    assert "DP transformer" in first
    assert "transformer" not in second
    assert "step" not in errors
    assert call("run", *config, f"--workdir={tmp_path / 'one'}").returncode == 0
    two, one = (records.read(tmp_path / name) for name in ("two", "one"))
    assert two.private == one.private
    for name, value in one.metrics.items():
        np.testing.assert_allclose(two.metrics[name], value, rtol=1e-5)
    samples = [records.load(r.workdir).sample(jax.random.key(0), 3) for r in (two, one)]
    assert samples[0] == samples[1]
    logs = [storage.read_lines(r.workdir / "metrics.jsonl") for r in (two, one)]
    assert [entry["step"] for entry in logs[0]] == [entry["step"] for entry in logs[1]]
    # Finished: a process alone reads back what two have left.
    assert call("run", *config, f"--workdir={tmp_path / 'two'}").returncode == 0


@pytest.mark.slow
def test_a_process_with_another_config_ends_all_in_one_line(tmp_path):
    """It would clip to 1000 under a guarantee for less."""
    flags = ("--config=text:tiny", "--config.data.generated=12000", f"--workdir={tmp_path / 'run'}")
    second = ("--config.train.l2_clip_norm=1000.0", "--config.epsilon=1e6", "--config.mesh.data=2")
    words = "error: config.epsilon, config.train.l2_clip_norm must be the same in all processes"
    assert all(words in errors for _, errors in ended(*flags, second=second, status=2))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_process_with_other_data_ends_all(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
        (folder / "lines.txt").write_text(f"a line of {folder.name}\n" * 50)
    flags = ("--config=text:tiny", *CONFIG[1:], "--config.data.path=lines.txt")
    said = ended(*flags, f"--workdir={tmp_path / 'run'}", folders=folders, status=2)
    assert all("the data are not the same in all processes" in errors for _, errors in said)
    assert not (tmp_path / "run" / "secret" / "keys.json").exists()


@pytest.mark.quick_cases("nobody")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--config=text:tiny", "--distributed"], "must say how to find the other processes"),
        (["--config=gram:tiny", "--distributed"], "trains no model on several processes"),
        (["--config=text:tiny", "--process=1"], "need --distributed: add it"),
    ],
    ids=["nobody", "no model", "no flag"],
)
def test_wrong_flags_end_in_one_line(tmp_path, flags, words):
    done = call("run", *flags, f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_what_ends_the_first_process_ends_the_others_in_one_line(monkeypatch):
    """As when the keys of a run are gone, for which the first one alone looks."""
    sent = [{"error": "keys are missing: use a new --workdir"}, None]
    monkeypatch.setattr(_processes, "several", lambda: True)
    monkeypatch.setattr(_processes, "is_first", lambda: False)
    monkeypatch.setattr(_processes, "of_each", lambda own: sent)
    with pytest.raises(cli.EXPECTED, match="keys are missing"):
        _processes.of_first(lambda: None)
