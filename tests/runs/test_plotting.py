"""matplotlib is optional: no experiment needs it before a figure is drawn."""

import pytest
from command_line import ROOT, python


@pytest.mark.slow
def test_experiments_start_without_matplotlib():
    """An import of it would stop whoever installed dpx without the extra `plots`."""
    found = sorted((ROOT / "experiments").glob("*/[a-z]*.py"))
    names = [f"{path.parent.name}.{path.stem}" for path in found if path.parent.name != "bench"]
    assert len(names) > 10
    code = "import sys; sys.modules['matplotlib'] = None\n" + "\n".join(
        f"import experiments.{name}" for name in ("run", "sweep", "report", *names)
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
