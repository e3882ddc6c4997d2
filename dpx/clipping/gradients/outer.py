"""A sum over positions of outer products of two arrays, whose axes have names.

The gradient of a matrix that multiplies is such a sum, and stays one while it is transposed, reshaped, cut
or scaled. Each axis of both factors has a label, and each axis of the result is made of labels:

- A label in one factor and in the result is a row or a column of the result.
- One in both factors but not in the result is a position, over which products are added up.
- One in both factors and in the result is a block: the result holds a product for each of its entries.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpx.clipping.rounding import accumulator

_labels = itertools.count()


def labels(count: int) -> tuple[int, ...]:
    """New labels."""
    return tuple(itertools.islice(_labels, count))


class Factor(NamedTuple):
    """A value of one example, and the label of each of its axes."""

    value: Any
    axes: tuple[int, ...]


class Outer(NamedTuple):
    """A sum of outer products.

    Attributes:
      name: the primitive that the parameter went into, for people.
      left, right: the factors.
      axes: for each axis of the result, its labels.
      sizes: the length of each label.
      gain: the number that the result is multiplied by.
      indexed: labels of the result along which the left factor is one-hot, as in a look-up. It then holds
        integers, which count the entries of these labels, the last label fastest. An integer that is no entry
        stands for a row of zeros.
      exact: whether the program asked for its product at the highest precision.
      detour: the number of elements of its factors up to which a gradient that is held is made from them. The
        program itself makes it by way of something larger.
    """

    name: str
    left: Factor
    right: Factor
    axes: tuple[tuple[int, ...], ...]
    sizes: dict[int, int]
    gain: float = 1.0
    indexed: tuple[int, ...] = ()
    exact: bool = True
    detour: float = 0

    @property
    def factors(self) -> tuple[Factor, Factor]:
        """Both factors, the left one first."""
        return self.left, self.right

    @property
    def places(self) -> tuple[int, ...]:
        """The labels of positions."""
        free = {a for axis in self.axes for a in axis}
        both = (a for a in self.right.axes if a in self.left.axes and a not in free)
        return tuple(a for a in both if self.sizes[a] > 1)

    def owners(self, label: int) -> tuple[bool, bool]:
        """Whether a label of the result belongs to the left factor, and to the right one."""
        return label in (*self.left.axes, *self.indexed), label in self.right.axes

    def count(self, labels: Iterable[int]) -> int:
        """The product of the lengths of labels."""
        return math.prod(self.sizes[a] for a in labels)

    def on_factors(self, label: int, by: Sequence[int], function: Callable, reader: Any) -> "Outer":
        """The same after a function of (array, axis) along a label of its factors, which others replace."""

        def changed(factor: Factor) -> Factor:
            if label not in factor.axes:
                return factor
            at = factor.axes.index(label)
            value = reader.make(lambda x: function(x, at), factor.value)
            return Factor(value, (*factor.axes[:at], *by, *factor.axes[at + 1 :]))

        return self._replace(left=changed(self.left), right=changed(self.right))

    def reshaped(self, shape: Sequence[int], reader: Any) -> "Outer | None":
        """The result in another shape; None if that needs labels that do not divide."""
        term, axes = self, []
        atoms = [a for axis in self.axes for a in axis if self.sizes[a] > 1]
        for size in shape:
            taken, product = [], 1
            while product < size and atoms:
                first, missing = atoms.pop(0), size // product
                length = term.sizes[first]
                if length > missing:
                    if size % product or length % missing:
                        return None
                    term, (first, rest) = term.split(first, missing, reader)
                    atoms.insert(0, rest)
                product *= term.sizes[first]
                taken.append(first)
            if product != size:
                return None
            axes.append(tuple(taken))
        return term._replace(axes=tuple(axes)) if not atoms else None

    def split(self, label: int, length: int, reader: Any) -> tuple["Outer", tuple[int, ...]]:
        """The same with two labels in place of one, the first of them of this length."""
        both, lengths = labels(2), (length, self.sizes[label] // length)

        def apart(x: Any, at: int) -> Any:
            return x.reshape(*x.shape[:at], *lengths, *x.shape[at + 1 :])

        sizes = self.sizes | dict(zip(both, lengths, strict=True))
        *axes, indexed = (
            tuple(each for a in axis for each in (both if a == label else (a,)))
            for axis in (*self.axes, self.indexed)
        )
        term = self.on_factors(label, both, apart, reader)
        return term._replace(axes=tuple(axes), sizes=sizes, indexed=indexed), both

    def along(
        self, axis: int, size: int, function: Callable, reader: Any, moves: bool = False
    ) -> "Outer | None":
        """The result after a function of (array, axis), such as a slice, along an axis of then a new size.

        `moves` is whether it only moves entries, leaves some out, or puts zeros between them.
        """
        long = [a for a in self.axes[axis] if self.sizes[a] > 1]
        if len(long) != 1:
            return None
        (old,), (new,) = long, labels(1)
        term = self._replace(
            sizes=self.sizes | {new: size},
            axes=tuple((new,) if i == axis else a for i, a in enumerate(self.axes)),
        )
        if old not in self.indexed:
            return term.on_factors(old, (new,), function, reader)
        if not moves or self.indexed != (old,):
            return None
        # The old number of each entry, from one on; zero for zeros. None of them lies on a mesh.
        nowhere = jax.sharding.AbstractMesh((), ())
        with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(nowhere):
            places = np.asarray(function(jnp.arange(1, self.sizes[old] + 1), 0))
        moved = np.full(self.sizes[old] + 1, size, np.int32)
        moved[places[places > 0] - 1] = np.flatnonzero(places)
        numbers = reader.make(lambda i: jnp.asarray(moved)[i], self.left.value)
        return term._replace(left=self.left._replace(value=numbers), indexed=(new,))

    def without(self, axis: int, reader: Any) -> "Outer | None":
        """The result added up along an axis."""
        term = self._replace(axes=self.axes[:axis] + self.axes[axis + 1 :])
        for label in self.axes[axis]:
            left, right = self.owners(label)
            if left and right:
                continue  # It is a position now.
            if left and self.indexed:
                return None
            if not (left or right):
                term = term._replace(gain=term.gain * self.sizes[label])
            term = term.on_factors(label, (), jnp.sum, reader)
        return term

    def times(
        self, value: Any, axes: Sequence[tuple[int, ...]], reader: Any, new: dict[int, int] | None = None,
        summed: Iterable[int] = (), precision: Any = lax.Precision.HIGHEST,
    ) -> "Outer | None":  # fmt: skip
        """The result times an array, whose axes have these labels; None if no factor has them all.

        With `new` labels, of these sizes, it is a product of matrices, added up over the `summed` labels,
        which one factor has to have, and the other must not.
        """
        sizes = self.sizes | (new or {})
        mine = [a for axis in axes for a in axis if sizes[a] > 1]
        inner = {a for a in summed if sizes[a] > 1}
        both = [
            inner.union(mine if new is None else ()).issubset(f.axes)
            and inner.isdisjoint(other.axes)
            for f, other in (self.factors, self.factors[::-1])
        ]
        if self.indexed:  # A row that a number counts can be multiplied by no array.
            both = [False, both[1] and set(self.indexed).isdisjoint(mine)]
        if not any(both):
            return None
        # The smaller factor, or the only one that it fits.
        left, right = (self.count(f.axes) for f in self.factors)
        which = int(both[1] and (not both[0] or right <= left))
        factor, shape = self.factors[which], [sizes[a] for a in mine]
        of_result = (
            *(a for a in factor.axes if a not in inner),
            *(a for a in mine if a not in factor.axes),
        )

        def times(x: Any, y: Any) -> Any:
            dtype = jnp.promote_types(x.dtype, y.dtype)
            x, y, wide = x.astype(dtype), y.reshape(shape).astype(dtype), accumulator(dtype)
            return jnp.einsum(
                x, factor.axes, y, mine, of_result, precision=precision, preferred_element_type=wide,
            )  # fmt: skip

        changed = Factor(reader.make(times, factor.value, value), of_result)
        return self._replace(**{("left", "right")[which]: changed}, sizes=sizes)
