"""What all tests share: compiled programs, and the option `--parts`."""

import collections
import datetime
import gc
import os
import tempfile
import zlib

import pytest
from xla_flags import QUICK_KERNELS, xla_flags

_FOLDER = tempfile.TemporaryDirectory(prefix="dpx-tests-")
# Before jax is imported, and inherited by the command lines that tests start.
os.environ["XDG_CACHE_HOME"] = os.path.join(_FOLDER.name, "cache")
# Compiled programs are found by what they compute, so that a session may use those of another.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(_FOLDER.name, "xla"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ |= xla_flags(*QUICK_KERNELS)
if QUICK_KERNELS:  # See `_programs`; a run of a command line is compared with one in this process.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"


@pytest.fixture(autouse=True, scope="module")
def _programs(request):
    """Compiles programs of a file, and forgets them: those of all files would fill some gigabytes.

    Machine code that is not optimized is made in a quarter less time. Files whose tests are about rounding
    are marked `optimized`. On a newer JAX all is compiled as users compile.
    """
    import jax

    quick = bool(QUICK_KERNELS) and request.node.get_closest_marker("optimized") is None
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def recording():
    """Lets `audit.replay` see what the tests of a file release."""
    from dpx import audit

    with audit.recording():
        yield


def pytest_collection_finish():
    """Spares the collector what stays: it would go through all modules again and again while JAX traces."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_addoption(parser):
    parser.addoption(
        "--parts",
        type=int,
        default=1,
        help="run one part in so many of the selected tests, another one each day: -m slow takes long",
    )


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
    _spare_cases(config, items)
    parts = config.getoption("--parts")
    if parts < 1:
        raise pytest.UsageError(
            f"--parts={parts} must be a positive number: one part in so many is run"
        )
    day = datetime.date.today().timetuple().tm_yday
    chosen, left = [], []
    for item in items:
        # By name, so that a test keeps its day when others are added.
        todays = zlib.crc32(item.nodeid.encode()) % parts == day % parts
        (chosen if todays else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = chosen


def _spare_cases(config, items):
    """Marks as slow what `quick_cases` leaves out, so that a table costs the fast tests a few of its rows."""
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("quick_cases"):
            cases[item.path, item.originalname].append(item)
    for (_, name), rows in cases.items():
        quick = rows[0].get_closest_marker("quick_cases").args or [rows[0].callspec.id]
        absent = set(quick) - {row.callspec.id for row in rows}
        some = config.getoption("lf", False) or any("::" in arg for arg in config.args)
        if absent and not some:
            raise pytest.UsageError(f"{name} has no case {absent}, which quick_cases names")
        for row in rows:
            if row.callspec.id not in quick:
                row.add_marker("slow")
