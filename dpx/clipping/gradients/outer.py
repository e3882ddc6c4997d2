"""A sum over positions of outer products of two arrays, whose axes have names.

The gradient of a matrix that multiplies is such a sum, and stays one while it is transposed, reshaped, cut
or scaled. Each axis of both factors has a label, and each axis of the result is made of labels:

- A label in one factor and in the result is a row or a column of the result.
- One in both factors but not in the result is a position, over which products are added up.
- One in both factors and in the result is a block: the result holds a product for each of its entries.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

_labels = itertools.count()


def labels(count: int) -> tuple[int, ...]:
    """New labels."""
    return tuple(itertools.islice(_labels, count))


class Factor(NamedTuple):
    """A value that is handed out for every example, by its number, and the label of each of its axes."""

    value: int
    axes: tuple[int, ...]


class Outer(NamedTuple):
    """A sum of outer products.

    Attributes:
      name: what the parameter went into, for people.
      left, right: the factors.
      axes: for each axis of the result, its labels.
      sizes: the length of each label.
      gain: what the result is multiplied by.
      indexed: labels of the result; the left factor's integers count their entries, the last label fastest.
        It is then one-hot along these: a look-up. An integer that is no entry stands for a row of zeros.
      exact: whether the program asked for its product at the highest precision.
    """

    name: str
    left: Factor
    right: Factor
    axes: tuple[tuple[int, ...], ...]
    sizes: dict[int, int]
    gain: complex = 1.0
    indexed: tuple[int, ...] = ()
    exact: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the result."""
        return tuple(math.prod(self.sizes[a] for a in axis) for axis in self.axes)

    @property
    def factors(self) -> tuple[Factor, Factor]:
        """Both, the left one first."""
        return self.left, self.right

    @property
    def elements(self) -> int:
        """Numbers in both factors of one example."""
        return sum(math.prod(self.sizes[a] for a in f.axes) for f in self.factors)

    def owners(self, label: int) -> tuple[bool, bool]:
        """Whether a label of the result belongs to the left factor, and to the right one."""
        return label in (*self.left.axes, *self.indexed), label in self.right.axes

    def with_factor(self, right: bool, factor: Factor, **changes: Any) -> "Outer":
        """The same with another factor in the place of one."""
        return self._replace(**{"right" if right else "left": factor}, **changes)

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
                    if length % missing:
                        return None
                    term, (first, rest) = term.split(first, missing, reader)
                    atoms.insert(0, rest)
                product *= term.sizes[first]
                taken.append(first)
            if product != size:
                return None
            axes.append(tuple(taken))
        return term._replace(axes=tuple(axes)) if not atoms else None

    def split(self, label: int, length: int, reader: Any) -> tuple["Outer", tuple[int, int]]:
        """The same with two labels in the place of one, the first of the given length."""
        first, second = labels(2)
        sizes = self.sizes | {first: length, second: self.sizes[label] // length}
        axes = tuple(_replaced(axis, label, (first, second)) for axis in self.axes)
        indexed = _replaced(self.indexed, label, (first, second))
        term = self._replace(sizes=sizes, axes=axes, indexed=indexed)
        for right, factor in enumerate(self.factors):
            if label in factor.axes:
                new = _replaced(factor.axes, label, (first, second))
                shape = [sizes[a] for a in new]
                value = reader.make(lambda x, shape=shape: x.reshape(shape), factor.value)
                term = term.with_factor(bool(right), Factor(value, new))
        return term, (first, second)

    def along(
        self, axis: int, size: int, function: Callable[[Any, int], Any], reader: Any,
        rows: Callable[[Any], Any] | None = None,
    ) -> "Outer | None":  # fmt: skip
        """The result with a function along one axis, such as a slice, that acts on each entry by itself.

        Args:
          axis: of the result.
          size: its new length.
          function: (array, axis) -> array.
          reader: of the values.
          rows: what becomes of integers that look rows up along this axis; None where nothing can.
        """
        found = [a for a in self.axes[axis] if self.sizes[a] > 1]
        if len(found) != 1:
            return None
        (old,), (new,) = found, labels(1)
        term = self._replace(
            sizes=self.sizes | {new: size},
            axes=tuple((new,) if i == axis else a for i, a in enumerate(self.axes)),
        )
        if old in self.indexed:
            if rows is None or self.indexed != (old,):
                return None
            left = self.left._replace(value=reader.make(rows, self.left.value))
            return term._replace(left=left, indexed=(new,))
        for right, factor in enumerate(self.factors):
            if old in factor.axes:
                at = factor.axes.index(old)
                value = reader.make(lambda x, at=at: function(x, at), factor.value)
                new_axes = _replaced(factor.axes, old, (new,))
                term = term.with_factor(bool(right), Factor(value, new_axes))
        return term

    def without(self, axis: int, reader: Any) -> "Outer | None":
        """The result added up along an axis."""
        term = self._replace(axes=self.axes[:axis] + self.axes[axis + 1 :])
        for label in self.axes[axis]:
            left, right = self.owners(label)
            if left and right:
                continue  # It is a position now.
            if label in self.indexed:
                return None
            factor = self.factors[right]
            at = factor.axes.index(label)
            value = reader.make(lambda x, at=at: jnp.sum(x, at), factor.value)
            term = term.with_factor(right, Factor(value, _replaced(factor.axes, label, ())))
        return term

    def scaled(self, value: Any, axes: Sequence[int], reader: Any) -> "Outer | None":
        """The result times an array, if that varies along axes of one factor alone.

        Args:
          value: the array, a variable or a number of one.
          axes: the axes of the result that its own axes are.
          reader: of the values.
        """
        mine = [a for axis in axes for a in self.axes[axis] if self.sizes[a] > 1]
        both = [all(a in f.axes for a in mine) for f in self.factors]
        if self.indexed:
            both[0] = False
        if not any(both):
            return None
        # The smaller factor, or the only one that it fits.
        sizes = [math.prod(self.sizes[a] for a in f.axes) for f in self.factors]
        right = bool(both[1] and (not both[0] or sizes[1] <= sizes[0]))
        factor = self.factors[right]
        shape = [self.sizes[a] for a in mine]
        order = sorted(range(len(mine)), key=lambda i: factor.axes.index(mine[i]))
        full = [self.sizes[a] if a in mine else 1 for a in factor.axes]

        def times(x: Any, y: Any) -> Any:
            return x * y.reshape(shape).transpose(order).reshape(full).astype(x.dtype)

        return self.with_factor(
            right, factor._replace(value=reader.make(times, factor.value, value))
        )

    def settled(self, label: int, stacked: bool, reader: Any) -> "Outer":
        """The same after a loop whose iterations have this label, if a factor was the same in all of them."""
        left, right = (label in f.axes for f in self.factors)
        if stacked and not (left or right):
            raise NoFormError
        if stacked or (left and right):
            return self
        if not (left or right):
            return self._replace(gain=self.gain * self.sizes[label])
        factor = self.factors[right]
        value = reader.make(lambda x: jnp.sum(x, 0), factor.value)
        return self.with_factor(right, Factor(value, factor.axes[1:]))


class NoFormError(Exception):
    """A value is no sum of outer products."""


def _replaced(axes: Sequence[int], label: int, by: Sequence[int]) -> tuple[int, ...]:
    at = axes.index(label) if label in axes else len(axes)
    return (*axes[:at], *by, *axes[at + 1 :]) if label in axes else tuple(axes)
