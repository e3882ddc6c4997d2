"""Finds every use of every parameter in the jaxpr of one example's loss."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core
from jax.lax import DotAlgorithmPreset, Precision
from jax.numpy import floating, issubdtype

from dpx.clipping import uses as _uses
from dpx.clipping.uses import Loop, Use, View

# Equations that only call a jaxpr: the name of the parameter that holds it.
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
REMAT = ("checkpoint", "remat", "remat2")


class Capture(NamedTuple):
    """The uses of each parameter.

    Attributes:
      uses: for each parameter, its uses that have a rule, in program order.
      opaque: for each parameter, the primitives that use it without a rule.
      narrowed: whether a parameter is cast to a type of lower precision.
      imprecise: whether a parameter is multiplied at less than the highest precision.
      checkpointed: whether a parameter is used under `jax.checkpoint`.
    """

    uses: list[list[Use]]
    opaque: list[list[str]]
    narrowed: bool
    imprecise: bool
    checkpointed: bool


def capture(closed: core.ClosedJaxpr, count: int) -> Capture:
    """Follows the first `count` inputs of a jaxpr, the parameters, through all it calls."""
    walk = _Walk([v.aval.shape for v in closed.jaxpr.invars[:count]])
    views = [_uses.whole(k, shape) for k, shape in enumerate(walk.shapes)]
    rest = [None] * (len(closed.jaxpr.invars) - count)
    for view in walk.run(closed.jaxpr, [*views, *rest], ()):
        walk.give_up(view, "the result itself")
    return Capture(walk.uses, walk.opaque, walk.narrowed, walk.imprecise, walk.checkpointed)


def scan_parts(params: dict[str, Any]) -> tuple[int, int]:
    """Where the operands of a scan turn from constants to carry, and from carry to sliced inputs."""
    if "num_consts" in params:
        return params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, carry, _ = (len(list(part)) for part in params["ft_in"].unpack())  # Since JAX 0.11.
    return consts, consts + carry


def _is_exact(params: dict[str, Any]) -> bool:
    """Whether an equation multiplies, if at all, at the highest precision."""
    if "precision" not in params:
        return True
    precision = params["precision"]
    both = precision if isinstance(precision, tuple) else (precision,)
    return all(each in (Precision.HIGHEST, DotAlgorithmPreset.F32_F32_F32) for each in both)


class _Walk:
    def __init__(self, shapes: list[tuple[int, ...]]):
        self.shapes = shapes
        self.uses: list[list[Use]] = [[] for _ in shapes]
        self.opaque: list[list[str]] = [[] for _ in shapes]
        self.narrowed = self.imprecise = self.checkpointed = False

    def give_up(self, view: View | None, name: str) -> None:
        if view is not None:
            self.opaque[view.param].append(name)

    def run(self, jaxpr: core.Jaxpr, views: Sequence[View | None], path: tuple[int, ...]):
        """Walks `jaxpr` with views for some of its inputs; returns views for its outputs."""
        env = {v: view for v, view in zip(jaxpr.invars, views, strict=True) if view is not None}

        def read(atom: Any) -> View | None:
            return None if isinstance(atom, core.Literal) else env.get(atom)

        for index, eqn in enumerate(jaxpr.eqns):
            inputs = [read(atom) for atom in eqn.invars]
            if any(inputs):
                results = self.visit(eqn, inputs, (*path, index))
                for var, view in zip(eqn.outvars, results, strict=True):
                    if view is not None:
                        env[var] = view
        return [read(atom) for atom in jaxpr.outvars]

    def visit(self, eqn: Any, inputs: list[View | None], path: tuple[int, ...]):
        """Records what one equation does with views; returns views for its outputs."""
        name, nothing = eqn.primitive.name, [None] * len(eqn.outvars)
        if name in CALLS:
            inner = eqn.params[CALLS[name]]
            return self.run(getattr(inner, "jaxpr", inner), inputs, path)
        if name in REMAT:
            self.checkpointed = True
            return self.run(eqn.params["jaxpr"], inputs, path)
        if name == "scan":
            return self.scan(eqn, inputs, path)
        if name == "cond" and inputs[0] is None:
            for number, branch in enumerate(eqn.params["branches"]):
                for view in self.run(branch.jaxpr, inputs[1:], (*path, number)):
                    self.give_up(view, name)
            return nothing
        if name == "stop_gradient":
            return nothing
        if (view := inputs[0]) is not None and (moved := self.moved(eqn, view)):
            return [moved]
        for which, view in enumerate(inputs):
            if view is not None:
                use = _uses.find(eqn, which, view, path, self.shapes)
                if use is None:
                    self.give_up(view, name)
                else:
                    self.uses[view.param].append(use)
                    self.imprecise |= not _is_exact(eqn.params)
        return nothing

    def moved(self, eqn: Any, view: View) -> View | None:
        """The view after an equation that only rearranges or casts it; None for any other."""
        name, params, axes = eqn.primitive.name, eqn.params, None
        shape = eqn.outvars[0].aval.shape
        if name == "transpose":
            axes = tuple(view.axes[i] for i in params["permutation"])
        elif name in ("reshape", "squeeze", "expand_dims"):
            if params.get("dimensions") is None or name != "reshape":
                axes = _uses.reshape_axes(view.axes, shape, self.shapes[view.param])
        elif name == "broadcast_in_dim":
            if eqn.invars[0].aval.size == eqn.outvars[0].aval.size:
                axes = _uses.reshape_axes(view.axes, shape, self.shapes[view.param])
        elif name in ("copy", "copy_p"):
            axes = view.axes
        elif name == "convert_element_type":
            old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
            if issubdtype(new, floating):
                self.narrowed |= new.itemsize < old.itemsize
                axes = view.axes
        return None if axes is None else view._replace(axes=axes)

    def scan(self, eqn: Any, inputs: list[View | None], path: tuple[int, ...]):
        """A scan shares its constants between iterations, and slices its inputs."""
        params, body = eqn.params, eqn.params["jaxpr"].jaxpr
        first, last = scan_parts(params)
        inner: list[View | None] = []
        kept: list[View | None] = [None] * len(eqn.outvars)
        for i, view in enumerate(inputs):
            if view is None:
                inner.append(None)
            elif i >= last:
                loop = Loop(params["length"], view.axes[0])
                inner.append(View(view.param, view.axes[1:], (*view.loops, loop)))
            elif i < first or body.outvars[i - first] is body.invars[i]:
                inner.append(view._replace(loops=(*view.loops, Loop(params["length"], ()))))
                if i >= first:
                    kept[i - first] = view
            else:
                self.give_up(view, "scan carry")
                inner.append(None)
        for i, view in enumerate(self.run(body, inner, path)):
            if kept[i] is None:
                self.give_up(view, "scan")
        return kept
