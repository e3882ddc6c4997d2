"""How every command line of the project fails: one line on stderr, exit status 2, no traceback."""

import sys
import warnings
from typing import NoReturn

from absl import flags, logging


def parse_flags(argv: list[str]) -> list[str]:
    """Parses flags, for `app.run(main, flags_parser=parse_flags)`."""
    warnings.showwarning = _show_warning
    try:
        left = flags.FLAGS(argv)
    except Exception as error:  # ml_collections raises many types for a bad config flag
        stop(error)
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax reports every file at INFO
    if len(left) > 1:
        stop(ValueError(f"unknown argument {left[1]!r}: flags start with --"))
    return left


def stop(error: Exception) -> NoReturn:
    """Ends the process with the error's first line."""
    text = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    sys.stderr.write(f"error: {lines[0] if lines else type(error).__name__}\n")
    sys.exit(2)


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    del category, filename, lineno, file, line
    sys.stderr.write(f"warning: {message}\n")
