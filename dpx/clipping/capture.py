"""Finds every use of every parameter in the jaxpr of one example's loss."""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import core
from jax.numpy import complexfloating, floating, issubdtype

from dpx.clipping import custom, jaxprs
from dpx.clipping import uses as _uses
from dpx.clipping import views as _views
from dpx.clipping.uses import Use
from dpx.clipping.views import Loop, View

Views = tuple[View, ...]


class Capture(NamedTuple):
    """The uses of each parameter.

    Attributes:
      splits: for each parameter, the parts of each axis, which some reshape may split.
      uses: for each parameter, its uses that have a rule, in program order.
      opaque: for each parameter, the primitives that use it without a rule.
      narrowed: whether a parameter is cast to a type of lower precision.
      imprecise: whether a parameter is multiplied at less than the highest precision.
      checkpointed: whether a parameter is used under `jax.checkpoint`.
      sliced: parameters of which the loss takes parts that go, in another shape, into products.
    """

    splits: list[list[tuple[int, ...]]]
    uses: list[list[Use]]
    opaque: list[list[str]]
    narrowed: bool
    imprecise: bool
    checkpointed: bool
    sliced: frozenset[int]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """For each parameter, its shape, the parts of each axis as axes of their own."""
        return [tuple(itertools.chain(*split)) for split in self.splits]


class _SplitError(Exception):
    """A reshape splits an axis (`atom`) of a parameter, whose parts the walk must know from the start."""

    def __init__(self, param: int, atom: int, major: int):
        super().__init__(param, atom, major)
        self.where = param, atom, major


def capture(
    closed: core.ClosedJaxpr, count: int, scaled: Sequence[dict[int, frozenset[int]]] = ()
) -> Capture:
    """Follows the first `count` inputs of a jaxpr, the parameters, through all it calls.

    The inputs after them are derived weights: parameters times arrays that vary over the axes in `scaled`.
    """
    with custom.reading(closed.jaxpr, count + len(scaled)):
        return _captured(closed, count, scaled)


def _captured(
    closed: core.ClosedJaxpr, count: int, scaled: Sequence[dict[int, frozenset[int]]]
) -> Capture:
    splits = [[(n,) for n in v.aval.shape] for v in closed.jaxpr.invars[:count]]
    rest: list[Views] = [()] * (len(closed.jaxpr.invars) - count - len(scaled))
    while True:
        walk = _Walk([tuple(itertools.chain(*split)) for split in splits])
        views = [(_views.whole(k, split),) for k, split in enumerate(splits)]
        derived = [_scaled(number, views, axes) for number, axes in enumerate(scaled)]
        try:
            for found in walk.run(closed.jaxpr, [*views, *derived, *rest], ()):
                walk.give_up(found, "the result itself")
        except _SplitError as error:
            # Every split makes more axes, so that this ends.
            _split_axis(splits, *error.where)
        else:
            return Capture(
                splits,
                walk.uses,
                walk.opaque,
                walk.narrowed,
                walk.imprecise,
                walk.checkpointed,
                frozenset(walk.sliced),
            )


def _scaled(number: int, views: list[Views], scaled: dict[int, frozenset[int]]) -> Views:
    """A derived weight as views of the parameters that it depends on."""
    found = []
    for k, axes in scaled.items():
        (view,) = views[k]
        atoms = frozenset(atom for axis in axes for atom in view.axes[axis])
        found.append(view._replace(scale=_views.Scale(number, atoms)))
    return tuple(found)


