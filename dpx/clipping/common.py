"""Gradients that are products of outer products and of fixed arrays with small values.

Where a loss computes something from a weight alone (`dpx.clipping.weights`), the gradient of an example is

    g = m ⊙ sum_p rows[p] ⊗ columns[p] + sum_j T_j ⊙ y_j,

with arrays m and T_j that are the same for all examples, and are made once for a batch, and y_j that are
small (numbers, or one for each row or column). The algebra of these terms is in `dpx.clipping.fixed_terms`;
what follows for an m that varies over rows and columns at once, in `dpx.clipping.masked`.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from dpx.clipping import fixed_terms, hoisting, jaxprs, meshes, own_products, rules, small_values
from dpx.clipping import rounding as _rounding
from dpx.clipping import weights as _weights
from dpx.clipping.capture import Capture, capture
from dpx.clipping.fixed_terms import Split, Term
from dpx.clipping.materialize import accumulator
from dpx.clipping.own_products import Own
from dpx.clipping.rules import Layout, pair
from dpx.clipping.uses import Use, is_whole
from dpx.clipping.weights import Multiple, Weights, find

# Sums of more products than this round too much to be taken as the loss has them, in one piece.
LONGEST = 4096


class Constants(NamedTuple):
    """What a loss computes from parameters alone, and its derivatives.

    Attributes:
      inputs: small values and derived weights that the inner loss takes.
      arrays: the fixed arrays T, each of the shape of a parameter.
      scales: m for (input of the inner loss, parameter), with axes of length one where it does not vary.
      inside: for each derived weight, how the small values inside it follow from its gradient.
      leads: for each parameter, how its gradient follows from small values.
    """

    inputs: list[jax.Array]
    arrays: dict[str, jax.Array]
    scales: dict[tuple[int, int], jax.Array]
    inside: list[list[Term]]
    leads: list[list[Term]]


def evaluate(weights: Weights, leaves: Sequence[jax.Array]) -> Constants:
    """Computes what does not depend on an example, once for a batch."""
    smalls, derived = weights.values(leaves)
    inputs = [v for v, small in zip(smalls, weights.smalls, strict=True) if small.is_input]
    arrays: dict[str, jax.Array] = {}
    scales, inside = {}, []
    leads: list[list[Term]] = [[] for _ in leaves]

    def term(small: int, axes: Any, multiple: Multiple, array: jax.Array) -> Term:
        array = array.astype(accumulator(array.dtype))
        rest = tuple(a for a in range(array.ndim) if a not in multiple.ratio)
        if multiple.base is not None:  # Of which the array is the multiple.
            key = f"parameter {multiple.base}"
            arrays[key] = leaves[multiple.base].astype(array.dtype)
            ratio = _first(array, rest)
        elif rest:
            key = f"ones {array.shape}"
            arrays[key] = jnp.ones(array.shape, array.dtype)
            ratio = _first(array, rest)
        else:
            key = f"own {len(arrays)}"
            arrays[key], ratio = array, jnp.ones((1,) * array.ndim, array.dtype)
        return Term(small, axes, key, ratio)

    for d, (each, value) in enumerate(zip(weights.derived, derived, strict=True), len(inputs)):
        wide = [
            jax.lax.broadcast_in_dim(smalls[j], value.shape, axes) for j, axes, _ in each.smalls
        ]
        over = [i for i, (*_, m) in enumerate(each.smalls, len(each.inputs)) if m.base is not None]
        given = [*(leaves[k] for k in each.inputs), *wide, meshes.ones_like(value)]
        cotangents = each.pull(given, over)
        for k, varies in each.scales.items():
            m = cotangents[each.inputs.index(k)]
            m = m.astype(accumulator(m.dtype))
            scales[d, k] = _first(m, [a for a in range(m.ndim) if a not in varies])
        terms = []
        for place, (j, axes, multiple) in enumerate(each.smalls, len(each.inputs)):
            follows = {axis: i for i, axis in enumerate(axes) if smalls[j].shape[i] > 1}
            axes = tuple(follows.get(a) for a in range(value.ndim))
            terms.append(term(j, axes, multiple, cotangents[place]))
        inside.append(terms)
    for j, (small, value) in enumerate(zip(weights.smalls, smalls, strict=True)):
        over = [
            i
            for i, k in enumerate(small.inputs)
            if k in small.leads and small.leads[k][1].base == k
        ]
        given = [*(leaves[k] for k in small.inputs), meshes.ones_like(value)]
        cotangents = small.pull(given, over)
        for k, (axes, multiple) in small.leads.items():
            leads[k].append(term(j, axes, multiple, cotangents[small.inputs.index(k)]))
    arrays, scales = _rounding.settled((arrays, scales))
    return Constants([*inputs, *derived], arrays, scales, inside, leads)


def _first(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The first entry along axes that the array does not vary over."""
    return x[tuple(slice(0, 1) if a in axes else slice(None) for a in range(x.ndim))]


