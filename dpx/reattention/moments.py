"""Mean and variance of activations after each kind of layer, from those before it.

Coordinates are treated as independent, as in the paper (arXiv 2405.18194, Section 4.3.2, Appendix C.2).
`dense`, `relu`, `gelu` and `maximum` are exact for independent Gaussian inputs, `layer_norm` uses the delta
method, and `attention` takes its weights as known. A variance whose last axis has size one holds for all
coordinates, and costs less to compute.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.stats import norm

# Larger variances are cut to this: their squares would be infinite, and quotients of these NaN.
LARGEST = 1e30


class Moments(NamedTuple):
    """Mean (..., d) and variance (..., d), (..., 1) or scalar, of independent Gaussian coordinates."""

    mean: jax.Array
    var: jax.Array


def dense(
    x: Moments, kernel: Moments | jax.Array, bias: Moments | jax.Array | None = None
) -> Moments:
    """The exact moments of x @ kernel + bias, where all three are uncertain (Eq. 30).

    Args:
      x: (..., in).
      kernel: (in, out), with a variance of that shape or scalar; or an array, which has no noise.
      bias: (out,).

    Raises:
      ValueError: for shapes that do not fit or a negative variance.
    """
    x, kernel = _checked(x, "x"), _checked(kernel, "kernel")
    inputs = x.mean.shape[-1] if x.mean.ndim else 0
    if kernel.mean.ndim != 2 or kernel.mean.shape[0] != inputs:
        raise ValueError(f"kernel {kernel.mean.shape} does not fit x {x.mean.shape}: use (in, out)")
    squared = jnp.square(kernel.mean) + kernel.var
    elementwise = x.var.shape[-1] == inputs
    var = _product(x.var, squared) if elementwise else x.var * squared.sum(0)
    if kernel.var.size > 1:
        var = var + jnp.square(x.mean) @ jnp.broadcast_to(kernel.var, kernel.mean.shape)
    else:
        var = var + kernel.var.ravel() * jnp.square(x.mean).sum(-1, keepdims=True)
    product = Moments(x.mean @ kernel.mean, var)
    return product if bias is None else add(product, _fitting(bias, "bias", product.mean.shape))


def add(x: Moments, y: Moments | jax.Array) -> Moments:
    """The moments of x + y for independent x and y: a residual branch counts as independent of its input.

    Raises:
      ValueError: for shapes that do not broadcast or a negative variance.
    """
    x = _checked(x, "x")
    y = _fitting(y, "y", x.mean.shape, grows=True)
    return Moments(x.mean + y.mean, x.var + y.var)


def maximum(x: Moments, y: Moments | jax.Array) -> Moments:
    """The exact moments of max(x, y), elementwise (Lemma C.2).

    With ν² = σ₁² + σ₂², γ = (μ₁ − μ₂)/ν and m(γ) = φ(γ) + γΦ(γ), the lemma's E[Z²] − E[Z]² equals

        Var = σ₁² Φ(γ) + σ₂² Φ(−γ) − ν² m(γ) m(−γ),

    which, unlike the lemma's form, does not cancel for large means.

    Raises:
      ValueError: for shapes that do not broadcast or a negative variance.
    """
    x = _checked(x, "x")
    y = _fitting(y, "y", x.mean.shape, grows=True)
    dtypes = jnp.result_type(x.mean, y.mean, 0.0), jnp.result_type(x.var, y.var, 0.0)
    x, y = _wide(x), _wide(y)
    total = x.var + y.var
    scale = jnp.sqrt(jnp.where(total > 0, total, 1))
    # Beyond 30 deviations float32 resolves nothing, and infinity times zero would be NaN.
    gamma = jnp.clip((x.mean - y.mean) / scale, -30, 30)
    first, second, density = norm.cdf(gamma), norm.cdf(-gamma), norm.pdf(gamma)
    excess, other = density + gamma * first, density - gamma * second
    mean = x.mean * first + y.mean * second + scale * density
    var = x.var * first + y.var * second - total * excess * other
    exact = jnp.maximum(x.mean, y.mean)
    mean, var = jnp.where(total > 0, mean, exact), jnp.maximum(var, 0)
    return Moments(mean.astype(dtypes[0]), var.astype(dtypes[1]))


def relu(x: Moments) -> Moments:
    """The exact moments of max(x, 0). Unlike Table 1, Eq. 31 of the paper subtracts c², not E[ReLU]²."""
    x = _checked(x, "x")
    return maximum(x, Moments(jnp.zeros((), x.mean.dtype), jnp.zeros((), x.var.dtype)))


def gelu(x: Moments, nodes: int = 64) -> Moments:
    """The moments of GELU, x Φ(x): the mean in closed form, the variance by Gauss–Hermite quadrature.

    For mean c and variance d, E = c Φ(a) + d φ(a)/√(1+d) with a = c/√(1+d). The variance is a weighted sum of
    squared deviations, so that nothing cancels. The paper uses ReLU's variance, 36 % off at N(0, 0.01²).

    Args:
      x: (..., d).
      nodes: The number of nodes of the quadrature; three are exact to fifth order in the standard deviation.
    """
    x = _checked(x, "x")
    dtypes = jnp.result_type(x.mean, 0.0), jnp.result_type(x.var, 0.0)
    x = _wide(x)
    spread = jnp.sqrt(1 + x.var)
    a = x.mean / spread
    below, density = norm.cdf(a), norm.pdf(a)
    mean = x.mean * below + x.var / spread * density
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    weights = weights / weights.sum()
    # The root has no derivative at 0; near 0 the variance is d·gelu'(c)².
    positive = x.var > 0
    std = jnp.sqrt(jnp.where(positive, x.var, 1))
    # Unrolled, sums fuse with the terms that they add, which is ten times faster.
    values = [jax.nn.gelu(x.mean + float(z) * std, approximate=False) for z in points]
    centre = jnp.asarray(sum(float(w) * value for w, value in zip(weights, values, strict=True)))
    deviations = [jnp.square(value - centre) for value in values]
    var = jnp.asarray(sum(float(w) * d for w, d in zip(weights, deviations, strict=True)))
    var = jnp.where(positive, var, x.var * jnp.square(below + a * density))
    return Moments(mean.astype(dtypes[0]), var.astype(dtypes[1]))


def gelu_series(x: Moments) -> Moments:
    """`gelu` with the first two terms of the Hermite series of the variance, at the cost of one activation.

    With m(c) the mean in closed form, Var = d m'² + d² m''²/2 + …, where all terms are positive. So the
    result is never too large. For c ≥ 0 it is at least 95 % of the variance; for c < 0, where the variance is
    small, it may be less.
    """
    x = _checked(x, "x")
    square = 1 + x.var
    spread = jnp.sqrt(square)
    a = x.mean / spread
    # Cheaper than `norm.cdf`, whose accurate tails are lost in a sum.
    below = 0.5 + 0.5 * jax.lax.erf(a * 0.5**0.5)
    density = jnp.exp(-jnp.square(a) / 2) * (2 * np.pi) ** -0.5
    slope = below + a * density / square
    curvature = density / spread * (1 + (1 - a**2) / square)
    var = x.var * slope**2 + 0.5 * (x.var * curvature) ** 2
    return Moments(x.mean * below + x.var / spread * density, var)


def layer_norm(
    x: Moments, scale: Moments | jax.Array, bias: Moments | jax.Array, *, epsilon: float = 1e-6
) -> Moments:
    """The moments of LayerNorm over the last axis, by the delta method.

    The divisor s is the root of s² = spread of the mean + average variance (1 − 1/d) + epsilon, the
    expectation of the square that LayerNorm divides by; so pure noise gets variance 1, not infinity. With y
    the mean, centred and divided by s,

        ∂y_j/∂x_k = (δ_jk − 1/d − y_j y_k/d)/s,

    and the variance is the sum of the squares of these, each times the variance of x_k. If the noise is not
    small, errors are O(1/d).

    Args:
      x: (..., d).
      scale, bias: (d,), arrays or, if they are noisy themselves, Moments.
      epsilon: The epsilon of the layer.

    Raises:
      ValueError: for shapes that do not fit or a negative variance.
    """
    x = _checked(x, "x")
    if not x.mean.ndim:
        raise ValueError("x is a scalar: pass (..., d)")
    scale, bias = (_fitting(*named, x.mean.shape) for named in ((scale, "scale"), (bias, "bias")))
    width = x.mean.shape[-1]
    average = jnp.mean(x.var, -1, keepdims=True)
    centred = x.mean - x.mean.mean(-1, keepdims=True)
    divisor = jnp.square(centred).mean(-1, keepdims=True) + average * (1 - 1 / width) + epsilon
    y = centred / jnp.sqrt(divisor)
    if x.var.shape[-1] == width > 1:
        tilt, bend = (x.var * y).mean(-1, keepdims=True), (x.var * y**2).mean(-1, keepdims=True)
    else:
        tilt, bend = 0.0, x.var * jnp.square(y).mean(-1, keepdims=True)
    shared = average + 2 * y * tilt + y**2 * bend
    var = jnp.maximum(x.var - (2 * (1 + y**2) * x.var - shared) / width, 0) / divisor
    scaled = jnp.square(scale.mean) * var + scale.var * (jnp.square(y) + var)
    return Moments(y * scale.mean + bias.mean, scaled + bias.var)


def rows(table: Moments, indices: jax.Array) -> Moments:
    """Rows of an embedding table (M, d), whose variance is (M, d), (M, 1) or scalar."""
    table = _checked(table, "table")
    each = jnp.broadcast_to(table.var, (len(table.mean), table.var.shape[-1]))
    return Moments(table.mean[indices], each[indices])


def attention(weights: jax.Array, v: Moments) -> Moments:
    """The moments of attention (..., Lq, Dv) with known weights (..., Lq, Lk) and values v (..., Lk, Dv).

    Raises:
      ValueError: for shapes that do not fit or a negative variance.
    """
    v = _checked(v, "v")
    if min(weights.ndim, v.mean.ndim) < 2 or weights.shape[-1] != v.mean.shape[-2]:
        raise ValueError(
            f"v {v.mean.shape} does not fit weights {weights.shape}: pass (..., Lq, Lk) and (..., Lk, Dv)"
        )
    if v.var.shape[-1] == v.mean.shape[-1] > 1:
        each = jnp.broadcast_to(v.var, v.mean.shape)
        return Moments(weights @ v.mean, jnp.square(weights) @ each)
    shared = jnp.broadcast_to(v.var, (*v.mean.shape[:-1], 1))
    # Written as a sum: many backends have no fast path for a product with a single column.
    var = (jnp.square(weights) * jnp.swapaxes(shared, -1, -2)).sum(-1, keepdims=True)
    return Moments(weights @ v.mean, var)


def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x @ kernel. A kernel of one column is multiplied as a vector, which is several times faster in XLA."""
    return x @ kernel if kernel.shape[1] > 1 else (x @ kernel[:, 0])[..., None]


