"""Whether derivatives that are written by hand are linear in the cotangents of results.

Two passes scale the losses by the clip factors and differentiate them together. That is the sum of the
clipped gradients because differentiation is linear: w times a loss has w times its gradient. The backward
pass of a `jax.custom_vjp` need not be: one that returns the sign of a cotangent gives the same gradient for
every w, and an example would add more than the threshold. Nor need an iterative solver be, which stops when
the error is small. A `jax.custom_jvp` is linear in tangents, which JAX transposes; but its rule may call such
a solver, or a transpose that somebody wrote. So each is traced, and must be known to be linear.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from dpx.clipping import custom, jaxprs

ZERO, FIXED, LINEAR = range(3)

# Linear in the first operand alone.
FIRST = frozenset((
    "broadcast_in_dim", "conj", "copy", "cumsum", "dynamic_slice", "expand_dims", "fft", "gather", "imag",
    "neg", "real", "reduce_sum", "reduce_window_sum", "reshape", "rev", "slice", "split", "squeeze",
    "stop_gradient", "transpose", "unstack", *jaxprs.LAYOUT,
))  # fmt: skip

# Linear in all operands together, apart from indices.
TOGETHER = frozenset((
    *jaxprs.PLAIN, "add", "add_any", "complex", "concatenate", "dynamic_update_slice", "pad", "scatter",
    "scatter-add", "scatter_add", "sub",
))  # fmt: skip

# Linear in each operand.
PRODUCTS = frozenset((*jaxprs.PRODUCTS, "mul", "ragged_dot", "ragged_dot_general"))

# What holds the body of an equation that only evaluates it.
BODIES = (
    jaxprs.CALLS
    | dict.fromkeys(jaxprs.REMAT, "jaxpr")
    | dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call_jaxpr")
    | {"custom_vjp_call_jaxpr": "fun_jaxpr", "custom_vmap_call": "call"}
)


class _UnclearError(Exception):
    """A value is not known to be linear in the cotangents."""


def unclear(jaxpr: Any, count: int) -> str | None:
    """The name of a backward pass that is not known to be linear; None where all are.

    The first `count` inputs are the parameters, by which the jaxpr is differentiated.
    """
    return _unclear(jaxpr, custom.taken(jaxpr, count), set())


def _unclear(jaxpr: Any, taken: dict[Any, list[int]], seen: set[int]) -> str | None:
    seen.add(id(jaxpr))
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in (*custom.NAMES, *custom.FORWARDS):
            if (which := taken.get(eqn)) is not None:
                traced = custom.backward(eqn, which)
                if traced is None or not _is_linear(traced.closed.jaxpr, len(eqn.invars)):
                    return custom.title(eqn)
            continue
        elif name == "custom_linear_solve" and eqn.params["jaxprs"].transpose_solve is not None:
            solver, given = (eqn.params[n].transpose_solve for n in ("jaxprs", "const_lengths"))
            if not _is_linear(solver.jaxpr, given):
                return "the solver of jax.lax.custom_linear_solve"
        elif name in custom.TRANSPOSED:
            return f"the transpose of a {name}"
        for inner in (getattr(each, "jaxpr", each) for each in jaxprs.inside(eqn)):
            found = None if id(inner) in seen else _unclear(inner, taken, seen)
            if found is not None:
                return found
    return None


def _is_linear(jaxpr: Any, given: int) -> bool:
    """Whether all results are linear in the inputs after the first ones, which are given."""
    count = len(jaxpr.invars) - given
    try:
        return FIXED not in _results(jaxpr, [FIXED] * given + [LINEAR] * count)
    except _UnclearError:
        return False


def _results(closed: Any, kinds: Sequence[int]) -> list[int]:
    """What the results of a jaxpr are, if its inputs are of these kinds."""
    jaxpr = getattr(closed, "jaxpr", closed)
    known = dict.fromkeys(jaxpr.constvars, FIXED) | dict(zip(jaxpr.invars, kinds, strict=True))

    def look(atom: Any) -> int:
        if not isinstance(atom, core.Literal):
            return known[atom]
        return FIXED if np.any(np.asarray(atom.val) != 0) else ZERO

    for eqn in jaxpr.eqns:
        found = _of(eqn, [look(atom) for atom in eqn.invars])
        known.update(zip(eqn.outvars, found, strict=True))
    return [look(atom) for atom in jaxpr.outvars]


def _of(eqn: Any, kinds: list[int]) -> Sequence[int]:
    name, count = eqn.primitive.name, len(eqn.outvars)
    if name in BODIES:
        return _results(eqn.params[BODIES[name]], kinds)
    if name == "scan":
        return _scan(eqn.params, kinds)
    if name == "optimization_barrier":
        return kinds
    if name == "cond" and kinds[0] != LINEAR:
        found = [_results(branch, kinds[1:]) for branch in eqn.params["branches"]]
        return [_together(each) for each in zip(*found, strict=True)]
    return [_one(name, eqn, kinds)] * count


def _one(name: str, eqn: Any, kinds: list[int]) -> int:
    """What all results of an equation without a body are."""
    if LINEAR not in kinds and ZERO not in kinds:
        return FIXED
    first, *others = kinds
    if name in FIRST and LINEAR not in others:
        return first
    if name == "convert_element_type" and not _narrows(eqn):
        return first
    if name in TOGETHER:
        arrays = zip(eqn.invars, kinds, strict=True)
        return _together([k for v, k in arrays if jnp.issubdtype(v.aval.dtype, jnp.inexact)])
    if name == "select_n" and first != LINEAR:
        return _together(others)
    if name in PRODUCTS and kinds.count(LINEAR) < 2:
        return ZERO if ZERO in kinds else max(kinds)
    if name == "div" and others != [LINEAR]:
        return first
    if name == "triangular_solve" and first != LINEAR:
        return others[0]
    if LINEAR in kinds:
        raise _UnclearError
    return FIXED


def _together(kinds: Sequence[int]) -> int:
    """What a sum of values is, or a choice among them."""
    if LINEAR in kinds and FIXED in kinds:
        raise _UnclearError  # Which no factor scales.
    return max(kinds, default=FIXED)


def _narrows(eqn: Any) -> bool:
    """Whether an equation rounds to a type of fewer bits, or to integers."""
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return not jnp.issubdtype(new, jnp.inexact) or new.itemsize < old.itemsize


def _scan(params: dict[str, Any], kinds: list[int]) -> list[int]:
    first, last = jaxprs.scan_parts(params)
    carry = kinds[first:last]
    while True:
        found = _results(params["jaxpr"], [*kinds[:first], *carry, *kinds[last:]])
        after = [_together(both) for both in zip(carry, found[: last - first], strict=True)]
        if after == carry:
            return [*carry, *found[last - first :]]
        carry = after
