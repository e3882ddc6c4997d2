"""Checks of values of a config, by the names of their keys; None and what a config does not have pass."""

from collections.abc import Iterable, Iterator
from typing import Any

from dpx import _validate


def values(config: Any, names: Iterable[str], prefix: str = "config") -> Iterator[tuple[Any, str]]:
    """Values and their full names, in the words of a command line."""
    for name in names:
        *sections, field = name.split(".")
        section = config
        for part in sections:
            section = section.get(part, {})
        if (value := section.get(field)) is not None:
            yield value, f"{prefix}.{name}"


def integers(config: Any, *names: str, least: int = 1, prefix: str = "config") -> None:
    """Raises ValueError for a value that is no whole number of at least `least`."""
    for value, name in values(config, names, prefix):
        _validate.check_integer(value, name, least)


def positive(config: Any, *names: str, zero: bool = False, prefix: str = "config") -> None:
    """Raises ValueError for a value that is not finite and positive (zero if allowed)."""
    for value, name in values(config, names, prefix):
        _validate.check_positive(value, name, zero=zero)


def choice(config: Any, name: str, known: Any, *, prefix: str = "config") -> None:
    """Raises ValueError for a value, or one of several, that is not among the known ones."""
    for value, full in values(config, (name,), prefix):
        for one in [value] if isinstance(value, str) else value:
            _validate.check_choice(one, full, tuple(known))


def share(config: Any, *names: str, budget: bool = False, why: str = "") -> None:
    """Raises ValueError for a value outside of (0, 1), or of a budget whose rest trains, of [0, 0.99]."""
    for value, name in values(config, names):
        if not (0 <= value <= 0.99 if budget else 0 < value < 1):
            allowed = "in [0, 0.99]" if budget else "a share in (0, 1)"
            raise ValueError(f"{name}={value} must be {allowed}{why and f': {why}'}")


def each(config: Any, *names: str, least: float, even: bool = False) -> None:
    """Raises ValueError for a number, or one of several, below `least`, or odd where it has to be even.

    Of several each has to be there once: releases have the names of their settings, and names serve once.
    """
    for value, name in values(config, names):
        numbers = [value] if isinstance(value, int | float) else value
        for number in numbers:
            if not number >= least or (even and number % 2):
                words = "even" if even else f"at least {least} throughout"
                raise ValueError(f"{name}={value} must be {words}")
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"{name}={value} must have each number once")
