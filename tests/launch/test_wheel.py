"""An installed wheel does what a clone does, from any folder."""

import os
import shutil
import subprocess
import sys

import pytest
from command_line import DPX, ROOT


@pytest.mark.slow
def test_a_wheel_runs_a_config_by_its_name_from_an_empty_folder(tmp_path):
    source, site, empty = tmp_path / "source", tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    # setuptools writes into the folder that it builds.
    ignored = shutil.ignore_patterns(".*", "build", "tests", "runs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    subprocess.run(list(map(str, build)), check=True)
    (wheel,) = tmp_path.glob("dpx_attention-*.whl")
    install = [*pip, "install", "--no-deps", "--target", site, wheel]
    subprocess.run(list(map(str, install)), check=True)
    assert (site / "dpx" / "py.typed").exists()
    top = {path.name.partition("-")[0] for path in site.iterdir()} - {"__pycache__", "bin"}
    assert top == {"dpx", "dpx_attention", "_dpx_command"}

    def dpx(*arguments):
        return subprocess.run(
            [sys.executable, "-c", DPX, *arguments],
            cwd=empty,
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            check=False,
        )

    ended = dpx("run", "--config=gram:tiny", "--workdir=run")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.startswith("gram.attention_error: started")
    assert "## gram:tiny" in ended.stdout
    assert (empty / "run" / "result.json").exists()
    assert dpx("--version").stdout.strip() == wheel.name.split("-")[1]
    ended = dpx("sample", "--workdir=run")
    assert ended.returncode == 2
    assert "leaves no model" in ended.stderr
