"""Two runs of a whole program on neighbouring data with the same randomness, to test declared sensitivities.

A proof of sensitivity is about a statistic, but a program may compute something else. `replay` runs the
program twice. The first run records every release (all go through `dpx.noise.release`). The second runs on a
neighbouring data set and is given the *outputs* of the first in place of its own, so that everything that
depends on earlier releases is the same. The randomness of sampling and dropout belongs to records, so that a
record which is in both data sets is sampled in the same steps. The two runs may then differ only in what one
record changes: the exact value behind each release, by no more than the declared sensitivity.

This is "record and replay" auditing (arXiv:2602.17454). It proves nothing for neighbours that were not tried.
It compares releases and whatever is returned, written and printed. It does not see whether noise has the
right law, or whether somebody knows a key.
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
    """A scope that keeps programs compiled for recording; around several replays they compile once."""
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
    """Runs a program once and returns its recording; see `replay` for the arguments."""
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
    """Runs a program on data and on a neighbour, with the same randomness and the outputs of the first run.

    Nothing else in the process may release or train meanwhile: it would be recorded too, and would be given
    outputs of the first run.

    Args:
      program: A function that is called as program(data), or, if it has two arguments without defaults, as
        program(data, workdir) with a folder of its own. It has to be deterministic, with fixed keys.
      data: Anything that the program takes.
      neighbour: The same data with one record more, one less, or one replaced.
      ids: (n,) the index in `data` of each record of the neighbour. A new record has an index that `data`
        does not have. By default the neighbour's records are those of `data` in order.
      ignore: Patterns (`fnmatch`) of what may differ, because no guarantee covers it: parts of the result as
        "result/…", files as "file/NAME", "stdout" and "stderr". A mapping gives a reason for each pattern.
      first: The recording that `record` returned for the same program and data, to compare several
        neighbours.

    Returns:
      A `Replay`; its `check()` raises if anything is wrong.

    Raises:
      ValueError: for a part of a result that can be neither compared nor pickled, and if a run declares two
        values public under one name.
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
    """A watcher that records nothing. Programs compiled under it, between two runs, can be recorded later."""

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
    """A watcher that records a run; in a second run it replaces releases by those of the first."""

    def __init__(self, ids: np.ndarray | None, first: Recording | None):
        self.recording = Recording([], [], {}, {})
        self._ids = ids
        self._first = first
        self._waiting = defaultdict(list)
        for seen in first.releases if first else ():
            self._waiting[seen.label].append(seen)
        self._sampling: Any = None
        self._batches = 0  # the number of batches whose gradients have not been released

    def released(self, about, key, exact, unit, noisy, scale):
        label = about["label"]
        if of_gradients(label):
            whole = about.get("parts", 1) == 1
            if self._batches:  # nothing is called here: batches are drawn in another thread
                self._batches -= 1
            elif whole and self._sampling is not None:
                self.recording.repeated = True
        earlier = self._waiting[label].pop(0) if self._waiting[label] else None
        if earlier is not None and layout(earlier.noisy) == layout(noisy):
            noisy = earlier.noisy
        # Copied, because JAX reuses the buffers that a callback is given.
        exact, unit, noisy = ([np.array(leaf) for leaf in part] for part in (exact, unit, noisy))
        scale = jax.tree.map(np.array, scale)
        words = tuple(np.ravel(key).tolist())
        self.recording.releases.append(
            Seen(label, about, words, exact, unit, noisy, scale, self._sampling)
        )
        return noisy

    def key(self, purpose, words):
        self.recording.keys.append((purpose, tuple(np.ravel(words).tolist())))

    def sampled(self, how):
        if how != self._sampling:
            jax.effects_barrier()  # waits for releases that were started
            self.recording.mixed |= self._batches > 0
            self._batches = 0
        self._sampling = how
        self._batches += 1

    def public(self, value, what):
        known = self.recording.public.setdefault(what, value)
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
                takes = inspect.signature(program).parameters.values()
                of_data_alone = sum(taken.default is taken.empty for taken in takes) < 2
                result = program(data) if of_data_alone else program(data, workdir)
                jax.effects_barrier()
                left = _leaves(result) | _files(workdir)
        finally:
            _watch.watch(_Idle())
        left |= {"stdout": printed.getvalue(), "stderr": complained.getvalue()}
        watcher.recording.left = {
            name: _content(name, value)
            for name, value in left.items()
            if not any(fnmatch(name, pattern) for pattern in ignore)
        }
        return watcher.recording


def _leaves(result: Any) -> dict[str, Any]:
    """The leaves of a result, by their paths."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(result):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        name = f"result/{name}" if name else "result"
        while name in leaves:  # as of {"a/b": x, "a": {"b": y}}
            name += "'"
        leaves[name] = leaf
    return leaves


def _files(folder: Path) -> dict[str, bytes]:
    """The contents of files by their paths, and folders too, since names may reveal something."""
    return {
        f"file/{path.relative_to(folder)}{'/' * path.is_dir()}": path.read_bytes()
        if path.is_file()
        else b""
        for path in sorted(folder.rglob("*"))
    }


def _content(name: str, leaf: Any) -> Any:
    """A leaf in the form in which two runs are compared: arrays and plain values as such, all else pickled.

    The printed form of an object would not suffice: a table prints without its middle.
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
    pickler.fast = True  # equal objects have equal bytes, whether they are shared or not
    try:
        pickler.dump(leaf)
    except Exception as error:
        raise ValueError(
            f"{name} is a {type(leaf).__name__}, which cannot be compared ({error}): return arrays or plain "
            "values, or name it in `ignore`"
        ) from error
    return pickled.getvalue()
