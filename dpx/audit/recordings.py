"""The recording of a run of a program: its releases, the keys that it used, its results and files."""

import dataclasses
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import dp_accounting
import numpy as np

from dpx.privacy import ADD_OR_REMOVE_ONE
from dpx.privacy.allocation import AllocatedGaussianDpEvent
from dpx.privacy.events import event_epsilon


class Seen(NamedTuple):
    """One release, as `dpx.noise.release` handed it out.

    Attributes:
      label: What was released.
      about: The form of the declared sensitivity: its norm, its axis and the number of parts. For a sampled
        covariance, the bound on its relative change.
      key: The words of the key of its noise.
      exact, unit, noisy: The leaves before noise, their sensitivities, and the leaves after noise.
      scale: The noise multiplier, or the parameters of the law of the noise.
      sampled: How the last batch before the release was sampled (`dpx._watch.sampled`), or None.
    """

    label: str
    about: dict
    key: tuple[int, ...]
    exact: list[np.ndarray]
    unit: list[np.ndarray]
    noisy: list[np.ndarray]
    scale: Any
    sampled: Any


def of_gradients(label: str) -> bool:
    """Whether a release with this label is of the gradients of the batch that was drawn last."""
    return label.startswith("gradients")


@dataclasses.dataclass
class Recording:
    """The recording of a run.

    Attributes:
      releases: The releases, in order.
      keys: The keys that were used for other purposes than noise.
      public: The values that were declared public, by name.
      left: The results, files and printed text, by name; other objects than arrays and numbers are bytes.
      mixed: Whether a batch was drawn by another sampling while gradients of the last were not yet released.
      repeated: Whether gradients were released more often than batches were drawn.
    """

    releases: list[Seen]
    keys: list[tuple[str, tuple[int, ...]]]
    public: dict[str, Any]
    left: dict[str, Any]
    mixed: bool = False
    repeated: bool = False

    def shared_keys(self) -> list[str]:
        """One sentence for each key that serves several purposes."""
        used = [(f"noise of {seen.label}", seen.key) for seen in self.releases] + self.keys
        uses = defaultdict(list)
        for purpose, words in used:
            if words:  # there are none if the operating system draws the noise
                uses[words].append(purpose)
        shared = [" and ".join(dict.fromkeys(who)) for who in uses.values() if len(who) > 1]
        return [f"one key serves {who}, several times over" for who in shared]

    def epsilon(self, delta: float, neighboring=ADD_OR_REMOVE_ONE) -> float:
        """The ε of all Gaussian releases together, from the noise multipliers that were really used.

        A release whose label begins with "gradients" is accounted as one of the batch that was drawn last.

        Raises:
          ValueError: for a release whose noise is not Gaussian, if batches of different samplings were drawn
            before the gradients of either were released, or if one batch had several releases of gradients.
        """
        if self.mixed:
            raise ValueError(
                "batches of different samplings were open at once, and which gradients are of "
                "which is not known: release the gradients of one before the other is sampled"
            )
        if self.repeated:
            raise ValueError(
                "gradients were released more often than batches were drawn, and two releases of one batch "
                "cost more than those of two: release them together"
            )
        events = Counter()
        for seen in self.releases:
            if seen.about.get("norm") != 2:
                raise ValueError(f"{seen.label} has noise that is not Gaussian")
            scale = np.ravel(seen.scale)[0]
            if seen.about["parts"] > 1 or np.ndim(seen.scale):
                scale = np.ravel(np.asarray(seen.scale) / seen.unit[0])[0]
            sampled = seen.sampled if of_gradients(seen.label) else None
            events[(float(scale), sampled)] += 1 / seen.about["parts"]
        parts = []
        for (multiplier, sampled), count in events.items():
            event, uses = dp_accounting.GaussianDpEvent(multiplier), round(count)
            if isinstance(sampled, tuple):
                _, _, length = sampled
                if length > 1:
                    event, uses = AllocatedGaussianDpEvent(multiplier, length, uses), 1
            elif sampled is not None and sampled < 1:
                event = dp_accounting.PoissonSampledDpEvent(sampled, event)
            parts.append(dp_accounting.SelfComposedDpEvent(event, uses))
        return event_epsilon(dp_accounting.ComposedDpEvent(parts), delta, neighboring)[0]
