"""Parameters whose gradients are normed together: of a deep model they are many, and each costs kernels.

Each bundle is of one group, says which values it needs, and knows the squared norm of all its gradients and
the sum of each over a batch, as a form does of one (`dpx.clipping.gradients.forms`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpx.clipping.gradients import gram
from dpx.clipping.gradients.factors import Factors, Values
from dpx.clipping.gradients.forms import Form, Held, total, weighted
from dpx.clipping.rounding import accumulator, sum_of_squares

# Entries of a held gradient up to which it is one array with others.
SHORT = 1024

# Gram matrices are kept for a while where they are smaller than the factors by this much.
SMALLER = 4

# From so many parameters on it is worth it.
LEAST = 3


class Alone(NamedTuple):
    """One parameter."""

    members: tuple[int, ...]
    form: Form

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the values that it needs."""
        return self.form.numbers

    def squared_norm(self, values: Values) -> jax.Array:
        """An upper bound on the square of one example's gradient, rounding included."""
        return self.form.squared_norm(values)

    def sums(self, values: Values, weights: jax.Array, shapes: Sequence[Any]) -> list[jax.Array]:
        """The sum over examples of weights times gradients, of each member."""
        return [self.form.weighted_sum(values, weights, shapes[0])]


class Joined(NamedTuple):
    """Short gradients that are held, as one array."""

    members: tuple[int, ...]
    numbers: tuple[int, ...]

    def _array(self, values: Values, axes: int) -> jax.Array:
        """All entries along the last axis, after the first `axes` ones."""
        held = [values[n] for n in self.numbers]
        flat = [x.astype(accumulator(x.dtype)).reshape(*x.shape[:axes], -1) for x in held]
        return lax.optimization_barrier(jnp.concatenate(flat, -1))

    def squared_norm(self, values: Values) -> jax.Array:
        """An upper bound on the square of one example's gradient, rounding included."""
        return sum_of_squares(self._array(values, 0))

    def sums(self, values: Values, weights: jax.Array, shapes: Sequence[Any]) -> list[jax.Array]:
        """The sum over examples of weights times gradients, of each member."""
        whole = weighted(self._array(values, 1), weights)
        ends = [0]
        for number in self.numbers:
            ends.append(ends[-1] + values[number][0].size)
        pieces = zip(ends, ends[1:], shapes, strict=False)
        return [whole[first:last].reshape(shape) for first, last, shape in pieces]


class Alike(NamedTuple):
    """Gradients that are kept as factors of the same shapes: what bounds their norms is one computation."""

    members: tuple[int, ...]
    forms: tuple[Factors, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the values that it needs."""
        return tuple(dict.fromkeys(n for form in self.forms for n in form.numbers))

    def squared_norm(self, values: Values) -> jax.Array:
        """An upper bound on the square of one example's gradient, rounding included."""
        layout = self.forms[0].layout
        return total(gram.squared_norms(layout, [form.pairs(values) for form in self.forms]))

    def sums(self, values: Values, weights: jax.Array, shapes: Sequence[Any]) -> list[jax.Array]:
        """The sum over examples of weights times gradients, of each member."""
        each = zip(self.forms, shapes, strict=True)
        return [form.weighted_sum(values, weights, shape) for form, shape in each]


Bundle = Alone | Joined | Alike


def bundles(forms: Sequence[Form], groups: Sequence[int], avals: Any) -> list[tuple[int, Bundle]]:
    """All parameters in bundles, each with its group.

    Several devices would have to exchange what lies on each of them: there each parameter is alone.

    Args:
      forms: of each parameter's gradient.
      groups: of each parameter.
      avals: shapes and types of values, by number.
    """
    found: dict[Any, list[int]] = {}
    for k, (form, group) in enumerate(zip(forms, groups, strict=True)):
        key = (group, *_kind(form, avals))
        found.setdefault(key if jax.device_count() == 1 else k, []).append(k)
    made: list[tuple[int, Bundle]] = []
    for of in found.values():
        own = tuple(forms[k] for k in of)
        if len(of) < LEAST:
            made += [(groups[k], Alone((k,), forms[k])) for k in of]
        elif isinstance(own[0], Factors):
            made.append((groups[of[0]], Alike(tuple(of), own)))  # type: ignore[arg-type]
        else:
            made.append(
                (groups[of[0]], Joined(tuple(of), tuple(n for f in own for n in f.numbers)))
            )
    return made


def _kind(form: Form, avals: Any) -> tuple:
    """What those that go together have in common."""
    if isinstance(form, Held):
        aval = avals[form.number]
        if 0 < aval.size <= SHORT:
            return "joined", accumulator(aval.dtype)
    if isinstance(form, Factors) and SMALLER * form.gram_elements <= form.elements:
        shapes = tuple((avals[n].shape, avals[n].dtype) for n in form.numbers)
        return "alike", form.layout, form.shapes, shapes
    return "alone", id(form)
