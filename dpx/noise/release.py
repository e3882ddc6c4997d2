"""Where noise is added to what is private: `release`."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from dpx import _watch
from dpx._meshes import varying
from dpx._numerics import native, wide_sums
from dpx._validate import check_key, check_real
from dpx.noise.lattice import RESOLUTION, add, moved, step_of
from dpx.noise.laws import Gaussian, Laplace, Law, TruncatedLaplace
from dpx.noise.leaves import Bits, draws_like
from dpx.noise.stream import check_noise

_GRID = 2.0**-20  # of the scale of a Laplace law


def release(
    key: jax.Array | Bits,
    exact: Any,
    *,
    sensitivity: Any,
    label: str,
    noise_multiplier: ArrayLike | None = None,
    law: Law | None = None,
    axis: int | None = None,
    parts: int = 1,
) -> Any:
    """Releases an exact statistic with noise: the one way from private data to outputs.

    Guarantee: what the caller's accounting makes of it. The caller promises that for neighbours the exact
    values differ by a vector Δ with ‖Δ/sensitivity‖₂ ≤ 1 over all entries together, and gets noise
    N(0, (noise_multiplier·sensitivity)²) on each entry: a Gaussian mechanism with that noise multiplier. A
    `law` says how large the noise is itself; for the Laplace laws the promise is ‖Δ/sensitivity‖₁ ≤ 1.

    What is released lies on a public grid, which follows from the size of the noise alone, so that low bits
    say nothing about the exact value (Mironov, CCS 2012). For Gaussian noise its step is 1/128 of the
    standard deviation, which is up to 2⁻¹² larger than stated, and noise and value never meet in floating
    point: `dpx.noise.lattice` has the law of what is released, in 32 bits as in 64, and its proof. Laplace
    noise is added in 64 bits, and the sum rounded to a power of two of at most 2⁻²⁰ of the noise's scale.
    Without noise nothing is rounded.

    A symmetric matrix is released entry by entry and made symmetric afterwards: an orthogonal projection that
    leaves the exact value alone is post-processing, and removes the noise in the directions it projects out.

    Args:
      key: A secret key that is used for this release alone; or, for Gaussian noise, words of a cryptographic
        stream that are used for it alone (`dpx.noise.stream`): its tail ends, so that the noise multiplier is
        1/18 or more then.
      exact: The statistic, an array or a tree of arrays. Sums are float32 at least.
      sensitivity: How far a record moves the statistic: one number; or, where entries have different units,
        an array for each leaf (or subtree) that broadcasts against it.
      label: What is released; the same in every run.
      noise_multiplier: The standard deviation of Gaussian noise per unit of sensitivity.
      law: The law of any other noise. `exact` is then one array, against which the law's parameters
        broadcast.
      axis: The axis along which the promise holds, for each index of the others; None for all entries.
      parts: The number of successive calls with this label that make one release together: the squares of
        their ‖Δ/sensitivity‖ add up to at most 1.

    Returns:
      A tree like `exact`, of its floating-point types, float32 at least. Where nothing is traced, it is
      computed in 64 bits if `exact` has them.

    Raises:
      ValueError: for an argument that is no key, for complex numbers, or for sizes of the noise that do not
        broadcast to the statistic.
      ValueError: outside `jit`, where exact value or noise are not finite, or noise is too small or too large
        for floats: nothing would be guaranteed. Inside `jit` the release is then not finite, and noise of a
        traced size that is too small makes it NaN.
    """
    if not isinstance(key, Bits):
        check_key(key)
    elif law is not None:
        raise ValueError(
            f"{label}: law={law} must have a key: words of a stream are for noise_multiplier"
        )
    elif noise_multiplier is not None:
        check_noise(noise_multiplier)
    with wide_sums(key, exact):
        if (law is None) == (noise_multiplier is None):
            raise ValueError(
                f"{label}: noise_multiplier={noise_multiplier} and law={law} must be one or the other"
            )
        leaves, structure = jax.tree.flatten(exact)
        for leaf in leaves:
            check_real(leaf, label)
        if law is not None and len(leaves) != 1:
            raise ValueError(
                f"{label}: a law draws for one array, and not for {len(leaves)}: release each with a key "
                "of its own"
            )
        leaves = [jnp.asarray(native(leaf)) for leaf in leaves]
        # Integers count as floats: an empty histogram of NumPy's holds integers.
        floats = (
            leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.result_type(float)
            for leaf in leaves
        )
        wide = jnp.result_type(jnp.float32, *floats)
        leaves = [leaf.astype(wide) for leaf in leaves]
        _check_drawn_once(label, key, leaves)
        unit = jax.tree.leaves(jax.tree.broadcast(sensitivity, structure.unflatten(leaves)))
        scales = [noise_multiplier] if law is None else jax.tree.leaves(law)
        check_size(label, [*scales, *unit] if law is None else scales)
        for leaf, one in zip(leaves, unit, strict=True):
            _check_shapes(label, leaf.shape, [*scales, one])
        sizes = [(noise_multiplier, one) for one in unit] if law is None else [(law.width,)]
        for size in sizes:
            _check_shows(label, wide, *size)
        unit = [jnp.asarray(one, wide) for one in unit]
        stds = [
            functools.reduce(jnp.multiply, [jnp.asarray(each, wide) for each in size])
            for size in sizes
        ]
        if law is None or isinstance(law, Gaussian):
            noisy = _with_normal_noise(key, leaves, stds, unit, label)
        else:
            noisy = [_with_noise_of(law, key, leaves[0])]
        noisy = [
            _unless_flushed(leaf, std, size, may_be_zero=law is None)
            for leaf, std, size in zip(noisy, stds, sizes, strict=True)
        ]
        check_finite(noisy, label)
        norm = 2 if law is None else law.norm
        about = {"label": label, "norm": norm, "axis": axis, "parts": parts}
        scale = noise_multiplier if law is None else jax.tree.leaves(law)
        shown: Any = key
        if isinstance(key, Bits):  # words that this draw alone has
            shown = key.further[0] if key.further else np.zeros(0, np.uint32)
        noisy = _watch.at_release(about, shown, leaves, unit, noisy, scale)
        return structure.unflatten(noisy)


def check_finite(released: Any, label: str) -> Any:
    """Returns what is to be released; raises ValueError outside `jit` where it is not finite."""
    for leaf in jax.tree.leaves(released):
        if not isinstance(leaf, Tracer) and not np.isfinite(np.asarray(leaf)).all():
            raise ValueError(f"{label} is not finite: use smaller bounds, or rows that are finite")
    return released


def _check_shapes(label: str, shape: tuple[int, ...], sizes: list[Any]) -> None:
    """Raises ValueError for a size with more entries than the statistic, which would share draws."""
    for size in sizes:
        try:
            fits = np.broadcast_shapes(np.shape(size), shape) == shape
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"{label}: a size of the noise has shape {np.shape(size)}, which must broadcast to {shape}: "
                "give one number, or one for each entry"
            )


def _check_drawn_once(label: str, key: Any, leaves: list[jax.Array]) -> None:
    """Raises ValueError inside `shard_map` where devices would add the same noise to different values."""
    if missing := varying(leaves) - varying(key):
        axes = sorted(missing)
        raise ValueError(
            f"{label} differ between devices along the mesh axes {axes}, but their noise would be the same: "
            f"add them up first, jax.lax.psum(grads, {axes}), or take a key that differs as well, if each "
            "device releases data of its own"
        )


def check_size(label: str, sizes: list[Any]) -> None:
    """Raises ValueError where bounds or noise of these sizes would not be finite in JAX's default floats."""
    largest = float(jnp.finfo(jnp.result_type(jnp.float32)).max) / 1e8
    for size in sizes:
        if not isinstance(size, Tracer) and not (np.abs(np.asarray(size)) <= largest).all():
            raise ValueError(
                f"{label}: a size of {np.max(np.abs(size)):.3g} is more than floats hold with noise: use "
                "smaller bounds"
            )


