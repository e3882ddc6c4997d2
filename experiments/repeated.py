"""Numbers that are repeated: their mean and its standard error, within a run and over runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from dpx.launch.experiment import Measure
from dpx.launch.figures import mean_and_error


def measure(
    row: str, metric: str, values: Any, settings: Mapping[str, Any] | None = None
) -> Measure:
    """The mean over repetitions (n,) of a number, with its standard error where there are several."""
    error = float(stats.sem(values)) if len(values) > 1 else None
    return Measure(row, metric, float(np.mean(values)), error, settings or {})


def over_runs(measures: Sequence[Measure]) -> tuple[float, float]:
    """The mean over runs and its standard error, which of one run is its own, or 0."""
    return mean_and_error([measure.value for measure in measures], measures[0].error)
