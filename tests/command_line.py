"""The project's command lines, as a user calls them."""

import os
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


def call(module, *arguments, folder=ROOT, **environment):
    return python(*command(module, *arguments)[1:], folder=folder, **environment)


def paths():
    """The PYTHONPATH of a process that imports what this one does, wherever it runs."""
    return os.pathsep.join(filter(None, sys.path))


def python(*arguments, folder=ROOT, timeout=None, **environment):
    """A process of Python that has ended, with its output."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
