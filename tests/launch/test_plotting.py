"""matplotlib is optional: no experiment needs it before a figure is drawn."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_experiments_start_without_matplotlib():
    """An import of it would stop whoever installed dpx without the extra `plots`."""
    found = sorted((ROOT / "experiments").glob("*/[a-z]*.py"))
    names = [f"{path.parent.name}.{path.stem}" for path in found if path.parent.name != "bench"]
    assert len(names) > 10
    code = "import sys; sys.modules['matplotlib'] = None\n" + "\n".join(
        f"import experiments.{name}" for name in ("run", "sweep", "report", *names)
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
