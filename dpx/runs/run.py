"""Runs one configured experiment.

dpx run --config=NAME[:arg] --workdir=DIR [--config.key=value ...] [--dry_run] [--noprogress] [--distributed]

`NAME` is a config that comes with dpx; a config of your own is given by its path.
"""

import contextlib
import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags

import dpx
from dpx import _processes, _validate, privacy
from dpx import _storage as storage
from dpx.privacy.ledger import composes
from dpx.runs import cli, experiment, figures, records, report, sources
from dpx.training import keys, log, trackers

_SEEDED = (
    "the guarantee holds only while noise_seed stays unknown to whoever sees the outputs, and is used for "
    "one run on one data set only"
)
_SYNTHETIC = (
    "the data are synthetic and the noise follows from the public seed: this is what the method would "
    "guarantee on private data, with noise from a secret key"
)
_LIMITED = (
    "records are added to or removed from the at most {} that data.limit leaves to train on, and no other "
    "takes the place of one: which records those are is public"
)


def check(config: Any) -> None:
    """Raises ValueError or FileNotFoundError for a value or a file that a run cannot use."""
    _validate.check_epsilon(config["epsilon"], "config.epsilon")
    _validate.check_delta(config["delta"], "config.delta")
    for name in ("seed", "noise_seed"):
        if config[name] is not None and config[name] < 0:
            raise ValueError(f"config.{name}={config[name]} must be at least 0")
    if config["seed"] is not None and config["seed"] >= 2**63:
        raise ValueError(f"config.seed={config['seed']} must be below 2**63, as seeds of JAX are")
    trackers.check(config.get("log"))
    records.experiment(config).validate(config)


def plan(config: Any) -> experiment.Plan:
    """The plan of a configuration, without running it.

    Raises:
      experiment.ContractError: if the experiment returns something else than a Plan.
    """
    planned = records.experiment(config).plan(config)
    if not isinstance(planned, experiment.Plan):
        raise experiment.ContractError(
            f"config.experiment={config.experiment!r}: plan returned {type(planned).__name__}: let it return "
            "a dpx.runs.experiment.Plan"
        )
    return planned


def prepare(config: ml_collections.ConfigDict, source: str, workdir: Path) -> None:
    """Checks a configuration and claims its folder, so that mistakes are reported before anything runs.

    Args:
      config: The configuration.
      source: The config file that it came from, with its argument.
      workdir: A folder that is new, empty, or of the same configuration.

    Raises:
      ValueError, FileNotFoundError: as `check` and `records.begin`, before anything is written.
      storage.StorageError: if `config.log` is a file that is no log.
    """
    # The mesh may differ, since a run does not depend on the devices that compute it.
    settings = {k: v for k, v in records.flatten(config).items() if k.split(".")[0] != "mesh"}
    _processes.check_same({f"config.{name}": value for name, value in settings.items()})
    check(config)
    trackers.check_table(config.get("log"), workdir)
    _processes.of_first(lambda: records.begin(config, source, workdir))


def execute(config: ml_collections.ConfigDict, workdir: Path) -> records.Record:
    """Runs a configuration in its prepared folder, resumes it, or reads its record if it has finished.

    Raises:
      experiment.ContractError: if the experiment returns something else than an Outcome.
      keys.CannotResumeError: if the run was killed and its keys are lost, or its data have changed.
      storage.BusyError: if another process runs it.
      storage.StorageError: if a file that it needs is damaged.
      MemoryError: if there is too little memory, of the machine or of a device. If the run has left nothing
        but its keys, these are deleted, so that it can begin again.
    """
    with storage.lock(workdir) as still_mine:
        if not _processes.of_first((workdir / "result.json").exists):
            began = time.monotonic()
            if _processes.is_first():
                sys.stderr.write(f"{config.experiment}: started; compiling comes first\n")
            try:
                # Before the run: of files that change meanwhile it says that they are not those of the run.
                public = _processes.of_first(lambda: records.digest_of_public_files(config))
                log_to: Any = config.get("log")
                with trackers.to(log_to):
                    outcome = records.experiment(config).run(config, workdir)
            except Exception as error:
                if not cli.is_out_of_memory(error):
                    raise
                if _processes.is_first():
                    keys.discard_unused(workdir)
                raise MemoryError(str(error)) from error
            if not isinstance(outcome, experiment.Outcome):
                raise experiment.ContractError(
                    f"config.experiment={config.experiment!r}: run returned {type(outcome).__name__}: let it "
                    "return a dpx.runs.experiment.Outcome"
                )
            still_mine()
            seconds = time.monotonic() - began
            _processes.of_first(lambda: write(outcome, config, workdir, seconds, public))
        record = records.read(workdir)
        assert record is not None
        # Keys are deleted only now: until the result is written, a resumed run needs the same noise.
        if _processes.is_first():
            keys.discard(workdir)
        return record


