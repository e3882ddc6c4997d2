"""Gradients that are kept as factors: sums of outer products of two values of one example."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpx.clipping.gradients import gram, products
from dpx.clipping.gradients.outer import Factor, NoFormError, Outer
from dpx.clipping.gradients.products import Layout, Pair
from dpx.clipping.gradients.reading import Reader, Terms
from dpx.clipping.rounding import multiplies_in_tf32, to_tf32

Values = Mapping[int, jax.Array]


class Term(NamedTuple):
    """An outer product, its factors as matrices.

    Attributes:
      term: the product; each axis of its result has one label.
      blocks, places, rows, columns: labels, in the order of the layout.
      swapped: whether the right factor runs over the rows.
    """

    term: Outer
    blocks: tuple[int, ...]
    places: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    swapped: bool

    def pair(self, values: Values) -> Pair:
        """The factors of one example: rows (K, P, R), or indices (K, P), and columns (K, P, C)."""
        left, right = (values[f.value] for f in self.term.factors)
        if self.term.indexed:
            index = self._matrix(left, self.term.left, ())[:, :, 0]
            return Pair(index.astype(jnp.int32), self._matrix(right, self.term.right, self.columns))
        if left.dtype != right.dtype and jnp.float64 in (left.dtype, right.dtype):
            # One type for both: bounds on rounding are those of one.
            left, right = left.astype(jnp.float64), right.astype(jnp.float64)
        rows, columns = (right, left) if self.swapped else (left, right)
        of_rows, of_columns = self.term.factors[:: -1 if self.swapped else 1]
        return Pair(
            self._matrix(rows, of_rows, self.rows), self._matrix(columns, of_columns, self.columns)
        )

    def _matrix(self, x: jax.Array, factor: Factor, inner: Sequence[int]) -> jax.Array:
        sizes = self.term.sizes
        kept = [a for a in factor.axes if sizes[a] > 1]
        parts = self.blocks, self.places, inner
        order = [kept.index(a) for part in parts for a in part]
        x = x.reshape([sizes[a] for a in kept]).transpose(order)
        return x.reshape([math.prod(sizes[a] for a in part) for part in parts])


class Factors(NamedTuple):
    """A sum of outer products."""

    terms: tuple[Term, ...]
    layout: Layout
    again: tuple[Any, ...] = ()

    @property
    def products(self) -> "tuple[Factors, ...]":
        """Itself."""
        return (self,)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the values that it needs."""
        return tuple(dict.fromkeys(f.value for t in self.terms for f in t.term.factors))

    @property
    def elements(self) -> int:
        """Numbers in all factors of one example."""
        return sum(t.term.elements for t in self.terms)

    @property
    def places(self) -> int:
        """Products that are added up, over positions of all terms."""
        return sum(math.prod(t.term.sizes[a] for a in t.places) for t in self.terms)

    @property
    def shapes(self) -> tuple[Any, ...]:
        """The sizes of each term in the order of its layout: two forms with the same ones are alike."""
        parts = [(t.blocks, t.places, t.rows, t.columns) for t in self.terms]
        return tuple(
            (t.swapped, bool(t.term.indexed), *(tuple(t.term.sizes[a] for a in p) for p in of))
            for t, of in zip(self.terms, parts, strict=True)
        )

    @property
    def gram_elements(self) -> int:
        """Numbers in the Gram matrices of one example."""
        return self.layout.sizes()[0] * self.places * (self.places + 1)

    @property
    def gram_flops(self) -> int:
        """Floating-point operations of the Gram matrices of one example."""
        blocks, rows, columns = self.layout.sizes()
        total, seen = 0, []
        for term in self.terms:
            count = math.prod(term.term.sizes[a] for a in term.places)
            seen.append((count, bool(term.term.indexed)))
            for other, indexed in seen:
                inner = columns + (1 if indexed or term.term.indexed else rows)
                total += 2 * blocks * count * other * inner
        return total

    def pairs(self, values: Values) -> list[Pair]:
        """The factors of one example, as matrices."""
        return [term.pair(values) for term in self.terms]

    def squared_norm(self, values: Values) -> jax.Array:
        """An upper bound on its square, rounding of what is added to the sum included."""
        return gram.squared_norm(self.layout, self.pairs(values))

    def weighted_sum(self, values: Values, weights: jax.Array, shape: Sequence[int]) -> jax.Array:
        """The sum over examples of weights times gradients, one product of matrices for each term."""
        pairs = jax.vmap(self.pairs)({n: values[n] for n in self.numbers})
        return products.weighted_sum(self.layout, pairs, weights).reshape(shape)

    def gradient(self, values: Values, shape: Sequence[int]) -> jax.Array:
        """That of one example."""
        return self.layout.restore(products.product(self.layout, self.pairs(values))).reshape(shape)