def has_closed_form(weights: Weights, param: int, shared: Layout, split: Split) -> bool:
    """Whether no coefficient of a fixed array in a parameter's gradient varies over both rows and columns."""
    varies: dict[Any, set[int]] = {}
    for number, (_, axes, multiple) in enumerate(weights.leads(param)):
        mine = {a for a, axis in enumerate(axes) if axis is not None}
        own = multiple.base is None and len(multiple.ratio) == len(axes)
        key = number if own else ("multiple of", multiple.base)
        varies.setdefault(key, set()).update(mine, () if own else multiple.ratio)
    return not any(fixed_terms.is_dense(shared, split, axes) for axes in varies.values())


def can_contract(
    weights: Weights, derived: int, shared: Layout, split: Split, uses: Sequence[Use]
) -> bool:
    """Whether the gradients of the small values inside a derived weight follow from its factors.

    They do, unless one varies over both rows and columns of a table that is looked up.
    """
    if all(use.indexed is None for use in uses):
        return True
    for j, axes, _ in weights.derived[derived].smalls:
        shape = weights.smalls[j].var.aval.shape
        follows = {axis for axis, n in zip(axes, shape, strict=True) if n > 1}
        if fixed_terms.is_dense(shared, split, follows):
            return False
    return True


def separate(
    closed: core.ClosedJaxpr, count: int, captured: Capture
) -> tuple[Weights, Capture] | None:
    """Takes functions of weights alone out of a loss, if large parameters have no rule for want of it."""
    opaque = zip(closed.in_avals, captured.opaque, strict=False)
    large = [k for k, (aval, names) in enumerate(opaque) if names and _weights.is_large(aval.shape)]
    if not large:
        return None
    flat, refused = hoisting.hoisted(jaxprs.flat(closed), count), set()
    while (found := find(flat, count, large, refused)) is not None:
        inner = capture(found.inner, count, found.scaled)
        bad = set()
        for d, each in enumerate(found.derived):
            for k in each.scales:
                shared = rules.layout(inner.uses[k], inner.shapes[k]) if inner.uses[k] else None
                if (
                    inner.opaque[k]
                    or not shared
                    or not can_contract(found, d, shared, inner.splits[k], inner.uses[k])
                ):
                    bad.add(each.var)
        if not bad:
            return found, inner
        refused |= bad
    return None


