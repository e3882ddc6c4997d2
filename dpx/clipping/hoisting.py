"""Functions of weights inside scans, moved in front of them.

A scan that slices a stacked weight, or shares one, may make something of it in every iteration: a mask, a
scale, tanh(W). That depends on no example and on no iteration before, so that all of it can be computed at
once, where `dpx.clipping.weights` finds it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from dpx.clipping import jaxprs
from dpx.clipping.parameter_graph import JOINS, VIEWS


def hoisted(closed: core.ClosedJaxpr, count: int) -> core.ClosedJaxpr:
    """The same flat jaxpr, its first `count` inputs being parameters."""
    jaxpr = closed.jaxpr
    if not any(eqn.primitive.name == "scan" for eqn in jaxpr.eqns):
        return closed

    def evaluate(*arguments: Any) -> list[Any]:
        env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env |= dict(zip(jaxpr.invars, arguments, strict=True))
        known = set(jaxpr.invars[:count])
        for eqn in jaxpr.eqns:
            mine = [v in known for v in eqn.invars if not isinstance(v, core.Literal)]
            if eqn.primitive.name != "scan" or not any(mine):
                jaxprs.run([eqn], env, ())
                if mine and all(mine) and not eqn.effects:
                    known.update(eqn.outvars)
                continue
            values = [v.val if isinstance(v, core.Literal) else env[v] for v in eqn.invars]
            flags = [not isinstance(v, core.Literal) and v in known for v in eqn.invars]
            env.update(zip(eqn.outvars, _scan(eqn, values, flags), strict=True))
        return jaxprs.run((), env, jaxpr.outvars)

    return jax.make_jaxpr(evaluate)(*closed.in_avals)


def _scan(eqn: Any, values: Sequence[Any], known: Sequence[bool]) -> list[Any]:
    """Evaluates a scan without what its body makes of operands that are known."""
    params = eqn.params
    body, (first, last) = jaxprs.flat(params["jaxpr"]), jaxprs.scan_parts(params)
    invars = body.jaxpr.invars
    consts = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
    consts |= dict(zip(invars[:first], values[:first], strict=True))
    slices = dict(zip(invars[last:], values[last:], strict=True))
    flags = zip(invars, known, strict=True)
    inputs = [v for v, is_known in flags if is_known and v not in invars[first:last]]
    of_shared, of_slices, shared, stacked = _ahead(body.jaxpr, inputs, slices)
    before = {**consts}
    once = jaxprs.run(of_shared, before, shared) if shared or stacked else []
    mine = [v for v in slices if v in inputs]

    def of_one(*found: Any) -> list[Any]:
        return jaxprs.run(of_slices, before | dict(zip(mine, found, strict=True)), stacked)

    each = jax.vmap(of_one)(*(slices[v] for v in mine)) if stacked else []
    rest = [e for e in body.jaxpr.eqns if not any(v in (*shared, *stacked) for v in e.outvars)]

    def step(carry: Any, inputs: Any) -> tuple[list, list]:
        xs, each = inputs
        env = consts | dict(zip(invars[first:], [*carry, *xs], strict=True))
        env |= dict(zip([*shared, *stacked], [*once, *each], strict=True))
        found = jaxprs.run(rest, env, body.jaxpr.outvars)
        return found[: last - first], found[last - first :]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(step, [*values[first:last]], ([*values[last:]], each), **options)
    return [*carry, *ys]


def _ahead(
    jaxpr: core.Jaxpr, inputs: Sequence[Any], slices: Iterable[Any]
) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """What can be computed from `inputs` ahead of a scan: from what all iterations share, and from `slices`.

    Returns:
      The equations of both kinds, and of their results those that other equations take. Mere views of inputs
      stay where they are.
    """
    depends, plain, sliced = set(inputs), set(inputs), set(slices)
    ready = {*inputs, *jaxpr.constvars}
    maker, eqns, taken = {}, [], []
    for eqn in jaxpr.eqns:
        operands = jaxprs.variables(eqn)
        if eqn.effects or not all(v in ready for v in operands):
            taken += [v for v in operands if v in depends and v not in plain]
            continue
        eqns.append(eqn)
        ready.update(eqn.outvars)
        maker |= dict.fromkeys(eqn.outvars, eqn)
        for kind in (depends, sliced):
            if any(v in kind for v in operands):
                kind.update(eqn.outvars)
        if eqn.primitive.name in VIEWS | JOINS and all(v in plain for v in operands):
            plain.update(eqn.outvars)
    # All results of an equation, or none.
    outs = list(dict.fromkeys(out for v in taken for out in maker[v].outvars))
    of_slices = [e for e in eqns if any(v in sliced for v in e.outvars)]
    of_shared = [e for e in eqns if e not in of_slices]
    return (
        of_shared,
        of_slices,
        [v for v in outs if v not in sliced],
        [v for v in outs if v in sliced],
    )
