"""The command lines: flags, help, and errors, which are one line on stderr and exit status 2."""

import contextlib
import errno
import functools
import io
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from dpx import _processes
from dpx import _storage as storage
from dpx.runs import listing, records, sources
from dpx.runs.experiment import ContractError
from dpx.training import keys

flags.disclaim_key_flags()  # what is defined here belongs to the command that asks for it

# Errors that users or machines can cause; all others are faults of the program, and show a traceback.
EXPECTED = (
    ContractError,
    keys.CannotResumeError,
    storage.StorageError,
    _processes.FirstProcessError,
    OSError,
    MemoryError,
    ModuleNotFoundError,
)
_REMEDIES = {
    errno.ENOSPC: "make room, and repeat the command",
    errno.EDQUOT: "make room, and repeat the command",
    errno.EACCES: "make it accessible, or use another path",
    errno.EPERM: "make it accessible, or use another path",
    errno.EROFS: "make it writable, or use another path",
    errno.ELOOP: "remove the link that was put there",
}


class OneLine(contextlib.ContextDecorator):
    """A context, or a decorator, in which expected errors, and those of `more` types, end in one line."""

    def __init__(self, *more: type[Exception]):
        self._types = (*more, *EXPECTED)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, self._types):
            stop(error)


def start(main: Callable[[], None]) -> None:
    """Runs `absl.app.run`; an interrupt from the keyboard prints one line and exits with status 130."""
    sys.unraisablehook = _show_unraisable
    for stream in (sys.stdout, sys.stderr):
        # In a locale without ε, printing the result would otherwise end in a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def run(argv: list[str]) -> None:
        del argv
        main()

    try:
        app.run(run, flags_parser=functools.partial(parse_flags, module=main.__module__))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the same command goes on where this one stopped\n")
        sys.exit(130)


class _Configs(flags.ArgumentParser):
    """A parser of the value of --config: the name of a config that comes with dpx, or a file."""

    def parse(self, argument):
        return records.load_config(argument)


def define_config(words: str) -> None:
    """Defines the flag --config, whose value is a configuration, and flags --config.KEY that change it."""
    config_flags.DEFINE_config_file("config", None, words)
    flags.FLAGS["config"].parser = _Configs()


def hurry(source: str) -> None:
    """Switches XLA's optimizations off for a `tiny` run, which takes longer to compile than to run."""
    if "tiny" in source.partition(":")[2].split(","):
        jax.config.update("jax_disable_most_optimizations", True)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for workers


def given_config() -> tuple[str, dict[str, Any]]:
    """The value of --config, a name or a file, and the values that flags --config.KEY set, by dotted name."""
    flag = flags.FLAGS["config"]
    overrides = config_flags.get_override_values(flag)
    return config_flags.get_config_filename(flag), dict(overrides)


def parse_flags(argv: list[str], module: str = "") -> list[str]:
    """Parses flags, for `app.run(main, flags_parser=parse_flags)`; the help is that of `module`."""
    warnings.showwarning = _show_warning
    if module and any(re.fullmatch(r"--?h(elp)?", argument) for argument in argv[1:]):
        _help(argv, module)
    try:
        if "config" in flags.FLAGS:
            _check_config(argv)
        left = flags.FLAGS(argv)
    except SystemExit:
        sys.exit(0)  # absl has printed the help, and would exit with status 1
    except flags.UnrecognizedFlagError as error:
        stop(ValueError(f"--{error.flagname} is no flag{_close_flag(error.flagname)}"))
    except Exception as error:  # ml_collections raises many types for a bad config flag
        stop(error)
    if not flags.FLAGS["verbosity"].present:
        # Orbax logs every file at INFO, and logs each error with a traceback before it raises it.
        logging.set_verbosity(logging.FATAL)
    if len(left) > 1:
        stop(ValueError(f"unknown argument {left[1]!r}: flags start with --"))
    return left


def _help(argv: list[str], module: str) -> NoReturn:
    """Prints the help of a command, its flags and, if a config is given, the config's keys."""
    try:
        source = _early(argv) if "config" in flags.FLAGS else None
        about = [] if source is None else ["", listing.describe(source)]
    except (ValueError, OSError, flags.Error) as error:
        stop(error)
    print("\n".join([str(sys.modules[module].__doc__), flags.FLAGS.module_help(module), *about]))
    sys.exit(0)


def _early(argv: list[str]) -> str | None:
    """The value of --config, before anything else is parsed."""
    early = flags.FlagValues()
    flags.DEFINE_string("config", None, "", flag_values=early)
    early(argv, known_only=True)
    return early.config


def _close_flag(name: str) -> str:
    """A suggestion of the flag that an unknown one may have meant."""
    known = {flag: flag for flag in flags.FLAGS if not flag.startswith("config.")}
    config = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
    if config is not None and not isinstance(config, str):
        for key in records.flatten(config):
            known.setdefault(key.rpartition(".")[2], f"config.{key}")
            known[f"config.{key}"] = f"config.{key}"
    close = sources.closest(name, known)
    return f": did you mean --{known[close]}?" if close else ": --help lists the flags"


def _check_config(argv: list[str]) -> None:
    """Raises ValueError for an unknown file, argument or key of a config; ml_collections names none."""
    source = _early(argv)
    if source is None:
        return
    known = records.flatten(records.load_config(source).to_dict())
    for argument in argv:
        key = re.match(r"--?(?:no)?config\.([\w.]+)", argument)
        if key:
            records.check_key(key[1], known, source)
            if key[1] == "experiment":
                raise ValueError(f"{argument} is fixed by the config file: use another --config")


def given(name: str, needed: str) -> Any:
    """The value of a flag; raises ValueError if it is not given, where `needed` says what it has to be."""
    value = getattr(flags.FLAGS, name)
    if value in (None, "", []):
        raise ValueError(f"--{name} is missing: use --{name}={needed}")
    return value


def workdir(needed: str) -> Path:
    """The folder that --workdir names, where ~ is the home folder: shells do not replace it in a flag."""
    return Path(os.path.expanduser(given("workdir", needed)))


def run_folder() -> Path:
    """The folder of a finished run, which --workdir names."""
    return workdir("RUN, the folder of a finished run")


def stop(error: Exception) -> NoReturn:
    """Prints the first line of an error and exits with its `status`, or 2; with 141 if nobody reads it."""
    if isinstance(error, BrokenPipeError):  # as of `dpx run ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    sys.stderr.write(f"error: {in_one_line(error)}\n")
    sys.exit(getattr(error, "status", 2))


def in_one_line(error: Exception) -> str:
    """The first line of an error's text, with a remedy if one is known."""
    text = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        remedy = _REMEDIES.get(error.errno or 0, "check the path")
        text = f"{error.filename}: {error.strerror}: {remedy}"
    if isinstance(error, MemoryError):
        text = f"not enough memory: use less data, a smaller model or more memory ({_first_line(text)})"
    if isinstance(error, ModuleNotFoundError) and "pip install" not in text:
        text = f'{text}: in the clone of dpx, pip install -e ".[data,plots]"'
    return _first_line(text) or type(error).__name__


def _first_line(text: object) -> str:
    """The first line of a text that is not blank, or nothing."""
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means too little memory, of the machine or of a device."""
    of_device = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    return of_device or isinstance(error, MemoryError)


def _show_unraisable(unraisable) -> None:
    # Orbax raises the error of a write once. Unfinished work of TensorStore then finds a closed event loop.
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    del category, filename, lineno, file, line
    sys.stderr.write(f"warning: {message}\n")
