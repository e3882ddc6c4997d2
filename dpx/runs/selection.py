"""Selects one of a sweep's points at a stated privacy cost: `sweep --select=METRIC --trials=LAW:MEAN`.

Each trial draws its point from the grid at random, with replacement, and the number of trials is random too
(`dpx.privacy.selection`). A trial is a run with its own noise, and noise is added to its metric as well. Only
the trial with the highest noisy score is released:

selection.json    the plan of the selection and its cost; public
selected/         a run's folder, with the model and its noisy score; public
private_trials/   everything else, for the owner alone, since no guarantee covers it
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from dpx import _storage as storage
from dpx import noise
from dpx.runs import points, records, run
from dpx.runs.experiment import Candidate, ContractError, Measure, Outcome
from dpx.runs.points import Task
from dpx.runs.selection_plan import Plan
from dpx.training import checkpoints, keys

SELECTED = "selected"
_ASKED, _DRAWN = "selection.json", "drawn.json"
_NONE = (
    "No trial was drawn, which is part of the Poisson law: nothing is selected, at the same price."
)


class TrialsFailedError(OSError):
    """The error of a selection one of whose trials failed, so that nothing can be selected yet."""

    status = 1


def begin(asked: Plan, folder: Path) -> None:
    """Claims a folder for a selection, and draws the number and the points of its trials.

    Raises:
      ValueError: if the folder holds another selection, or other files.
      keys.CannotResumeError: if the drawn numbers are lost, or the data have changed.
    """
    path, drawn = folder / _ASKED, folder / records.PRIVATE / _DRAWN
    records.refuse_foreign(path, "selection", (records.PRIVATE,))
    with storage.lock(folder, wait=60):
        records.refuse_foreign(path, "selection", (records.PRIVATE,))
        another = (
            f"{folder} holds another selection, or one with another number of held-out records: use a new "
            "--workdir"
        )
        if not path.exists():
            storage.create_private(drawn, _draw(asked))
            # Trials that were drawn for one plan must not serve another, which has another cost.
            if storage.read_private(drawn).get("plan") != _digest(asked):
                raise ValueError(another)
            storage.write_json(path, asked.to_json())
        if storage.read_json(path) != asked.to_json():
            raise ValueError(another)
        if (folder / SELECTED / "result.json").exists():
            return
        if not drawn.exists():
            raise keys.CannotResumeError(
                f"{drawn} is missing: with another number of trials the selection would be paid for twice, "
                "so use a new --workdir"
            )
        # Not in what is public, since whoever guesses the data could check the guess.
        if storage.read_private(drawn)["data"] != _data(asked):
            raise keys.CannotResumeError(
                f"the data changed since the selection in {folder} began: use a new --workdir, or the old "
                "data"
            )


def _digest(asked: Plan) -> str:
    return hashlib.sha256(json.dumps(asked.to_json(), sort_keys=True).encode()).hexdigest()


def _data(asked: Plan) -> list[str]:
    return [candidate.data for candidate in asked.candidates]


def _draw(asked: Plan) -> dict:
    """The random draws of a selection, which are kept so that a resumed selection has the same trials."""
    opened = keys.Keys(keys.secret_key(), np.random.SeedSequence())
    if asked.synthetic:
        config = points.point_config(asked.source, asked.overrides(0))
        opened = keys.open_keys(config, Path(), synthetic=True)
    generator = np.random.default_rng(opened.seed("trials"))
    count = asked.trials.draw(generator)
    return {
        "plan": _digest(asked),
        "data": _data(asked),
        "points": generator.integers(len(asked.grid), size=count).tolist(),
        # On synthetic data noise follows from the config, and two trials must not share it.
        "noise_seeds": generator.integers(2**62, size=count).tolist() if asked.synthetic else None,
        "scores": np.asarray(jax.random.key_data(opened.noise("scores"))).tobytes().hex(),
    }


def finish(
    asked: Plan, folder: Path, run_tasks: Callable[[list[Task]], list[tuple[str, str]]]
) -> records.Record:
    """Runs the trials that have not finished, and releases the best one.

    Args:
      asked: The plan for which the folder was begun.
      folder: The folder of the selection.
      run_tasks: A function that runs trials and returns those that failed.

    Raises:
      TrialsFailedError: if a trial failed twice.
      ContractError: if a run released something else than its plan says.
    """
    if (selected := _finished(folder)) is not None:
        return selected
    private = folder / records.PRIVATE
    drawn = storage.read_private(private / _DRAWN)
    tasks = [
        Task(
            asked.source,
            _overrides(asked, drawn, trial),
            str(private),
            f"trial{trial}",
            drawn["data"][point],
        )
        for trial, point in enumerate(drawn["points"])
    ]
    if run_tasks(tasks):
        raise TrialsFailedError(
            f"a trial failed, so that nothing is selected: read {private / points.LOG}, and repeat the "
            "command"
        )
    words = np.frombuffer(bytes.fromhex(drawn["scores"]), np.uint32)
    noise_of = keys.derive(jax.random.wrap_key_data(jax.numpy.asarray(words))).noise
    scores = [
        _score(asked, asked.candidates[point], noise_of(f"score of trial {trial}"), tasks[trial])
        for trial, point in enumerate(drawn["points"])
    ]
    with storage.lock(folder, wait=60):
        if not (folder / SELECTED / "result.json").exists():
            if scores:
                best = int(np.argmax(scores))
                chosen = (drawn["points"][best], scores[best], tasks[best].workdir)
                _give_away(asked, folder, *chosen)
            else:
                _give_away(asked, folder, None, None, None)
    selected = _finished(folder)
    assert selected is not None
    return selected


def _finished(folder: Path) -> records.Record | None:
    """The selected run, or None. Once it exists, the key of the scores is deleted."""
    selected = records.read(folder / SELECTED)
    if selected is not None:
        storage.delete_private(folder / records.PRIVATE / _DRAWN)
    return selected


def _overrides(asked: Plan, drawn: dict, trial: int) -> dict:
    point = asked.overrides(drawn["points"][trial])
    return point | ({"noise_seed": drawn["noise_seeds"][trial]} if asked.synthetic else {})


def _score(asked: Plan, candidate: Candidate, key: jax.Array, task: Task) -> float:
    """The noisy metric of a trial, after a check that the trial costs what was planned."""
    record = records.read(task.workdir)
    assert record is not None
    spent = record.releases.get(candidate.row, {}).get("event")
    if spent != str(candidate.guarantee.event):
        raise ContractError(
            f"{record.config['experiment']}: candidate(config) planned {candidate.guarantee.event} for the "
            f"row {candidate.row}, whose run released {spent}: let both be the same"
        )
    exact = np.float64(record.metrics[f"{candidate.row}/{asked.metric}"])
    return float(
        noise.release(
            key,
            exact,
            sensitivity=asked.sensitivity,
            noise_multiplier=asked.score_noise,
            label="score of a trial",
        )
    )


def _give_away(
    asked: Plan, folder: Path, point: int | None, score: float | None, trial: Path | None
) -> None:
    """Writes the folder of the selected run, with the trial's model and nothing else, not even its time."""
    target, spent = folder / SELECTED, asked.price.guarantee
    candidate = asked.candidates[point or 0]
    shutil.rmtree(target, ignore_errors=True)
    overrides = dict(asked.fixed) if point is None else asked.overrides(point)
    config = points.point_config(asked.source, overrides)
    records.begin(config, asked.source, target)
    ran = None if trial is None else records.read(trial)
    if trial is not None:
        checkpoints.copy_model(trial, target)
        for name in candidate.files:
            shutil.copyfile(trial / name, target / name)
    outcome = Outcome(
        measures=[] if score is None else [Measure(candidate.row, asked.metric, score)],
        headline=spent,
        releases={candidate.row: spent},
        synthetic=asked.synthetic,
        not_covered=[f"everything in {records.PRIVATE}, which is not to be given away"],
        notes=asked.words + (f" {_NONE}" if score is None else ""),
        headline_row=candidate.row,
    )
    files = None if ran is None else ran.public_files
    run.write(outcome, config, target, seconds=None, public_files=files)
