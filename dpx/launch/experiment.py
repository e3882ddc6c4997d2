"""What an experiment is: a module that checks a configuration, plans it, runs it and draws the results.

validate(config)          raises for what no run could use, before anything is spent
plan(config)              a `Plan`: what a run will release, and its noise, without running it
run(config, workdir)      an `Outcome`
figures(records, folder)  draws finished runs (`launch.records.Record`), returns the paths; optional
OWN_AXES                  the keys against which these figures draw a sweep, and nobody else has to; optional
load(config, workdir)     the private model that a finished run left; optional
candidate(config)         what a selection among runs has to know of one, without running it; optional
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ml_collections import ConfigDict

import dpx


class ContractError(Exception):
    """An experiment does not keep to what this module says."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run will release, before anything is computed.

    A run must cost what its plan says: `--dry_run` shows the total before anybody decides to spend it.

    Attributes:
      releases: What the total will be composed of, under the labels of `Outcome.composed`. Their numbers,
        relation, unit and event are those of the run; their assumptions are stated by the run alone.
      parameters: Noise multipliers and what else is known, by name.
    """

    releases: Mapping[str, dpx.PrivacyGuarantee]
    parameters: Mapping[str, Any]


def compares(config: Any) -> bool:
    """Whether a run also makes the releases that it only compares with: each costs the whole budget again.

    `config.comparisons` says so. Where it is None, they are made on data that come with dpx and not on
    one's own, which `config.data.path` names.
    """
    if config.comparisons is not None:
        return config.comparisons
    return config.data.path is None


@dataclasses.dataclass(frozen=True)
class Measure:
    """One number of a table.

    Attributes:
      row: What was measured, such as `dp_transformer`; the ε of the row is that of the release of this name.
      metric: In what, such as `nats_per_character`.
      value: The number.
      error: Its standard error over repetitions within the run, where there were several.
      settings: Where one run measures a row at several settings, which of them this is, by name.
    """

    row: str
    metric: str
    value: float
    error: float | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The one-line name under which result.json and results.csv show it."""
        return "/".join(part for part in (self.place, self.metric) if part)

    @property
    def place(self) -> str:
        """Settings and row in one line; the release of this name is what the row cost at these settings."""
        parts = (*(f"{k}={v}" for k, v in self.settings.items()), self.row)
        return "/".join(part for part in parts if part)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """By which metric rows are compared with those that took less effort. A report says who wins.

    Attributes:
      metric: Of all these rows, such as `nats_per_character`.
      baselines: Rows that are private answers too, and that anybody would try first, such as a private mean.
        The best of them is found from the numbers.
      starts: For rows that were trained, by name: the row of the release or the model that each started from.
      more_is_better: Whether more of the metric is better, as of an accuracy.
    """

    metric: str
    baselines: Sequence[str] = ()
    starts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    more_is_better: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run found.

    Attributes:
      measures: The table, in its order.
      headline: The guarantee of the run's main output.
      releases: Every output that was released, with its guarantee, by row.
      composed: What the total is composed of, where it is not `releases` (two rows that start from one
        release, which counts once).
      not_covered: What was computed on private data and is covered by no guarantee, in words.
      synthetic: The data are generated, and the noise follows from the public seed.
      notes: Markdown that goes under the table.
      titles: Words for rows, by row; a row without any is shown by its name.
      headline_row: The row that the run is about, which tables mark.
      comparisons: With what its rows are compared, in which metrics.

    Raises:
      ContractError: for what no record could state.
    """

    measures: Sequence[Measure]
    headline: dpx.PrivacyGuarantee
    releases: Mapping[str, dpx.PrivacyGuarantee]
    composed: Mapping[str, dpx.PrivacyGuarantee] | None = None
    not_covered: Sequence[str] = ()
    synthetic: bool = False
    notes: str = ""
    titles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    headline_row: str = ""
    comparisons: Sequence[Comparison] = ()

    def __post_init__(self):
        _check_guarantees(self)
        _check_comparisons(self)
        for measure in self.measures:
            try:
                json.dumps(dataclasses.asdict(measure))
            except TypeError as error:
                raise ContractError(
                    f"measure {measure.name}: {error}: give Python's numbers, as float(x) and int(x) are"
                ) from None
        several = [name for name, n in Counter(m.name for m in self.measures).items() if n > 1]
        if several:
            raise ContractError(
                f"several measures are called {several[0]}: tell them apart by row, metric or settings"
            )
        if isinstance(self.not_covered, str):
            raise ContractError(
                f"not_covered={self.not_covered!r} must be a list of words: put brackets around it"
            )

    @property
    def metrics(self) -> dict[str, float]:
        """Every number by name; the standard error of `NAME` is `NAME_se`."""
        found = {}
        for measure in self.measures:
            found[measure.name] = float(measure.value)
            if measure.error is not None:
                found[f"{measure.name}_se"] = float(measure.error)
        return found


def _check_guarantees(outcome: Outcome) -> None:
    """Raises ContractError unless there is a release, and all guarantees are about the same neighbours."""
    composed = outcome.releases if outcome.composed is None else outcome.composed
    for name, found in (("releases", outcome.releases), ("composed", composed)):
        if not found:
            raise ContractError(
                f"{name}={found!r} must hold a guarantee: name every output by its row"
            )
    about = outcome.headline
    for label, spent in (*outcome.releases.items(), *composed.items()):
        if (spent.unit, spent.neighboring) != (about.unit, about.neighboring):
            raise ContractError(
                f"release {label} is about {spent.neighboring.name} {spent.unit}, and the headline about "
                f"{about.neighboring.name} {about.unit}: state all guarantees of a run for the same ones"
            )


def _check_comparisons(outcome: Outcome) -> None:
    """Raises ContractError for a row that is to be compared in a metric in which it was not measured."""
    for comparison in outcome.comparisons:
        measured = {m.row for m in outcome.measures if m.metric == comparison.metric}
        named = [*comparison.baselines, *comparison.starts, *comparison.starts.values()]
        absent = [row for row in named if row not in measured]
        if outcome.measures and absent:
            raise ContractError(
                f"comparison by {comparison.metric}: row {absent[0]!r} was not measured in it: name rows of "
                "the table"
            )


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What a run leaves for itself, which may be selected among those of other runs.

    Attributes:
      row: The row of the table that holds the model.
      guarantee: Of all that the row rests on, with the event that `Outcome.releases` states for it.
      sensitivities: By metric of the row, of which more is better: how far the metric of a fixed model
        changes where one record is added or removed (or replaced, under that relation).
      files: Of the run, which belong to its model and hold nothing that is private.
      synthetic: As of `Outcome`.
    """

    row: str
    guarantee: dpx.PrivacyGuarantee
    sensitivities: Mapping[str, float]
    files: Sequence[str] = ()
    synthetic: bool = False


class Experiment(Protocol):
    """The functions of an experiment's module; `figures`, `load` and `candidate` may be missing."""

    def validate(self, config: ConfigDict) -> None: ...

    def plan(self, config: ConfigDict) -> Plan: ...

    def run(self, config: ConfigDict, workdir: Path) -> Outcome: ...

    def figures(self, records: Sequence[Any], folder: Path) -> list[Path]: ...

    def load(self, config: ConfigDict, workdir: Path) -> Any: ...

    def candidate(self, config: ConfigDict) -> Candidate: ...