def factors(reader: Reader, terms: Terms, shape: Sequence[int]) -> Factors | None:
    """Outer products as one form; None if they split axes into rows and columns in different ways.

    Args:
      reader: of the values.
      terms: at least one.
      shape: of the parameter.
    """
    if any(complex(term.gain).imag for term in terms):
        return None
    if (refined := _refined(terms, shape)) is None:
        return None
    try:
        reshaped = [term.reshaped(refined, reader) for term in terms]
    except NoFormError:
        return None
    found = [term for term in reshaped if term is not None]
    if len(found) < len(terms):
        return None
    # A label may still be one that both factors have only in a part.
    kinds = [_kinds(term) for term in found]
    first = next((k for k, t in zip(kinds, found, strict=True) if t.indexed), kinds[0])
    blocks, rows, columns = (
        tuple(i for i, k in enumerate(first) if k == kind) for kind in (3, 1, 2)
    )
    made, fast = [], []
    turned = {1: 2, 2: 1}
    for term, kind in zip(found, kinds, strict=True):
        swapped = kind != first
        if swapped and (term.indexed or [turned.get(k, k) for k in kind] != first):
            return None
        label = [axis[0] if axis else None for axis in term.axes]
        free = {a for a in label if a is not None}
        places = tuple(
            a
            for a in term.right.axes
            if a in term.left.axes and a not in free and term.sizes[a] > 1
        )
        mine = [
            tuple(a for i in part if (a := label[i]) is not None)
            for part in (blocks, rows, columns)
        ]
        if term.indexed:
            term = _in_order(term, mine[1], reader)
        number = complex(term.gain).real
        if number != 1:
            value = reader.make(lambda x, number=number: x * number, term.right.value)
            term = term.with_factor(True, term.right._replace(value=value), gain=1.0)
        fast.append(_is_fast(term, reader))
        if fast[-1]:
            for right, factor in enumerate(term.factors):
                value = reader.make(to_tf32, factor.value)
                term = term.with_factor(bool(right), factor._replace(value=value))
        made.append(Term(term, mine[0], places, mine[1], mine[2], swapped))
    return Factors(tuple(made), Layout(tuple(refined), blocks, rows, columns, tuple(fast)))


def _is_fast(term: Outer, reader: Reader) -> bool:
    """Whether the program itself rounds the factors of a product to TensorFloat-32."""
    types = {reader.avals[f.value].dtype for f in term.factors}
    return multiplies_in_tf32() and not term.exact and types == {jnp.dtype(jnp.float32)}


def _refined(terms: Terms, shape: Sequence[int]) -> list[int] | None:
    """The shape in which each axis has one label of every term, or is a part of one."""
    refined = []
    for i, size in enumerate(shape):
        cuts = {1, size}
        for term in terms:
            product = 1
            for label in term.axes[i]:
                product *= term.sizes[label]
                cuts.add(product)
        ordered = sorted(cuts)
        for one, other in itertools.pairwise(ordered):
            if other % one:
                return None
            refined.append(other // one)
        if size == 1:
            refined.append(1)
    return refined


def _kinds(term: Outer) -> list[int]:
    """For each axis of the result 1, 2 or 3: its label is the left factor's, the right one's, or of both."""
    return [
        sum(weight * has for weight, has in zip((1, 2), term.owners(axis[0]), strict=True))
        if axis
        else 0
        for axis in term.axes
    ]


def _in_order(term: Outer, rows: Sequence[int], reader: Reader) -> Outer:
    """A look-up whose integers count entries of rows in this order."""
    old = [a for a in term.indexed if term.sizes[a] > 1]
    if list(rows) == old:
        return term
    sizes = [term.sizes[a] for a in old]

    def counted(index: Any) -> Any:
        each = dict(
            zip(
                old, jnp.unravel_index(jnp.clip(index, 0, math.prod(sizes) - 1), sizes), strict=True
            )
        )
        found: Any = 0
        for label in rows:
            found = found * term.sizes[label] + each[label]
        return jnp.where((index >= 0) & (index < math.prod(sizes)), found, math.prod(sizes))

    left = term.left._replace(value=reader.make(counted, term.left.value))
    return term.with_factor(False, left, indexed=tuple(rows))
