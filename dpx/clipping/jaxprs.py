"""Reads jaxprs and evaluates their equations, whichever of JAX's releases they come from."""

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.extend import core
from jax.extend.core.primitives import closed_call_p
from jax.lax import DotAlgorithmPreset, Precision

# Equations that only call a jaxpr: the name of the parameter that holds it. Since JAX 0.11 `closed_call_p` is
# called eval_jaxpr, a name that another primitive had before.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    closed_call_p.name: "call_jaxpr",
    "core_call": "call_jaxpr",
}
REMAT = ("checkpoint", "remat", "remat2")
# Equations whose results are their operands, and whose cotangents pass unchanged.
PLAIN = ("copy", "copy_p", "name", "sharding_constraint", "optimization_barrier")
# They say how values are laid out on devices, and exchange nothing.
LAYOUT = ("pvary", "pcast", "reshard", "mesh_cast", "sharding_constraint", "core_pvary")


# Values of variables, as a tree of JAX: its keys need no order.
Values = collections.OrderedDict


def values(atoms: Iterable[Any], env: dict) -> list:
    """Those of variables and constants, where the variables are known."""
    return [atom.val if isinstance(atom, core.Literal) else env[atom] for atom in atoms]


def variables(eqn: Any) -> list[Any]:
    """The variables that an equation takes."""
    return [v for v in eqn.invars if not isinstance(v, core.Literal)]


def is_loop(eqn: Any) -> bool:
    """Whether the body of an equation is that of a scan, rather than of a block."""
    return eqn.primitive.name == "scan"


def carried(eqn: Any) -> tuple[int, int]:
    """Where the operands of a scan turn from constants to carry, and from carry to slices.

    All that the operands of other equations are is constants.
    """
    if not is_loop(eqn):
        return len(eqn.invars), len(eqn.invars)
    if "num_consts" in (params := eqn.params):
        return params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, carry, _ = (len(list(part)) for part in params["ft_in"].unpack())  # Since JAX 0.11.
    return consts, consts + carry


def scan_options(eqn: Any) -> dict[str, Any]:
    """What `lax.scan` takes for an equation beside its operands."""
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
    """The same jaxpr with the equations of what it calls in place of calls."""
    variables, consts = list(closed.jaxpr.constvars), list(closed.consts)
    eqns: list[Any] = []

    def enter(jaxpr: Any, env: dict[Any, Any], is_called: bool) -> list[Any]:
        def named(atoms: Sequence[Any]) -> list[Any]:
            return [v if isinstance(v, core.Literal) else env.get(v, v) for v in atoms]

        for eqn in jaxpr.eqns:
            if eqn.primitive.name in CALLS:
                inner = eqn.params[CALLS[eqn.primitive.name]]
                body = getattr(inner, "jaxpr", inner)
                own = [core.Var(v.aval) for v in body.constvars]
                variables.extend(own)
                consts.extend(getattr(inner, "consts", ()))
                given = [*own, *named(eqn.invars)]
                of_body = dict(zip([*body.constvars, *body.invars], given, strict=True))
                results = enter(body, of_body, True)
            else:  # What is called twice has other variables each time.
                outs = eqn.outvars
                results = [core.Var(v.aval) for v in outs] if is_called else outs
                eqns.append(eqn.replace(invars=named(eqn.invars), outvars=results))
            env.update(zip(eqn.outvars, results, strict=True))
        return named(jaxpr.outvars)

    outs = enter(closed.jaxpr, {}, False)
    jaxpr = closed.jaxpr.replace(constvars=variables, eqns=eqns, outvars=outs)
    return core.ClosedJaxpr(jaxpr, consts)


