"""Training in several processes on one machine: the result of one, also after one of them was killed."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fit_cases
import jax
import numpy as np
import pytest
from xla_flags import CHEAP, on_devices

from dpx import _processes
from dpx.training import layout

PROGRAM = Path(fit_cases.__file__).with_name("fit_process.py")


def start(folder, count, devices=1, killed=None, other=None, unit="records"):
    """Starts all processes; number `killed` is killed at step 3, and number `other` clips to another norm."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    settings = {
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    folder.mkdir(exist_ok=True)
    return [
        subprocess.Popen(
            [
                *(sys.executable, PROGRAM, address, str(count), str(number), folder),
                *("3" if number == killed else "0", "1000" if number == other else "0.5", unit),
            ],
            env=os.environ | on_devices(devices, CHEAP) | settings,
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"{number}.log").open("w"),
        )
        for number in range(count)
    ]


def finish(processes, folder):
    """What each has found, and what it has said."""
    codes = [process.wait(timeout=240) for process in processes]
    said = [(folder / f"{number}.log").read_text() for number in range(len(codes))]
    assert codes == [0] * len(codes), said[0][-3000:]
    return [dict(np.load(folder / f"{number}.npz")) for number in range(len(codes))], said


def check(found, **changes):
    """All have what a process alone finds, and bit by bit the same as each other.

    Sums of other blocks round differently, by which an entry may fall on the next point of the noise's grid.
    """
    one = fit_cases.fit(**changes)
    for each in found:
        for name, want in one.params.items():
            off = np.abs(each[name] - want)
            assert off.max() < 1e-4
            assert (off > 1e-6).sum() <= 2
            np.testing.assert_array_equal(each[name], found[0][name])
        np.testing.assert_allclose(each["losses"], [r.loss for r in one.history], atol=1e-5)
        assert each["epsilon"] == one.guarantee.epsilon


@pytest.mark.slow
def test_two_processes_find_what_one_does_and_the_first_writes(tmp_path):
    found, said = finish(start(tmp_path / "run", 2), tmp_path / "run")
    check(found)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == fit_cases.STEPS
    assert "step 4/4" in said[0]
    assert "step" not in said[1]
    assert not (tmp_path / "run" / "secret" / "keys.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_after_one_was_killed_the_same_command_goes_on(tmp_path, killed):
    folder = tmp_path / "run"
    processes = start(folder, 2, killed=killed)
    assert processes[killed].wait(timeout=240) == -9
    survivor = processes[1 - killed]
    survivor.kill()  # it would notice within two minutes, and end
    survivor.wait()
    found, said = finish(start(folder, 2), folder)
    assert "step 1/4" not in said[0]
    check(found)


@pytest.mark.slow
def test_a_process_with_another_clipping_norm_ends_all(tmp_path):
    folder = tmp_path / "run"
    assert [process.wait(timeout=240) for process in start(folder, 2, other=1)] == [1, 1]
    for number in range(2):
        said = (folder / f"{number}.log").read_text()
        assert "ValueError: l2_clip_norm must be the same in all processes" in said
    assert not (folder / "secret").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "devices", "unit"),
    [
        (4, 1, "records"),
        (2, 2, "records"),  # of which two share the parameters
        (2, 1, "allocation"),
        (2, 1, "users"),
        (2, 1, "secure"),
        (2, 2, "secure"),
    ],
)
def test_more_processes_and_devices_find_what_one_does(tmp_path, count, devices, unit):
    found, _ = finish(start(tmp_path / "run", count, devices, unit=unit), tmp_path / "run")
    check(found, **fit_cases.UNITS[unit])


def test_a_mesh_takes_all_devices_and_shares_parameters_within_a_process(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    devices = np.array([[SimpleNamespace(process_index=0), SimpleNamespace(process_index=1)]])
    mesh = SimpleNamespace(size=2, devices=devices, shape={"data": 1, "model": 2})
    with pytest.raises(ValueError, match="'model' in one process: make that axis divide 1"):
        layout._check_processes(mesh)
    with pytest.raises(ValueError, match="must use all 2 devices of the processes"):
        layout._check_processes(SimpleNamespace(size=1, shape={"data": 1, "model": 1}))
    layout._check_processes(SimpleNamespace(size=2, devices=devices.T, shape={}))


def test_a_process_alone_is_the_first_and_has_all_records():
    assert _processes.is_first()
    assert _processes.of_first(lambda: {"a": 1}) == {"a": 1}
    assert layout.share({"x": np.arange(5)})["x"].tolist() == [0, 1, 2, 3, 4]


def test_settings_of_all_processes_are_compared(monkeypatch):
    mine = {"l2_clip_norm": 1.0, "workdir": None}

    def check(*others):
        monkeypatch.setattr(_processes, "of_each", lambda own: [own, *others])
        _processes.check_same(mine)

    check(mine, mine)
    for other, named in (
        ({**mine, "l2_clip_norm": 2.0}, "l2_clip_norm"),
        ({"l2_clip_norm": 1.0}, "workdir"),  # what is missing is not None
        ({**mine, "unit": None}, "unit"),
    ):
        with pytest.raises(ValueError, match=f"^{named} must be the same in all processes"):
            check(mine, other)


@pytest.mark.parametrize("number", [0, 1])
def test_the_first_of_several_computes_and_ends_the_others(number, monkeypatch):
    monkeypatch.setattr(_processes, "several", lambda: True)
    monkeypatch.setattr(jax, "process_index", lambda: number)
    assert _processes.is_first() == (number == 0)

    def ask(compute, told):
        """`of_first`, where another process is told this."""
        monkeypatch.setattr(_processes, "of_each", lambda own: [own if number == 0 else told])
        return _processes.of_first(compute)

    def fail():
        raise OSError("no space left")

    with pytest.raises(OSError if number == 0 else _processes.FirstProcessError, match="no space"):
        ask(fail, {"error": "no space left"})
    assert ask(lambda: 3, {"result": 3}) == 3
