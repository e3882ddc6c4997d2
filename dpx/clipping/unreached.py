"""Parameters that no gradient reaches, by the program of the loss: they would get noise all the same."""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core

from dpx.clipping import jaxprs, reports

# The collections of Linen beside "params" that hold floating-point state, which no optimizer should move.
_STATE = ("batch_stats", "cache", "intermediates", "losses", "perturbations", "spectral_stats")
_SHOWN = 4
# What has a derivative of zero, or one that somebody wrote.
_DOUBTFUL = (
    "stop_gradient", "sign", "floor", "ceil", "round", "nextafter", "while", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "linear_call", "custom_transpose_call",
)  # fmt: skip

_REPORTED: contextvars.ContextVar[bool] = contextvars.ContextVar("unreached", default=False)


def report(closed: core.ClosedJaxpr, paths: Sequence[str], strict: bool) -> None:
    """Warns where no gradient of a traced loss of (parameters, one example) reaches a parameter.

    Args:
      closed: the loss.
      paths: names of the parameters, which are its first inputs.
      strict: whether it is an error.
    """
    _report([paths[k] for k in of(closed, len(paths))], strict)


def report_forms(zero: Sequence[bool]) -> None:
    """The same for the call that is being traced, whose gradients are known to be zero or not."""
    call = reports.call()
    if call is not None and not _REPORTED.get():
        names = zip(call.parameters.paths, zero, strict=True)
        _report([path for path, is_zero in names if is_zero], None)


def _report(unreached: Sequence[str], strict: bool | None) -> None:
    if not unreached:
        return
    found = [name.removesuffix("/value") for name in unreached]
    shown = [tuple(map(_part, name.split("/"))) for name in found[:_SHOWN]]
    reports.report(
        f"no gradient of loss_fn reaches {_listed(found)}: the loss does not use them, or only behind "
        "stop_gradient, so that all they would get is noise: leave them out by wrt, as in "
        f"wrt=lambda path, leaf: path not in {shown}",
        strict,
    )


def of(closed: core.ClosedJaxpr, count: int) -> list[int]:
    """Which of the first `count` inputs of a loss have a gradient of zero for every example.

    Gradients are linear in the cotangent of the loss. One that does not depend on it, in the program that
    JAX makes of the backward pass, is zero whatever the example holds. Values are not looked at, so that the
    answer says nothing about data. That program is made only where a look at the loss leaves a doubt.
    """
    if all(_reaching(closed.jaxpr, (True,), {})[:count]):
        return []

    def pull(cotangent: jax.Array, *inputs: jax.Array) -> tuple:
        def loss(*leaves: jax.Array) -> jax.Array:
            return core.jaxpr_as_fun(closed)(*leaves, *inputs[count:])[0]

        return jax.vjp(loss, *inputs[:count])[1](cotangent)

    backward = jax.make_jaxpr(pull)(*closed.out_avals, *closed.in_avals).jaxpr
    reached = jaxprs.follow(backward, jaxprs.first_inputs(backward, 1), lambda *_: False)
    return [k for k, depends in enumerate(reached) if not depends]


def _reaching(jaxpr: Any, wanted: tuple[bool, ...], known: dict) -> tuple[bool, ...]:
    """Which inputs of a jaxpr surely have a gradient from the wanted ones of its results."""
    key = id(jaxpr), wanted
    if key in known:
        return known[key]
    found = {v for v, flag in zip(jaxpr.outvars, wanted, strict=True) if flag and _is_var(v)}
    for eqn in reversed(jaxpr.eqns):
        flags = tuple(v in found for v in eqn.outvars)
        if any(flags) and eqn.primitive.name not in _DOUBTFUL:
            own = zip(eqn.invars, _operands(eqn, flags, known), strict=True)
            found |= {v for v, flag in own if flag and _is_var(v)}
    known[key] = tuple(v in found for v in jaxpr.invars)
    return known[key]


def _operands(eqn: Any, wanted: tuple[bool, ...], known: dict) -> tuple[bool, ...]:
    name, params = eqn.primitive.name, eqn.params
    called = [getattr(inner, "jaxpr", inner) for inner in jaxprs.inside(eqn)]
    if name == "scan":
        first, last = jaxprs.scan_parts(params)
        carries = last - first
        while True:
            flags = _reaching(called[0], wanted, known)
            merged = tuple(map(max, wanted[:carries], flags[first:last]))
            if merged == wanted[:carries]:
                return flags
            wanted = (*merged, *wanted[carries:])
    if name == "cond":
        branches = [_reaching(branch, wanted, known) for branch in called]
        return (False, *map(max, *branches)) if len(branches) > 1 else (False, *branches[0])
    if len(called) == 1 and name in (*jaxprs.CALLS, *jaxprs.REMAT):
        return _reaching(called[0], wanted, known)
    return tuple(True for _ in eqn.invars)


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, core.Literal) and jnp.issubdtype(atom.aval.dtype, jnp.inexact)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Nothing is said within: the caller has looked, and has better names for the parameters."""
    token = _REPORTED.set(True)
    try:
        yield
    finally:
        _REPORTED.reset(token)


def report_state(params: Any, wrt: Any, strict: bool) -> None:
    """Warns where a tree of parameters holds the state of a model, such as running statistics.

    It has gradients, and would be trained. Linen tells it from parameters by name, NNX by type.
    """
    if wrt is not None:
        return
    if isinstance(params, nnx.State):
        kinds = {type(v) for v in jax.tree.leaves(params, is_leaf=_is_state) if _is_state(v)}
        names, remedy = sorted(kind.__name__ for kind in kinds), "wrt=nnx.Param"
    else:
        keys = params if isinstance(params, Mapping) and "params" in params else ()
        names = [name for name in _STATE if name in keys]
        remedy = 'wrt=lambda path, leaf: path[0] == "params"'
    if names:
        reports.report(
            f"params holds {_listed(names)} beside the parameters, state of the model that would be trained "
            f"and get noise: leave it out by {remedy}",
            strict,
        )


def _is_state(x: Any) -> bool:
    if not isinstance(x, nnx.Variable) or isinstance(x, nnx.Param):
        return False
    return any(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in jax.tree.leaves(x))


def _part(name: str) -> str | int:
    return int(name) if name.isdecimal() else name


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
