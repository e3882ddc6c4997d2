"""The plan of a selection and its privacy cost, with all checks that are made before it runs."""

import dataclasses
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import ml_collections

from dpx import privacy
from dpx._validate import check_positive
from dpx.runs import points, records, run
from dpx.runs.experiment import Candidate


@dataclasses.dataclass(frozen=True)
class Plan:
    """A selection that has been checked, before anything is drawn.

    Attributes:
      source: The config file, with its argument.
      grid: The points, as overrides by dotted name.
      candidates: The candidate of each point.
      metric: The metric by which trials are scored.
      trials: The law of the number of trials.
      score_noise: The noise multiplier of the score.
      price: The privacy cost.
      fixed: The overrides that all points have in common.
    """

    source: str
    grid: list[dict]
    candidates: list[Candidate]
    metric: str
    trials: privacy.Trials
    score_noise: float
    price: privacy.Price
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def overrides(self, number: int) -> dict:
        """All overrides at a point of the grid."""
        return {**self.fixed, **self.grid[number]}

    @property
    def synthetic(self) -> bool:
        return self.candidates[0].synthetic

    @property
    def sensitivity(self) -> float:
        return self.candidates[0].sensitivities[self.metric]

    @property
    def words(self) -> str:
        """The cost of the selection, and of its alternatives, in words."""
        guarantee = self.price.guarantee
        expected = f"{self.trials.mean:g} trial" + "s" * (self.trials.mean != 1)
        return (
            f"Selected by {self.metric} among {len(self.grid)} points of a grid, in a number of trials from "
            f"the {self.trials.law} law with mean {self.trials.mean:g}. The score has noise of standard "
            f"deviation {self.score_noise * self.sensitivity:.3g}. At δ = {guarantee.delta:.3g} one trial "
            f"costs ε = {self.price.trial:.4g}, this selection ε = {guarantee.epsilon:.4g}, and giving away "
            f"{expected} would cost ε = {self.price.composed:.4g} (all by Rényi divergences)."
        )

    def to_json(self) -> dict:
        """The plan as it is read back from JSON, with lists in place of tuples."""
        plain = {
            "source": self.source,
            "grid": self.grid,
            **({"fixed": dict(self.fixed)} if self.fixed else {}),
            "select": self.metric,
            "trials": {"law": self.trials.law, "mean": self.trials.mean},
            "score_noise_multiplier": self.score_noise,
            "score_sensitivity": self.sensitivity,
            "candidates": [str(candidate.guarantee.event) for candidate in self.candidates],
            "guarantee": self.price.guarantee.to_json(),
        }
        return json.loads(json.dumps(plain))


def parse_trials(text: str | None) -> privacy.Trials:
    """The law that `--trials` names.

    Raises:
      ValueError: for anything but LAW:MEAN.
    """
    parts = re.fullmatch(r"(\w+):([0-9.eE+-]+)", text or "")
    try:
        if parts is None:
            raise ValueError("it has no law and mean")
        return privacy.Trials(parts[1], float(parts[2]))
    except ValueError as error:
        raise ValueError(
            f"--trials={text} must be geometric:MEAN or poisson:MEAN, as in geometric:10: {error}"
        ) from None


def plan(
    source: str,
    grid: list[dict],
    metric: str | None,
    trials: str | None,
    score_noise: float,
    *,
    fixed: Mapping[str, Any] = MappingProxyType({}),
) -> Plan:
    """Checks a selection and computes its privacy cost, before anything runs.

    Args:
      source, grid, metric, score_noise, fixed: As in `Plan`.
      trials: The value of `--trials`.

    Raises:
      ValueError: for a selection that cannot have a guarantee.
    """
    if metric is None:
        raise ValueError("--select is missing: give the metric of --trials, as in --select=hit@10")
    law = parse_trials(trials)
    check_positive(score_noise, "--score_noise")
    for name in grid[0]:
        if name.startswith("data."):
            raise ValueError(
                f"--set={name}=… must not be an axis of a selection, whose trials have one data set: "
                f"leave it out, or give one value as --config.{name}"
            )
    candidates = [_candidate(points.point_config(source, {**fixed, **p}), metric) for p in grid]
    if candidates[0].synthetic and len({point.get("seed") for point in grid}) > 1:
        raise ValueError(
            "--set=seed=… must have one value here: synthetic data are drawn from the seed, and the trials "
            "of a selection have one data set"
        )
    if len({candidate.sensitivities[metric] for candidate in candidates}) > 1:
        raise ValueError(
            f"--select={metric} must be measured on the same records at every point: leave out the axes that "
            "change what is held out"
        )
    price = privacy.selected_guarantee(
        [candidate.guarantee for candidate in candidates], law, score_noise_multiplier=score_noise
    )
    return Plan(source, grid, candidates, metric, law, score_noise, price, dict(fixed))


def _candidate(config: ml_collections.ConfigDict, metric: str) -> Candidate:
    run.check(config)
    if config.noise_seed is not None:
        raise ValueError(
            f"config.noise_seed={config.noise_seed} must be None: trials with the same noise are not "
            "independent, so leave it out"
        )
    if config.get("log") is not None:
        raise ValueError(
            f"config.log={config.log} must be left out: who reads such a log sees every trial, and the price "
            "of a selection is of its winner alone"
        )
    module = records.experiment(config)
    if not hasattr(module, "candidate"):
        raise ValueError(
            f"--select={metric}: the experiment {config.experiment} must say how far one record can change "
            "its metrics: give it a function candidate(config), or select recommenders or models of text"
        )
    candidate = module.candidate(config)
    if metric not in candidate.sensitivities:
        raise ValueError(
            f"--select={metric} must be a metric that one record can change only so far: use one of "
            f"{', '.join(candidate.sensitivities)}"
        )
    return candidate