def _check_shows(label: str, dtype: Any, *sizes: Any) -> None:
    """Raises ValueError for noise so small that floats have no grid for it, or flush it to zero.

    The standard deviation is the product of the sizes. Traced sizes pass: `_unless_flushed` is for them.
    """
    if any(isinstance(size, Tracer) for size in sizes):
        return
    wide = [np.asarray(size, np.float64) for size in sizes]
    std, least = functools.reduce(np.multiply, wide), _least(dtype)
    is_meant = functools.reduce(np.logical_and, [size != 0 for size in wide])
    if np.any(is_meant & (std < least)):
        raise ValueError(
            f"{label}: noise of size {np.min(std[is_meant]):.3g} is less than floats hold with what it is "
            "added to: use larger bounds"
        )


def _unless_flushed(
    noisy: jax.Array, std: jax.Array, sizes: tuple, *, may_be_zero: bool
) -> jax.Array:
    """The values with noise; NaN where the noise has a traced size that `_check_shows` would refuse."""
    if not any(isinstance(size, Tracer) for size in sizes):
        return noisy
    lost = ~(std >= _least(noisy.dtype))
    for size in sizes:
        lost = (lost & (size != 0) if may_be_zero else lost) | _is_subnormal(size)
    return jnp.where(lost, jnp.nan, noisy)


