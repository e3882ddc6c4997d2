"""How a parameter is used by one equation, and why its gradient there is a sum of outer products.

A per-example gradient through a matrix product, a table look-up or a convolution is

    gradient[k, r, c] = sum_p left[k, p, r] · right[k, p, c]

where `left` comes from the other operand, `right` is the cotangent of the result, p runs over
positions (tokens, pixels, time steps), and the axes of the parameter fall into k (axes that both
factors have: heads of a batched product, layers of a scan), r and c. For look-ups, left[k, p, :]
is a one-hot row, of which only the index is kept. A `Use` says where in the program the two
factors are found and which parameter axes their axes stand for.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpx._meshes import varying
from dpx.clipping import complex_weights, convolutions, custom, look_ups, views
from dpx.clipping.rounding import settled
from dpx.clipping.views import Axes, Loop, Scale, View


class Gradient(NamedTuple):
    """Another form of a use: the gradient itself, made without factors.

    Attributes:
      product: (the other operand, the cotangent) -> the gradient of the view.
      axes: what its axes stand for.
      operand: takes the other operand.
      aval: shape and dtype of that.
      examples: the axes of the two along which they may hold several examples, whose gradients are added up.
    """

    product: Callable[[jax.Array, jax.Array], jax.Array]
    axes: Axes
    operand: Callable[[Sequence[jax.Array]], jax.Array]
    aval: jax.ShapeDtypeStruct
    examples: tuple[int, int]


class Use(NamedTuple):
    """One equation that turns a view of a parameter into something else.

    Attributes:
      param: index of the parameter.
      primitive: name of the primitive.
      path: where the equation stands: its index in the jaxpr, after those of the equations
        (and branches) around it.
      loops: the scans around it, outermost first.
      left: the equation's operands -> the left factor of one iteration.
      right: the cotangent of the equation's result -> the right factor.
      left_axes, right_axes: what the axes of the factors stand for, loops excluded.
      left_aval, right_aval: shapes and dtypes of the factors of one iteration.
      indexed: the parameter axes that a left factor of row indices stands for, in their order, else None.
      scale: what the product of the factors is multiplied by, if anything.
      gradient: how the gradient follows without factors, where there is a way.
      by_factors: whether `left` and `right` are factors. If not, they are what `gradient` is made of.
    """

    param: int
    primitive: str
    path: tuple[int, ...]
    loops: tuple[Loop, ...]
    left: Callable[[Sequence[jax.Array]], jax.Array]
    right: Callable[[jax.Array], jax.Array]
    left_axes: Axes
    right_axes: Axes
    left_aval: jax.ShapeDtypeStruct
    right_aval: jax.ShapeDtypeStruct
    indexed: tuple[int, ...] | None = None
    scale: Scale | None = None
    gradient: Gradient | None = None
    by_factors: bool = True

    def without_factors(self) -> "Use":
        """The same use in its other form."""
        if (other := self.gradient) is None:
            return self
        return self._replace(
            left=other.operand, right=_same, left_aval=other.aval, by_factors=False
        )

    @property
    def form(self) -> "Use":
        """What the factors look like; equal for uses that are alike, wherever they stand."""
        return self._replace(param=0, path=(), left=_same, right=_same, gradient=None)

    @property
    def is_masked(self) -> bool:
        """Whether the array of its scale varies over axes of both factors, and is not looked up itself."""
        if self.scale is None or self.indexed is not None:
            return False
        loops = {atom for loop in self.loops for atom in loop.axes}
        factors = self.left_axes, self.right_axes
        return not any(self.scale.atoms <= loops.union(*axes) for axes in factors)

    @property
    def is_product(self) -> bool:
        """Whether it is a product, outside scans, whose left factor is the other operand as it is."""
        return isinstance(self.left, _Operand) and self.by_factors and not self.loops

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(loop.length for loop in self.loops)

    @property
    def is_shared_by_loop(self) -> bool:
        return any(loop.length > 1 and not loop.axes for loop in self.loops)


def find(eqn: Any, which: int, view: View, path: tuple[int, ...], sizes: Any) -> Use | None:
    """The use that equation `eqn` makes of its operand `which`, or None if there is no rule."""
    rule = RULES.get(eqn.primitive.name)
    found = rule(eqn, which, view, sizes) if rule else None
    if found is None or (view.pads and view.scale is not None):
        return None
    left, left_axes, right_axes, indexed, gradient, *others = found
    (right,) = others or (_same,)
    if view.pads or view.scale is not None:
        gradient = None
    if not (left or gradient):
        return None
    if view.pads:
        padded = views.pads_of(view, left_axes), views.pads_of(view, right_axes)
        if len(padded[0]) + len(padded[1]) < len(view.pads):
            return None  # The axis of a look-up, which is in neither factor.
        left = functools.partial(_pad_left, left, padded[0])
        right = functools.partial(_pad_right, right, padded[1])
    operands = [_struct(v.aval) for v in eqn.invars]
    if jnp.issubdtype(operands[which].dtype, jnp.complexfloating):
        if left is None:
            return None
        gradient = None
        left, right, left_axes, right_axes = complex_weights.real_factors(
            left, right, view.gain, (left_axes, right_axes), indexed
        )
    elif view.gain != 1:
        right = functools.partial(_multiplied, view.gain, right)
        gradient = gradient and (functools.partial(_times, view.gain, gradient[0]), *gradient[1:])
    if gradient is not None:
        product, axes, examples = gradient
        gradient = Gradient(product, axes, _Operand(1 - which), operands[1 - which], examples)
    if left is None:
        use = Use(
            view.param, eqn.primitive.name, path, view.loops, _Operand(1 - which), right, (), (),
            operands[1 - which], eqn.outvars[0].aval, gradient=gradient,
        )  # fmt: skip
        return use.without_factors()
    left_aval = _evaluated(left, [v.aval for v in eqn.invars])
    right_aval = _evaluated(right, eqn.outvars[0].aval)
    if not all(jnp.issubdtype(a.dtype, jnp.floating) for a in (left_aval, right_aval)):
        return None
    return Use(
        view.param, eqn.primitive.name, path, view.loops, left, right, left_axes, right_axes,
        left_aval, right_aval, indexed, view.scale, gradient,
    )  # fmt: skip


class _Operand(NamedTuple):
    """Takes one operand as it is."""

    which: int

    def __call__(self, operands: Sequence[Any]) -> Any:
        return operands[self.which]


def _evaluated(function: Callable, arguments: Any) -> Any:
    """The shape and dtype of a function's result."""
    if function is _same or isinstance(function, _Operand):
        return _struct(function(arguments))
    arguments = jax.tree.map(lambda aval: aval if varying(aval) else _struct(aval), arguments)
    return _struct(jax.eval_shape(function, arguments))


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _same(cotangent: jax.Array) -> jax.Array:
    return cotangent


