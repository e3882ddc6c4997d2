"""matplotlib is optional: no experiment needs it before a figure is drawn."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_experiments_start_without_matplotlib():
    """An import of it would stop whoever installed dpx without the extra `plots`."""
    names = [path.stem for path in sorted((ROOT / "experiments").glob("*.py"))]
    code = "import sys; sys.modules['matplotlib'] = None\n" + "\n".join(
        f"import experiments.{name}" for name in names if not name.startswith("bench_")
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
