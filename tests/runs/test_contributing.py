"""The example of CONTRIBUTING.md works as printed: one module, one experiment, one config, one test."""

import re
import shutil

import pytest
from command_line import ROOT, python


@pytest.mark.slow
def test_the_example_of_contributing_runs_in_a_clone(tmp_path):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    blocks = re.findall(r"This is\s+`([\w/.]+)`:\n\n```python\n(.*?)```", text, re.DOTALL)
    assert [path for path, _ in blocks] == [
        "dpx/mean.py", "experiments/mean.py", "configs/mean.py", "tests/test_mean.py"
    ]  # fmt: skip
    for folder in ("dpx", "configs", "experiments"):
        ignored = shutil.ignore_patterns("__pycache__", "*.ipynb")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for path, code in blocks:
        target = tmp_path / path
        assert not target.exists(), path
        target.parent.mkdir(exist_ok=True)
        target.write_text(code)
    public = tmp_path / "dpx" / "__init__.pyi"
    listed = public.read_text()
    assert listed.count("    ngram,\n") == listed.count('    "ngram",\n') == 1
    listed = listed.replace("    ngram,\n", "    mean,\n    ngram,\n")
    public.write_text(listed.replace('    "ngram",\n', '    "mean",\n    "ngram",\n'))
    given = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_mean.py")
    ended = python(*given, folder=tmp_path, PYTHONPATH=str(tmp_path))
    assert ended.returncode == 0, ended.stdout
    assert "4 passed" in ended.stdout
