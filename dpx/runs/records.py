"""The records in a run's folder, and functions that write and read them.

Each .json file holds a checksum of its content, so that damage is noticed.

config.json       the configuration, its file, the overrides, and the folder in which the command was given,
                  to which paths are relative; it is written before anything runs
environment.json  versions and devices
metrics.jsonl     the progress, for the owner alone, since no guarantee covers the losses
privacy.json      every release with its guarantee, their total, the risk, and what no guarantee covers
result.json       metrics, the headline guarantee and its risk, wall time, notes; written last, atomically
"""

import dataclasses
import functools
import json
import os
import platform
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import ml_collections
from flax import traverse_util

from dpx import _storage as storage
from dpx.runs import sources
from dpx.runs.experiment import Comparison, Measure
from dpx.runs.sources import config_module, experiment, load_config
from dpx.training import keys, resuming

PRIVATE = "private_trials"  # the folder of a selection's trials, which stay secret


@dataclasses.dataclass(frozen=True)
class Record:
    """A finished run."""

    workdir: Path
    source: str
    config: dict
    overrides: dict
    metrics: dict
    privacy: dict
    wall_seconds: float | None
    folder: str = ""
    risk: dict = dataclasses.field(default_factory=dict)
    measures: tuple[Measure, ...] = ()
    titles: dict = dataclasses.field(default_factory=dict)
    headline_row: str = ""
    comparisons: tuple[Comparison, ...] = ()
    notes: str = ""
    public_files: str | None = None

    @functools.cached_property
    def private(self) -> dict:
        """The content of privacy.json."""
        return storage.read_json(self.workdir / "privacy.json")

    @property
    def releases(self) -> dict[str, dict]:
        """The guarantee of every output, by label."""
        return self.private["releases"]

    @property
    def total(self) -> dict:
        """The guarantee of all outputs together."""
        return self.private["total"]

    def title(self, skip: str = "") -> str:
        """The source of the run and its overrides, without the key `skip`."""
        changed = [f"{name}={value}" for name, value in self.overrides.items() if name != skip]
        return " ".join([self.source, *changed])


def check_key(name: str, known: Mapping[str, Any], source: str) -> None:
    """Raises ValueError for a dotted name that is not in the flat config of a source."""
    if name not in known:
        if others := _variants_with(name, source):
            several = "one of " * (len(others) > 1)
            raise ValueError(f"{source} does not read {name!r}: use {several}{', '.join(others)}")
        if close := sources.did_you_mean(name, known):
            raise ValueError(
                f"config has no key {name!r}{close.replace('mean ', 'mean --config.')}"
            )
        raise ValueError(f"config has no key {name!r}: use one of {', '.join(known)}")


def _variants_with(name: str, source: str) -> list[str]:
    """The other variants of a config file that have a key of that dotted name."""
    path, _, arg = source.partition(":")
    module, tiny = config_module(path), ",tiny" * ("tiny" in arg.split(","))
    variants = (f"{path}:{variant}{tiny}" for variant in getattr(module, "VARIANTS", ()))
    return [variant for variant in variants if name in flatten(load_config(variant).to_dict())]


def flatten(config: Mapping | ml_collections.ConfigDict) -> dict[str, Any]:
    """The values of a config by dotted name."""
    nested = config.to_dict() if isinstance(config, ml_collections.ConfigDict) else config
    return traverse_util.flatten_dict(nested, sep=".")


def overrides(config: ml_collections.ConfigDict, source: str) -> dict[str, Any]:
    """The values that differ from those of the config file, by dotted name."""
    defaults = flatten(load_config(source).to_dict())
    return {
        name: value
        for name, value in flatten(config.to_dict()).items()
        if name not in defaults or defaults[name] != value
    }


def begin(config: ml_collections.ConfigDict, source: str, workdir: Path) -> None:
    """Claims a folder for a configuration.

    Raises:
      ValueError: if the folder holds another configuration, or other files.
      storage.StorageError: if another process uses it, or its files are damaged.
    """
    path = workdir / "config.json"
    if not path.exists():
        refuse_foreign(path, "run", (keys.FOLDER, "environment.json"))
        with storage.lock(workdir, wait=10):
            refuse_foreign(path, "run", (keys.FOLDER, "environment.json"))
            if not path.exists():
                storage.write_json(workdir / "environment.json", _environment())
                storage.write_json(
                    path,
                    {
                        "source": source,
                        "config": _shown(config.to_dict(), workdir, new=True),
                        "overrides": _shown(overrides(config, source), workdir),
                        "folder": os.getcwd(),
                    },
                )
    stored = storage.read_json(path)["config"]
    mine = config.to_dict()
    # A run may be resumed on other devices, so that the mesh does not count.
    for settings in (stored, mine):
        settings.pop("mesh", None)
    same_kind = (stored.get("noise_seed") is None) == (mine.get("noise_seed") is None)
    shown = json.loads(json.dumps(_shown(mine, workdir) if same_kind else mine))
    if stored != shown:
        raise ValueError(
            f"{workdir} holds a run of another config, with other values of {_changed(stored, shown)}: use a "
            "new --workdir, or the old values"
        )


def _changed(before: dict, now: dict, most: int = 5) -> str:
    """The dotted names of keys with different values in two configs, at most the first few."""
    one, other = flatten(before), flatten(now)
    names = [
        name
        for name in one | other
        if name not in one or name not in other or one[name] != other[name]
    ]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _shown(values: dict, workdir: Path, *, new: bool = False) -> dict:
    """Values as records show them, with a fingerprint in place of the noise seed."""
    if values.get("noise_seed") is None:
        return values
    return {**values, "noise_seed": keys.fingerprint(values["noise_seed"], workdir, new=new)}


