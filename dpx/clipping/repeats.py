"""Equations that a jaxpr repeats, such as those of blocks that nobody scanned, differentiated only once.

JAX keeps the derivative of a function under `jax.jit`, and its form for a batch, for the next call. Equations
that stand one after the other, and again elsewhere, are made such a function. It is inlined, so that the
compiler sees the equations that it would see without.
"""

import functools
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from dpx.clipping.jaxprs import Evaluate, run, variables


class Repeat(NamedTuple):
    """Equations that stand elsewhere too.

    Attributes:
      function: their results, of their operands.
      operands, results: the variables that they take from outside, and those that are taken outside.
      after: the equation that comes next.
    """

    function: Callable[..., list]
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    after: int


def find(jaxpr: core.Jaxpr, alone: Container[int], evaluate: Evaluate) -> dict[int, Repeat]:
    """The equations of a jaxpr that are repeated, by the first of each run.

    Args:
      jaxpr: what is evaluated.
      alone: equations that are in no run.
      evaluate: what evaluates the others.
    """
    last: dict[Any, int] = {}  # Where each variable is taken last.
    for i, eqn in enumerate(jaxpr.eqns):
        last.update(dict.fromkeys(variables(eqn), i))
    last.update({v: len(jaxpr.eqns) for v in jaxpr.outvars if not isinstance(v, core.Literal)})
    runs: dict[Any, list[tuple[int, int, tuple, tuple]]] = {}  # All runs of one form.
    start = 0
    for i in range(len(jaxpr.eqns) + 1):
        if i < len(jaxpr.eqns) and i not in alone and not jaxpr.eqns[i].effects:
            continue
        if i - start > 1:
            key, operands, results = _form(jaxpr.eqns[start:i], i, last)
            runs.setdefault(key, []).append((start, i, operands, results))
        start = i + 1
    found = {}
    for places in runs.values():
        if len(places) > 1:
            first, after, operands, results = places[0]
            function = _function(jaxpr.eqns[first:after], operands, results, evaluate)
            for first, after, operands, results in places:
                found[first] = Repeat(function, operands, results, after)
    return found


def _form(eqns: Sequence[Any], after: int, last: dict[Any, int]) -> tuple[Any, tuple, tuple]:
    """What is the same of all runs of one form, and the operands and results of this one."""
    number: dict[Any, int] = {}
    operands, form = [], []
    for eqn in eqns:
        atoms = []
        for atom in eqn.invars:
            if isinstance(atom, core.Literal):
                value = np.asarray(atom.val)
                atoms.append((value.tobytes(), atom.aval))
                continue
            if atom not in number:
                number[atom] = len(number)
                operands.append(atom)
            atoms.append(number[atom])
        for var in eqn.outvars:
            number[var] = len(number)
        params = tuple((name, *_hashable(value)) for name, value in sorted(eqn.params.items()))
        form.append((eqn.primitive, eqn.ctx, params, tuple(atoms)))
    results = tuple(v for eqn in eqns for v in eqn.outvars if last.get(v, 0) >= after)
    avals = tuple(v.aval for v in operands)
    return (tuple(form), avals, tuple(number[v] for v in results)), tuple(operands), results


def _hashable(value: Any) -> tuple[type, Any]:
    """What is equal for equal values; a value that has no hash is equal to itself alone."""
    try:
        hash(value)
    except TypeError:
        return type(value), id(value)
    return type(value), repr(value) if isinstance(value, float) else value


def _function(eqns: Sequence[Any], operands: tuple, results: tuple, evaluate: Evaluate) -> Callable:
    @functools.partial(jax.jit, inline=True)
    def repeated(*values: Any) -> list[Any]:
        return run(eqns, dict(zip(operands, values, strict=True)), results, evaluate)

    return repeated
