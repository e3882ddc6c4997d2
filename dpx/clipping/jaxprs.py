"""Reads jaxprs and evaluates their equations, whichever of JAX's releases they come from."""

from collections.abc import Callable, Iterator, Sequence
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


def variables(eqn: Any) -> list[Any]:
    """The variables that an equation takes."""
    return [v for v in eqn.invars if not isinstance(v, core.Literal)]


def scan_parts(params: dict[str, Any]) -> tuple[int, int]:
    """Where the operands of a scan turn from constants to carry, and from carry to sliced inputs."""
    if "num_consts" in params:
        return params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, carry, _ = (len(list(part)) for part in params["ft_in"].unpack())  # Since JAX 0.11.
    return consts, consts + carry


def bind(eqn: Any, values: list) -> list[Any]:
    """The results of an equation."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    # Until 0.10.1 JAX returned the functions of a call apart from its other parameters.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*functions, *values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def run(eqns: Sequence[Any], env: dict[Any, Any], outs: Sequence[Any]) -> list[Any]:
    """Evaluates equations in an environment of variables."""

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for eqn in eqns:
        operands = [read(atom) for atom in eqn.invars]
        env.update(zip(eqn.outvars, bind(eqn, operands), strict=True))
    return [read(atom) for atom in outs]


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


def equations(jaxpr: Any, axes: frozenset[str] = frozenset()) -> Iterator[tuple[Any, frozenset]]:
    """All equations of a jaxpr and of what it calls, each with the names of the axes that are its own there.

    These are the axes of a `shard_map` around it, whose devices hold parts of one example.
    """
    for eqn in jaxpr.eqns:
        yield eqn, axes
        own = axes
        if eqn.primitive.name == "shard_map":
            own |= eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))
        for called in inside(eqn):
            yield from equations(getattr(called, "jaxpr", called), own)


def is_exact(params: dict[str, Any]) -> bool:
    """Whether an equation multiplies, if at all, at the highest precision."""
    if "precision" not in params:
        return True
    precision = params["precision"]
    both = precision if isinstance(precision, tuple) else (precision,)
    return all(each in (Precision.HIGHEST, DotAlgorithmPreset.F32_F32_F32) for each in both)


def gain(eqn: Any) -> complex | None:
    """The number by which an equation multiplies the one array that it takes; None where it does not."""
    name = eqn.primitive.name
    if name not in ("neg", "mul", "div") or len(variables(eqn)) != 1:
        return None
    if name == "neg":
        return -1.0
    (number,) = (complex(v.val) for v in eqn.invars if isinstance(v, core.Literal))
    number = number if number.imag else number.real
    if name == "mul":
        return number
    return 1 / number if number and isinstance(eqn.invars[1], core.Literal) else None


def follow(
    jaxpr: Any, own: Sequence[bool], visit: Callable[[Any, list[bool]], None], known: Any = None
) -> list[bool]:
    """Which results of a jaxpr depend on some of its inputs; what a loop carries, in every iteration.

    Args:
      jaxpr: with its constants, which belong to nobody.
      own: one flag for each input.
      visit: is called with every equation and one flag for each of its operands.
      known: what has been found for jaxprs that are called from several places.
    """
    known = {} if known is None else known
    key = id(jaxpr), *own
    if key in known:
        return known[key]
    depends = dict(zip(jaxpr.invars, own, strict=True))

    def is_own(atom: Any) -> bool:
        return not isinstance(atom, core.Literal) and depends.get(atom, False)

    def inside_of(called: Any, flags: Sequence[bool]) -> list[bool]:
        return follow(getattr(called, "jaxpr", called), flags, visit, known)

    def carried(body: Any, before: list[bool], carry: list[bool], after: list[bool]) -> list[bool]:
        """What a loop carries in all iterations, and its other results."""
        while True:
            ends = inside_of(body, [*before, *carry, *after])
            merged = [*map(min, carry, ends)]
            if merged == carry:
                return [*carry, *ends[len(carry) :]]
            carry = merged

    for eqn in jaxpr.eqns:
        given, name, params = [is_own(atom) for atom in eqn.invars], eqn.primitive.name, eqn.params
        results = [any(given)] * len(eqn.outvars)
        visit(eqn, given)
        if name == "scan":
            first, last = scan_parts(params)
            results = carried(params["jaxpr"], given[:first], given[first:last], given[last:])
        elif name == "while":
            first = params["cond_nconsts"]
            last = first + params["body_nconsts"]
            results = carried(params["body_jaxpr"], given[first:last], given[last:], [])
            inside_of(params["cond_jaxpr"], [*given[:first], *results])
        else:
            inner = [*inside(eqn)]
            for called in inner:
                count = len(getattr(called, "jaxpr", called).invars)
                flags = given[1:] if name == "cond" else given
                ends = inside_of(called, flags if count == len(flags) else [any(given)] * count)
                if len(inner) == 1 and len(ends) == len(results):
                    results = ends
        depends.update(zip(eqn.outvars, results, strict=True))
    known[key] = [is_own(atom) for atom in jaxpr.outvars]
    return known[key]