def peak_bytes(jaxpr: Any) -> int:
    """Bytes that results of equations hold at once, at most, each from where it is made to its last use.

    Those of the jaxpr are held to the end. A compiler that joins equations holds less.
    """
    last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in variables(eqn)}
    last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    most = now = 0
    ends: dict[int, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        made = eqn.outvars
        within = [peak_bytes(getattr(each, "jaxpr", each)) for each in inside(eqn)]
        most = max(most, now + sum(map(_bytes, made)) + max(within, default=0))
        for v in made:
            if v in last:
                now += _bytes(v)
                ends[last[v]] = ends.get(last[v], 0) + _bytes(v)
        now -= ends.pop(i, 0)
    return most


def _bytes(var: Any) -> int:
    return var.aval.size * getattr(var.aval.dtype, "itemsize", 4)


def inside(eqn: Any) -> Iterator[Any]:
    """The jaxprs in the parameters of an equation, with what they close over."""
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield inner


def length(jaxpr: Any) -> int:
    """How many equations a jaxpr has, those inside of others included."""
    inner = [getattr(each, "jaxpr", each) for eqn in jaxpr.eqns for each in inside(eqn)]
    return len(jaxpr.eqns) + sum(map(length, inner))


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
    if name == "neg":
        return -1.0
    (number,) = (complex(v.val) for v in eqn.invars if isinstance(v, core.Literal))
    if number.imag:
        return None
    if name == "mul":
        return number.real
    return 1 / number.real if number and isinstance(eqn.invars[1], core.Literal) else None


def walked(jaxpr: Any, own: Sequence[bool]) -> list[tuple[Any, list[bool], frozenset[str]]]:
    """All equations of a jaxpr and of what it calls, once for each way in which they are called.

    There is one flag for each input. With each equation comes whether its operands depend on inputs with a
    flag, of which a loop may carry some in its first iteration alone; and the names of the axes that are its
    own: those of a `shard_map` around it, whose devices hold parts of one example.
    """
    found: list[tuple[Any, list[bool], frozenset[str]]] = []
    known: dict[Any, list[bool]] = {}

    def follow(called: Any, own: Sequence[bool], axes: frozenset[str]) -> list[bool]:
        """Which results depend on inputs that are an example's own."""
        jaxpr = getattr(called, "jaxpr", called)
        if (key := (id(jaxpr), axes, *own)) in known:
            return known[key]
        depends = dict(zip(jaxpr.invars, own, strict=True))

        def of(atoms: Sequence[Any]) -> list[bool]:
            return [not isinstance(v, core.Literal) and depends.get(v, False) for v in atoms]

        for eqn in jaxpr.eqns:
            given, name, params = of(eqn.invars), eqn.primitive.name, eqn.params
            found.append((eqn, given, axes))
            inner, results = [*inside(eqn)], [any(given)] * len(eqn.outvars)
            if name == "scan":
                first, last = carried(eqn)
                before, carry, after = given[:first], given[first:last], given[last:]
                results = in_loop(params["jaxpr"], before, carry, after, axes)
            elif name == "while":
                first = params["cond_nconsts"]
                last = first + params["body_nconsts"]
                results = in_loop(params["body_jaxpr"], given[first:last], given[last:], [], axes)
                follow(params["cond_jaxpr"], [*given[:first], *results], axes)
            else:
                within = params.get("newly_manual_axes", params.get("manual_axes", ()))
                within = axes.union(within if name == "shard_map" else ())
                for each in inner:
                    count = len(getattr(each, "jaxpr", each).invars)
                    flags = given[1:] if name == "cond" else given
                    flags = flags if count == len(flags) else [any(given)] * count
                    ends = follow(each, flags, within)
                    if len(inner) == 1 and len(ends) == len(results):
                        results = ends
            depends.update(zip(eqn.outvars, results, strict=True))
        known[key] = of(jaxpr.outvars)
        return known[key]

    def in_loop(body: Any, before: list, carry: list, after: list, axes: frozenset) -> list[bool]:
        """What a loop carries in all iterations, and its other results."""
        while True:
            ends = follow(body, [*before, *carry, *after], axes)
            merged = [*map(min, carry, ends)]
            if merged == carry:
                return [*carry, *ends[len(carry) :]]
            carry = merged

    follow(jaxpr, own, frozenset())
    return found
