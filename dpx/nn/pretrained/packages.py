"""Imports of the packages of the extra `lm`, when a file needs them."""

import importlib
from typing import Any


def needed(name: str, what: str) -> Any:
    """The package; a ModuleNotFoundError says what needs it, and how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModuleNotFoundError(
            f'{what} need the package {name}: in the clone of dpx, pip install -e ".[lm]"',
            name=name,
        ) from None
