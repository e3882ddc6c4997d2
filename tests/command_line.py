"""The project's command lines, as a user calls them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def command(module, *arguments):
    return [sys.executable, "-m", f"experiments.{module}", *map(str, arguments)]


def call(module, *arguments):
    return subprocess.run(
        command(module, *arguments), cwd=ROOT, capture_output=True, text=True, check=False
    )
