"""The list of configs and the meaning of their keys, for `dpx configs`, `--config=NAME --help` and the site.

The first line of a config's docstring says what it is. Its `MEANINGS` say what its keys mean, by dotted name.
"""

import ast
import textwrap
from typing import Any, NamedTuple

from dpx.runs import records, sources

_WIDTH, _COLUMN = 98, 40


class Key(NamedTuple):
    """A key of a config: its dotted name, its default in the form of a command line, and its meaning."""

    name: str
    default: str
    meaning: str


def summary(name: str) -> str:
    """The first line of the docstring of a config that comes with dpx."""
    text = sources.names()[name].read_text(encoding="utf-8")  # read and not imported
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def keys(source: str) -> list[Key]:
    """The keys of `NAME[:arg]` without `experiment`, which is fixed; those that every config has come first.

    Raises:
      FileNotFoundError, ValueError: as `sources.load_config`.
    """
    config = sources.load_config(source)
    meanings = getattr(sources.config_module(source), "MEANINGS", {})
    listed = [
        Key(name, _shown(value, sources.kind_of(config, name)), meanings.get(name, ""))
        for name, value in records.flatten(config).items()
        if name != "experiment"
    ]
    return sorted(listed, key=lambda key: (*sources.KEYS, key.name).index(key.name))


def variants(source: str) -> tuple[str, ...]:
    """The arguments that a config takes after the colon, without `tiny`; the default comes first."""
    return getattr(sources.config_module(source), "VARIANTS", ())


def _shown(value: Any, kind: type) -> str:
    if value is None:
        return f"<{kind.__name__}>"
    if isinstance(value, tuple | list):
        return f"({','.join(map(str, value))}{',' * (len(value) == 1)})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def describe(source: str) -> str:
    """The help of a config's keys, for a command line."""
    name = source.partition(":")[0]
    lines = [f"keys of {source}, with their defaults (<str> has none):"]
    lines += [
        line for key in keys(source) for line in _row(f"--config.{key.name}={key.default}", key[2])
    ]
    if words := variants(source):
        lines += [
            "",
            *textwrap.wrap(f"variants, as in {name}:{words[-1]}: {', '.join(words)}", _WIDTH),
        ]
    return "\n".join(lines)


def overview() -> str:
    """One line for every config that comes with dpx, and another one if it has variants."""
    lines = []
    for name in sources.names():
        lines.append(f"  {name:17}{summary(name)}")
        lines += [f"  {'':17}:{', :'.join(words)}" for words in [variants(name)] if words]
    more = "dpx run --config=NAME[:variant] --help lists the keys of one; every one also takes tiny"
    return "\n".join([*lines, "", more])


def _row(start: str, words: str) -> list[str]:
    """The lines of a table row: `start`, and the words in a column beside it, or below if it is too long."""
    lines = [f"  {'':{_COLUMN}}{line}" for line in textwrap.wrap(words, _WIDTH - _COLUMN)]
    if len(start) > _COLUMN - 2 or not lines:
        return [f"  {start}", *lines]
    return [f"  {start:{_COLUMN}}{lines[0].lstrip()}", *lines[1:]]
