"""Parameters of which a loss takes parts only, each of which is then a parameter to the engine.

A stack of weights that a model goes through one by one, `for i in range(n): x = x @ w[i]`, has a gradient
that consists of the gradients of its parts: its squared norm is the sum of theirs, and each has factors of
its own. As slices of one parameter they would be looked up, which holds their gradients.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from dpx.clipping import jaxprs

# Equations that do with each part what they do with the whole.
ENTRYWISE = (*jaxprs.SUMS, "convert_element_type", "copy", "copy_p", "div", "mul", "name", "neg")

Range = tuple[int, int]  # The first index, and the one after the last.


class Cut(NamedTuple):
    """Where a parameter is cut: along which axis, and the ranges that are taken, in order and disjoint."""

    axis: int
    ranges: tuple[Range, ...]

    def parts(self, x: jax.Array) -> list[jax.Array]:
        """The parts of an array."""
        return [lax.slice_in_dim(x, low, high, axis=self.axis) for low, high in self.ranges]

    def whole(self, parts: Sequence[jax.Array], shape: Sequence[int]) -> jax.Array:
        """The array that has these parts, and is zero between them."""

        def like(count: int) -> tuple[int, ...]:
            return (*shape[: self.axis], count, *shape[self.axis + 1 :])

        ends = [0, *(high for _, high in self.ranges)]
        starts = [*(low for low, _ in self.ranges), shape[self.axis]]
        gaps = [jnp.zeros(like(b - a), parts[0].dtype) for a, b in zip(ends, starts, strict=True)]
        shaped = [
            x.reshape(like(high - low)) for (low, high), x in zip(self.ranges, parts, strict=True)
        ]
        pieces = itertools.chain(gaps[:1], *zip(shaped, gaps[1:], strict=True))
        return jnp.concatenate([x for x in pieces if x.size], self.axis)

    def names(self, path: str) -> list[str]:
        """What the parts of a parameter of this name are called."""
        before = ":, " * self.axis
        return [
            f"{path}[{before}{low}]" if high == low + 1 else f"{path}[{before}{low}:{high}]"
            for low, high in self.ranges
        ]


class Parts(NamedTuple):
    """The parameters of a loss, some of them cut.

    Attributes:
      cuts: for each parameter where it is cut, or None.
      shapes: the shapes of the parameters.
    """

    cuts: tuple[Cut | None, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def owners(self) -> list[int]:
        """For each part, the parameter that it is a part of."""
        return self._of(range(len(self.cuts)), lambda cut, k: [k] * len(cut.ranges))

    def of(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """The parts of all parameters."""
        return self._of(leaves, Cut.parts)

    def described(self, paths: Sequence[str], leaves: Sequence[jax.Array]) -> tuple[list, list]:
        """The names of all parts, and their shapes and types, from those of the parameters."""
        return self._of(paths, Cut.names), jax.eval_shape(self.of, leaves)

    def _of(self, each: Sequence[Any], function: Callable[[Cut, Any], list]) -> list:
        found = (function(cut, x) if cut else [x] for cut, x in zip(self.cuts, each, strict=True))
        return list(itertools.chain(*found))

    def whole(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays, one for each parameter, that these are the parts of."""
        rest = iter(parts)
        return [
            next(rest).reshape(shape)
            if cut is None
            else cut.whole([next(rest) for _ in cut.ranges], shape)
            for cut, shape in zip(self.cuts, self.shapes, strict=True)
        ]


