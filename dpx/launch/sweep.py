"""Runs a grid of configurations, each in a folder of its own under --workdir.

dpx sweep --config=NAME[:arg] --workdir=DIR [--set=key=v1,v2 ...]

The default grid is the config's sweep(). Finished points are skipped, an unfinished one resumes, and a point
that fails does not stop the others. Several sweeps may share one folder: each takes points that nobody runs.
"""

import hashlib
import itertools
import sys
import time
import traceback
from pathlib import Path

import ml_collections
import yaml
from absl import flags

from dpx import _storage as storage
from dpx.launch import cli, records, report, run, sources

_LONGEST_NAME = 200
_PATIENCE = 1.0  # seconds between looks at points that other processes run


def grid(source: str, axes: list[str]) -> list[dict]:
    """The points of a grid as overrides by dotted name.

    Args:
      source: The config file, with its argument.
      axes: `key=v1,v2` each; none means the config's own `sweep(arg)`.

    Raises:
      ValueError: for an axis without values, a value that is none, or a key that cannot be set.
    """
    if axes:
        chosen = {}
        for axis in axes:
            name, equals, values = axis.partition("=")
            if not equals:
                raise ValueError(f"--set={axis} must be key=v1,v2")
            if name in chosen:
                raise ValueError(f"--set={name}=… is given twice: put all values in one --set")
            chosen[name] = [_parse(value, axis) for value in values.split(",")]
    else:
        module = records.config_module(source)
        if not callable(getattr(module, "sweep", None)):
            raise ValueError(
                f"{source} has no function sweep: give the grid, as in --set=epsilon=1,2"
            )
        chosen = sources.call(module, "sweep", source)
    known = records.flatten(records.load_config(source).to_dict())
    for name in chosen:
        records.check_key(name, known, source)
        if name == "experiment":
            raise ValueError("--set=experiment=… is fixed by the config file: use another --config")
        if name == "noise_seed":
            raise ValueError(
                "--set=noise_seed=… would write a secret into the points' names: give it to dpx run, "
                "for one run at a time, or leave it out"
            )
    return [
        dict(zip(chosen, values, strict=True)) for values in itertools.product(*chosen.values())
    ]


def _parse(value: str, axis: str):
    if not value:
        raise ValueError(f"empty value in --set={axis}")
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        raise ValueError(
            f"--set={axis}: {value!r} is not a value; commas separate values"
        ) from None


def point_config(source: str, overrides: dict) -> ml_collections.ConfigDict:
    """The configuration of one point.

    Raises:
      ValueError: for a value of the wrong type.
    """
    config = records.load_config(source)
    for name, value in overrides.items():
        default = records.flatten(config)[name]
        try:
            config.update_from_flattened_dict(
                {name: float(value) if isinstance(default, float) else value}
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"--set={name}={value}: {error}") from None
    return config


def point_name(overrides: dict) -> str:
    """The folder of a point: its overrides, in the order of the grid.

    File systems allow names of 255 bytes: what is longer is cut, and ends in a digest of the whole.
    """
    name = ",".join(f"{key}={value}" for key, value in overrides.items()).replace("/", "_") or "all"
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    start = name.encode()[: _LONGEST_NAME - 17].decode(errors="ignore")
    return f"{start},{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def run_points(source: str, points: list[dict], folder: Path) -> list[tuple[str, Exception]]:
    """Runs the points that are not finished, and that were checked before.

    Several processes may share the points of one folder.
    A point that another process runs is left to it, and looked at again when all others are done: by then
    it has finished, or its process was killed and it can go on here.

    Returns:
      The names of those that failed, with their errors, which are also printed.
    """
    failed, left, said = [], list(enumerate(points, start=1)), set()
    while left:
        held = []
        for number, overrides in left:
            name = point_name(overrides)
            if number not in said:
                sys.stderr.write(f"[{number}/{len(points)}] {name}\n")
            try:
                config = point_config(source, overrides)
                records.begin(config, source, folder / name)
                run.execute(config, folder / name)
            except storage.BusyError:
                if number not in said:
                    sys.stderr.write(f"[{number}/{len(points)}] runs in another process: later\n")
                held.append((number, overrides))
            except cli.EXPECTED as error:
                sys.stderr.write(f"error: {cli.in_one_line(error)}\n")
                failed.append((name, error))
            except Exception as error:
                traceback.print_exc()
                failed.append((name, error))
            said.add(number)
        if len(held) == len(left):
            time.sleep(_PATIENCE)
        left = held
    return failed


def main(argv: list[str]) -> None:
    del argv
    flag = flags.FLAGS
    try:
        if flag.config is None or flag.workdir is None:
            raise ValueError("--config=NAME and --workdir=DIR are both needed")
        source, folder = flag.config, Path(flag.workdir)
        points = grid(source, flag.set)
        configs = {point_name(overrides): point_config(source, overrides) for overrides in points}
        for config in configs.values():
            run.check(config)
        # Every folder is claimed before anything is computed: what one refuses, all may refuse.
        for name, config in configs.items():
            records.begin(config, source, folder / name)
    except (ValueError, OSError) as error:
        cli.stop(error)
    failed = run_points(source, points, folder)
    try:
        if records.read_all(folder):
            print(report.write(folder))
    except cli.EXPECTED as error:
        cli.stop(error)
    if failed:
        sys.stderr.write(f"{len(failed)} of {len(points)} points failed:\n")
        for name, error in failed:
            sys.stderr.write(f"  {name}: {type(error).__name__}: {cli.in_one_line(error)}\n")
        sys.exit(1)


def start() -> None:
    """The command line."""
    flags.DEFINE_string("config", None, "name or file of the config, with :arg if any")
    flags.DEFINE_string("workdir", None, "folder of the sweep")
    flags.DEFINE_multi_string("set", [], "key=v1,v2: an axis of the grid, instead of sweep()")
    cli.start(main)
