"""The project's command lines, as a user calls them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DPX = "from dpx._command import main; main()"


def command(module, *arguments):
    """A module of experiments, where it is one, and else the command dpx."""
    if "." in module or module in ("run", "sweep", "report"):
        return [sys.executable, "-m", f"experiments.{module}", *map(str, arguments)]
    return [sys.executable, "-c", DPX, module, *map(str, arguments)]


def call(module, *arguments, folder=ROOT):
    return subprocess.run(
        command(module, *arguments), cwd=folder, capture_output=True, text=True, check=False
    )
