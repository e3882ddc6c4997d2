"""A cache, in the user's cache directory, for numbers that are slow to compute and quick to check."""

import contextlib
import hashlib
import json
import math
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from dpx import _storage

# The numbers that this process has computed or checked, and need not check again.
_known: dict[str, float] = {}


def remember(key: dict, compute: Callable[[], float], holds: Callable[[float], bool]) -> float:
    """The positive number that is stored for `key`; if there is none, `compute()`, which is then stored.

    An entry that cannot be read, or fails its check, counts as absent: anybody may have written it, and a
    guarantee must not rest on a file. A number that cannot be written is computed again the next time.

    Args:
      key: All that the number depends on.
      compute: Computes the number.
      holds: Checks a number that was read; called once in a process.
    """
    name = json.dumps({**key, "dp-accounting": metadata.version("dp-accounting")}, sort_keys=True)
    if name not in _known:
        stored = _read(name)
        with contextlib.suppress(ArithmeticError, ValueError):  # as a number of anybody's may raise
            if stored is not None and holds(stored):
                _known[name] = stored
        if name not in _known:
            value = _known[name] = compute()
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                _storage.write_text(_path(name), json.dumps({"key": name, "value": value}))
    return _known[name]


def _path(name: str) -> Path:
    return _storage.user_cache() / f"{hashlib.sha256(name.encode()).hexdigest()}.json"


def _read(name: str) -> float | None:
    with contextlib.suppress(
        OSError, RuntimeError, ArithmeticError, ValueError, TypeError, KeyError
    ):
        entry = json.loads(_path(name).read_text(encoding="utf-8"))
        if entry["key"] == name and 0 < entry["value"] < math.inf:
            return float(entry["value"])
    return None
