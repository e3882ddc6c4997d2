"""The comparison of two recorded runs on neighbouring data."""

import dataclasses
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import jax
import numpy as np

from dpx.audit.recordings import Recording, Seen

_SAME = 1e-12  # the relative difference up to which declared sensitivities count as equal


class Compared(NamedTuple):
    """A release of both runs. The ratio is ‖Δ‖ over the declared sensitivity and must not exceed 1."""

    label: str
    ratio: float


@dataclasses.dataclass
class Replay:
    """The differences between two runs on neighbouring data.

    Attributes:
      compared: Each release with its ratio, in order.
      differences: One sentence for every other difference, in control flow or in results and files.
      recording: The recording of the first run.
    """

    compared: list[Compared]
    differences: list[str]
    recording: Recording

    @property
    def largest_ratio(self) -> float:
        return max((each.ratio for each in self.compared), default=0.0)

    def check(self, tolerance: float = 1e-6) -> "Replay":
        """Returns itself; raises AssertionError with all differences if there are any."""
        wrong = [
            f"{each.label} moved by {each.ratio:.6g} times its declared sensitivity"
            for each in self.compared
            if not each.ratio <= 1 + tolerance
        ]
        wrong += self.differences + self.recording.shared_keys()
        if wrong:
            raise AssertionError("; ".join(dict.fromkeys(wrong)))
        return self


def equal(one: Any, other: Any) -> bool:
    """Whether two values have one type and are equal bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return layout([one]) == layout([other]) and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return one.hex() == other.hex()  # NaN counts as equal to NaN
    return one == other


def control_flow(first: Recording, second: Recording) -> list[str]:
    """The differences in public values, and in order, shapes, sensitivities and noise of the releases."""
    labels = [[seen.label for seen in run.releases] for run in (first, second)]
    if labels[0] != labels[1]:
        return [
            f"the releases differ: {_counted(labels[0])} in one run, {_counted(labels[1])} in the other"
        ]
    wrong = [
        f"{what} is declared to be public in one run alone"
        for what in sorted(first.public.keys() ^ second.public.keys())
    ]
    for one, other in zip(first.releases, second.releases, strict=True):
        if layout(one.exact) != layout(other.exact):
            wrong.append(f"{one.label} has another shape or type")
        elif one.about != other.about or one.sampled != other.sampled:
            wrong.append(f"{one.label} makes another claim or is sampled in another way")
        elif not all(map(_close, (*one.unit, *_flat(one)), (*other.unit, *_flat(other)))):
            wrong.append(f"{one.label} has another sensitivity or noise")
        elif one.key != other.key:
            wrong.append(f"{one.label} has another key")
    return wrong


def layout(leaves: list) -> list:
    return [(np.shape(leaf), leaf.dtype) for leaf in leaves]


def _flat(seen: Seen) -> list:
    return jax.tree.leaves(seen.scale)


def _close(one, other) -> bool:
    return np.shape(one) == np.shape(other) and np.allclose(one, other, rtol=_SAME, atol=0)


def _counted(labels: list[str]) -> str:
    return ", ".join(f"{count} × {label}" for label, count in Counter(labels).items()) or "none"


def compare(first: list[Seen], second: list[Seen]) -> list[Compared]:
    """The ratios of the releases that both runs have; the parts of a release are compared together."""
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
    if layout(one.exact) != layout(other.exact):
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
    """The relative change ‖C^(-1/2)(C' − C)C^(-1/2)‖_F between two covariances."""
    here, there = one.exact[0].astype(np.float64), other.exact[0].astype(np.float64)
    root = np.linalg.inv(np.linalg.cholesky(here))
    return float(np.linalg.norm(root @ (there - here) @ root.T))
