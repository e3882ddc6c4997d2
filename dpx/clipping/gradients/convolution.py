"""Convolutions of two values of one example, as the gradient of a kernel is.

The result at place s, of batch b and feature f, is the sum over w and c of x[b, c, s + w] · kernel[w, c, f]:
over entries of the window of the second value, and over features. Where it is the gradient of a kernel, there
are few places, one for each entry of that kernel, and the window is as large as the image.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dpx.clipping.gradients.outer import labels
from dpx.clipping.rounding import accumulator


class Convolution:
    """A convolution as a product of two factors: patches of x, and the kernel with features in groups.

    Groups, of features or of the batch, are blocks.

    Attributes:
      left, right: the labels of the factors.
      axes: the labels of each axis of the result.
      sizes: the length of each label.
    """

    def __init__(self, eqn: Any):
        self._params, self._numbers = eqn.params, eqn.params["dimension_numbers"]
        self._result = eqn.outvars[0].aval
        of_x, of_kernel, of_result = self._numbers
        (x, kernel), result = (v.aval.shape for v in eqn.invars), self._result.shape
        batch_groups = self._params["batch_group_count"]
        count = self._params["feature_group_count"] * batch_groups
        group, batch, feature_in, feature_out = labels(4)
        self._places, self._window = labels(len(x) - 2), labels(len(x) - 2)
        self.sizes = {
            group: count,
            batch: x[of_x[0]] // batch_groups,
            feature_in: kernel[of_kernel[1]],
            feature_out: kernel[of_kernel[0]] // count,
            **{a: result[i] for a, i in zip(self._places, of_result[2:], strict=True)},
            **{a: kernel[i] for a, i in zip(self._window, of_kernel[2:], strict=True)},
        }
        first = (group, batch) if batch_groups > 1 else (batch, group)
        self._first = (*first, feature_in)
        self.left = (*self._first, *itertools.chain(*zip(self._places, self._window, strict=True)))
        mine = (feature_out, feature_in, *self._window)
        right = [label for _, label in sorted(zip(of_kernel, mine, strict=True))]
        self.right = (*right[: of_kernel[0]], group, *right[of_kernel[0] :])
        made = ((batch,), (group, feature_out), *((a,) for a in self._places))
        self.axes = tuple(label for _, label in sorted(zip(of_result, made, strict=True)))

    def patches(self, x: jax.Array) -> jax.Array:
        """The first factor."""
        return self._windows(x, 0).reshape([self.sizes[a] for a in self.left])

    def grouped(self, kernel: jax.Array) -> jax.Array:
        """The second factor."""
        return kernel.reshape([self.sizes[a] for a in self.right])

    def _windows(self, x: jax.Array, first: int) -> jax.Array:
        """x, padded and dilated. From the first one on, a spatial axis is two: of places, of the window."""
        params, spatial = self._params, self._numbers.lhs_spec[2:]
        widths = [(0, 0, 0)] * x.ndim
        each = zip(spatial, params["padding"], params["lhs_dilation"], strict=True)
        for axis, (low, high), dilation in each:
            widths[axis] = (low, high, dilation - 1)
        x = lax.pad(x, jnp.zeros((), x.dtype), widths).transpose(self._numbers.lhs_spec)
        for i in reversed(range(first, len(spatial))):
            places = self.sizes[self._places[i]], params["window_strides"][i]
            window = self.sizes[self._window[i]], params["rhs_dilation"][i]
            # The fewer of the two are stacked.
            is_short = places[0] <= window[0]
            (count, step), (size, stride) = (places, window) if is_short else (window, places)
            span = (size - 1) * stride + 1
            parts = [
                lax.slice_in_dim(x, k * step, k * step + span, stride, 2 + i) for k in range(count)
            ]
            x = jnp.stack(parts, 2 + i if is_short else 3 + i)
        return x

    def evaluate(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """The result, made of one product of matrices for each place, with a part of x as it lies.

        A batch of such convolutions would be one with a group for every example, which takes long. Patches of
        all places together would repeat each entry of x for as many places as it lies in.
        """
        strides, dilations = self._params["window_strides"], self._params["rhs_dilation"]
        # Places along the last axes, whose windows share no entry, are taken together.
        outer = 0
        each = zip(self._places, strides, dilations, strict=True)
        for i, (place, stride, dilation) in enumerate(each, start=1):
            outer = i if self.sizes[place] * stride > dilation else outer
        places, inner = self._places[:outer], self.left[3 + 2 * outer :]
        value, kernel = self._windows(x, outer), self.grouped(kernel)
        mine = (*self._first, *self._window[:outer], *inner)
        made = [a for axis in self.axes for a in axis if a not in places]
        dtype = accumulator(jnp.promote_types(x.dtype, kernel.dtype))

        def product(at: Any) -> jax.Array:
            part = value
            for i, window in enumerate(self._window[:outer]):
                span = (self.sizes[window] - 1) * dilations[i] + 1
                part = lax.dynamic_slice_in_dim(part, at[i] * strides[i], span, 2 + i)
                part = lax.slice_in_dim(part, 0, span, dilations[i], 2 + i)
            part = part.reshape([self.sizes[a] for a in mine])
            return jnp.einsum(
                part, mine, kernel, self.right, made,
                preferred_element_type=dtype, precision=lax.Precision.HIGHEST,
            )  # fmt: skip

        counts = [self.sizes[a] for a in places]
        every = jnp.asarray(list(itertools.product(*map(range, counts))), jnp.int32)
        products, now = lax.map(product, every) if outer else product(()), [*places, *made]
        result = products.reshape([self.sizes[a] for a in now])
        result = result.transpose([now.index(a) for axis in self.axes for a in axis])
        return result.reshape(self._result.shape).astype(self._result.dtype)
