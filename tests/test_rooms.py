"""The rooms of dpx, its files and folders, import one another in one direction."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import dpx

ROOT = Path(dpx.__file__).parent


def imported(text: str) -> Iterator[str]:
    """The rooms that a module imports from, at its top or within a function, and what dpx never imports."""
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import, which this test does not follow"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            first, *rest = name.split(".")
            if first in ("configs", "experiments"):
                yield first
            elif first == "dpx" and rest:
                yield rest[0]


def arrows() -> dict[str, set[str]]:
    """For each room, those that it imports from."""
    found: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).with_suffix("").parts[0]
        found.setdefault(room, set()).update(set(imported(path.read_text())) - {room})
    return found


def test_no_room_imports_from_one_above_it():
    rooms = arrows()
    assert {"privacy", "noise", "training", "nn", "runs"} <= rooms.keys()
    list(graphlib.TopologicalSorter(rooms).static_order())  # raises for a circle
    rooms["privacy"].update(imported("def f():\n    from dpx.training import fit"))
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter(rooms).static_order())


@pytest.mark.slow
def test_nothing_but_its_command_imports_the_launcher():
    assert [room for room, others in arrows().items() if "runs" in others] == ["_command"]
    assert not any({"configs", "experiments"} & others for others in arrows().values())
