"""What is installed works from any folder: a wheel, and a clone beside a script of one's own."""

import shutil

import pytest
from command_line import DPX, ROOT, python


def copied(target):
    # setuptools writes into the folder that it builds.
    ignored = shutil.ignore_patterns(".*", "build", "tests", "runs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, target, ignore=ignored)
    return target


@pytest.mark.slow
def test_a_clone_called_dpx_does_not_hide_the_package_from_what_lies_beside_it(tmp_path):
    """Python takes a folder without __init__.py for a package too, where it finds no other."""
    clone, site = copied(tmp_path / "dpx"), tmp_path / "site"
    build = "from setuptools import build_meta; build_meta.build_editable('..')"
    python("-c", build, folder=clone).check_returncode()
    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, site, "zip")
    code = (
        f"import site; site.addsitedir({str(site)!r})\n"
        "import dpx; print(dpx.training.fit.__name__, dpx.__file__)"
    )
    ended = python("-c", code, folder=tmp_path, PYTHONPATH="")
    assert ended.stdout == f"fit {clone / 'dpx' / '__init__.py'}\n", ended.stderr


@pytest.mark.slow
def test_importing_dpx_imports_nothing_heavy_and_its_help_is_a_map():
    code = (
        "import sys, dpx\n"
        "assert not {'jax', 'numpy', 'scipy', 'flax'} & set(sys.modules)\n"
        "missing = [name for name in dpx.__all__ if not hasattr(dpx, name)]\n"
        "assert not missing, missing\n"
        "import re\n"
        "for words in re.findall(r'\\bdpx\\.([\\w.]+)', dpx.__doc__):\n"
        "    found = dpx\n"
        "    for name in words.strip('.').split('.'):\n"
        "        found = getattr(found, name)\n"
        "    print(words)\n"
    )
    ended = python("-c", code)
    assert ended.returncode == 0, ended.stderr
    assert {"training.fit", "cross_attention.build", "save"} <= set(ended.stdout.split())


@pytest.mark.slow
def test_a_wheel_runs_a_config_by_its_name_from_an_empty_folder(tmp_path):
    source, site, empty = tmp_path / "source", tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    copied(source)
    pip = ["-m", "pip", "-q", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    python(*pip, *build).check_returncode()
    (wheel,) = tmp_path.glob("dpx_attention-*.whl")
    python(*pip, "install", "--no-deps", "--target", site, wheel).check_returncode()
    assert (site / "dpx" / "py.typed").exists()
    top = {path.name.partition("-")[0] for path in site.iterdir()} - {"__pycache__", "bin"}
    assert top == {"dpx", "dpx_attention"}

    def dpx(*arguments):
        return python("-c", DPX, *arguments, folder=empty, PYTHONPATH=str(site))

    ended = dpx("run", "--config=gram:tiny", "--workdir=run")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.startswith("gram.attention_error: started")
    assert "## gram:tiny" in ended.stdout
    assert (empty / "run" / "result.json").exists()
    assert dpx("--version").stdout.strip() == wheel.name.split("-")[1]
    ended = dpx("sample", "--workdir=run")
    assert ended.returncode == 2
    assert "leaves no model" in ended.stderr