def _least(dtype: Any) -> float:
    """The smallest standard deviation that has a grid of normal numbers, and remainders of its step."""
    return float(jnp.finfo(dtype).tiny) * RESOLUTION * 2.0 ** (jnp.finfo(dtype).nmant + 1)


def _is_subnormal(size: Any) -> Any:
    """Whether a traced number is not zero, and compiled code takes it for zero."""
    if not (isinstance(size, Tracer) and jnp.issubdtype(size.dtype, jnp.floating)):
        return False
    # Bits without the sign, in a comparison that compilers do not turn into one of floats with zero.
    bits = jax.lax.bitcast_convert_type(size, f"uint{8 * size.dtype.itemsize}") << 1
    return bits - 1 < 2 ** (jnp.finfo(size.dtype).nmant + 1) - 1


def _with_normal_noise(
    key: jax.Array | Bits,
    leaves: list[jax.Array],
    stds: list[jax.Array],
    unit: list[jax.Array],
    label: str,
) -> list[jax.Array]:
    """The leaves with normal noise, each on its grid (`dpx.noise.lattice`)."""
    # The norm over all entries of the noise per unit of sensitivity, whatever their units are.
    squares = [
        leaf.size * jnp.square(jnp.where(one > 0, std / one, 0)).mean()
        for leaf, std, one in zip(leaves, stds, unit, strict=True)
        if leaf.size
    ]
    norm = jnp.sqrt(sum(squares)) if squares else 0.0
    most = RESOLUTION / moved(leaves[0].dtype) if leaves else math.inf
    if not isinstance(norm, Tracer) and norm >= most:
        raise ValueError(
            f"{label}: noise of {norm:.3g} times the sensitivity, over all entries, must be less than "
            f"{most:.3g} times, or rounding would move values by as much: raise epsilon or delta"
        )
    return [
        add(leaf, step_of(std, leaf.dtype, multiplier_norm=norm), *draw)
        for leaf, std, draw in zip(leaves, stds, draws_like(key, leaves), strict=True)
    ]


def _with_noise_of(law: Laplace | TruncatedLaplace, key: Any, exact: jax.Array) -> jax.Array:
    """The value with noise of a law, on multiples of the largest power of two up to 2⁻²⁰ of its scale.

    In 64 bits: with 32 too few draws would fall on a point of the grid.
    """
    with jax.enable_x64(True):
        noisy = exact.astype(jnp.float64) + law.sample(key, exact.shape)
        scale = jnp.asarray(law.width, jnp.float64)
        _, exponent = jnp.frexp(scale * _GRID)
        step = jnp.ldexp(jnp.ones_like(scale), exponent - 1)
        steps = noisy / step
        # Where noise does not show in the value, there is nothing to round.
        rounded = jnp.where(jnp.isfinite(steps), jnp.round(steps) * step, noisy)
        return rounded.astype(exact.dtype)
