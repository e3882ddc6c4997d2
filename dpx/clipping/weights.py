"""Functions of weights alone: penalties, weight norm, spectral norm, masks, scales.

What a loss computes from its parameters before any example comes in is the same for all examples. It is taken
out of the loss: `inner` is the loss as a function of the parameters and of what was taken out, which is
of two kinds. A *small* value (the sum of squares of a penalty, the norms of columns) has a gradient for each
example that is small as well, and leads on to each parameter by a product with a fixed array. A *derived*
weight is a parameter times an array, entry by entry, or another function of that kind; its uses are uses of
the parameter, times the derivative. Inside it stand small values, which are broadcast.

What is not of this kind stays in the loss, and falls back to per-example gradients there.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from dpx.clipping import jaxprs, pullback
from dpx.clipping.parameter_graph import Graph

# Parameters with fewer elements are not worth it: their per-example gradients are held. Of one axis, they are
# biases and scales as a rule, of which the loss makes no weights.
LEAST, LEAST_OF_ONE_AXIS = 256, 4096

# A value is small if this many of it are as large as the parameter.
SMALL = 8


class Multiple(NamedTuple):
    """A fixed array: input `base` of the function times what varies over the axes `ratio` alone.

    With `base` None, the array itself, of which only the axes `ratio` are more than one entry long.
    """

    base: int | None
    ratio: frozenset[int]


class Small(NamedTuple):
    """A small value, and how each parameter's gradient follows from its own.

    Attributes:
      var: the variable.
      is_input: whether the loss uses it directly.
      leads: for each parameter that it depends on, the axes of the value that those of the parameter follow
        (None: no axis), and the array.
      pull: parameters in the order of `inputs`, cotangent -> their cotangents.
      inputs: indices of the parameters that `pull` takes.
    """

    var: Any
    is_input: bool
    leads: dict[int, tuple[tuple[int | None, ...], Multiple]]
    pull: pullback.Derivative
    inputs: tuple[int, ...]


class Derived(NamedTuple):
    """A weight of the shape of the parameters `scales`, of which it is an entry-by-entry function.

    Attributes:
      var: the variable.
      scales: for each parameter, the axes over which the derivative varies.
      smalls: for each small value inside, its index, the axes that its own stand for, and the derivative.
      pull: parameters in the order of `inputs`, small values in that of `smalls`, at full size, cotangent
        -> their cotangents.
      inputs: indices of the parameters that `pull` takes.
    """

    var: Any
    scales: dict[int, frozenset[int]]
    smalls: list[tuple[int, tuple[int, ...], Multiple]]
    pull: pullback.Derivative
    inputs: tuple[int, ...]


class Weights(NamedTuple):
    """A loss without its functions of weights.

    Attributes:
      inner: (parameters, small values that are inputs, derived weights, example) -> loss.
      smalls, derived: what was taken out.
      values: parameters -> small values, derived weights.
    """

    inner: core.ClosedJaxpr
    smalls: list[Small]
    derived: list[Derived]
    values: Callable[[Sequence[jax.Array]], tuple[list, list]]

    @property
    def scaled(self) -> list[dict[int, frozenset[int]]]:
        """For each input of the inner loss after the parameters, those that it is a derived weight of."""
        return [{} for small in self.smalls if small.is_input] + [d.scales for d in self.derived]

    def leads(self, param: int) -> list[tuple[int, tuple[int | None, ...], Multiple]]:
        """The small values that lead on to a parameter, and how."""
        return [
            (j, *small.leads[param]) for j, small in enumerate(self.smalls) if param in small.leads
        ]


def is_large(shape: Sequence[int]) -> bool:
    """Whether it is worth it to look for functions of a parameter of this shape."""
    axes = sum(n > 1 for n in shape)
    return math.prod(shape) >= (LEAST if axes > 1 else LEAST_OF_ONE_AXIS)


def find(
    closed: core.ClosedJaxpr, count: int, large: Sequence[int], refused: set[Any]
) -> Weights | None:
    """Takes functions of the parameters `large` out of a flat jaxpr; None where there is none.

    Args:
      closed: the loss, (parameters, example) -> loss, without calls.
      count: the number of parameters.
      large: indices of parameters for which it is worth it.
      refused: variables of derived weights that are to stay, because a use of them has no rule.
    """
    graph = Graph(closed, count)
    smalls: list[Small] = []
    derived: list[Derived] = []
    seen: dict[Any, int] = {}

    def small(var: Any, is_input: bool) -> int:
        """The index of a small value, found anew or again."""
        if var not in seen:
            found = _lead(graph, var, is_input)
            seen[var] = len(smalls)
            smalls.append(found)
        elif is_input:
            smalls[seen[var]] = smalls[seen[var]]._replace(is_input=True)
        return seen[var]

    boundary = dict.fromkeys(graph.core_of(v) for v in graph.used if v not in graph.plain)
    for var in boundary:
        if var in graph.plain or var in refused or not graph.depends[var].intersection(large):
            continue
        if not jnp.issubdtype(var.aval.dtype, jnp.floating):
            continue
        before = len(smalls), dict(seen)
        try:
            biggest = max(graph.leaves[k].aval.size for k in graph.depends[var])
            if var.aval.size * SMALL <= biggest:
                small(var, True)
            else:
                derived.append(_derive(graph, var, small))
        except pullback.UnclearError:
            del smalls[before[0] :]
            seen.clear()
            seen.update(before[1])
    if not smalls and not derived:
        return None
    inputs = [s.var for s in smalls if s.is_input] + [d.var for d in derived]
    rest = closed.jaxpr.invars[count:]

    def inner(*arguments: Any) -> Any:
        names = [*graph.leaves, *inputs, *rest]
        env = graph.env(dict(zip(names, arguments, strict=True)))
        kept = [e for e in closed.jaxpr.eqns if not all(v in inputs for v in e.outvars)]

        def evaluate(eqn: Any, operands: Sequence[Any]) -> list[Any]:
            results = zip(eqn.outvars, jaxprs.bind(eqn, list(operands)), strict=True)
            return [env[v] if v in inputs else result for v, result in results]

        return jaxprs.run(kept, env, closed.jaxpr.outvars, evaluate)

    def values(leaves: Sequence[jax.Array]) -> tuple[list, list]:
        outs = [s.var for s in smalls], [d.var for d in derived]
        found = graph.evaluate([*outs[0], *outs[1]], dict(zip(graph.leaves, leaves, strict=True)))
        return found[: len(smalls)], found[len(smalls) :]

    traced = jax.make_jaxpr(inner)(*_avals([*graph.leaves, *inputs, *rest]))
    live, _ = dce_jaxpr(traced.jaxpr, [True], instantiate=True)
    traced = core.ClosedJaxpr(live, traced.consts)
    return Weights(traced, smalls, derived, values)


def _lead(graph: Graph, var: Any, is_input: bool) -> Small:
    """A small value, with the derivative that leads on from it.

    Raises:
      UnclearError: an entry of a parameter influences more than one of its entries.
    """
    inputs = tuple(sorted(graph.depends[var]))
    leaves = [graph.leaves[k] for k in inputs]
    pull = _pull(graph, var, leaves)
    traced = jax.make_jaxpr(pull)(_avals(leaves), _avals([var])[0])
    derivative = pullback.read(traced, len(inputs), graph.is_trusted([var]))
    long = [i for i, n in enumerate(var.aval.shape) if n > 1]
    leads = {}
    for i, (k, value) in enumerate(zip(inputs, derivative.results, strict=True)):
        if value.axes is None:
            continue  # Zero, as it is linear.
        if sorted(a for a in value.axes if a is not None) != long:
            raise pullback.UnclearError
        leads[k] = (value.axes, _multiple(value, {i: k}))
    return Small(var, is_input, leads, derivative, inputs)


def _multiple(value: pullback.Value, bases: dict[int, int]) -> Multiple:
    base = bases.get(-1 if value.base is None else value.base)
    return Multiple(base, value.varies if base is None else value.ratio)


def _derive(graph: Graph, var: Any, small: Callable[[Any, bool], int]) -> Derived:
    """A derived weight, with its derivatives.

    Raises:
      UnclearError: it is no function of parameters entry by entry.
    """
    cuts = _cuts(graph, var)
    depends = sorted(
        {k for i in graph.needed([var], list(cuts)) for v in graph.jaxpr.eqns[i].invars
         for k, leaf in enumerate(graph.leaves) if v is leaf and v not in cuts}
    )  # fmt: skip
    leaves = [graph.leaves[k] for k in depends]
    pull = _pull(graph, var, [*leaves, *cuts])
    shape = var.aval.shape
    wide = [var.aval.update(dtype=t.aval.dtype) for t, _ in cuts.values()]
    traced = jax.make_jaxpr(pull)([*_avals(leaves), *wide], _avals([var])[0])
    trusted = not any(
        jaxprs.has_custom_vjp(graph.jaxpr.eqns[i]) for i in graph.needed([var], list(cuts))
    )
    varies = {
        len(leaves) + i: frozenset(a for a, n in zip(axes, t.aval.shape, strict=True) if n > 1)
        for i, (t, axes) in enumerate(cuts.values())
    }
    derivative = pullback.read(traced, len(traced.in_avals) - 1, trusted, varies)
    bases = {i: k for i, k in enumerate(depends) if graph.leaves[k].aval.shape == shape}
    scales, smalls = {}, []
    for i, value in enumerate(derivative.results):
        # What does not follow the cotangent at all is zero, as all of this is linear.
        if value.axes is not None and not value.follows(shape):
            raise pullback.UnclearError
        if i >= len(depends):
            t, axes = list(cuts.values())[i - len(depends)]
            smalls.append((small(t, False), axes, _multiple(value, bases)))
        elif value.axes is not None:
            if i not in bases:
                raise pullback.UnclearError
            scales[depends[i]] = value.varies
    if not scales:
        raise pullback.UnclearError
    return Derived(var, scales, smalls, derivative, tuple(depends))


def _cuts(graph: Graph, var: Any) -> dict[Any, tuple[Any, tuple[int, ...]]]:
    """Where small values are broadcast on the way to a weight: variable -> small value, its axes there."""
    cuts: dict[Any, tuple[Any, tuple[int, ...]]] = {}
    seen, stack = {var}, [var]
    while stack:
        index = graph.maker.get(stack.pop())
        if index is None:
            continue
        eqn = graph.jaxpr.eqns[index]
        name, out = eqn.primitive.name, eqn.outvars[0]
        for v in eqn.invars:
            if isinstance(v, core.Literal) or not graph.depends[v]:
                continue
            is_small = v.aval.size * SMALL <= var.aval.size and jnp.issubdtype(
                v.aval.dtype, jnp.floating
            )
            if not is_small:
                if v not in seen:
                    seen.add(v)
                    stack.append(v)
            elif out.aval.shape != var.aval.shape:
                raise pullback.UnclearError
            elif name == "broadcast_in_dim":
                cuts[out] = (v, tuple(eqn.params["broadcast_dimensions"]))
            elif name in pullback.ELEMENTWISE and v.aval.ndim in (0, out.aval.ndim):
                cuts[v] = (v, tuple(range(v.aval.ndim)))
            else:
                raise pullback.UnclearError
    return cuts


def _avals(variables: Sequence[Any]) -> list[Any]:
    return [v.aval for v in variables]


def _pull(graph: Graph, outs: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    """(values of inputs, cotangent of a variable) -> cotangents of those inputs."""

    def apply(values: Sequence[Any], cotangent: Any) -> Any:
        def forward(values: Sequence[Any]) -> Any:
            return graph.evaluate([outs], dict(zip(inputs, values, strict=True)))[0]

        return jax.vjp(forward, list(values))[1](cotangent)[0]

    return apply
