"""Gradients that are kept as factors: sums of outer products of two values of one example."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dpx.clipping.gradients import gram
from dpx.clipping.gradients.forms import FEW, Form, Values
from dpx.clipping.gradients.gram import Layout, Pair, product
from dpx.clipping.gradients.outer import Factor, Outer
from dpx.clipping.gradients.reading import Reader, Terms
from dpx.clipping.rounding import accumulator, gamma, in_products, multiplies_in_tf32, to_tf32


@dataclasses.dataclass(frozen=True, eq=False)
class Factors(Form):
    """A sum of outer products, each axis of which has one label.

    Attributes:
      terms: the products. Left factors run over the rows of the layout, right ones over its columns.
      layout: the split of the parameter's axes into blocks, rows and columns.
    """

    terms: tuple[Outer, ...]
    layout: Layout

    products = property(lambda self: (self,))

    @property
    def needs(self) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(f.value for term in self.terms for f in term.factors))

    @property
    def elements(self) -> int:
        """The number of elements of all factors of one example."""
        return sum(term.count(f.axes) for term in self.terms for f in term.factors)

    @property
    def places(self) -> int:
        """The number of products that are added up: the positions of all terms."""
        return sum(term.count(term.places) for term in self.terms)

    @property
    def gram_flops(self) -> int:
        """The floating-point operations of the Gram matrices of one example."""
        blocks, rows, columns = self.layout.sizes()
        flops = 0
        for s, t in itertools.combinations_with_replacement(self.terms, 2):
            inner = columns + (1 if s.indexed or t.indexed else rows)
            flops += 2 * blocks * s.count(s.places) * t.count(t.places) * inner
        return flops

    def pairs(self, values: Values) -> list[Pair]:
        """The factors of one example as matrices."""
        return [self._pair(term, *(values[f.value] for f in term.factors)) for term in self.terms]

    def _pair(self, term: Outer, left: jax.Array, right: jax.Array) -> Pair:
        parts = (self.layout.blocks, self.layout.rows, self.layout.columns)
        blocks, rows, columns = ([term.axes[i][0] for i in part] for part in parts)
        before = blocks, term.places
        if term.indexed:
            index = _matrix(left, term, term.left, before).astype(jnp.int32)
            return Pair(index, _matrix(right, term, term.right, (*before, columns)))
        if left.dtype != right.dtype and jnp.float64 in (left.dtype, right.dtype):
            # One type for both: bounds on rounding are those of one.
            left, right = left.astype(jnp.float64), right.astype(jnp.float64)
        of_rows = _matrix(left, term, term.left, (*before, rows))
        return Pair(of_rows, _matrix(right, term, term.right, (*before, columns)))

    @property
    def alike(self) -> Any:
        places = [term.count(term.places) for term in self.terms]
        types = [f.value.aval.dtype for term in self.terms for f in term.factors]
        return (self.layout, *places, *types) if self.places <= FEW else None

    def squared_norm(self, values: Values, more: Sequence[Any] = ()) -> jax.Array:
        return gram.squared_norm(self.layout, *(each.pairs(values) for each in (self, *more)))

    def weighted_sum(self, values: Values, weights: jax.Array, shape: Sequence[int]) -> jax.Array:
        """One product of matrices for each term."""
        pairs = jax.vmap(self.pairs)(Values((v, values[v]) for v in self.needs))
        return weighted_sum(self.layout, pairs, weights).reshape(shape)

    def gradient(self, *values: jax.Array) -> jax.Array:
        """The gradient of one example, from the values that it needs."""
        batch = Values(zip(self.needs, (x[None] for x in values), strict=True))
        return self.weighted_sum(batch, jnp.ones(1), self.layout.shape)

    def rounding(self, size: int, dtype: Any) -> float:
        """There is a product for each of P positions, and the sum of their lengths exceeds that of the
        gradient by 1 / `gram.FLOOR` at most.
        """
        terms = in_products(size * self.places) + len(self.terms) + 4
        return gamma(terms, dtype) / gram.FLOOR


def _matrix(x: jax.Array, term: Outer, factor: Factor, parts: Sequence[Sequence[int]]) -> jax.Array:
    """A factor with an axis for each part of its labels."""
    kept = [a for a in factor.axes if term.sizes[a] > 1]
    order = [kept.index(a) for part in parts for a in part]
    x = lax.reshape(x, [term.sizes[a] for a in kept])
    return lax.reshape(lax.transpose(x, order), [term.count(part) for part in parts])


def factors(reader: Reader, terms: Terms, shape: Sequence[int]) -> Factors | None:
    """Outer products as one form; None if they split axes into rows and columns in different ways."""
    if (refined := _refined(terms, shape)) is None:
        return None
    reshaped = [new for term in terms if (new := term.reshaped(refined, reader))]
    if len(reshaped) < len(terms):
        return None
    kinds = _kinds(next((term for term in reshaped if term.indexed), reshaped[0]))
    each = ([i for i, k in enumerate(kinds) if k == kind] for kind in (3, 1, 2))
    blocks, rows, columns = map(tuple, each)
    made, fast = [], []
    for term in reshaped:
        if _kinds(term) != kinds and not term.indexed:
            term = term._replace(left=term.right, right=term.left)
        # A label may still be one that both factors have only in a part.
        if _kinds(term) != kinds:
            return None
        counted = [a for a in term.indexed if term.sizes[a] > 1]
        if counted and counted != [term.axes[i][0] for i in rows]:  # They count in another order.
            return None
        number = term.gain
        if number != 1:
            value = reader.make(lambda x, number=number: x * number, term.right.value)
            term = term._replace(right=term.right._replace(value=value), gain=1.0)
        # Whether the program itself rounds the factors to TensorFloat-32.
        is_float = all(f.value.aval.dtype == jnp.float32 for f in term.factors)
        fast.append(multiplies_in_tf32() and not term.exact and is_float)
        if fast[-1]:
            left, right = (f._replace(value=reader.make(to_tf32, f.value)) for f in term.factors)
            term = term._replace(left=left, right=right)
        made.append(term)
    return Factors(tuple(made), Layout(tuple(refined), blocks, rows, columns, tuple(fast)))


def _refined(terms: Terms, shape: Sequence[int]) -> list[int] | None:
    """The shape in which each axis is one label, or a part of one, in every term; None if there is none."""
    refined = []
    for i, size in enumerate(shape):
        cuts = {1, size}
        for term in terms:
            cuts.update(itertools.accumulate((term.sizes[a] for a in term.axes[i]), operator.mul))
        for one, other in itertools.pairwise(sorted(cuts)):
            if other % one:
                return None
            refined.append(other // one)
        if size == 1:
            refined.append(1)
    return refined


def _kinds(term: Outer) -> list[int]:
    """For each axis of the result, whose label it is: 1 for the left factor, 2 for the right one, 3 for both.

    It is 0 for an axis of length one.
    """
    each = (term.owners(axis[0]) if axis else (False, False) for axis in term.axes)
    return [left + 2 * right for left, right in each]


@functools.partial(jax.jit, static_argnums=0)
def weighted_sum(shared: Layout, pairs: Sequence[Pair], weights: jax.Array) -> jax.Array:
    """sum_b weights[b]·g_b from factors with a leading batch axis, in the shape of the parameter."""
    k, r, c = shared.sizes()
    total: Any = None
    in_turn = sorted(zip(pairs, shared.fast, strict=True), key=lambda each: each[0].rows.ndim == 3)
    for (rows, columns), fast in in_turn:
        dtype = accumulator(columns.dtype)
        scale = weights.astype(dtype)[:, None, None, None]
        if rows.ndim == 3:
            total = jnp.zeros((k, r, c), dtype) if total is None else total
            block = jnp.arange(k)[None, :, None]
            total = total.at[block, rows].add(columns.astype(dtype) * scale, mode="drop")
            continue
        # Scale the smaller factor, and let it come first: the larger is then read as it lies, without a
        # transposed copy. Its scale comes first too, or XLA compiles two orders of operands.
        flips = columns.size < rows.size
        small, large = (columns, rows) if flips else (rows, columns)
        term = _products(scale * small.astype(dtype), large, fast)
        term = jnp.swapaxes(term, 1, 2) if flips else term
        total = term if total is None else total + term
    return shared.restore(total)


def _products(a: jax.Array, b: jax.Array, fast: bool) -> jax.Array:
    """Sums outer products over examples and positions: (B, K, P, R), (B, K, P, C) -> (K, R, C).

    Matrix units multiply numbers of 8 or 11 bits exactly, several times as fast as float32 ones. So where `b`
    has no more bits, `a` in float32 is replaced by the sum of two such numbers (`rounding.in_products`).
    """
    is_bfloat16 = (a.dtype, b.dtype) == (jnp.float32, jnp.bfloat16)
    if jax.default_backend() == "cpu" or not (is_bfloat16 or fast):
        return _product(a, b, fast)
    narrow = functools.partial(
        lax.reduce_precision, exponent_bits=8, mantissa_bits=7 if is_bfloat16 else 10
    )
    most, dtype = narrow(a), b.dtype if is_bfloat16 else a.dtype
    rest = narrow(a - most)
    return _product(rest.astype(dtype), b, fast) + _product(most.astype(dtype), b, fast)


def _product(a: jax.Array, b: jax.Array, fast: bool) -> jax.Array:
    if a.shape[1] > 1:
        return product("bkpr,bkpc->krc", a, b, fast)
    # Without a batch axis, even of length one, XLA's product is twice as fast on CPUs.
    a, b = (x.reshape(-1, x.shape[-1]) for x in (a, b))
    return product("nr,nc->rc", a, b, fast)[None]
