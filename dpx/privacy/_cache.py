"""Numbers that are slow to find and quick to check, kept in the user's cache directory."""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable
from importlib import metadata

from dpx import _storage

# What this process has found or checked: it need not be checked again.
_known: dict[str, float] = {}


def remember(key: dict, compute: Callable[[], float], holds: Callable[[float], bool]) -> float:
    """The positive number stored for `key`, or else `compute()`, stored for the next time.

    The cache is a convenience: an unreadable, corrupt or unwritable entry is as good as none. So is one that
    fails its check, for anybody may have written it, and a guarantee must not rest on a file.

    Args:
      key: What the number depends on.
      compute: Finds it.
      holds: Whether a number that was read is right; asked once in a process.
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
