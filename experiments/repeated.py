"""Numbers that are repeated: their mean and its standard error, within a run and over runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from dpx.launch.experiment import Measure


def measure(
    row: str, metric: str, values: Any, settings: Mapping[str, Any] | None = None
) -> Measure:
    """The mean over repetitions (n,) of a number, with its standard error where there are several."""
    error = float(stats.sem(values)) if len(values) > 1 else None
    return Measure(row, metric, float(np.mean(values)), error, settings or {})


def over_runs(measures: Sequence[Measure]) -> tuple[float, float]:
    """The mean over runs and its standard error, which of one run is its own, or 0."""
    if len(measures) == 1:
        return measures[0].value, measures[0].error or 0.0
    values = [measure.value for measure in measures]
    return float(np.mean(values)), float(stats.sem(values))
