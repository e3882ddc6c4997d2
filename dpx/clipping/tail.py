"""What a loss does after its last rematerialised block: as a rule the head and the loss itself.

Two backward passes (`dpx.clipping.two_pass`) need not go through it twice. Cotangents are linear: those of
the second pass are the clip factors times those of the first, so that it starts from what the first one
found where the tail begins. The gradients of the parameters that the tail uses are held, as in one pass, and
so none of its activations are.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from dpx.clipping.jaxprs import REMAT, nested, variables
from dpx.clipping.materialize import accumulator
from dpx.clipping.program import Program


class Tail(NamedTuple):
    """The tail of a loss.

    Attributes:
      start: the number of equations before it.
      crossing: the variables that it takes from these, if they depend on the example.
      uses: indices of the parameters that it uses.
    """

    start: int
    crossing: tuple[Any, ...] = ()
    uses: frozenset[int] = frozenset()


def find(program: Program) -> Tail:
    """The tail; none where nothing is recomputed, or what crosses is narrower than float32."""
    jaxpr = program.closed.jaxpr
    eqns = jaxpr.eqns
    start = max((i + 1 for i, eqn in enumerate(eqns) if _recomputes(eqn)), default=len(eqns))
    none = Tail(len(eqns))
    # Small values that lead on to parameters (`dpx.clipping.common`) need cotangents from all of the loss.
    if start == len(eqns) or program.weights is not None:
        return none
    leaves = jaxpr.invars[: len(program.choices)]
    direct = {v for v, c in zip(leaves, program.choices, strict=True) if c.rule is None}
    tapped = {use.path[0] for uses in program.captured.uses for use in uses}
    own = direct.union(jaxpr.invars[len(leaves) :])
    for i, eqn in enumerate(eqns[:start]):
        if i in tapped or any(v in own for v in variables(eqn)):
            own.update(eqn.outvars)
    later = {v for eqn in eqns[start:] for v in variables(eqn)}
    crossing = [v for eqn in eqns[:start] for v in eqn.outvars if v in own and v in later]
    crossing = [v for v in crossing if jnp.issubdtype(v.aval.dtype, jnp.floating)]
    if any(accumulator(v.aval.dtype) != v.aval.dtype for v in crossing):
        return none
    uses = {use.param for uses in program.captured.uses for use in uses if use.path[0] >= start}
    uses |= {k for k, v in enumerate(leaves) if v in direct and v in later}
    return Tail(start, tuple(crossing), frozenset(uses))


def _recomputes(eqn: Any) -> bool:
    return any(each.primitive.name in REMAT for each in nested(eqn))
