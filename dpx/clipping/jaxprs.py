"""Reads jaxprs and evaluates their equations, whichever of JAX's releases they come from."""

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.extend import core
from jax.extend.core.primitives import closed_call_p
from jax.lax import DotAlgorithmPreset, Precision

# Primitives that only call a jaxpr, and the name of the parameter that holds it. Since JAX 0.11
# `closed_call_p` is called eval_jaxpr, a name that another primitive had before.
CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", closed_call_p.name: "call_jaxpr", "core_call": "call_jaxpr",
}  # fmt: skip
REMAT = ("checkpoint", "remat", "remat2")
# Primitives whose results are their operands, and whose cotangents pass unchanged.
PLAIN = ("copy", "copy_p", "name", "sharding_constraint", "optimization_barrier")
# Primitives that say how values are laid out on devices, and exchange nothing.
LAYOUT = ("pvary", "pcast", "reshard", "mesh_cast", "sharding_constraint", "core_pvary")
# The values of variables, as a tree of JAX, whose keys need no order.
Values = collections.OrderedDict


def values(atoms: Iterable[Any], env: dict) -> list:
    """The values of variables, which `env` has, and of constants."""
    return [atom.val if isinstance(atom, core.Literal) else env[atom] for atom in atoms]


def variables(eqn: Any) -> list[Any]:
    """The operands of an equation that are variables."""
    return [v for v in eqn.invars if not isinstance(v, core.Literal)]


def carried(eqn: Any) -> tuple[int, int]:
    """Where a loop's operands turn from constants to carry, and to slices: other equations have constants."""
    if eqn.primitive.name != "scan":
        kept = len(eqn.outvars) if eqn.primitive.name == "while" else 0
        return len(eqn.invars) - kept, len(eqn.invars)
    if "num_consts" in (params := eqn.params):
        return params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, carry, _ = (len(list(part)) for part in params["ft_in"].unpack())  # Since JAX 0.11.
    return consts, consts + carry


def scan_options(eqn: Any) -> dict[str, Any]:
    """The options of `lax.scan` that an equation has."""
    return {name: eqn.params[name] for name in ("length", "reverse", "unroll")}


