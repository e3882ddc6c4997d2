"""The forms that the gradient of a parameter has. Each knows its norm, and its sum over a batch.

Norms are upper bounds, with what a gradient's share of the sum rounds. `dpx.clipping.gradients.factors` has
one more form: sums of outer products, never added up for one example.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dpx.clipping import xla_cpu
from dpx.clipping.jaxprs import Values
from dpx.clipping.rounding import accumulator, gamma, sum_of_squares

# A held gradient of at most so many entries, or factors of so many positions, are normed with others as one.
SHORT, FEW = 1024, 64


class Form:
    """The form of a gradient. This one is zero for every example.

    Attributes:
      needs: the values that it is made of.
      again: the forms `Within` in it, which are made again for the sum.
      products: the forms `Factors` in it.
      unruled: the primitives that have no rule, where it is held for that reason.
      alike: what gradients have in common that are normed as one array; None where it is not to be.
    """

    needs: Any = ()
    again: Any = ()
    products: Any = ()
    unruled: tuple[str, ...] = ()
    alike: Any = None

    def squared_norm(self, values: Values, more: Sequence[Any] = ()) -> jax.Array:
        """An upper bound on its squared norm for one example, plus those of `more` that are alike."""
        return jnp.zeros(())

    def weighted_sum(self, values: Values, weights: jax.Array, shape: Sequence[int]) -> jax.Array:
        """The sum over the examples of a batch of weights times gradients."""
        return jnp.zeros(shape, weights.dtype)

    def rounding(self, size: int, dtype: Any) -> float:
        """A bound on the error of the sum over `size` examples, over the sum of their thresholds.

        The sum of n terms in any order errs by γ_n times the sum of their lengths.
        """
        return gamma(size + 4, dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Held(Form):
    """The gradient of one example itself."""

    value: Any
    unruled: tuple[str, ...] = ()

    needs = property(lambda self: (self.value,))

    @property
    def alike(self) -> Any:
        aval = self.value.aval
        return accumulator(aval.dtype) if 0 < aval.size <= SHORT else None

    def squared_norm(self, values: Values, more: Sequence[Any] = ()) -> jax.Array:
        if not more:
            return sum_of_squares(values[self.value])
        each = (values[form.value].astype(self.alike).ravel() for form in (self, *more))
        return sum_of_squares(lax.optimization_barrier(jnp.concatenate([*each])))

    def weighted_sum(self, values: Values, weights: jax.Array, shape: Sequence[int]) -> jax.Array:
        dtype = accumulator(values[self.value].dtype)
        held, weights = values[self.value].astype(dtype), weights.astype(dtype)
        if xla_cpu.uses("rows"):
            return xla_cpu.by_rows(weights, held).reshape(shape)
        # One kernel that reads each number once, as narrow as it is held.
        return jnp.sum(weights.reshape(-1, *(1 for _ in held.shape[1:])) * held, 0).reshape(shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Parts(Form):
    """Zeros but for parts along one axis that do not overlap, each of which has a form of its own.

    Attributes:
      axis: the axis of the parameter.
      parts: of each part, in order, where it begins, its length, and its form.
    """

    axis: int
    parts: tuple[tuple[int, int, Form], ...]

    def _all(self, name: str) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(x for *_, form in self.parts for x in getattr(form, name)))

    needs = property(lambda self: self._all("needs"))
    again = property(lambda self: self._all("again"))
    products = property(lambda self: self._all("products"))

    def squared_norm(self, values: Values, more: Sequence[Any] = ()) -> jax.Array:
        return total(jnp.stack([form.squared_norm(values) for *_, form in self.parts]))

    def weighted_sum(self, values: Values, weights: jax.Array, shape: Sequence[int]) -> jax.Array:
        before, after, sums, at = shape[: self.axis], shape[self.axis + 1 :], [], 0
        for first, length, form in (*self.parts, (shape[self.axis], 0, Form())):
            for size, each in ((first - at, Form()), (length, form)):
                sums.append(each.weighted_sum(values, weights, (*before, size, *after)))
            at = first + length
        return jnp.concatenate(sums, self.axis)

    def rounding(self, size: int, dtype: Any) -> float:
        return max(form.rounding(size, dtype) for *_, form in self.parts)


@dataclasses.dataclass(frozen=True, eq=False)
class Within(Form):
    """A gradient inside a rematerialised block, or inside such blocks in a loop.

    The block hands out its norm alone, and makes it once more for the sum (`dpx.clipping.passes`).

    Attributes:
      norm: the squared norm that the block hands out, one for each iteration of loops around it.
      eqn: the equation of the block, or of the loop around it.
      which: the number of the equation's result that the gradient is.
      sums: the form of this result within the equation, by which it is added up.
      moves: the equations that rearrange the result.
    """

    norm: Any
    eqn: Any
    which: int
    sums: Form
    moves: tuple[Any, ...]

    needs = property(lambda self: (self.norm,))
    again = property(lambda self: (self,))
    products = property(lambda self: self.sums.products)

    def squared_norm(self, values: Values, more: Sequence[Any] = ()) -> jax.Array:
        return total(values[self.norm])

    def weighted_sum(self, values: Values, weights: jax.Array, shape: Sequence[int]) -> jax.Array:
        """The sum itself is among the values, under this form, once the block has made it."""
        return values[self].reshape(shape)

    def rounding(self, size: int, dtype: Any) -> float:
        """Nothing is known of how a gradient that is made again rounds."""
        return math.inf


def total(parts: jax.Array) -> jax.Array:
    """An upper bound on the sum of squared norms, in whatever order they are added up."""
    return jnp.sum(parts) * (1 + 1.01 * gamma(parts.size + 2, parts.dtype))


def together(forms: Sequence[Form], groups: Sequence[int]) -> list[tuple[int, list[Any]]]:
    """All forms, each with its group. Those of a group that are alike are one entry, to be normed together.

    A deep model has many, and each costs kernels. Several devices would have to exchange them.
    """
    joined: dict[Any, list[Any]] = {}
    for k, (form, group) in enumerate(zip(forms, groups, strict=True)):
        kind = k if form.alike is None or jax.device_count() > 1 else form.alike
        joined.setdefault((group, kind), []).append(form)
    return [(group, each) for (group, _), each in joined.items()]
