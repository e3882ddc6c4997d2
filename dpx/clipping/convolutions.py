"""How a convolution uses its kernel.

Entry [o, i, c] of a kernel's gradient, for an offset o within the kernel, an input feature i and an output
feature c, is the sum over positions p of input[p + o, i] · cotangent[p, c]. There are two forms of it:

- Factors: patches of the input, one row of all offsets and input features for each position; the cotangent.
- The gradient itself: one product of matrices after the other, one for each offset, with a part of the input
  as it lies. This needs no patches, which repeat each number of the input as often as the kernel has offsets,
  and features may be in groups, which have no common factors.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from dpx.clipping.materialize import accumulator
from dpx.clipping.views import View


class Convolution(NamedTuple):
    """The parameters of `lax.conv_general_dilated`, and what shape kernel and result have."""

    params: dict[str, Any]
    kernel: tuple[int, ...]
    result: tuple[int, ...]

    @classmethod
    def of(cls, eqn: Any) -> "Convolution":
        return cls(eqn.params, eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape)

    @property
    def window(self) -> list[int]:
        """The lengths of the kernel along its spatial axes."""
        return [self.kernel[i] for i in self.params["dimension_numbers"].rhs_spec[2:]]

    @property
    def groups(self) -> int:
        """The number of groups of features."""
        return self.params["feature_group_count"]

    def padded(self, x: jax.Array) -> jax.Array:
        """The input with its padding, and with zeros between its entries where it is dilated."""
        spatial = self.params["dimension_numbers"].lhs_spec[2:]
        widths = [(0, 0, 0)] * x.ndim
        each = zip(spatial, self.params["padding"], self.params["lhs_dilation"], strict=True)
        for axis, (low, high), dilation in each:
            widths[axis] = (low, high, dilation - 1)
        return lax.pad(x, jnp.zeros((), x.dtype), widths)

    @property
    def positions(self) -> list[int]:
        """The lengths of the result along its spatial axes."""
        return [self.result[i] for i in self.params["dimension_numbers"].out_spec[2:]]

    def part(self, padded: jax.Array, offset: Sequence[Any]) -> jax.Array:
        """The entries of the padded input that the kernel's entries at an offset are multiplied by.

        The offset is that along the first spatial axes; all of the input is taken along the others.
        """
        starts: list[Any] = [0] * padded.ndim
        spans, strides = list(padded.shape), [1] * padded.ndim
        for i, first in enumerate(offset):
            axis = self.params["dimension_numbers"].lhs_spec[2 + i]
            starts[axis] = first * self.params["rhs_dilation"][i]
            strides[axis] = self.params["window_strides"][i]
            spans[axis] = (self.positions[i] - 1) * strides[axis] + 1
        found = lax.dynamic_slice(padded, starts, spans)
        return lax.slice(found, [0] * padded.ndim, spans, strides)

    def windows(self, x: jax.Array, axes: Sequence[int]) -> jax.Array:
        """What the kernel's entries along its last spatial axes are multiplied by: (*window, *x).

        One axis is taken after the other: a window takes no more slices than its sides are long together.

        Args:
          x: the padded input, its axes in any order.
          axes: which of them these spatial axes are; the result has positions there.
        """
        first, ndim = len(self.window) - len(axes), x.ndim
        for i, axis in reversed([*enumerate(axes, first)]):
            stride, dilation = (self.params[key][i] for key in ("window_strides", "rhs_dilation"))
            shape = self.window[i], stride, dilation, self.positions[i]
            x = _windows(x, axis + x.ndim - ndim, *shape)
        return x


def _windows(
    x: jax.Array, axis: int, window: int, stride: int, dilation: int, positions: int
) -> jax.Array:
    """(window, *x), with positions along the axis."""
    if window == 1 or window > stride or dilation > 1:
        span = (positions - 1) * stride + 1
        starts = range(0, window * dilation, dilation)
        return jnp.stack([lax.slice_in_dim(x, o, o + span, stride, axis) for o in starts])
    # Windows that do not overlap are pieces of the input, of which no more is left than a part of one.
    widths = [(0, 0, 0)] * x.ndim
    widths[axis] = (0, positions * stride - x.shape[axis], 0)
    x = lax.pad(x, jnp.zeros((), x.dtype), widths)
    x = x.reshape(*x.shape[:axis], positions, stride, *x.shape[axis + 1 :])
    return jnp.moveaxis(lax.slice_in_dim(x, 0, window, axis=axis + 1), axis + 1, 0)


def patches(conv: Convolution, operands: Sequence[jax.Array]) -> jax.Array:
    """The left factor: (*window, batch, input feature, *positions)."""
    x = conv.padded(operands[0]).transpose(conv.params["dimension_numbers"].lhs_spec)
    return conv.windows(x, range(2, x.ndim))


def gradient(conv: Convolution, x: jax.Array, cotangent: jax.Array) -> jax.Array:
    """The gradient of the kernel, in its own shape, from the input and the cotangent of the result."""
    numbers, groups = conv.params["dimension_numbers"], conv.groups
    spatial = len(conv.window)
    dtype = accumulator(jnp.promote_types(x.dtype, cotangent.dtype))
    # Axes by number: batch and positions, the group, and features of the input and of the result.
    positions, group, feature_in, feature_out, offsets = [*range(1 + spatial)], 50, 51, 52, 60
    x_axes, cotangent_axes = [0] * x.ndim, [0] * cotangent.ndim
    for axes, spec, feature in (
        (x_axes, numbers.lhs_spec, feature_in),
        (cotangent_axes, numbers.out_spec, feature_out),
    ):
        for axis, label in zip(spec, [positions[0], feature, *positions[1:]], strict=True):
            axes[axis] = label
    cotangent, cotangent_axes = _grouped(cotangent, cotangent_axes, feature_out, group, groups)
    padded = conv.padded(x)
    # Offsets along the last axes are taken together where patches do not overlap, and so repeat nothing.
    outer = spatial
    while outer and conv.window[outer - 1] <= conv.params["window_strides"][outer - 1]:
        outer -= 1
    # A product takes the cotangent as it lies, with features before its positions or after them.
    made = [*range(offsets + 2 + outer, offsets + 2 + spatial), group, feature_in, feature_out]
    if numbers.out_spec[1] < numbers.out_spec[-1]:
        made[-2:] = feature_out, feature_in
    # The order of the kernel's own axes; entries for one offset along the first ones have length one there.
    order: list[int] = []
    for which in np.argsort(numbers.rhs_spec).tolist():
        taken_together = [offsets + which] if which >= 2 + outer else []
        order += {0: [group, feature_out], 1: [feature_in]}.get(which, taken_together)
    shape = list(conv.kernel)
    for axis in numbers.rhs_spec[2 : 2 + outer]:
        shape[axis] = 1

    def product(first: Any) -> jax.Array:
        taken = conv.windows(conv.part(padded, first), numbers.lhs_spec[2 + outer :])
        axes = [*made[:-3], *x_axes]
        taken, axes = _grouped(taken, axes, feature_in, group, groups)
        found = jnp.einsum(
            taken, axes, cotangent, cotangent_axes, made,
            preferred_element_type=dtype, precision=lax.Precision.HIGHEST,
        )  # fmt: skip
        return found.transpose([made.index(axis) for axis in order]).reshape(shape)

    if not outer:
        return product(())
    firsts = jnp.asarray(np.array(list(itertools.product(*map(range, conv.window[:outer])))))

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        i = jnp.asarray(i)  # Without jit it is a number of Python's.
        starts = [jnp.zeros_like(i)] * total.ndim
        for j, axis in enumerate(numbers.rhs_spec[2 : 2 + outer]):
            starts[axis] = firsts[i, j].astype(i.dtype)
        return _update(total, product(firsts[i]), starts)

    # One after the other, or all parts would be held at once, which are the patches. XLA makes the zeros that
    # a loop starts from when the program starts, and holds them until then; anything else it makes in time.
    entry = cotangent.reshape(-1)[:1].astype(dtype).sum()
    return lax.fori_loop(0, len(firsts), step, jnp.broadcast_to(entry, conv.kernel))


@jax.custom_batching.custom_vmap
def _update(x: jax.Array, part: jax.Array, starts: Sequence[jax.Array]) -> jax.Array:
    return lax.dynamic_update_slice(x, part, starts)


@_update.def_vmap
def _update_rule(
    size: int, batched: Any, x: jax.Array, part: jax.Array, starts: Sequence[jax.Array]
):
    """The same of a batch, of which JAX would make a scatter: XLA writes twice as many kernels for one."""
    x, part = (
        a if is_batched else jnp.broadcast_to(a, (size, *a.shape))
        for a, is_batched in zip((x, part), batched, strict=False)
    )
    return _update(x, part, [jnp.zeros_like(starts[0]), *starts]), True


def _grouped(
    x: jax.Array, axes: list[int], feature: int, group: int, groups: int
) -> tuple[jax.Array, list[int]]:
    """Splits the axis of features into groups and the features of each."""
    at = axes.index(feature)
    shape = (*x.shape[:at], groups, x.shape[at] // groups, *x.shape[at + 1 :])
    return x.reshape(shape), [*axes[:at], group, *axes[at:]]


def use(eqn: Any, which: int, view: View, sizes: Any) -> tuple | None:
    """What `dpx.clipping.uses.RULES` wants of a convolution; None where it has no rule."""
    if (forms := rule(eqn, which)) is None:
        return None
    by_patches, gradient = forms
    left_axes, right_axes = patch_axes(eqn, view.axes)
    numbers = eqn.params["dimension_numbers"]
    examples = numbers.lhs_spec[0], numbers.out_spec[0]
    return by_patches, left_axes, right_axes, None, (gradient, view.axes, examples)


def rule(eqn: Any, which: int) -> tuple[Callable | None, Callable] | None:
    """How patches follow from the operands (None if features are in groups), and the gradient."""
    if which != 1 or eqn.params["batch_group_count"] != 1:
        return None
    conv = Convolution.of(eqn)
    by_patches = functools.partial(patches, conv) if conv.groups == 1 else None
    return by_patches, functools.partial(gradient, conv)


def patch_axes(eqn: Any, axes: Sequence[tuple[int, ...]]) -> tuple[tuple, tuple]:
    """What the axes of patches and of the cotangent stand for, from those of the kernel."""
    numbers = eqn.params["dimension_numbers"]
    out_feature, in_feature, *spatial = (axes[i] for i in numbers.rhs_spec)
    places = [(-2 - i,) for i in range(len(spatial))]
    right: list[tuple[int, ...]] = [()] * len(axes)
    for axis, meaning in zip(numbers.out_spec, [(-1,), out_feature, *places], strict=True):
        right[axis] = meaning
    return (*spatial, (-1,), in_feature, *places), tuple(right)


def evaluate(eqn: Any, operands: Sequence[jax.Array]) -> jax.Array:
    """The result of a convolution, with derivatives that are as fast in a loop as outside of one.

    XLA's CPU compiler rewrites convolutions for its library, which has features last, but not those in loops,
    and these take many times as long. So they are written that way from the start.
    """
    conv = Convolution.of(eqn)

    @jax.custom_vjp
    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return _features_last(eqn, x, kernel)

    def forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple]:
        return convolve(x, kernel), (x, kernel)

    def backward(held: tuple, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, kernel = held

        def by_x(kernel: jax.Array, cotangent: jax.Array) -> jax.Array:
            return jax.linear_transpose(lambda x: _bound(eqn, x, kernel), x)(cotangent)[0]

        traced = jax.make_jaxpr(by_x)(kernel, cotangent)
        env = dict(zip(traced.jaxpr.invars, (kernel, cotangent), strict=True))
        for each in traced.jaxpr.eqns:
            values = [v.val if isinstance(v, core.Literal) else env[v] for v in each.invars]
            is_convolution = each.primitive.name == eqn.primitive.name
            result = _features_last(each, *values) if is_convolution else _bound(each, *values)
            env[each.outvars[0]] = result
        if conv.params["batch_group_count"] == 1:
            total = gradient(conv, x, cotangent).astype(kernel.dtype)
        else:
            (total,) = jax.linear_transpose(lambda kernel: _bound(eqn, x, kernel), kernel)(
                cotangent
            )
        return env[traced.jaxpr.outvars[0]], total

    convolve.defvjp(forward, backward)
    return convolve(*operands)


def _bound(eqn: Any, *operands: jax.Array) -> jax.Array:
    return eqn.primitive.bind(*operands, **eqn.params)


def _features_last(eqn: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The convolution of (batch, *positions, features) with (*window, features in, features out)."""
    (n, c, *positions), (o, i, *window), out = eqn.params["dimension_numbers"]
    last = len(positions) + 1
    spec = lax.ConvDimensionNumbers(
        (0, last, *range(1, last)), (last, last - 1, *range(last - 1)), (0, last, *range(1, last))
    )
    x, kernel = x.transpose(n, *positions, c), kernel.transpose(*window, i, o)
    result = eqn.primitive.bind(x, kernel, **eqn.params | {"dimension_numbers": spec})
    order = [out[0], *out[2:], out[1]]
    return result.transpose([order.index(axis) for axis in range(len(order))])
