"""What all tests share: compiled programs, and the option `--third`."""

import datetime
import os
import tempfile
import zlib

import pytest

_FOLDER = tempfile.TemporaryDirectory(prefix="dpx-tests-")
# Before jax is imported, and inherited by the command lines that tests start.
os.environ["XDG_CACHE_HOME"] = os.path.join(_FOLDER.name, "cache")
# Compiled programs are found by what they compute, so that a session may use those of another.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(_FOLDER.name, "xla"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    """Files share no programs in memory, which would fill some gigabytes with them."""
    yield
    import jax

    jax.clear_caches()


def pytest_addoption(parser):
    parser.addoption(
        "--third",
        action="store_true",
        help="run a third of the selected tests, another one each day: what -m slow is too long for",
    )


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--third"):
        return
    day = datetime.date.today().timetuple().tm_yday
    chosen, left = [], []
    for item in items:
        # By name, so that a test keeps its day when others are added.
        todays = zlib.crc32(item.nodeid.encode()) % 3 == day % 3
        (chosen if todays else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = chosen
