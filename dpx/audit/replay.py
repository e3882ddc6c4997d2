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
import dataclasses
import inspect
import io
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import dp_accounting
import jax
import numpy as np

from dpx import _watch
from dpx.privacy import ADD_OR_REMOVE_ONE
from dpx.privacy.events import event_epsilon

_SAME = 1e-12  # relative; what is declared has to agree between the runs


class Seen(NamedTuple):
    """One release, as it passed the door.

    Attributes:
      label: What was released.
      about: The claim, which is the norm, the axis and the number of parts; for a sampled covariance it is
        how far the covariance moves, whitened.
      key: The words of the key of its noise.
      exact, unit, noisy: The leaves before noise, their sensitivities, and the leaves after noise.
      scale: The noise multiplier, or the parameters of the law of the noise.
      sampling_probability: That of the last Poisson sampling before the release, or None.
    """

    label: str
    about: dict
    key: tuple[int, ...]
    exact: list[np.ndarray]
    unit: list[np.ndarray]
    noisy: list[np.ndarray]
    scale: Any
    sampling_probability: float | None


@dataclasses.dataclass
class Recording:
    """A run: its releases in order, the other keys it used, what it called public, and what it left."""

    releases: list[Seen]
    keys: list[tuple[str, tuple[int, ...]]]
    public: dict[str, Any]
    left: dict[str, Any]

    def shared_keys(self) -> list[str]:
        """A sentence for each two uses of randomness that share a key."""
        used = [(f"noise of {seen.label}", seen.key) for seen in self.releases] + self.keys
        uses = defaultdict(list)
        for purpose, words in used:
            if words:  # none where the operating system draws
                uses[words].append(purpose)
        found = [" and ".join(dict.fromkeys(who)) for who in uses.values() if len(who) > 1]
        return [f"one key serves {who}, several times over" for who in found]

    def epsilon(self, delta: float, neighboring=ADD_OR_REMOVE_ONE) -> float:
        """The ε of all Gaussian releases together, from the multipliers with which noise was in fact drawn.

        A release that is labelled as gradients is taken to be about the samples of the Poisson sampling
        before it, if there is one.

        Raises:
          ValueError: where a release has another law.
        """
        events = Counter()
        for seen in self.releases:
            if seen.about.get("norm") != 2:
                raise ValueError(f"{seen.label} has noise that is not Gaussian")
            scale = np.ravel(seen.scale)[0]
            if seen.about["parts"] > 1 or np.ndim(seen.scale):
                scale = np.ravel(np.asarray(seen.scale) / seen.unit[0])[0]
            sampled = seen.sampling_probability if seen.label.startswith("gradients") else None
            events[(float(scale), sampled)] += 1 / seen.about["parts"]
        parts = []
        for (multiplier, sampled), count in events.items():
            event = dp_accounting.GaussianDpEvent(multiplier)
            if sampled is not None and sampled < 1:
                event = dp_accounting.PoissonSampledDpEvent(sampled, event)
            parts.append(dp_accounting.SelfComposedDpEvent(event, round(count)))
        return event_epsilon(dp_accounting.ComposedDpEvent(parts), delta, neighboring)[0]


class Compared(NamedTuple):
    """A release in both runs. The ratio is ‖Δ‖ over the declared sensitivity and may not exceed 1."""

    label: str
    ratio: float