def bind(eqn: Any, values: list) -> list[Any]:
    """The results of an equation."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    # Until 0.10.1 JAX returned the functions of a call apart from its other parameters.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*functions, *values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def flat(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same jaxpr with the equations of what it calls in place of the calls."""
    variables, consts, eqns = [], [], []

    def enter(called: core.ClosedJaxpr, given: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr, whose equations get variables of their own in each call."""
        jaxpr, own = called.jaxpr, [core.Var(v.aval) for v in called.jaxpr.constvars]
        variables.extend(own)
        consts.extend(called.consts)
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*own, *given), strict=True))

        def named(atoms: Sequence[Any]) -> list[Any]:
            return [v if isinstance(v, core.Literal) else env[v] for v in atoms]

        for eqn in jaxpr.eqns:
            if (name := eqn.primitive.name) in CALLS:
                results = enter(as_closed(eqn.params[CALLS[name]]), named(eqn.invars))
            else:
                results = [core.Var(v.aval) for v in eqn.outvars]
                eqns.append(eqn.replace(invars=named(eqn.invars), outvars=results))
            env.update(zip(eqn.outvars, results, strict=True))
        return named(jaxpr.outvars)

    outs = enter(closed, closed.jaxpr.invars)
    jaxpr = closed.jaxpr.replace(constvars=variables, eqns=eqns, outvars=outs)
    return core.ClosedJaxpr(jaxpr, consts)


def as_closed(jaxpr: Any) -> core.ClosedJaxpr:
    """A jaxpr with what it closes over. Where it came alone, that is among its inputs, before the others."""
    return jaxpr if hasattr(jaxpr, "consts") else core.ClosedJaxpr(opened(jaxpr), ())


def opened(jaxpr: Any) -> Any:
    """The jaxpr with its constants as inputs before the others. Since JAX 0.12 it holds their values too."""
    own = {"consts": []} if hasattr(jaxpr, "consts") else {}
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], **own)


def peak_bytes(jaxpr: Any) -> int:
    """The most bytes that results of equations hold at once, each from where it is made to its last use.

    The results of the jaxpr are held to its end. A compiler that joins equations holds less.
    """
    last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in variables(eqn)}
    last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    most, now, ends = 0, 0, collections.Counter[int]()
    for i, eqn in enumerate(jaxpr.eqns):
        within = [peak_bytes(each.jaxpr) for each in inside(eqn)]
        most = max(most, now + sum(map(_bytes, eqn.outvars)) + max(within, default=0))
        for v in filter(last.__contains__, eqn.outvars):
            now += _bytes(v)
            ends[last[v]] += _bytes(v)
        now -= ends[i]
    return most


def _bytes(var: Any) -> int:
    return var.aval.size * getattr(var.aval.dtype, "itemsize", 4)


def inside(eqn: Any) -> Iterator[core.ClosedJaxpr]:
    """The jaxprs in the parameters of an equation, with what they close over."""
    for value in getattr(eqn, "params", {}).values():  # A reader adds equations without any.
        for inner in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield as_closed(inner)


def is_exact(params: dict[str, Any]) -> bool:
    """Whether an equation multiplies, if at all, at the highest precision."""
    precision = params.get("precision", Precision.HIGHEST)
    both = precision if isinstance(precision, tuple) else (precision,)
    return all(each in (Precision.HIGHEST, DotAlgorithmPreset.F32_F32_F32) for each in both)


def gain(eqn: Any) -> float | None:
    """The number by which an equation multiplies the one array that it takes; None where it does not."""
    name = eqn.primitive.name
    if name not in ("neg", "mul", "div") or len(variables(eqn)) != 1:
        return None
    number = next((complex(v.val) for v in eqn.invars if isinstance(v, core.Literal)), -1.0)
    if number.imag or (name == "div" and (not number or isinstance(eqn.invars[0], core.Literal))):
        return None
    return 1 / number.real if name == "div" else number.real


def walked(
    jaxpr: Any, own: Sequence[bool], ever: bool = False
) -> list[tuple[Any, list[bool], frozenset[str]]]:
    """All equations of a jaxpr and of what it calls, once for each way in which they are called.

    `own` says of each input whether it is the example's own. With each equation comes, for each operand,
    whether it depends on such inputs, and the names of the axes of a `shard_map` around the equation, whose
    devices hold parts of one example. What a loop carries depends on them if it does in every iteration. With
    `ever` all does of which `jax.vmap` makes one value for each example: what does in one iteration, and all
    that is carried by loops that the example ends, or given to branches that it chooses.
    """
    visited: list[tuple[Any, list[bool], frozenset[str]]] = []
    known: dict[Any, list[bool]] = {}

    def follow(jaxpr: Any, own: Sequence[bool], axes: frozenset[str]) -> list[bool]:
        """Which results depend on inputs that are an example's own."""
        if (key := (jaxpr, axes, *own)) in known:
            return known[key]
        depends = dict(zip(jaxpr.invars, own, strict=True))

        def of(atoms: Sequence[Any]) -> list[bool]:
            return [not isinstance(v, core.Literal) and depends.get(v, False) for v in atoms]

        for eqn in jaxpr.eqns:
            given, name, params = of(eqn.invars), eqn.primitive.name, eqn.params
            visited.append((eqn, given, axes))
            inner, results = [*inside(eqn)], [any(given)] * len(eqn.outvars)
            if name == "scan":
                results = in_loop(params["jaxpr"].jaxpr, [*given], *carried(eqn), axes)
            elif name == "while":
                consts, first = params["cond_nconsts"], params["body_nconsts"]
                body = params["body_jaxpr"].jaxpr
                results = in_loop(body, given[consts:], first, None, axes)
                ends = follow(params["cond_jaxpr"].jaxpr, [*given[:consts], *results], axes)
                if ever and any(ends):  # `jax.vmap` then carries all for each example.
                    carried_too = [*given[consts : consts + first], *(True for _ in results)]
                    results = in_loop(body, carried_too, first, None, axes)
            else:
                within = params.get("newly_manual_axes", params.get("manual_axes", ()))
                within = axes.union(within if name == "shard_map" else ())
                for each in inner:
                    count = len(each.jaxpr.invars)
                    flags = given[1:] if name == "cond" else given
                    # Where an example chooses a branch `jax.vmap` runs them all.
                    if count != len(flags) or (ever and name == "cond" and given[0]):
                        flags = [any(given)] * count
                    ends = follow(each.jaxpr, flags, within)
                    if len(inner) == 1 and len(ends) == len(results):
                        results = ends
            depends.update(zip(eqn.outvars, results, strict=True))
        known[key] = of(jaxpr.outvars)
        return known[key]

    def in_loop(body: Any, given: list, first: int, last: Any, axes: frozenset) -> list[bool]:
        """The same of the results of a loop that carries a part of what it is given."""
        while True:
            ends, carry = follow(body, given, axes), given[first:last]
            given[first:last] = merged = [*map(max if ever else min, carry, ends)]
            if merged == carry:
                return [*carry, *ends[len(carry) :]]

    follow(jaxpr, own, frozenset())
    return visited
