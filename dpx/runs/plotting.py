"""Access to matplotlib, which is optional and slow to import, and a function that saves figures."""

import importlib.util
from pathlib import Path
from typing import Any

from dpx import _storage as storage


def available() -> bool:
    """Whether the extra `plots` is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def pyplot() -> Any:
    """The module matplotlib.pyplot, set up to write files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path, title: str) -> Path:
    """Writes a figure with a title, closes it, and returns the path."""
    figure.suptitle(title, fontsize=10)
    with storage.replacing(path) as file:
        figure.savefig(file, format="png", dpi=120, bbox_inches="tight")
    pyplot().close(figure)
    return path
