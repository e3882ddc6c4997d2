"""Convolutions of two values of one example, as the gradient of a kernel is.

An entry of the result at place s, of batch b and feature f, is the sum over entries w of the second value's
window and over features c of x[b, c, s + w] · kernel[w, c, f]. As a gradient, s are few offsets within the
kernel that is trained, and w are all positions.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpx.clipping.gradients.outer import labels
from dpx.clipping.rounding import accumulator


def read(eqn: Any) -> tuple[Callable, Callable, tuple, tuple, tuple, dict]:
    """The factors of a convolution: patches of the first value, and the second with features in groups.

    Returns:
      a function of the first value, one of the second, the labels of what these return and of the result,
      and the length of each label. Groups, of features or of the batch, are blocks.
    """
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    x, kernel, result = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    spatial = len(numbers.lhs_spec) - 2
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    count = groups * batch_groups
    group, batch, feature_in, feature_out = labels(4)
    places, window = labels(spatial), labels(spatial)
    sizes = {
        group: count,
        batch: x.shape[numbers.lhs_spec[0]] // batch_groups,
        feature_in: kernel.shape[numbers.rhs_spec[1]],
        feature_out: kernel.shape[numbers.rhs_spec[0]] // count,
    }
    sizes |= {a: result.shape[i] for a, i in zip(places, numbers.out_spec[2:], strict=True)}
    sizes |= {a: kernel.shape[i] for a, i in zip(window, numbers.rhs_spec[2:], strict=True)}
    first = (group, batch, feature_in) if batch_groups > 1 else (batch, group, feature_in)
    left = (*first, *(a for both in zip(places, window, strict=True) for a in both))

    def patches(value: jax.Array) -> jax.Array:
        value = padded(params, value).transpose(numbers.lhs_spec)
        for i in reversed(range(spatial)):
            value = _windows(params, value, 2 + i, i, sizes[places[i]], sizes[window[i]])
        return value.reshape([sizes[a] for a in left])

    at = numbers.rhs_spec[0]
    right: list[int] = [0] * kernel.ndim
    for axis, label in zip(numbers.rhs_spec, [feature_out, feature_in, *window], strict=True):
        right[axis] = label
    right.insert(at, group)

    def grouped(value: jax.Array) -> jax.Array:
        return value.reshape([sizes[a] for a in right])

    axes: list[tuple[int, ...]] = [()] * result.ndim
    made = [(batch,), (group, feature_out), *((a,) for a in places)]
    for axis, label in zip(numbers.out_spec, made, strict=True):
        axes[axis] = label
    return patches, grouped, left, tuple(right), tuple(axes), sizes


def padded(params: Any, x: jax.Array) -> jax.Array:
    """The first value with its padding, and with zeros between its entries where it is dilated."""
    spatial = params["dimension_numbers"].lhs_spec[2:]
    widths = [(0, 0, 0)] * x.ndim
    each = zip(spatial, params["padding"], params["lhs_dilation"], strict=True)
    for axis, (low, high), dilation in each:
        widths[axis] = (low, high, dilation - 1)
    return lax.pad(x, jnp.zeros((), x.dtype), widths)


def _windows(params: Any, x: jax.Array, axis: int, i: int, places: int, window: int) -> jax.Array:
    """An axis of positions as two: of places, and of entries of the window."""
    stride, dilation = params["window_strides"][i], params["rhs_dilation"][i]
    if places <= window:
        span = (window - 1) * dilation + 1
        parts = [
            lax.slice_in_dim(x, p * stride, p * stride + span, dilation, axis)
            for p in range(places)
        ]
        return jnp.stack(parts, axis)
    span = (places - 1) * stride + 1
    parts = [
        lax.slice_in_dim(x, w * dilation, w * dilation + span, stride, axis) for w in range(window)
    ]
    return jnp.stack(parts, axis + 1)


def evaluate(eqn: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The result, one product of matrices after the other: one for each place, with a part of x as it lies.

    A batch of such convolutions would be one with a group for every example, which takes long. Patches of
    all places together would repeat each entry of x for as many places as it lies in.
    """
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    _, grouped, left, right, axes, sizes = read(eqn)
    spatial = len(numbers.lhs_spec) - 2
    first, each = left[:3], [left[3 + 2 * i : 5 + 2 * i] for i in range(spatial)]
    # Places along the last axes are taken together where their windows share no entry.
    outer = spatial
    while outer and _repeats_nothing(params, outer - 1, sizes[each[outer - 1][0]]):
        outer -= 1
    dtype = accumulator(jnp.promote_types(x.dtype, kernel.dtype))
    value, kernel = padded(params, x).transpose(numbers.lhs_spec), grouped(kernel)
    for i in reversed(range(outer, spatial)):
        value = _windows(params, value, 2 + i, i, *(sizes[a] for a in each[i]))
    made = [a for axis in axes for a in axis if a not in [p for p, _ in each[:outer]]]
    mine = [*first, *(w for _, w in each[:outer]), *(a for both in each[outer:] for a in both)]
    number = {a: i for i, a in enumerate(sizes)}

    def product(starts: Any) -> jax.Array:
        part = value
        for i, (_, window) in enumerate(each[:outer]):
            dilation = params["rhs_dilation"][i]
            span = (sizes[window] - 1) * dilation + 1
            part = lax.dynamic_slice_in_dim(
                part, starts[i] * params["window_strides"][i], span, 2 + i
            )
            part = lax.slice_in_dim(part, 0, span, dilation, 2 + i)
        return jnp.einsum(
            part.reshape([sizes[a] for a in mine]), [number[a] for a in mine],
            kernel, [number[a] for a in right], [number[a] for a in made],
            preferred_element_type=dtype, precision=lax.Precision.HIGHEST,
        )  # fmt: skip

    result = eqn.outvars[0].aval
    if not outer:
        return product(()).reshape(result.shape).astype(result.dtype)
    counts = [sizes[p] for p, _ in each[:outer]]
    places = np.array(list(itertools.product(*map(range, counts))), np.int32)
    found = lax.map(product, jnp.asarray(places)).reshape(*counts, *(sizes[a] for a in made))
    now = [*(p for p, _ in each[:outer]), *made]
    order = [now.index(a) for axis in axes for a in axis]
    return found.transpose(order).reshape(result.shape).astype(result.dtype)


def _repeats_nothing(params: Any, i: int, places: int) -> bool:
    """Whether patches along a spatial axis hold each entry of the first value once at most."""
    return places * params["window_strides"][i] <= params["rhs_dilation"][i]