def _split_axis(splits: list[list[tuple[int, ...]]], param: int, atom: int, major: int) -> None:
    for axis, parts in enumerate(splits[param]):
        if atom < len(parts):
            halves = (major, parts[atom] // major)
            splits[param][axis] = (*parts[:atom], *halves, *parts[atom + 1 :])
            return
        atom -= len(parts)


class _Walk:
    def __init__(self, shapes: list[tuple[int, ...]]):
        self.shapes = shapes
        self.uses: list[list[Use]] = [[] for _ in shapes]
        self.opaque: list[list[str]] = [[] for _ in shapes]
        self.sliced: set[int] = set()
        self.narrowed = self.imprecise = self.checkpointed = False

    def give_up(self, views: Views, name: str) -> None:
        for view in views:
            self.opaque[view.param].append(name)

    def run(self, jaxpr: core.Jaxpr, views: Sequence[Views], path: tuple[int, ...]) -> list[Views]:
        """Walks `jaxpr` with views for some of its inputs; returns views for its outputs."""
        env = {v: found for v, found in zip(jaxpr.invars, views, strict=True) if found}

        def read(atom: Any) -> Views:
            return () if isinstance(atom, core.Literal) else env.get(atom, ())

        consumers = functools.cache(lambda: jaxprs.consumers(jaxpr))
        carrying = custom.carrying(jaxpr)
        for index, eqn in enumerate(jaxpr.eqns):
            inputs = [read(atom) for atom in eqn.invars]
            if carrying is not None and carrying.isdisjoint(eqn.outvars):
                continue  # What is made here has no gradient.
            if any(inputs):
                results = self.visit(eqn, inputs, (*path, index), consumers)
                for var, found in zip(eqn.outvars, results, strict=True):
                    if found:
                        env[var] = found
        return [read(atom) for atom in jaxpr.outvars]

    def visit(
        self, eqn: Any, inputs: list[Views], path: tuple[int, ...], consumers: jaxprs.Consumers
    ):
        """Records what one equation does with views; returns views for its outputs."""
        name, nothing = eqn.primitive.name, [()] * len(eqn.outvars)
        if not eqn.outvars:  # Such as printing, of which nothing is differentiated.
            return nothing
        if name in jaxprs.CALLS:
            inner = eqn.params[jaxprs.CALLS[name]]
            return self.run(getattr(inner, "jaxpr", inner), inputs, path)
        if name in jaxprs.REMAT:
            self.checkpointed = True
            return self.run(eqn.params["jaxpr"], inputs, path)
        if name == "scan":
            return self.scan(eqn, inputs, path)
        if name == "cond" and not inputs[0]:
            for number, branch in enumerate(eqn.params["branches"]):
                for found in self.run(branch.jaxpr, inputs[1:], (*path, number)):
                    self.give_up(found, name)
            return nothing
        if name == "stop_gradient":
            return nothing
        if name in jaxprs.PLAIN:
            return inputs
        if inputs[0] and (moved := _all(self.moved(eqn, view) for view in inputs[0])):
            return [moved]
        if (gain := jaxprs.gain(eqn)) is not None:
            (views,) = filter(None, inputs)
            return [_times(gain, views)]
        if name in jaxprs.SUMS and all(inputs):
            return [(*inputs[0], *_times(jaxprs.SUMS[name], inputs[1]))]
        if name in jaxprs.PARTS and any(
            jaxprs.is_multiplied(consumers, out)
            and (name == "unstack" or not jaxprs.is_only_multiplied(consumers, out))
            for out in eqn.outvars
        ):
            self.sliced.update(view.param for view in inputs[0])
        if parts := self.parts(eqn, inputs, consumers):
            return parts
        for which, views in enumerate(inputs):
            for view in views:
                use = _uses.find(eqn, which, view, path, self.shapes)
                if use is None:
                    self.give_up((view,), name)
                else:
                    self.uses[view.param].append(use)
                    self.imprecise |= not jaxprs.is_exact(eqn.params)
        return nothing

    def moved(self, eqn: Any, view: View) -> View | None:
        """The view after an equation that only rearranges or casts it; None for any other."""
        name, params = eqn.primitive.name, eqn.params
        shape = eqn.outvars[0].aval.shape
        if name == "transpose":
            order = list(params["permutation"])
            pads = tuple((order.index(axis), *widths) for axis, *widths in view.pads)
            return view._replace(axes=tuple(view.axes[i] for i in order), pads=pads)
        if name == "convert_element_type":
            old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
            if not issubdtype(new, floating) and not issubdtype(new, complexfloating):
                return None
            self.narrowed |= new.itemsize < old.itemsize
            return view
        if name == "broadcast_in_dim":
            reshapes = eqn.invars[0].aval.size == eqn.outvars[0].aval.size
        else:
            plain = name == "reshape" and params.get("dimensions") is None
            reshapes = plain or name in ("squeeze", "expand_dims")
        if not reshapes or view.pads:
            return None
        sizes = self.shapes[view.param]
        if (split := _views.to_split(view.axes, shape, sizes)) is not None:
            raise _SplitError(view.param, *split)
        axes = _views.reshape_axes(view.axes, shape, sizes)
        return None if axes is None else view._replace(axes=axes)

    def parts(
        self, eqn: Any, inputs: list[Views], consumers: jaxprs.Consumers
    ) -> list[Views] | None:
        """The views after an equation that joins values or takes parts of one; None for any other."""
        name, params = eqn.primitive.name, eqn.params
        shapes = [var.aval.shape for var in eqn.invars]
        found: list[list[View | None]] = []
        if name == "concatenate":
            axis, offset = params["dimension"], 0
            found = [[]]
            for views, shape in zip(inputs, shapes, strict=True):
                after = eqn.outvars[0].aval.shape[axis] - offset - shape[axis]
                found[0] += [_views.padded(view, axis, -offset, -after) for view in views]
                offset += shape[axis]
        elif name == "split":
            axis, offset = params["axis"], 0
            for size in params["sizes"]:
                ends = (offset, shapes[0][axis] - offset - size)
                found.append([_views.padded(view, axis, *ends) for view in inputs[0]])
                offset += size
        elif name == "slice" and all(s == 1 for s in params["strides"] or ()):
            starts, stops = params["start_indices"], params["limit_indices"]
            cut: list[View | None] = [*inputs[0]]
            for axis, (low, high, n) in enumerate(zip(starts, stops, shapes[0], strict=True)):
                if (low, high) != (0, n):
                    cut = [view and _views.padded(view, axis, low, n - high) for view in cut]
            # A part that goes anywhere but into a product of matrices is better looked up, row by row.
            found = [cut] if jaxprs.is_only_multiplied(consumers, eqn.outvars[0]) else []
        results = [_all(views) for views in found]
        return results if all(results) else None

    def scan(self, eqn: Any, inputs: list[Views], path: tuple[int, ...]) -> list[Views]:
        """A scan shares its constants between iterations, and slices its inputs."""
        params, body = eqn.params, eqn.params["jaxpr"].jaxpr
        first, last = jaxprs.scan_parts(params)
        inner: list[Views] = []
        kept: list[Views] = [()] * len(eqn.outvars)
        same = jaxprs.unchanged(body) if any(inputs[first:last]) else {}
        for i, views in enumerate(inputs):
            if i >= last and not any(axis == 0 for view in views for axis, *_ in view.pads):
                inner.append(tuple(_sliced(view, params["length"]) for view in views))
            elif i < first or (i < last and same.get(i - first) == i):
                loop = Loop(params["length"], ())
                inner.append(tuple(v._replace(loops=(*v.loops, loop)) for v in views))
                if i >= first:
                    kept[i - first] = views
            else:
                self.give_up(views, "scan carry" if i < last else "scan")
                inner.append(())
        for i, views in enumerate(self.run(body, inner, path)):
            if not kept[i]:
                self.give_up(views, "scan")
        return kept


def _times(gain: complex, views: Views) -> Views:
    return tuple(view._replace(gain=gain * view.gain) for view in views)


def _all(views: Iterable[View | None]) -> Views:
    """The views, or none if one of them is None."""
    views = list(views)
    found = tuple(view for view in views if view is not None)
    return found if len(found) == len(views) else ()


def _sliced(view: View, length: int) -> View:
    """One iteration's slice of a view, along its first axis."""
    loop = Loop(length, view.axes[0])
    pads = tuple((axis - 1, *widths) for axis, *widths in view.pads)
    return view._replace(axes=view.axes[1:], loops=(*view.loops, loop), pads=pads)
