"""What a loss computes from its parameters alone, before any example comes in."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from dpx.clipping import jaxprs

VIEWS = frozenset(
    ("transpose", "reshape", "squeeze", "expand_dims", "convert_element_type", *jaxprs.PLAIN)
)
JOINS = frozenset(("concatenate", "split", "slice"))


class Graph:
    """The equations of a jaxpr that depend on parameters and constants alone."""

    def __init__(self, closed: core.ClosedJaxpr, count: int):
        self.jaxpr, self.consts = closed.jaxpr, closed.consts
        self.leaves = closed.jaxpr.invars[:count]
        self.maker: dict[Any, int] = {}
        # The parameters that each known variable depends on.
        self.depends: dict[Any, frozenset[int]] = {v: frozenset() for v in self.jaxpr.constvars}
        self.depends |= {v: frozenset([k]) for k, v in enumerate(self.leaves)}
        self.plain = set(self.leaves)
        self.used: dict[Any, None] = {}
        for index, eqn in enumerate(self.jaxpr.eqns):
            operands = [v for v in eqn.invars if not isinstance(v, core.Literal)]
            if not eqn.effects and all(v in self.depends for v in operands):
                found = frozenset().union(*(self.depends[v] for v in operands))
                self.depends |= dict.fromkeys(eqn.outvars, found)
                self.maker |= dict.fromkeys(eqn.outvars, index)
                name = eqn.primitive.name
                if name in VIEWS | JOINS and operands and all(v in self.plain for v in operands):
                    self.plain |= set(eqn.outvars)
            else:
                self.used |= dict.fromkeys(v for v in operands if v in self.depends)
        self.used |= dict.fromkeys(v for v in self.jaxpr.outvars if v in self.depends)

    def needed(self, outs: Sequence[Any], stop: Sequence[Any] = ()) -> list[int]:
        """The equations behind variables, in order."""
        found: set[int] = set()
        stack = [v for v in outs if v not in stop]
        while stack:
            index = self.maker.get(stack.pop())
            if index is not None and index not in found:
                found.add(index)
                operands = self.jaxpr.eqns[index].invars
                stack += [v for v in operands if not isinstance(v, core.Literal) and v not in stop]
        return sorted(found)

    def evaluate(self, outs: Sequence[Any], inputs: dict[Any, Any]) -> list[Any]:
        """Variables from their inputs, which are parameters or stand on the way."""
        indices = self.needed(outs, list(inputs))
        return jaxprs.run([self.jaxpr.eqns[i] for i in indices], self.env(inputs), outs)

    def env(self, inputs: dict[Any, Any]) -> dict[Any, Any]:
        """The values of variables, constants included."""
        return dict(zip(self.jaxpr.constvars, self.consts, strict=True)) | inputs

    def core_of(self, var: Any) -> Any:
        """The variable that this one is a mere view of."""
        while (index := self.maker.get(var)) is not None:
            eqn = self.jaxpr.eqns[index]
            if eqn.primitive.name not in VIEWS or len(eqn.invars) != 1 or var in self.plain:
                break
            if not jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating):
                break
            var = eqn.invars[0]
        return var

    def is_trusted(self, outs: Sequence[Any]) -> bool:
        """Whether JAX alone differentiates what leads to these variables."""
        return not any(jaxprs.has_custom_vjp(self.jaxpr.eqns[i]) for i in self.needed(outs))