def refuse_foreign(claim: Path, kind: str, ours: Collection[str]) -> None:
    """Raises ValueError for a folder that has no claim and holds other files than a killed process leaves.

    Args:
      claim: The file that says what the folder belongs to.
      kind: The kind of folder, in a word.
      ours: The names of files that are written before the claim.
    """
    folder = claim.parent
    if claim.exists() or not folder.exists():
        return
    names = (path.name for path in folder.iterdir())
    if any(
        not name.endswith(".partial") and not storage.of_lock(name) and name not in ours
        for name in names
    ):
        raise ValueError(
            f"{folder} is not empty and holds no {kind} (no {claim.name}): use a new --workdir"
        )


def read(workdir: str | Path) -> Record | None:
    """The record of a finished run; None if there is no result yet."""
    workdir = Path(workdir)
    if not (workdir / "result.json").exists():
        return None
    result = storage.read_json(workdir / "result.json")
    result["measures"] = tuple(Measure(**fields) for fields in result["measures"])
    result["comparisons"] = tuple(Comparison(**fields) for fields in result.get("comparisons", ()))
    return Record(workdir=workdir, **storage.read_json(workdir / "config.json"), **result)


def finished(folder: str | Path) -> list[Path]:
    """The folders of all finished runs in a folder, without the private trials of selections.

    They are ordered by path, numbers in it by their size: epsilon=4 comes before epsilon=16.
    """
    folders = (path.parent for path in Path(folder).rglob("result.json"))
    found = (path for path in folders if PRIVATE not in path.relative_to(folder).parts)
    return sorted(found, key=_by_numbers)


def _by_numbers(path: Path) -> list:
    """The path's words and numbers in turn, for sorting."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", str(path))
    return [float(part) if i % 2 else part for i, part in enumerate(parts)]


def read_all(folder: str | Path) -> list[Record]:
    """All finished runs in a folder, in the order of `finished`."""
    return [record for workdir in finished(folder) if (record := read(workdir)) is not None]


def by_seed(runs: Iterable[Record]) -> dict[str, list[Record]]:
    """Groups of runs that differ in the seed only, by title; equal titles are extended by the folder.

    Whole configs are compared, since a config file may have changed between two runs. Two runs with the same
    seed are in different groups, because they show the effect of noise and not of the seed.
    """
    groups, times = defaultdict(list), Counter()
    for record in runs:
        seed, others = record.config["seed"], {**record.config, "seed": None}
        config = json.dumps([record.source, others], sort_keys=True)
        times[config, seed] += 1
        groups[config, times[config, seed]].append(record)
    titles = _titles([group[0] for group in groups.values()])
    return {
        title if titles.count(title) == 1 else f"{title} (in {group[0].workdir})": group
        for title, group in zip(titles, groups.values(), strict=True)
    }


def _titles(runs: list[Record]) -> list[str]:
    """The title of each run: its source and the values that differ between runs of that source.

    If no value differs, the overrides take their place.
    """
    titles = []
    for record in runs:
        alike = [other for other in runs if other.source == record.source]
        values = flatten(record.config)
        changed = [f"{name}={values[name]}" for name in varied(alike)]
        titles.append(" ".join([record.source, *changed]) if changed else record.title(skip="seed"))
    return titles


def varied(runs: Sequence[Record]) -> list[str]:
    """The dotted names of keys, without seeds, whose values differ between runs; ε comes first."""
    flat = [flatten(record.config) for record in runs]
    common = [name for name in flat[0] if all(name in other for other in flat)]
    names = [n for n in common if any(other[n] != flat[0][n] for other in flat)]
    names = [name for name in names if name not in ("seed", "noise_seed")]
    return sorted(names, key=lambda name: name != "epsilon")


def fixed(runs: Sequence[Record]) -> dict[str, Any]:
    """The overrides that several runs have in common, without seeds, by dotted name."""
    first, *others = [record.overrides for record in runs]
    same = {k: v for k, v in first.items() if all(k in o and o[k] == v for o in others)}
    return {name: value for name, value in same.items() if name not in ("seed", "noise_seed")}


def load(workdir: str | Path) -> Any:
    """The private model that a finished run left, which can sample, recommend or predict.

    Raises:
      FileNotFoundError: if the folder holds no finished run.
      ValueError: if its experiment leaves no model, or if the pretrained one that it was made on has changed.
    """
    record = read(workdir)
    if record is None:
        raise FileNotFoundError(f"{workdir} holds no finished run")
    config = sources.find_home(ml_collections.ConfigDict(record.config), record.folder)
    module = experiment(config)
    if not hasattr(module, "load"):
        raise ValueError(f"{workdir}: the experiment {config.experiment} leaves no model")
    if record.public_files not in (None, digest_of_public_files(config)):
        raise ValueError(
            f"{workdir} was made on a pretrained model whose files have changed since: put them back"
        )
    return module.load(config, Path(workdir))


def digest_of_public_files(config: ml_collections.ConfigDict) -> str | None:
    """The digest of the files that the model of a finished run is read with; None if there are none."""
    module = experiment(config)
    files = module.public_files(config) if hasattr(module, "public_files") else []
    return resuming.digest(files) if files else None


def _environment() -> dict:
    packages = ("jax", "flax", "optax", "numpy", "dp-accounting", "orbax-checkpoint")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: metadata.version(name) for name in packages},
        "devices": [str(device) for device in jax.devices()],
        "cores": os.cpu_count(),
    }