def _times(gain: complex, function: Callable, *arguments: jax.Array) -> jax.Array:
    return function(*arguments[:-1], settled(arguments[-1] * gain))


def _multiplied(gain: complex, right: Callable, cotangent: jax.Array) -> jax.Array:
    # After a backward pass by hand, which need not be linear in the cotangent.
    return settled(right(cotangent) * gain)


def is_whole(use: Use) -> bool:
    """Whether the right factor is the cotangent as it is."""
    return use.right is _same


def _pad_left(left: Callable, pads: tuple, operands: Sequence[jax.Array]) -> jax.Array:
    return views.pad(pads, left(operands))


def _pad_right(right: Callable, pads: tuple, cotangent: jax.Array) -> jax.Array:
    return views.pad(pads, right(cotangent))


def _dot_general(eqn, which, view, sizes):
    (contract, batch) = eqn.params["dimension_numbers"]
    other = 1 - which
    ndim = eqn.invars[other].aval.ndim
    free = [i for i in range(ndim) if i not in (*contract[other], *batch[other])]
    positions = {axis: (-1 - n,) for n, axis in enumerate(free)}
    axes = dict(zip(contract[other], (view.axes[i] for i in contract[which]), strict=True))
    axes |= dict(zip(batch[other], (view.axes[i] for i in batch[which]), strict=True))
    left_axes = tuple((axes | positions)[i] for i in range(ndim))

    used = (*contract[which], *batch[which])
    halves = [[a for i, a in enumerate(view.axes) if i not in used], [positions[i] for i in free]]
    # The result has the batch axes, then the free axes of the first operand, then the second's.
    right_axes = (*(view.axes[i] for i in batch[which]), *halves[which], *halves[other])
    return _Operand(other), left_axes, right_axes, None, None


# (equation, which operand, what its axes stand for, sizes) -> `left`, `left_axes`, `right_axes`, `indexed`, a
# gradient without factors, its axes and those of examples; and `right` where it is not the cotangent itself.
RULES: dict[str, Callable[..., Any]] = {
    "dot_general": _dot_general,
    "gather": look_ups.gather,
    "dynamic_slice": look_ups.consecutive,
    "slice": look_ups.consecutive,
    "conv_general_dilated": convolutions.use,
    **dict.fromkeys(custom.NAMES, custom.use),
}
