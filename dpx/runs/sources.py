"""The loading of configs and experiments, which come with dpx or are a user's own files.

A config is a file with `get_config(arg="")`, which returns a ConfigDict, and optionally `sweep(arg="")`,
which returns the values of a grid by key. Its `experiment` names the module that runs it: one that comes with
dpx (`gram.attention_error`), or a file, relative to the config file (`my_experiment.py`).
"""

import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

KEYS = ("experiment", "epsilon", "delta", "seed", "noise_seed")
FUNCTIONS = ("validate", "plan", "run")


def root() -> Path:
    """The folder that holds `configs` and `experiments`: inside the installed package, or the clone."""
    package = Path(__file__).parents[1]
    shipped = package / "shipped"
    return shipped if shipped.is_dir() else package.parent


def names() -> dict[str, Path]:
    """The configs that come with dpx, by name."""
    files = sorted((root() / "configs").glob("*.py"))
    return {file.stem: file for file in files if file.stem not in ("__init__", "common")}


def config_path(source: str) -> Path:
    """The file of `NAME[:arg]` or `FILE[:arg]`.

    Raises:
      FileNotFoundError: if there is no such file.
    """
    name, known = source.partition(":")[0], names()
    if name in known:
        return known[name]
    if not Path(name).is_file():
        raise FileNotFoundError(
            f"{name}: no such config file: give a path, or one of {', '.join(known)}"
            + did_you_mean(name, known)
        )
    return Path(name)


def config_module(source: str) -> ModuleType:
    """The module of a config file; raises ValueError if it lacks get_config."""
    path = config_path(source)
    module = _from_file(path, path.stem)
    if not callable(getattr(module, "get_config", None)):
        raise ValueError(f"{path}: the function get_config is missing: let it return a ConfigDict")
    return module


def load_config(source: str) -> ConfigDict:
    """The configuration of `NAME[:arg]` or `FILE[:arg]`, with its default values.

    Raises:
      FileNotFoundError, ValueError: if there is no such file, or it lacks what every experiment needs.
    """
    path, module = config_path(source), config_module(source)
    config = call(module, "get_config", source)
    if not isinstance(config, ConfigDict):
        raise ValueError(
            f"{path}: get_config returned {type(config).__name__}: let it return an ml_collections.ConfigDict"
        )
    for key in KEYS:
        if key not in config:
            raise ValueError(f"{path}: the config has no key {key!r}: add it at the top level")
    if str(config.experiment).endswith(".py"):
        config.experiment = str((path.parent / str(config.experiment)).resolve())
    return find_home(config)


def find_home(config: ConfigDict, folder: str = "") -> ConfigDict:
    """Replaces, in place, the ~ at the start of paths by the home folder, and returns the configuration.

    Paths are the values of keys that end in `path`. Shells do not replace the ~ in `--config.data.path=~/x`.
    Those that are relative, and there in `folder`, become paths in it.
    """
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            find_home(value, folder)
        elif name.endswith("path") and isinstance(value, str):
            path = os.path.expanduser(value)
            there = os.path.join(folder, path)
            config[name] = there if os.path.exists(there) else path
    return config


def kind_of(config: Any, name: str) -> type:
    """The type of a key, by its dotted name, also if it has no value yet."""
    *sections, last = name.split(".")
    for section in sections:
        config = config[section]
    return config.get_type(last)


def call(module: ModuleType, function: str, source: str):
    """The result of `get_config` or `sweep` of a module, called with the argument after the colon."""
    name, _, arg = source.partition(":")
    called = getattr(module, function)
    if not arg:
        return called()
    if not inspect.signature(called).parameters:
        raise ValueError(f"{name}: {function} takes no argument: leave out {':' + arg!r}")
    return called(arg)


def experiment(config: ConfigDict) -> ModuleType:
    """The module that runs a configuration.

    Raises:
      FileNotFoundError, ValueError: if there is no such experiment, or it lacks a function.
    """
    name = str(config.experiment)
    module = _own_experiment(name) if name.endswith(".py") else _shipped_experiment(name)
    if module is None:
        raise ValueError(
            f"config.experiment={name!r} is no experiment: leave it as the config has it, or name a .py file"
        )
    for function in FUNCTIONS:
        if not callable(getattr(module, function, None)):
            raise ValueError(
                f"config.experiment={name!r} has no function {function!r}: define it as "
                "dpx.runs.experiment.Experiment says"
            )
    return module


def closest(name: str, known: Iterable[str]) -> str:
    """The known name that is most similar to another one, or "" if none is."""
    return next(iter(difflib.get_close_matches(name, list(known), 1)), "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The text `; did you mean …?` if a known name is similar, otherwise ""."""
    close = closest(name, known)
    return f"; did you mean {close}?" if close else ""


def _shipped_experiment(name: str) -> ModuleType | None:
    _make_importable()
    full = f"experiments.{name}"
    try:
        spec = importlib.util.find_spec(full)
    except ModuleNotFoundError:  # the package that should hold it does not exist
        return None
    return importlib.import_module(full) if spec else None


@functools.cache
def _own_experiment(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"config.experiment={path!r}: no such file: name it relative to the config file"
        )
    folder = str(Path(path).parent)
    if folder not in sys.path:
        sys.path.append(folder)  # so that it can import modules beside it
    module = _from_file(Path(path), f"dpx_own_experiment:{path}")
    sys.modules[module.__name__] = module
    return module


def _from_file(path: Path, name: str) -> ModuleType:
    _make_importable()
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}: mend it") from None
    return module


def _make_importable() -> None:
    """Makes `import configs` and `import experiments` work wherever dpx is installed."""
    if str(root()) not in sys.path:
        sys.path.append(str(root()))
