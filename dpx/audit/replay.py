"""Two runs of a whole program on neighbouring data, with the same randomness: does it do what it declares?

A proof of sensitivity is about a statistic; what runs is a program. `replay` runs the program twice. The
first run is recorded at the door that every release goes through (`dpx.noise.release`). The second runs on
a neighbouring data set and is given the *outputs* of the first in place of its own, so that all that depends
on earlier releases goes the same way. Sampling and dropout belong to records, so that a record which stays
is sampled in the same steps. What then differs is what one record changes: the exact value behind each
release, by no more than was declared, and nothing else.

This is "record and replay" auditing (arXiv:2602.17454). It proves nothing for the neighbours that were not
tried. It sees what passes the door and what is returned, written and printed; it does not see whether noise
has the law that it should have, nor a key that somebody knows.
"""

import contextlib
import inspect
import io
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dpx import _watch
from dpx.audit.comparison import Replay, compare, control_flow, equal, layout
from dpx.audit.recordings import Recording, Seen


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Keeps the programs that are compiled for recording; wrap several replays in it to compile once."""
    jax.clear_caches()
    _watch.watch(_Watcher(None, None))
    try:
        yield
    finally:
        _watch.watch(None)
        jax.clear_caches()


def record(
    program: Callable, data: Any, *, ignore: Sequence[str] = (), ids: np.ndarray | None = None
) -> Recording:
    """Runs a program once and records it; see `replay` for the arguments."""
    return _run(program, data, ids, None, ignore)


def replay(
    program: Callable,
    data: Any,
    neighbour: Any,
    *,
    ids: np.ndarray | None = None,
    ignore: Sequence[str] | Mapping[str, str] = (),
    first: Recording | None = None,
) -> Replay:
    """Runs a program on data and on a neighbour with the same randomness and the first run's outputs.

    Args:
      program: A function that is called as program(data), or as program(data, workdir) with a folder of its
        own if it takes two arguments. It has to be deterministic: its keys are fixed in it.
      data: Anything that the program takes.
      neighbour: The same with one record more, one less, or one replaced.
      ids: (n,) for each record of the neighbour its index in `data`. A new record has an index that `data`
        does not have. By default the neighbour's records are those of `data` in order.
      ignore: Patterns (`fnmatch`) of what may differ, because no guarantee covers it: parts of the result as
        "result/…", files as "file/NAME", "stdout" and "stderr". A mapping says for each pattern why.
      first: What `record` returned for the same program and data. Give it to compare several neighbours.

    Returns:
      A `Replay`; its `check()` raises if anything is wrong.
    """
    if first is None:
        first = _run(program, data, None, None, ignore)
    second = _run(program, neighbour, ids, first, ignore)
    differences = control_flow(first, second)
    for name in sorted({*first.left, *second.left}):
        if not equal(first.left.get(name), second.left.get(name)):
            differences.append(f"{name} differs")
    return Replay(compare(first.releases, second.releases), differences, first)


class _Watcher:
    """Collects what passes the door; in a second run it hands out what the first run released."""

    def __init__(self, ids: np.ndarray | None, first: Recording | None):
        self.found = Recording([], [], {}, {})
        self._ids = ids
        self._first = first
        self._waiting = defaultdict(list)
        for seen in first.releases if first else ():
            self._waiting[seen.label].append(seen)
        self._sampling: float | None = None

    def released(self, about, key, exact, unit, noisy, scale):
        label = about["label"]
        earlier = self._waiting[label].pop(0) if self._waiting[label] else None
        if earlier is not None and layout(earlier.noisy) == layout(noisy):
            noisy = earlier.noisy
        # What a callback is given lies in buffers that are used again.
        exact, unit, noisy = ([np.array(leaf) for leaf in part] for part in (exact, unit, noisy))
        scale = jax.tree.map(np.array, scale)
        words = tuple(np.ravel(key).tolist())
        self.found.releases.append(
            Seen(label, about, words, exact, unit, noisy, scale, self._sampling)
        )
        return noisy

    def key(self, purpose, words):
        self.found.keys.append((purpose, tuple(np.ravel(words).tolist())))

    def sampled(self, probability):
        self._sampling = probability

    def public(self, value, what):
        if self._first is not None and what in self._first.public:
            return self._first.public[what]
        return self.found.public.setdefault(what, value)

    def record_ids(self, count):
        if self._ids is not None and len(self._ids) == count:
            return np.asarray(self._ids, np.int32)
        return np.arange(count, dtype=np.int32)


def _run(program, data, ids, first, ignore) -> Recording:
    outer = _watch.watching()
    with contextlib.nullcontext() if outer else recording():
        watcher = _Watcher(ids, first)
        _watch.watch(watcher)
        printed, complained = io.StringIO(), io.StringIO()
        try:
            with (
                tempfile.TemporaryDirectory() as folder,
                contextlib.redirect_stdout(printed),
                contextlib.redirect_stderr(complained),
            ):
                workdir = Path(folder) / "run"
                takes = len(inspect.signature(program).parameters)
                result = program(data, workdir) if takes > 1 else program(data)
                jax.effects_barrier()
                left = {f"result{name}": leaf for name, leaf in _leaves(result)}
                left |= {f"file/{name}": content for name, content in _files(workdir)}
        finally:
            _watch.watch(_Watcher(None, None))
        left |= {"stdout": printed.getvalue(), "stderr": complained.getvalue()}
        watcher.found.left = {
            name: value
            for name, value in left.items()
            if not any(fnmatch(name, pattern) for pattern in ignore)
        }
        return watcher.found


def _leaves(result: Any) -> list[tuple[str, Any]]:
    """The leaves of a result with their paths. Objects that are no data stand as what they print."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(result):
        if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array | np.ndarray | np.number):
            leaf = np.array(leaf)
        elif not isinstance(leaf, str | bytes | int | float | bool):
            leaf = str(leaf)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found.append((f"/{name}" if name else "", leaf))
    return found


def _files(folder: Path) -> list[tuple[str, bytes]]:
    if not folder.exists():
        return []
    return [
        (str(path.relative_to(folder)), path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
