"""The interface of an experiment: a module that checks a configuration, plans it, runs it and draws results.

validate(config)          raises for values that no run could use, before anything is spent
plan(config)              returns a `Plan`: what a run will release, and its noise, without running it
run(config, workdir)      returns an `Outcome`
figures(records, folder)  draws finished runs (`runs.records.Record`), returns the paths; optional
OWN_AXES                  the keys of a sweep that `figures` draws, and that need no other figure; optional
load(config, workdir)     returns the private model that a finished run left; optional
public_files(config)      returns the bytes of the files that `load` needs beside the run, arrays; optional
candidate(config)         returns what a selection has to know of a run, without running it; optional
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ml_collections import ConfigDict

import dpx
from dpx.training import resuming


class ContractError(Exception):
    """The error of an experiment that does not keep to the interface of this module."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The releases of a run, before anything is computed.

    A run must cost what its plan says, because `--dry_run` shows the total before it is spent.

    Attributes:
      releases: The guarantees that the total is composed of, under the labels of `Outcome.composed`. They
        have the numbers, relation, unit and event of the run; assumptions are stated by the run alone.
      parameters: Noise multipliers and other numbers that are known beforehand, by name.
    """

    releases: Mapping[str, dpx.PrivacyGuarantee]
    parameters: Mapping[str, Any]


def compares(config: Any) -> bool:
    """Whether a run also makes releases that serve for comparison only; each costs the whole budget again.

    `config.comparisons` decides. If it is None, they are made for data that come with dpx, but not for data
    of one's own, which `config.data.path` names.
    """
    if config.comparisons is not None:
        return config.comparisons
    return config.data.path is None


@dataclasses.dataclass(frozen=True)
class Measure:
    """One number of a table.

    Attributes:
      row: The model or mechanism, such as `dp_transformer`; its ε is that of the release of the same name.
      metric: The metric, such as `nats_per_character`.
      value: The number.
      error: Its standard error over repetitions within the run, if there are several.
      settings: The settings of this number, by name, if a run measures a row at several settings.
    """

    row: str
    metric: str
    value: float
    error: float | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the number in result.json and results.csv."""
        return "/".join(part for part in (self.place, self.metric) if part)

    @property
    def place(self) -> str:
        """Settings and row in one line, which is also the name of the release that the row cost."""
        parts = (*(f"{k}={v}" for k, v in self.settings.items()), self.row)
        return "/".join(part for part in parts if part)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A comparison of rows with simpler ones in one metric. A report says which row wins.

    A row that a run left out, as the dearer ones on data of one's own, is left out of the comparison.

    Attributes:
      metric: The metric of all these rows, such as `nats_per_character`.
      baselines: Rows of simple private answers that one would try first, such as a private mean.
      starts: For each row that was trained, the row of the release or the model that it started from.
      more_is_better: Whether larger values of the metric are better, as for an accuracy.
    """

    metric: str
    baselines: Sequence[str] = ()
    starts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    more_is_better: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
      measures: The numbers of the table, in order.
      headline: The guarantee of the run's main output.
      releases: The guarantee of every output that was released, by row.
      composed: The guarantees that the total is composed of, if these are not `releases`: for example, two
        rows may start from one release, which counts once.
      not_covered: Descriptions of what was computed on private data and is covered by no guarantee.
      synthetic: Whether data are generated, and noise follows from the public seed.
      notes: Markdown that goes under the table.
      titles: The title of each row; a row without one is shown by its name.
      headline_row: The row that the run is about, which tables mark.
      comparisons: The comparisons between rows.

    Raises:
      ContractError: for an outcome that no record could state.
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
        """All numbers by name; the standard error of `NAME` is `NAME_se`."""
        numbers = {}
        for measure in self.measures:
            numbers[measure.name] = float(measure.value)
            if measure.error is not None:
                numbers[f"{measure.name}_se"] = float(measure.error)
        return numbers


def _check_guarantees(outcome: Outcome) -> None:
    """Raises ContractError unless there is a release, and all guarantees have one relation and unit."""
    composed = outcome.releases if outcome.composed is None else outcome.composed
    for name, guarantees in (("releases", outcome.releases), ("composed", composed)):
        if not guarantees:
            raise ContractError(
                f"{name}={guarantees!r} must hold a guarantee: name every output by its row"
            )
    about = outcome.headline
    for label, spent in (*outcome.releases.items(), *composed.items()):
        if (spent.unit, spent.neighboring) != (about.unit, about.neighboring):
            raise ContractError(
                f"release {label} is about {spent.neighboring.name} {spent.unit}, and the headline about "
                f"{about.neighboring.name} {about.unit}: state all guarantees of a run for the same ones"
            )


def _check_comparisons(outcome: Outcome) -> None:
    """Raises ContractError for a comparison of what is no row, or of a row that has other metrics only."""
    rows = {measure.row for measure in outcome.measures}
    for comparison in outcome.comparisons:
        left_out = outcome.titles.keys() - rows
        measured = {m.row for m in outcome.measures if m.metric == comparison.metric}
        named = [*comparison.baselines, *comparison.starts, *comparison.starts.values()]
        absent = [row for row in named if row not in measured | left_out]
        if rows and absent:
            raise ContractError(
                f"comparison by {comparison.metric}: row {absent[0]!r} was not measured in it: name rows of "
                "the table, or of titles"
            )


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The model of a run, as a candidate for a selection among runs.

    Attributes:
      row: The row of the table that holds the model.
      guarantee: The guarantee of all that the row is computed from, with the event that `Outcome.releases`
        states for it.
      sensitivities: For each metric of the row, of which more must be better, the sensitivity of the metric
        of a fixed model under the neighbouring relation.
      files: The files of the run that belong to its model and hold nothing private.
      synthetic: As in `Outcome`.
      data: The digest of the arrays that `run` gives `keys.open_keys`, held-out records among them. A trial
        that finds others is refused: its score would have noise for another number of records.
    """

    row: str
    guarantee: dpx.PrivacyGuarantee
    sensitivities: Mapping[str, float]
    files: Sequence[str] = ()
    synthetic: bool = False
    data: str = resuming.digest(())


class Experiment(Protocol):
    """The functions of an experiment's module; `figures`, `load` and `candidate` may be missing."""

    def validate(self, config: ConfigDict) -> None: ...

    def plan(self, config: ConfigDict) -> Plan: ...

    def run(self, config: ConfigDict, workdir: Path) -> Outcome: ...

    def figures(self, records: Sequence[Any], folder: Path) -> list[Path]: ...

    def load(self, config: ConfigDict, workdir: Path) -> Any: ...

    def candidate(self, config: ConfigDict) -> Candidate: ...