class Batch:
    """What a loss computes from parameters alone, for all examples of a batch."""

    def __init__(
        self,
        weights: Weights,
        captured: Capture,
        choices: Sequence[Any],
        leaves: Sequence[jax.Array],
    ):
        self.weights, self.captured, self.choices = weights, captured, choices
        self.constants = evaluate(weights, leaves)
        self.shapes = [small.var.aval.shape for small in weights.smalls]
        self.with_result = [
            use
            for k, choice in enumerate(choices)
            if choice.tapped and choice.rule.by_gram
            for use in choice.tapped
            if self._gives_own(k, choice.rule.layout, use)
        ]
        scaled = {(use.scale.derived, use.param) for use in self.with_result if use.scale}
        self.is_multiple = {
            (d, k): own_products.is_multiple(
                self.constants.inputs[d], leaves[k], self.constants.scales[d, k]
            )
            for d, k in sorted(scaled)
        }

    @property
    def inputs(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Small values, and derived weights, that the inner loss takes."""
        count = sum(small.is_input for small in self.weights.smalls)
        return self.constants.inputs[:count], self.constants.inputs[count:]

    def _gives_own(self, k: int, shared: Layout, use: Use) -> bool:
        """Whether the result of a product spares one of a factor with the parameter itself.

        Only where it is known to be as precise: a short sum in float32, at full precision.
        """
        found = self.captured
        precise = not found.narrowed and (not found.imprecise or jax.default_backend() == "cpu")
        types = {use.left_aval.dtype, use.right_aval.dtype}
        return (
            precise
            and any(multiple.base == k for *_, multiple in self.weights.leads(k))
            and use.primitive == "dot_general"
            and is_whole(use)
            and types == {jnp.dtype("float32")}
            and max(shared.sizes()) <= LONGEST
            and own_products.varies_with_result(use, shared)
        )

    def _own(self, k: int, use: Use, factors: Sequence[Any]) -> Own | None:
        """The product of a use with the parameter itself, if its result gives it."""
        if use not in self.with_result:
            return None
        shared, scale = self.choices[k].rule.layout, self.scale(use)
        found = own_products.arranged(use, shared, factors[2])
        if use.scale is None or scale is None:
            return Own(found, found)
        array = fixed_terms.arrange(
            shared, self.captured.splits[k], self.constants.arrays[f"parameter {k}"]
        )
        is_good = self.is_multiple[use.scale.derived, k]
        return own_products.of_derived(use, shared, factors[:2], found, array, scale, is_good)

    def scale(self, use: Use) -> jax.Array | None:
        """What the product of a use is multiplied by, arranged for its parameter."""
        if use.scale is None:
            return None
        k = use.param
        m = self.constants.scales[use.scale.derived, k]
        return fixed_terms.arrange(self.choices[k].rule.layout, self.captured.splits[k], m)

    def terms(
        self, given: Sequence[Any], direct: Sequence[jax.Array]
    ) -> tuple[list, list, list, list]:
        """For every parameter coefficients of fixed arrays, these with the arrays, `scale`, and `Own`s."""
        owns = [
            [self._own(k, *each) for each in zip(choice.tapped, given[k], strict=True)]
            if choice.tapped
            else []
            for k, choice in enumerate(self.choices)
        ]
        smalls = self._smalls(given, direct, owns)
        coefficients, terms = [], []
        for k, choice in enumerate(self.choices):
            found = _rounding.settled(fixed_terms.by_array(self.constants.leads[k], smalls))
            coefficients.append(found)
            own = f"parameter {k}"
            pairs = [(self.constants.arrays[key], y, key == own) for key, y in found.items()]
            if choice.rule is not None and choice.rule.by_gram:
                shared, split = choice.rule.layout, self.captured.splits[k]
                put = functools.partial(fixed_terms.arrange, shared, split)
                pairs = [(put(t), put(y), is_own) for t, y, is_own in pairs]
            terms.append(pairs)
        return coefficients, terms, [self.scale] * len(terms), owns

    def _smalls(
        self, given: Sequence[Any], direct: Sequence[jax.Array], owns: Sequence[Any]
    ) -> list[jax.Array | None]:
        """Gradients of small values: those that the inner loss takes, and those inside derived weights."""
        rest = iter(direct)
        found: list[Any] = [next(rest) if s.is_input else None for s in self.weights.smalls]
        first = len(direct)
        for d, (each, inside) in enumerate(
            zip(self.weights.derived, self.constants.inside, strict=True), first
        ):
            k = next(iter(each.scales))
            rule = self.choices[k].rule
            uses = [
                (pair(use, rule.layout, *factors[:2]), own)
                for use, factors, own in zip(rule.uses, given[k], owns[k], strict=True)
                if use.scale is not None and use.scale.derived == d
            ]
            for term in inside if uses else ():
                array, j = self.constants.arrays[term.key], term.small
                is_own = term.key == f"parameter {k}"
                each = [(pair, own.bare if own and is_own else None) for pair, own in uses]
                mine = small_values.small_gradient(
                    term, array, rule.layout, self.captured.splits[k], each, self.shapes[j]
                )
                found[j] = mine if found[j] is None else found[j] + mine
        return found

    def finished(
        self, rule: Any, total: jax.Array, coefficients: dict[str, jax.Array], weights: jax.Array
    ) -> jax.Array:
        """A weighted sum of products of factors, with the fixed arrays of its gradient."""
        if rule.is_masked:
            use = rule.uses[0]
            total = total * self.constants.scales[use.scale.derived, use.param]
        for key, y in coefficients.items():
            flat = y.reshape(len(y), -1)
            summed = jnp.matmul(weights.astype(flat.dtype), flat, precision=rules.HIGHEST)
            total += self.constants.arrays[key] * summed.reshape(y.shape[1:])
        return total
