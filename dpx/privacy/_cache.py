"""A cache, in the user's cache directory, for numbers that are slow to compute and quick to check."""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable
from importlib import metadata

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
    if name in _known:
        return _known[name]
    stored = _read(name)
    if stored is not None and holds(stored):
        _known[name] = stored
        return stored
    value = _known[name] = compute()
    try:
        path = _storage.user_cache() / f"{hashlib.sha256(name.encode()).hexdigest()}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, delete=False, encoding="utf-8"
        ) as file:
            json.dump({"key": name, "value": value}, file)
        os.replace(file.name, path)
    except (OSError, RuntimeError):
        pass
    return value


def _read(name: str) -> float | None:
    try:
        path = _storage.user_cache() / f"{hashlib.sha256(name.encode()).hexdigest()}.json"
        entry = json.loads(path.read_text(encoding="utf-8"))
        if entry["key"] == name and 0 < entry["value"] < math.inf:
            return float(entry["value"])
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):
        pass
    return None
