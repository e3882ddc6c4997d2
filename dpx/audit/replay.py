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
import pickle
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
from dpx.audit.recordings import Recording, Seen, of_gradients


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Keeps the programs that are compiled for recording; wrap several replays in it to compile once."""
    jax.clear_caches()
    _watch.watch(_Idle())
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

    Nothing else in the process may release or train meanwhile: it would be recorded too, and be given what
    the first run released.

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

    Raises:
      ValueError: for a result with a part that can be neither compared nor pickled, and for two values that
        a run declares to be public under one name.
    """
    if first is None:
        first = _run(program, data, None, None, ignore)
    second = _run(program, neighbour, ids, first, ignore)
    differences = control_flow(first, second)
    for name in sorted({*first.left, *second.left}):
        if not equal(first.left.get(name), second.left.get(name)):
            differences.append(f"{name} differs")
    return Replay(compare(first.releases, second.releases), differences, first)


class _Idle:
    """Watches between two runs and sees nothing, so that what is compiled there can be recorded later."""

    def released(self, about, key, exact, unit, noisy, scale):
        return noisy

    def key(self, purpose, words):
        pass

    def sampled(self, how):
        pass

    def public(self, value, what):
        return value

    def record_ids(self, count):
        return np.arange(count, dtype=np.int32)


class _Watcher(_Idle):
    """Collects what passes the door; in a second run it hands out what the first run released."""

    def __init__(self, ids: np.ndarray | None, first: Recording | None):
        self.found = Recording([], [], {}, {})
        self._ids = ids
        self._first = first
        self._waiting = defaultdict(list)
        for seen in first.releases if first else ():
            self._waiting[seen.label].append(seen)
        self._sampling: Any = None
        self._batches = 0  # whose gradients have not been released

    def released(self, about, key, exact, unit, noisy, scale):
        label = about["label"]
        if of_gradients(label):
            self._batches = max(0, self._batches - 1)
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

    def sampled(self, how):
        if how != self._sampling:
            jax.effects_barrier()  # releases that were started have been seen then
            self.found.mixed |= self._batches > 0
            self._batches = 0
        self._sampling = how
        self._batches += 1

    def public(self, value, what):
        known = self.found.public.setdefault(what, value)
        if not np.array_equal(known, value):
            raise ValueError(
                f"{what} was {known} and is {value}: what is public needs a name for each value, by which a "
                "replay gives it to the second run"
            )
        return value if self._first is None else self._first.public.get(what, value)

    def record_ids(self, count):
        if self._ids is not None and len(self._ids) == count:
            return np.asarray(self._ids, np.int32)
        return super().record_ids(count)


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
                left = _leaves(result) | _files(workdir)
        finally:
            _watch.watch(_Idle())
        left |= {"stdout": printed.getvalue(), "stderr": complained.getvalue()}
        watcher.found.left = {
            name: _content(name, value)
            for name, value in left.items()
            if not any(fnmatch(name, pattern) for pattern in ignore)
        }
        return watcher.found


def _leaves(result: Any) -> dict[str, Any]:
    """The leaves of a result, by their paths."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(result):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found[f"result/{name}" if name else "result"] = leaf
    return found


def _files(folder: Path) -> dict[str, bytes]:
    """What files hold, by their paths, and folders, whose names say something too."""
    return {
        f"file/{path.relative_to(folder)}{'/' * path.is_dir()}": path.read_bytes()
        if path.is_file()
        else b""
        for path in sorted(folder.rglob("*"))
    }


def _content(name: str, leaf: Any) -> Any:
    """What two runs are compared by: arrays and plain values as they are, all else pickled.

    What an object prints would not do: a table leaves out its middle.
    """
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array | np.generic) or type(leaf) is np.ndarray:
        leaf = np.array(leaf)
        if not leaf.dtype.hasobject:
            return leaf
    if isinstance(leaf, str | bytes | int | float):
        return leaf
    pickled = io.BytesIO()
    pickler = pickle.Pickler(pickled)
    pickler.fast = True  # objects that are equal, and not one and the same, have the same bytes
    try:
        pickler.dump(leaf)
    except Exception as error:
        raise ValueError(
            f"{name} is a {type(leaf).__name__}, which cannot be compared ({error}): return arrays or plain "
            "values, or name it in `ignore`"
        ) from error
    return pickled.getvalue()
