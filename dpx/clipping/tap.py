"""Evaluates a jaxpr, handing out the two factors of chosen uses as gradients of empty slots.

A slot is an array of zeros that the result does not depend on. Its cotangent, by a custom
derivative, is whatever the backward pass holds at that place: so what happens at a use inside
scan, cond, jit or remat comes out through ordinary differentiation, stacked by scans, recomputed
under remat, zero from the branch of a cond that is not taken.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from dpx.clipping import convolutions, meshes, repeats, rewriting
from dpx.clipping.jaxprs import CALLS, REMAT, bind, scan_parts
from dpx.clipping.rounding import rounded, settled
from dpx.clipping.uses import Use

# What is handed out for a use: (left factor, right factor) -> arrays.
Export = Callable[..., Any]
Path = tuple[int, ...]


class Tapped:
    """A jaxpr with slots at some uses. Slots are keyed by the order of those uses."""

    def __init__(
        self,
        closed: core.ClosedJaxpr,
        taps: Sequence[tuple[Use, Export]],
        with_result: Sequence[Use] = (),
        watched: tuple[int, Sequence[Any]] = (0, ()),
        stacked: bool = False,
        settled_later: Sequence[bool] = (),
    ):
        self.closed = closed
        # How many equations run before the cotangents of some variables are handed out too, and these.
        self.after, self.watched = watched
        # Whether `jax.vmap` gives every example slots of its own, though its results may be those of all.
        self.stacked = stacked
        self.uses = [use for use, _ in taps]
        self.exports = [export for _, export in taps]
        # Uses whose factors the caller settles, in the forms in which they are read.
        self.later = {i for i, is_later in enumerate(settled_later) if is_later}
        # Exports that take the result of the equation too.
        self.with_result = {i for i, use in enumerate(self.uses) if use in with_result}
        self.at: dict[Path, list[int]] = {}
        self.enclosing: dict[Path, list[int]] = {}
        for index, use in enumerate(self.uses):
            self.at.setdefault(use.path, []).append(index)
            for depth in range(1, len(use.path)):
                self.enclosing.setdefault(use.path[:depth], []).append(index)

    def slots(self) -> dict[int, Any]:
        """Zeros for every use, with a leading axis for every scan around it, and for what is watched.

        The latter come first, with keys -1, -2, ...
        """

        def shape(index: int) -> Any:
            use = self.uses[index]
            avals = use.left_aval, use.right_aval, use.right_aval
            out = jax.eval_shape(
                self.exports[index], *avals[: 3 if index in self.with_result else 2]
            )
            return jax.tree.map(
                lambda s: jax.ShapeDtypeStruct((*use.lengths, *s.shape), s.dtype), out
            )

        watched = {-1 - i: v.aval for i, v in enumerate(self.watched)}
        return meshes.zeros(watched | {index: shape(index) for index in range(len(self.uses))})

    def __call__(self, arguments: Sequence[Any], slots: dict[int, Any]) -> list[Any]:
        return self._run(self.closed.jaxpr, self.closed.consts, arguments, slots, ())

    def _run(self, jaxpr: Any, consts: Any, arguments: Any, slots: dict, path: Path) -> list[Any]:
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else env[atom]

        places = [(*path, index) for index in range(len(jaxpr.eqns))]
        alone = {i for i, here in enumerate(places) if here in self.at or here in self.enclosing}
        if not path:
            alone.add(self.after - 1)
        repeated = repeats.find(jaxpr, alone, _results)
        done = 0
        for index, (here, eqn) in enumerate(zip(places, jaxpr.eqns, strict=True)):
            if not path and index == self.after:
                for i, var in enumerate(self.watched):
                    env[var] = _tap(
                        How(_cotangent, self.stacked, settled), env[var], (), slots[-1 - i]
                    )
            if index < done:
                continue
            if (run := repeated.get(index)) is not None:
                results = run.function(*map(read, run.operands))
                env.update(zip(run.results, results, strict=True))
                done = run.after
                continue
            values = [read(atom) for atom in eqn.invars]
            if here in self.enclosing:
                results = self._enter(eqn, values, slots, here)
            else:
                results = _results(eqn, values)
                for use in self.at.get(here, ()):
                    export = functools.partial(self._export, use)
                    kept = (*values, results[0]) if use in self.with_result else tuple(values)
                    how = How(export, self.stacked, rounded if use in self.later else settled)
                    results = [_tap(how, results[0], kept, slots[use])]
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _export(self, index: int, operands: Sequence[jax.Array], cotangent: jax.Array) -> Any:
        use = self.uses[index]
        result = operands[-1:] if index in self.with_result else ()
        return self.exports[index](use.left(operands), use.right(cotangent), *result)

    def _enter(self, eqn: Any, values: list, slots: dict, here: Path) -> list[Any]:
        """Evaluates an equation around a use: the same control flow, with slots passed in."""
        name, params = eqn.primitive.name, eqn.params
        mine = {index: slots[index] for index in self.enclosing[here]}
        if name in CALLS:
            inner = params[CALLS[name]]
            jaxpr, consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
            return self._run(jaxpr, consts, values, mine, here)
        if name in REMAT:
            body = jax.checkpoint(
                lambda values, slots: self._run(params["jaxpr"], (), values, slots, here),
                prevent_cse=params["prevent_cse"],
                policy=params["policy"],
            )
            return body(values, mine)
        if name == "cond":
            branches = [
                functools.partial(self._branch, branch, (*here, number))
                for number, branch in enumerate(params["branches"])
            ]
            return lax.switch(values[0], branches, values[1:], mine)
        return self._scan(params, values, mine, here)

    def _branch(self, branch: core.ClosedJaxpr, path: Path, values: list, slots: dict) -> list:
        mine = {
            index: slots[index] for index in slots if self.uses[index].path[: len(path)] == path
        }
        return self._run(branch.jaxpr, branch.consts, values, mine, path)

    def _scan(self, params: dict, values: list, slots: dict, path: Path) -> list[Any]:
        body, (first, last) = params["jaxpr"], scan_parts(params)

        def step(carry: list, inputs: tuple) -> tuple[list, list]:
            sliced, slot = inputs
            arguments = [*values[:first], *carry, *sliced]
            out = self._run(body.jaxpr, body.consts, arguments, slot, path)
            return out[: last - first], out[last - first :]

        carry, stacked = lax.scan(
            step,
            values[first:last],
            (values[last:], slots),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *stacked]


def _results(eqn: Any, values: list) -> list[Any]:
    if eqn.primitive.name == "conv_general_dilated":
        with eqn.ctx.manager:
            return [convolutions.evaluate(eqn, values)]
    return bind(eqn, rewriting.stretched(eqn, values))


def _cotangent(operands: tuple, cotangent: jax.Array) -> jax.Array:
    return cotangent


class How(NamedTuple):
    """How a value is tapped.

    Attributes:
      export: (operands, cotangent) -> what is handed out.
      stacked: whether every example has slots of its own, though the value may be that of all.
      settle: is applied to operands and cotangent before.
    """

    export: Callable
    stacked: bool
    settle: Callable


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(how: How, result: jax.Array, operands: tuple, slots: Any) -> jax.Array:
    return _of_each(result, slots) if how.stacked else result


@jax.custom_batching.custom_vmap
def _of_each(result: jax.Array, slots: Any) -> jax.Array:
    """The result; a copy for every example that has slots of its own, so that its cotangent is its own."""
    return result


@_of_each.def_vmap
def _of_each_rule(size: int, batched: Any, result: jax.Array, slots: Any):
    return (result if batched[0] else jnp.broadcast_to(result, (size, *result.shape))), True


def _tap_forward(how: How, result: jax.Array, operands: tuple, slots: Any):
    return (_of_each(result, slots) if how.stacked else result), operands


def _tap_backward(how: How, operands: tuple, cotangent: jax.Array):
    # What is settled goes on through the backward pass too, so that no copy is needed.
    operands, cotangent = how.settle((operands, cotangent))
    # What follows from the model alone, such as the rows that a slice takes, is the same on every device.
    return cotangent, None, meshes.vary(how.export(operands, cotangent), meshes.varying(cotangent))


_tap.defvjp(_tap_forward, _tap_backward)