def _checked(x: Moments | jax.Array, name: str) -> Moments:
    """The argument as Moments, where an array has variance 0; concrete variances are checked."""
    if not isinstance(x, Moments):
        x = Moments(x, jnp.zeros(()))
    mean, var = jnp.asarray(x.mean), jnp.asarray(x.var)
    var = var[None] if mean.ndim > var.ndim == 0 else var
    if jnp.broadcast_shapes(mean.shape, var.shape) != mean.shape:
        raise ValueError(f"{name}: variance {var.shape} does not broadcast to mean {mean.shape}")
    check_sign(var, name)
    return Moments(mean, var)


def _fitting(
    y: Moments | jax.Array, name: str, shape: tuple[int, ...], *, grows: bool = False
) -> Moments:
    """The argument as Moments, which broadcasts to `shape`, or with it if that `grows`, or ValueError."""
    y = _checked(y, name)
    try:
        joint = jnp.broadcast_shapes(y.mean.shape, shape)
    except ValueError:
        joint = None
    if joint is None or (joint != shape and not grows):
        raise ValueError(f"{name} {y.mean.shape} does not fit {shape}: pass {shape[-1:]}")
    return y


def _wide(x: Moments) -> Moments:
    """The moments in at least 32 bits, which `norm` needs."""
    return Moments(*(a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in x))


def check_sign(variance: jax.Array, name: str) -> None:
    """Raises ValueError for a concrete variance that is negative or NaN."""
    # In NumPy, because under `jit` JAX would trace an operation on a constant.
    if not isinstance(variance, Tracer) and not (known := np.asarray(variance) >= 0).all():
        wrong = np.asarray(variance)[~known].flat[0]
        raise ValueError(f"{name}: the variance {wrong} is negative or NaN, which none can be")
