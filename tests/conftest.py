"""Caches of the test session: programs that several tests compile are compiled once."""

import os
import tempfile

_FOLDER = tempfile.TemporaryDirectory(prefix="dpx-tests-")
# Before jax is imported, and inherited by the command lines that tests start.
os.environ["XDG_CACHE_HOME"] = os.path.join(_FOLDER.name, "cache")
# Compiled programs are found by what they compute, so that a session may use those of another.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(_FOLDER.name, "xla"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