def write(
    outcome: experiment.Outcome,
    config,
    workdir: Path,
    seconds: float | None,
    public_files: str | None = None,
) -> None:
    """Writes privacy.json and result.json; `seconds` is None if the time that a run took must stay secret.

    `public_files` is the digest of what its model is read with.
    """
    synthetic = outcome.synthetic

    def state(spent: dpx.PrivacyGuarantee) -> dpx.PrivacyGuarantee:
        return spent.assuming(*_assumptions(config, synthetic, spent))

    releases = {label: state(spent) for label, spent in outcome.releases.items()}
    composed = outcome.releases if outcome.composed is None else outcome.composed
    composed = {label: state(spent) for label, spent in composed.items()}
    headline, total = state(outcome.headline), compose(composed)
    written = {
        "releases": {label: spent.to_json() for label, spent in releases.items()},
        "total": total.to_json(),
        "risk": {"headline": _risk(headline), "total": _risk(total)},
        "not_covered": list(outcome.not_covered),
        "synthetic": synthetic,
    }
    storage.write_json(workdir / "privacy.json", written)
    about = headline.to_json()
    summary = {name: about[name] for name in ("epsilon", "delta", "neighboring", "unit")}
    result = {
        "metrics": outcome.metrics,
        "measures": [dataclasses.asdict(measure) for measure in outcome.measures],
        "titles": dict(outcome.titles),
        "headline_row": outcome.headline_row,
        "comparisons": [dataclasses.asdict(comparison) for comparison in outcome.comparisons],
        "privacy": summary,
        "risk": written["risk"]["headline"],
        "wall_seconds": None if seconds is None else round(seconds, 2),
        "notes": outcome.notes.rstrip(),
        "public_files": public_files,
    }
    storage.write_json(workdir / "result.json", result)


def _risk(spent: dpx.PrivacyGuarantee) -> dict[str, dict[str, float | None]]:
    """The risks of a guarantee for JSON, where None stands for infinity."""
    return {
        relation: {
            "mu": risk.mu if math.isfinite(risk.mu) else None,
            "tpr_at_1_percent": risk.tpr_at_1_percent,
        }
        for relation, risk in spent.risks().items()
    }


def _assumptions(config, synthetic: bool, spent: dpx.PrivacyGuarantee) -> list[str]:
    """The assumptions that the settings of a run add to its guarantees."""
    assumptions = []
    if config.noise_seed is not None:
        assumptions.append(_SEEDED)
    elif synthetic:
        assumptions.append(_SYNTHETIC)
    limit = config.get("data", {}).get("limit", 0)
    if limit and spent.neighboring == privacy.ADD_OR_REMOVE_ONE:
        assumptions.append(_LIMITED.format(limit))
    return assumptions


def compose(releases: dict[str, dpx.PrivacyGuarantee]) -> dpx.PrivacyGuarantee:
    """The guarantee of all releases together, at their largest δ (for plain guarantees, at the sum of δ).

    Each release must be an entry once. If two rows of a table start from one release, that release is an
    entry of its own, and the entries of the rows do not include it.
    """
    ledger = dpx.Ledger()
    for label, spent in releases.items():
        ledger.spend(spent, label)
    added_up = [spent for spent in releases.values() if not composes(spent)]
    plain = math.fsum(spent.delta for spent in added_up)  # as the ledger adds them
    largest = max(spent.delta for spent in releases.values())
    timed = len(added_up) < len(releases)
    return ledger.guarantee(min(plain + largest * timed, 1 - 1e-12))


def price(spent: dpx.PrivacyGuarantee) -> str:
    """A planned cost in words, with what it is to."""
    relation = spent.neighboring.name.lower()
    return f"ε = {spent.epsilon:.6g}, δ = {spent.delta:.3g} ({relation}, {spent.unit})"


def _show(planned: experiment.Plan) -> None:
    """Prints the parameters of a run, the cost of each of its releases, and the total cost."""
    for name, value in planned.parameters.items():
        print(f"{name}: {value}")
    total = compose(dict(planned.releases))
    print("releases:")
    for label, spent in planned.releases.items():
        print(f"  {label}: ε = {spent.epsilon:.6g}, δ = {spent.delta:.3g}")
    print(f"planned total of all releases: {price(total)}")


def main() -> None:
    flag = flags.FLAGS
    with cli.OneLine(ValueError):
        known = f"FILE, or one of {', '.join(sources.names())}"
        config = sources.find_home(cli.given("config", known))
        if flag.distributed:
            if "mesh" not in config:
                raise ValueError(
                    f"--distributed: {config.experiment} trains no model on several processes: leave it out"
                )
            _processes.join(flag.coordinator, flag.processes, flag.process)
        elif (flag.coordinator, flag.processes, flag.process) != (None, None, None):
            raise ValueError("--coordinator, --processes and --process need --distributed: add it")
        if flag.dry_run:
            check(config)
            _show(plan(config))
            return
        workdir = cli.workdir("DIR, a new folder")
        source = cli.given_config()[0]
        cli.hurry(source)
        prepare(config, source, workdir)
    with cli.OneLine():
        with contextlib.nullcontext() if flag.progress else log.quiet():
            record = execute(config, workdir)
        if not _processes.is_first():
            return
        print(report.summarize(record))
        with storage.lock(workdir, wait=60):
            for path in figures.draw([record], workdir):
                print(f"figure: {path}")


def start() -> None:
    """The command line."""
    cli.define_config("name or file of the config, with :arg if any")
    flags.DEFINE_string("workdir", None, "folder of this run's records")
    flags.DEFINE_bool(
        "dry_run", False, "print what will be released and what it costs in all, and stop"
    )
    flags.DEFINE_bool(
        "progress",
        True,
        "say on stderr how far a training is; its losses are of private data: --noprogress where logs go to "
        "others",
    )
    flags.DEFINE_bool(
        "distributed",
        False,
        "train in several processes that share --workdir: the same command for each, which a cluster such as "
        "Slurm numbers, or else the next three flags",
    )
    flags.DEFINE_string("coordinator", None, "HOST:PORT of the first process")
    flags.DEFINE_integer("processes", None, "how many there are", lower_bound=1)
    flags.DEFINE_integer("process", None, "the number of this one, from 0", lower_bound=0)
    cli.start(main)
