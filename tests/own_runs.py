"""Runs in the process of a test: of configs with changes, of experiments of one's own, and whole sweeps."""

import csv
from types import SimpleNamespace

from absl import flags
from ml_collections import ConfigDict

import dpx
from dpx import _storage as storage
from dpx.runs import records, run, sweep

CONFIG = """
from ml_collections import ConfigDict, config_dict

def get_config(arg=""):
    config = ConfigDict({{
        "experiment": "mine.py", "epsilon": 1.0, "delta": 1e-6, "seed": 0, **{values!r}
    }})
    config.noise_seed = config_dict.placeholder(int)
    {more}
    return config
"""


def own(folder, experiment, more="pass", **values):
    """Writes a config with these values, and its experiment, into a folder; returns the config's path."""
    (folder / "own.py").write_text(CONFIG.format(values=values, more=more))
    (folder / "mine.py").write_text(experiment)
    return str(folder / "own.py")


def config_of(source, **changes):
    config = records.load_config(source)
    config.update_from_flattened_dict(changes)
    return config


def go(source, folder, **changes):
    """The record of a run, as the command makes it after its flags."""
    config = config_of(source, **changes)
    run.prepare(config, source, folder)
    return run.execute(config, folder)


def plain(epsilon=1.0, delta=1e-5, unit="user", relation=dpx.privacy.ADD_OR_REMOVE_ONE, event=None):
    """A guarantee that says of itself that it is a test."""
    return dpx.PrivacyGuarantee(epsilon, delta, relation, unit, "test", ("it is a test",), event)


def sweep_command(monkeypatch, source, folder, fixed=None, **given):
    """`dpx sweep` with these flags, in this process; `fixed` are the values of --config.KEY."""
    flag = {"config": source, "workdir": str(folder), "set": [], "executor": "local", "workers": 1}
    flag |= {"shard": "", "slurm": [], "progress": True, "dry_run": False, "select": None}
    flag |= {"trials": None, "score_noise": 5.0}
    monkeypatch.setattr(flags, "FLAGS", SimpleNamespace(**flag | given))
    monkeypatch.setattr(sweep.cli, "given_config", lambda: (source, fixed or {}))
    sweep.main()


def rows_of(folder):
    """The lines of a report's results.csv, without the times that runs took."""
    with (folder / "results.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    return [{name: row[name] for name in row if name != "wall_seconds"} for row in found]


def written(folder, outcome, **changes):
    """The record of a run that had this outcome."""
    about = {"epsilon": 1.0, "delta": 1e-5, "seed": 0, "noise_seed": None} | changes
    folder.mkdir(exist_ok=True)
    run.write(outcome, ConfigDict(about), folder, 1.0)
    config = {"source": "test", "config": about, "overrides": {}}
    storage.write_json(folder / "config.json", config)
    found = records.read(folder)
    assert found is not None
    return found
