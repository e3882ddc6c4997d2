"""The forms that the gradient of a parameter has. Each knows its norm, and its sum over a batch.

- `Zero`: nothing.
- `Held`: the gradient of one example itself.
- `Factors` (`dpx.clipping.gradients.factors`): a sum of outer products, never added up for one example.
- `Parts`: zeros but for parts that do not overlap, each of which has a form of its own.
- `Within`: a gradient that a rematerialised block makes. The block hands out its norm alone, and makes the
  gradient once more when the sum is wanted (`dpx.clipping.passes.again`).

Each says also which values it needs (`numbers`), which gradients are made `again`, and what of it is kept as
factors (`products`). Values are handed out by number (`dpx.clipping.gradients.reading`): `squared_norm` takes
those of one example, and `weighted_sum` those of a batch, each with a leading axis of examples.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpx.clipping import xla_cpu
from dpx.clipping.gradients.factors import Factors, Values
from dpx.clipping.rounding import accumulator, gamma, sum_of_squares


class Zero(NamedTuple):
    """A gradient that is zero for every example."""

    numbers: tuple[int, ...] = ()
    again: "tuple[Within, ...]" = ()
    products: "tuple[Factors, ...]" = ()

    def squared_norm(self, values: Values) -> jax.Array:
        """Zero."""
        del values
        return jnp.zeros(())

    def weighted_sum(self, values: Values, weights: jax.Array, shape: Sequence[int]) -> jax.Array:
        """Zeros."""
        del values
        return jnp.zeros(shape, weights.dtype)


class Held(NamedTuple):
    """The gradient of one example itself, by its number."""

    number: int
    again: "tuple[Within, ...]" = ()
    products: "tuple[Factors, ...]" = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the values that it needs."""
        return (self.number,)

    def squared_norm(self, values: Values) -> jax.Array:
        """An upper bound on its square, rounding included."""
        return sum_of_squares(values[self.number])

    def weighted_sum(self, values: Values, weights: jax.Array, shape: Sequence[int]) -> jax.Array:
        """The sum over examples of weights times gradients."""
        return weighted(values[self.number], weights).reshape(shape)


def weighted(held: jax.Array, weights: jax.Array) -> jax.Array:
    """The sum over examples of weights times what is held of each."""
    dtype = accumulator(held.dtype)
    held, weights = held.astype(dtype), weights.astype(dtype)
    if xla_cpu.uses("rows"):
        return xla_cpu.by_rows(weights, held)
    # One kernel that reads each number once, as narrow as it is held.
    return jnp.sum(weights.reshape(-1, *(1 for _ in held.shape[1:])) * held, 0)


class Parts(NamedTuple):
    """Zeros but for parts along one axis.

    Attributes:
      axis: of the parameter.
      parts: for each, in order, where it begins, its length, and its form.
    """

    axis: int
    parts: "tuple[tuple[int, int, Form], ...]"

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the values that it needs."""
        return tuple(dict.fromkeys(n for *_, form in self.parts for n in form.numbers))

    @property
    def again(self) -> "tuple[Within, ...]":
        """What is made again for the sum."""
        return tuple(each for *_, form in self.parts for each in form.again)

    @property
    def products(self) -> tuple[Factors, ...]:
        """What is kept as factors."""
        return tuple(each for *_, form in self.parts for each in form.products)

    def squared_norm(self, values: Values) -> jax.Array:
        """An upper bound on its square: the parts do not overlap."""
        return total(jnp.stack([form.squared_norm(values) for *_, form in self.parts]))

    def weighted_sum(self, values: Values, weights: jax.Array, shape: Sequence[int]) -> jax.Array:
        """The sums of the parts, with zeros between them."""
        found, at = [], 0

        def zeros(length: int) -> jax.Array:
            size = (*shape[: self.axis], length, *shape[self.axis + 1 :])
            return jnp.zeros(size, weights.dtype)

        for first, length, form in self.parts:
            own = (*shape[: self.axis], length, *shape[self.axis + 1 :])
            found += [zeros(first - at)] if first > at else []
            found.append(form.weighted_sum(values, weights, own))
            at = first + length
        found += [zeros(shape[self.axis] - at)] if shape[self.axis] > at else []
        return jnp.concatenate(found, self.axis)


class Within(NamedTuple):
    """A gradient inside a rematerialised block, or inside such blocks in a loop.

    Attributes:
      number: of the squared norm that the block hands out, one for each iteration of loops around it.
      eqn: the block, or the loop around it.
      which: the result of the block, or the loop, that the gradient is.
      form: that of this result within, by which its norm is found.
      sums: the form by which it is added up.
      moves: equations that rearrange it.
    """

    number: int
    eqn: Any
    which: int
    form: "Form"
    sums: "Form"
    moves: tuple[Any, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the values that it needs."""
        return (self.number,)

    @property
    def again(self) -> "tuple[Within, ...]":
        """Itself."""
        return (self,)

    @property
    def products(self) -> tuple[Factors, ...]:
        """What is kept as factors while a block makes its gradients."""
        return self.sums.products

    @property
    def key(self) -> int:
        """What stands for its sum among the values, once that is made."""
        return ~self.number

    def squared_norm(self, values: Values) -> jax.Array:
        """An upper bound on its square."""
        return total(values[self.number])

    def weighted_sum(self, values: Values, weights: jax.Array, shape: Sequence[int]) -> jax.Array:
        """The sum that the block has made."""
        del weights
        return values[self.key].reshape(shape)


Form = Zero | Held | Factors | Parts | Within


def total(parts: jax.Array) -> jax.Array:
    """An upper bound on the sum of squared norms, in whatever order they are added up."""
    return jnp.sum(parts) * (1 + 1.01 * gamma(parts.size + 2, parts.dtype))
