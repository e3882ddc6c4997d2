"""Numbers that are repeated: their mean and its standard error, within a run and over runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from dpx.runs.experiment import Measure
from dpx.runs.tables import mean_and_error


def measure(
    row: str, metric: str, values: Any, settings: Mapping[str, Any] | None = None
) -> Measure:
    """The mean over repetitions (n,) of a number, with its standard error where there are several."""
    return Measure(row, metric, *mean_and_error(values), settings or {})


def over_runs(measures: Sequence[Measure]) -> tuple[float, float]:
    """The mean over runs and its standard error, which of one run is its own, or 0."""
    return mean_and_error([measure.value for measure in measures], measures[0].error or 0.0)