def cut(
    closed: core.ClosedJaxpr, count: int, wanted: Sequence[int]
) -> tuple[core.ClosedJaxpr, Parts]:
    """The loss as a function of its first `count` inputs, in parts where that is wanted and can be done."""
    flat = jaxprs.flat(closed)
    jaxpr, cuts = flat.jaxpr, _cuts(flat.jaxpr, count, wanted)
    parts = Parts(cuts, tuple(aval.shape for aval in closed.in_avals[:count]))

    def loss(leaves: Sequence[jax.Array], rest: Sequence[jax.Array]) -> list[Any]:
        given = iter(leaves)
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, flat.consts, strict=True))
        env |= dict(zip(jaxpr.invars[count:], rest, strict=True))
        in_parts: dict[Any, dict[Range, jax.Array]] = {}
        for var, each in zip(jaxpr.invars, cuts, strict=False):
            if each is None:
                env[var] = next(given)
            else:
                in_parts[var] = {taken: next(given) for taken in each.ranges}
        for eqn in jaxpr.eqns:
            mine = {v: in_parts[v] for v in jaxprs.variables(eqn) if v in in_parts}
            if not mine:
                jaxprs.run([eqn], env, ())
                continue
            first = next(iter(mine.values()))
            if (results := _taken(eqn)) is not None:
                for out, (_, taken) in zip(eqn.outvars, results, strict=True):
                    if taken in first:
                        env[out] = first[taken].reshape(out.aval.shape)
                continue
            (out,) = eqn.outvars
            in_parts[out] = {}
            for taken in first:
                operands = env | {v: each[taken] for v, each in mine.items()}
                (in_parts[out][taken],) = jaxprs.run([eqn], operands, [out])
        return jaxprs.run((), env, jaxpr.outvars)

    avals = jax.make_jaxpr(parts.of)(closed.in_avals[:count]).out_avals
    return jax.make_jaxpr(loss)(avals, closed.in_avals[count:]), parts


def _cuts(jaxpr: core.Jaxpr, count: int, wanted: Sequence[int]) -> tuple[Cut | None, ...]:
    """Where parameters are cut: in the same places where they are combined before slices are taken."""
    made_of = {jaxpr.invars[k]: {k} for k in wanted}  # Values that are made of them entry by entry.
    slices: list[tuple[set[int], tuple[int, Range] | None]] = []  # None for any other use.
    consumers = jaxprs.consumers(jaxpr)
    for eqn in jaxpr.eqns:
        used = [v for v in jaxprs.variables(eqn) if v in made_of]
        family = set[int]().union(*(made_of[v] for v in used))
        if used and eqn.primitive.name in ENTRYWISE and _is_uniform(eqn, used):
            made_of[eqn.outvars[0]] = family
        elif used:
            results = _taken(eqn) or [None] * len(eqn.outvars)
            each = zip(eqn.outvars, results, strict=True)
            slices += [(family, taken) for out, taken in each if out in consumers]
    together: list[set[int]] = []
    for family, _ in slices:
        linked = [each for each in together if each & family]
        together = [each for each in together if each not in linked] + [family.union(*linked)]
    cuts: list[Cut | None] = [None] * count
    for family in together:
        found = _cut([taken for each, taken in slices if each & family])
        for k in family:
            cuts[k] = found
    return tuple(cuts)


def _is_uniform(eqn: Any, used: Sequence[Any]) -> bool:
    """Whether an equation has arrays of one shape, and numbers that are the same for all entries."""
    (out,) = eqn.outvars
    return all(v.aval.shape == (out.aval.shape if v in used else ()) for v in eqn.invars)


def _cut(taken: Sequence[tuple[int, Range] | None]) -> Cut | None:
    """The cut that gives these slices; None unless they are disjoint ranges of one axis."""
    slices = [each for each in taken if each is not None]
    axes = {axis for axis, _ in slices}
    if len(slices) < len(taken) or len(axes) > 1:
        return None
    ranges = sorted({each for _, each in slices})
    apart = all(high <= low for (_, high), (low, _) in itertools.pairwise(ranges))
    return Cut(axes.pop(), tuple(ranges)) if apart else None


def _taken(eqn: Any) -> list[tuple[int, Range]] | None:
    """Along which axis each result takes which range of an operand; None if they are anything else."""
    name, params, shape = eqn.primitive.name, eqn.params, eqn.invars[0].aval.shape
    if name == "unstack":  # Without the axis, which reshaping takes away.
        return [(params["axis"], (i, i + 1)) for i in range(len(eqn.outvars))]
    if name == "split":
        ends = [0, *itertools.accumulate(params["sizes"])]
        return [(params["axis"], taken) for taken in itertools.pairwise(ends)]
    if name != "slice" or set(params["strides"] or (1,)) != {1}:
        return None
    ranges = zip(params["start_indices"], params["limit_indices"], strict=True)
    cut = [(i, r) for i, (r, n) in enumerate(zip(ranges, shape, strict=True)) if r != (0, n)]
    return cut if len(cut) == 1 else None