@dataclasses.dataclass
class Replay:
    """What two runs on neighbours differ in.

    Attributes:
      compared: Each release with its ratio, in order.
      differences: A sentence for every other difference, in control flow or in what was left.
      recording: The recording of the first run.
    """

    compared: list[Compared]
    differences: list[str]
    recording: Recording

    @property
    def largest_ratio(self) -> float:
        return max((each.ratio for each in self.compared), default=0.0)

    def check(self, tolerance: float = 1e-6) -> "Replay":
        """Returns itself, or raises AssertionError with all that is wrong."""
        wrong = [
            f"{each.label} moved by {each.ratio:.6g} times its declared sensitivity"
            for each in self.compared
            if not each.ratio <= 1 + tolerance
        ]
        wrong += self.differences + self.recording.shared_keys()
        if wrong:
            raise AssertionError("; ".join(dict.fromkeys(wrong)))
        return self


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
    differences = _control_flow(first, second)
    for name in sorted({*first.left, *second.left}):
        if not _equal(first.left.get(name), second.left.get(name)):
            differences.append(f"{name} differs")
    return Replay(_compare(first.releases, second.releases), differences, first)


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
        if earlier is not None and _layout(earlier.noisy) == _layout(noisy):
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


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and one.tobytes() == other.tobytes()
    return type(one) is type(other) and one == other


def _control_flow(first: Recording, second: Recording) -> list[str]:
    """Differences in the number, order, shapes, sensitivities and noise of the releases."""
    labels = [[seen.label for seen in run.releases] for run in (first, second)]
    if labels[0] != labels[1]:
        return [
            f"the releases differ: {_counted(labels[0])} in one run, {_counted(labels[1])} in the other"
        ]
    wrong = []
    for one, other in zip(first.releases, second.releases, strict=True):
        if _layout(one.exact) != _layout(other.exact):
            wrong.append(f"{one.label} has another shape or type")
        elif one.about != other.about or one.sampling_probability != other.sampling_probability:
            wrong.append(f"{one.label} makes another claim or is sampled with another probability")
        elif not all(map(_close, (*one.unit, *_flat(one)), (*other.unit, *_flat(other)))):
            wrong.append(f"{one.label} has another sensitivity or noise")
        elif one.key != other.key:
            wrong.append(f"{one.label} has another key")
    return wrong


def _layout(leaves: list) -> list:
    return [(np.shape(leaf), leaf.dtype) for leaf in leaves]


def _flat(seen: Seen) -> list:
    return jax.tree.leaves(seen.scale)


def _close(one, other) -> bool:
    return np.shape(one) == np.shape(other) and np.allclose(one, other, rtol=_SAME, atol=0)


def _counted(labels: list[str]) -> str:
    return ", ".join(f"{count} × {label}" for label, count in Counter(labels).items()) or "none"


def _compare(first: list[Seen], second: list[Seen]) -> list[Compared]:
    """The ratios of the releases that both runs have. The parts of one release are taken together."""
    waiting = defaultdict(list)
    for seen in second:
        waiting[seen.label].append(seen)
    compared, partial = [], defaultdict(list)
    for one in first:
        if not waiting[one.label]:
            continue
        ratio = _ratio(one, waiting[one.label].pop(0))
        parts = one.about.get("parts", 1)
        partial[one.label].append(ratio)
        if len(partial[one.label]) == parts:
            squares = np.sum(np.square(partial.pop(one.label)))
            compared.append(Compared(one.label, float(np.sqrt(squares))))
    return compared


def _ratio(one: Seen, other: Seen) -> float:
    if _layout(one.exact) != _layout(other.exact):
        return np.inf
    if "change" in one.about:
        return max(_whitened(one, other), _whitened(other, one)) / one.about["change"]
    moved = [
        (np.asarray(there, np.float64) - np.asarray(here, np.float64))
        / np.asarray(unit, np.float64)
        for here, there, unit in zip(one.exact, other.exact, one.unit, strict=True)
    ]
    power, axis = one.about["norm"], one.about["axis"]
    sums = [np.sum(np.abs(leaf) ** power, axis=axis) for leaf in moved]
    total = max(map(np.max, sums)) if axis is not None else sum(map(np.sum, sums))
    return float(total ** (1 / power))


def _whitened(one: Seen, other: Seen) -> float:
    """‖C^(-1/2)(C' − C)C^(-1/2)‖_F of two covariances."""
    here, there = one.exact[0].astype(np.float64), other.exact[0].astype(np.float64)
    root = np.linalg.inv(np.linalg.cholesky(here))
    return float(np.linalg.norm(root @ (there - here) @ root.T))
