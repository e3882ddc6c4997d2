"""Plants every fault of `faults.FAULTS` in a copy of the project and expects its test to fail.

python -m pytest -m slow tests/faults
python -m pytest -m slow --parts=5 tests/faults    a fifth of them, another one each day
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from faults import FAULTS, table
from forks import Forks

ROOT = Path(__file__).parents[2]
# What a test dies of that no fault makes: the patch itself is broken.
BROKEN = re.compile(
    r"^E +(\w+\.)*(NameError|SyntaxError|ImportError|AttributeError|TypeError)", re.M
)


def copied(folder):
    """A copy of all that tests need."""
    for name in ("dpx", "experiments", "configs", "tests"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return copied(tmp_path_factory.mktemp("sound"))


@pytest.fixture(scope="module")
def forks():
    with Forks() as running:
        yield running


def nodes_of(fault):
    return re.split(r" (?=tests/)", fault.test)


def test_every_fault_has_one_place_and_a_name():
    assert len(FAULTS) >= 60
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert (ROOT / fault.file).read_text().count(fault.old) == 1, fault
        assert fault.old != fault.new
        for node in nodes_of(fault):
            file, _, name = node.partition("::")
            assert f"def {name.split('[')[0]}(" in (ROOT / file).read_text() or not name, fault
    assert table().count("\n") == len(FAULTS) + 1
    assert f"There are {len(FAULTS)} patches" in (ROOT / "SECURITY.md").read_text()


def test_no_fault_has_a_name_that_nothing_defines(tmp_path):
    for number, fault in enumerate(FAULTS):
        text = (ROOT / fault.file).read_text().replace(fault.old, fault.new)
        (tmp_path / f"fault_{number}.py").write_text(text)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821,F823"]
    done = subprocess.run([*ruff, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_what_catches_faults_passes_without_them(sound, forks):
    nodes = dict.fromkeys(node for fault in FAULTS for node in nodes_of(fault))
    status, output = forks.run(sound, nodes)
    assert status == 0, output


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_caught(fault, sound, forks):
    path = sound / fault.file
    text = path.read_text()
    try:
        path.write_text(text.replace(fault.old, fault.new))
        status, output = forks.run(sound, nodes_of(fault))
    finally:
        path.write_text(text)
    assert status == 1, output
    assert not BROKEN.search(output), output
