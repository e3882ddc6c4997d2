"""Re-Attention: attention weights corrected for the noise that private training put into the keys.

Private training leaves more noise in some parameters than in others: the embedding of a rare token moves by
noise alone. A noisy key has noisy logits, E[exp(logit)] = exp(E[logit] + Var[logit]/2), and draws attention
that it does not deserve ("attention distraction"). Ding et al. (arXiv 2405.18194, Section 4) follow mean and
variance of every activation through the network, parameters taken as independent Gaussians, and correct.

Moments of independent coordinates in, moments of coordinates out; correlations are dropped on the way, as
in the paper. `dense`, `relu`, `gelu` and `maximum` are exact given Gaussian inputs without correlations,
`layer_norm` is the delta method, `attention` takes its weights as known. Wherever a variance is expected,
a last axis of size one stands for coordinates that share it, and costs less.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.stats import norm

from dpx import attention as dpx_attention
from dpx import popularity, privacy
from dpx.data.histories import Histories

_LARGEST = 1e30  # of a variance: products of two stay finite where they are cut again


class Moments(NamedTuple):
    """Mean (..., d) and variance (..., d), (..., 1) or scalar, of independent Gaussian coordinates."""

    mean: jax.Array
    var: jax.Array


class ParameterErrors(NamedTuple):
    """Effective errors, as standard deviations: of the rows of the embedding (M,), of everything else."""

    embedding: jax.Array
    rest: float | jax.Array


class TokenProbabilities(NamedTuple):
    """(M,) probability that a record holds a token, and the guarantee it was released with."""

    values: np.ndarray
    guarantee: privacy.PrivacyGuarantee


def effective_error(
    noise_multiplier: float,
    batch_size: float,
    token_probability: np.ndarray | jax.Array | None = None,
    *,
    l2_clip: float = 1.0,
    floor: float = 1e-6,
) -> np.ndarray:
    """Standard deviation of the noise of one DP-SGD step in a parameter (Definition 4.1, Claim 4.2).

    The noise on the sum of gradients is shared by the examples that tell something about the parameter:
    σ_eff = σ_dp · C / (B · p), p = 1 for a parameter that every example uses, and the probability that a
    record holds the token for a row of the embedding.

    Args:
      noise_multiplier: σ_dp ≥ 0.
      batch_size: Expected batch size B.
      token_probability: (M,) probabilities in [0, 1]; None for p = 1.
      l2_clip: Clipping norm C.
      floor: Smallest p, for tokens that were never seen.

    Returns:
      (M,) or scalar, float32.

    Raises:
      ValueError: for an argument out of range.
    """
    if not noise_multiplier >= 0:
        raise ValueError(f"noise_multiplier={noise_multiplier} must be at least 0")
    for name, value in (("batch_size", batch_size), ("l2_clip", l2_clip), ("floor", floor)):
        if not value > 0:
            raise ValueError(f"{name}={value} must be positive")
    p = np.asarray(1.0 if token_probability is None else token_probability, np.float64)
    if not ((p >= 0) & (p <= 1)).all():
        wrong = p[~((p >= 0) & (p <= 1))].flat[0]
        raise ValueError(f"token_probability has {wrong}, outside [0, 1]: clip noisy estimates")
    return np.asarray(noise_multiplier * l2_clip / (batch_size * np.maximum(p, floor)), np.float32)


def token_probabilities(
    key: jax.Array,
    histories: Histories,
    *,
    epsilon: float,
    delta: float,
    max_tokens: int,
    unit: str = "user",
) -> TokenProbabilities:
    """Estimates privately in which share of the records each token occurs.

    Guarantee: (ε, δ)-DP for adding or removing one record. A record enters by the 0/1 vector of its distinct
    tokens, of norm √n for n of them, rescaled to norm at most √max_tokens; so one record moves the sum by at
    most √max_tokens in l2 norm, whatever the others are, and the sum is released once with Gaussian noise.
    Division by the number of records, which is taken to be public, and clipping to [0, 1] are
    post-processing. Records with more distinct tokens count less at each: by √(max_tokens/n).

    Args:
      key: Of the noise.
      histories: N records of tokens.
      epsilon, delta: The budget, to be charged to the ledger of the training run.
      max_tokens: Distinct tokens with which a record counts in full.
      unit: What one record is.

    Raises:
      ValueError: for an argument out of range.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1")
    if not histories.items:
        raise ValueError("histories holds no records: there is nothing to estimate")
    noisy = popularity.fit(
        key, histories, epsilon=epsilon, delta=delta, l2_clip=max_tokens**0.5, unit=unit
    )
    guarantee = noisy.guarantee.assuming("the number of records is public")
    return TokenProbabilities(np.clip(noisy.counts / len(histories.items), 0, 1), guarantee)


def uniform_probabilities(num_tokens: int, length: int) -> np.ndarray:
    """(M,) probability that a record of `length` tokens drawn uniformly holds a token: looks at no data."""
    return np.full(num_tokens, -np.expm1(length * np.log1p(-1 / num_tokens)))


def dense(
    x: Moments, kernel: Moments | jax.Array, bias: Moments | jax.Array | None = None
) -> Moments:
    """x @ kernel + bias with all of them uncertain: exact (Eq. 30).

    Args:
      x: (..., in).
      kernel: (in, out), variance of that shape or scalar; an array for one without noise.
      bias: (out,).

    Raises:
      ValueError: for shapes that do not fit or a negative variance.
    """
    x, kernel = _checked(x, "x"), _checked(kernel, "kernel")
    inputs = x.mean.shape[-1]
    if kernel.mean.ndim != 2 or kernel.mean.shape[0] != inputs:
        raise ValueError(f"kernel {kernel.mean.shape} does not fit x {x.mean.shape}: use (in, out)")
    squared = jnp.square(kernel.mean) + kernel.var
    elementwise = jnp.ndim(x.var) and x.var.shape[-1] == inputs
    var = _product(x.var, squared) if elementwise else x.var * squared.sum(0)
    if jnp.ndim(kernel.var):
        var = var + jnp.square(x.mean) @ jnp.broadcast_to(kernel.var, kernel.mean.shape)
    else:
        var = var + kernel.var * jnp.square(x.mean).sum(-1, keepdims=True)
    product = Moments(x.mean @ kernel.mean, var)
    return product if bias is None else add(product, bias)


def add(x: Moments, y: Moments | jax.Array) -> Moments:
    """x + y, as independent: a residual branch's correlation with its input is dropped."""
    x, y = _checked(x, "x"), _checked(y, "y")
    return Moments(x.mean + y.mean, x.var + y.var)


def maximum(x: Moments, y: Moments | jax.Array) -> Moments:
    """max(x, y) elementwise: exact (Lemma C.2).

    With ν² = σ₁² + σ₂², γ = (μ₁ − μ₂)/ν and m(γ) = φ(γ) + γΦ(γ) the lemma's E[Z²] − E[Z]² is

        Var = σ₁² Φ(γ) + σ₂² Φ(−γ) − ν² m(γ) m(−γ),

    in which, unlike there, nothing cancels where the means are large.
    """
    x, y = _checked(x, "x"), _checked(y, "y")
    total = x.var + y.var
    scale = jnp.sqrt(jnp.where(total > 0, total, 1))
    # Beyond 30 deviations float32 has nothing to say, and infinity times zero would be NaN.
    gamma = jnp.clip((x.mean - y.mean) / scale, -30, 30)
    first, second, density = norm.cdf(gamma), norm.cdf(-gamma), norm.pdf(gamma)
    excess, other = density + gamma * first, density - gamma * second
    mean = x.mean * first + y.mean * second + scale * density
    var = x.var * first + y.var * second - total * excess * other
    exact = jnp.maximum(x.mean, y.mean)
    return Moments(jnp.where(total > 0, mean, exact), jnp.maximum(var, 0))


def relu(x: Moments) -> Moments:
    """max(x, 0): exact. Eq. 31 of the paper subtracts c² where E[ReLU]² belongs; Table 1 does not."""
    return maximum(x, Moments(jnp.zeros(()), jnp.zeros(())))


def gelu(x: Moments, nodes: int = 64) -> Moments:
    """x Φ(x), the exact erf form: the mean in closed form, the variance by Gauss–Hermite quadrature.

    E = c Φ(a) + d φ(a)/√(1+d) with a = c/√(1+d), for mean c and variance d. The variance is a weighted sum of
    squared deviations, so that nothing cancels. The paper uses ReLU's, 36 % off at N(0, 0.01²).

    Args:
      x: (..., d).
      nodes: Of the quadrature; three are exact to fifth order in the standard deviation.
    """
    x = _checked(x, "x")
    spread = jnp.sqrt(1 + x.var)
    a = x.mean / spread
    mean = x.mean * norm.cdf(a) + x.var / spread * norm.pdf(a)
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    weights = weights / weights.sum()
    std = jnp.sqrt(x.var)
    # Unrolled, the sums fuse with what they sum over, which matters tenfold.
    values = [jax.nn.gelu(x.mean + float(z) * std, approximate=False) for z in points]
    centre = jnp.asarray(sum(float(w) * value for w, value in zip(weights, values, strict=True)))
    deviations = [jnp.square(value - centre) for value in values]
    var = jnp.asarray(sum(float(w) * d for w, d in zip(weights, deviations, strict=True)))
    return Moments(mean, var)


def gelu_series(x: Moments) -> Moments:
    """`gelu` with the first two terms of the variance's Hermite series, at the price of one activation.

    With m(c) the mean in closed form, Var = d m'² + d² m''²/2 + …, all terms positive: never too much, and at
    least 95 % of the variance for c ≥ 0, less below, where there is little of it.
    """
    x = _checked(x, "x")
    square = 1 + x.var
    spread = jnp.sqrt(square)
    a = x.mean / spread
    # Cheaper than `norm.cdf`, whose care for the tails is lost on a sum.
    below = 0.5 + 0.5 * jax.lax.erf(a * 0.5**0.5)
    density = jnp.exp(-jnp.square(a) / 2) * (2 * np.pi) ** -0.5
    slope = below + a * density / square
    curvature = density / spread * (1 + (1 - a**2) / square)
    var = x.var * slope**2 + 0.5 * (x.var * curvature) ** 2
    return Moments(x.mean * below + x.var / spread * density, var)


def layer_norm(
    x: Moments, scale: Moments | jax.Array, bias: Moments | jax.Array, *, epsilon: float = 1e-6
) -> Moments:
    """LayerNorm over the last axis by the delta method.

    The divisor is s² = spread of the mean + average variance (1 − 1/d) + epsilon, the expectation of what
    LayerNorm divides by: input of pure noise comes out with variance 1, not infinite. With y the mean,
    centred and divided by s,

        ∂y_j/∂x_k = (δ_jk − 1/d − y_j y_k/d)/s,

    whose squares are summed against the variances. Errors are O(1/d) where the noise is not small.

    Args:
      x: (..., d).
      scale, bias: (d,), arrays or, if they are noisy themselves, Moments.
      epsilon: The layer's own.
    """
    x, scale, bias = _checked(x, "x"), _checked(scale, "scale"), _checked(bias, "bias")
    width = x.mean.shape[-1]
    average = jnp.mean(x.var, -1, keepdims=True) if jnp.ndim(x.var) else x.var
    centred = x.mean - x.mean.mean(-1, keepdims=True)
    divisor = jnp.square(centred).mean(-1, keepdims=True) + average * (1 - 1 / width) + epsilon
    y = centred / jnp.sqrt(divisor)
    if jnp.ndim(x.var) and x.var.shape[-1] == width > 1:
        tilt, bend = (x.var * y).mean(-1, keepdims=True), (x.var * y**2).mean(-1, keepdims=True)
    else:
        tilt, bend = 0.0, x.var * jnp.square(y).mean(-1, keepdims=True)
    shared = average + 2 * y * tilt + y**2 * bend
    var = jnp.maximum(x.var - (2 * (1 + y**2) * x.var - shared) / width, 0) / divisor
    scaled = jnp.square(scale.mean) * var + scale.var * (jnp.square(y) + var)
    return Moments(y * scale.mean + bias.mean, scaled + bias.var)


def rows(table: Moments, indices: jax.Array) -> Moments:
    """Rows of an embedding or of the positions: `table` (M, d), variance (M, d), (M, 1) or scalar."""
    table = _checked(table, "table")
    var = table.var[indices] if jnp.ndim(table.var) else table.var
    return Moments(table.mean[indices], var)


def attention(weights: jax.Array, v: Moments) -> Moments:
    """Attention's output (..., Lq, Dv) for known weights (..., Lq, Lk) and uncertain values (..., Lk, Dv)."""
    v = _checked(v, "v")
    if jnp.ndim(v.var) and v.var.shape[-1] == v.mean.shape[-1] > 1:
        return Moments(weights @ v.mean, jnp.square(weights) @ v.var)
    shared = jnp.broadcast_to(v.var, (*v.mean.shape[:-1], 1))
    # A sum, since a product with a single column misses the fast path of many backends.
    var = (jnp.square(weights) * jnp.swapaxes(shared, -1, -2)).sum(-1, keepdims=True)
    return Moments(weights @ v.mean, var)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | Moments,
    key_variance: jax.Array,
    *,
    mask: jax.Array | None = None,
    renormalize: bool = True,
) -> jax.Array | Moments:
    """Softmax attention with S_i ← S_i / exp(Var[logit_i]/2) (Section 4.3.3, Algorithm 2 line 8).

    The logit ⟨q, k⟩/√D of a head has variance Σ_j q_j² Var[k_j]/D. The correction is a constant to
    differentiation: as in the paper gradients take the path of the means, while a gradient through the
    variance would train the model to look certain, in place of being so.

    Any variance is safe, infinity included; one that all keys share changes nothing if renormalised.

    Args:
      q: Queries (..., Lq, D).
      k: Keys (..., Lk, D).
      v: Values (..., Lk, Dv), or their Moments.
      key_variance: (..., Lk, D), or (..., Lk, 1) where a key's coordinates share it.
      mask: As in `dpx.attention.softmax`.
      renormalize: Whether the corrected weights sum to one (a shift of the logits by half their variance), or
        are the quotients as the paper prints them, which fade as the noise grows.

    Returns:
      (..., Lq, Dv), or its Moments if `v` are Moments.

    Raises:
      ValueError: for shapes that do not fit together, a mask that is not boolean or a negative variance.
    """
    weights = attention_weights(q, k, key_variance, mask=mask, renormalize=renormalize)
    values = v.mean if isinstance(v, Moments) else jnp.asarray(v)
    if values.ndim < 2 or values.shape[-2] != weights.shape[-1]:
        raise ValueError(f"v {values.shape} does not fit k {jnp.shape(k)}: pass v (..., Lk, Dv)")
    if isinstance(v, Moments):
        return attention(weights, v)
    return (weights @ values.astype(weights.dtype)).astype(values.dtype)


def attention_weights(
    q: jax.Array,
    k: jax.Array,
    key_variance: jax.Array,
    *,
    mask: jax.Array | None = None,
    renormalize: bool = True,
) -> jax.Array:
    """The corrected weights (..., Lq, Lk) of `attend`; the same arguments."""
    q, k, key_variance = jnp.asarray(q), jnp.asarray(k), jnp.asarray(key_variance)
    if min(q.ndim, k.ndim, key_variance.ndim) < 2 or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q {q.shape} and k {k.shape} must be (..., Lq, D) and (..., Lk, D)")
    if key_variance.shape[-2] != k.shape[-2] or key_variance.shape[-1] not in (1, k.shape[-1]):
        raise ValueError(
            f"key_variance {key_variance.shape} does not fit k {k.shape}: pass (..., Lk, D) or (..., Lk, 1)"
        )
    _check_sign(key_variance, "key_variance")
    if mask is not None and jnp.asarray(mask).dtype != jnp.bool_:
        raise ValueError(f"mask has dtype {mask.dtype}: pass booleans, True where q may attend")
    key_variance = jnp.clip(key_variance.astype(jnp.result_type(q, k, jnp.float32)), 0, _LARGEST)
    if not renormalize:
        variance = _logit_variance(q, key_variance)
        weights = dpx_attention.attention_weights(q, k, mask=mask)
        return weights * jax.lax.stop_gradient(jnp.exp(-variance / 2))
    # What all keys share cancels, but in floating point only if it never enters.
    variance = _logit_variance(q, key_variance - key_variance.min(-2, keepdims=True))
    if mask is None:
        variance = variance - variance.min(-1, keepdims=True)
    else:
        least = variance.min(-1, keepdims=True, where=mask, initial=_LARGEST)
        variance = jnp.where(mask, variance - least, 0)
    bias = jax.lax.stop_gradient(-variance / 2)
    return dpx_attention.attention_weights(q, k, mask=mask, bias=bias)


def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x @ kernel; a kernel of one column as a vector, without which XLA takes several times as long."""
    return x @ kernel if kernel.shape[1] > 1 else (x @ kernel[:, 0])[..., None]


def _logit_variance(q: jax.Array, key_variance: jax.Array) -> jax.Array:
    """(..., Lq, Lk), finite."""
    squares = jnp.square(q.astype(key_variance.dtype)) / q.shape[-1]
    if key_variance.shape[-1] == 1:
        squares = squares.sum(-1, keepdims=True)
    variance = jnp.einsum("...qd,...kd->...qk", squares, key_variance)
    return jnp.minimum(variance, _LARGEST)


def _checked(x: Moments | jax.Array, name: str) -> Moments:
    """Moments of anything, an array having no variance; the values are checked where they are known."""
    if not isinstance(x, Moments):
        return Moments(jnp.asarray(x), jnp.zeros(()))
    mean, var = jnp.asarray(x.mean), jnp.asarray(x.var)
    if jnp.broadcast_shapes(mean.shape, var.shape) != mean.shape:
        raise ValueError(f"{name}: variance {var.shape} does not broadcast to mean {mean.shape}")
    _check_sign(var, name)
    return Moments(mean, var)


def _check_sign(variance: jax.Array, name: str) -> None:
    """Raises for a variance that is known to be negative or NaN."""
    # In NumPy: under jit an operation of JAX on a constant is traced.
    if not isinstance(variance, Tracer) and not (known := np.asarray(variance) >= 0).all():
        wrong = np.asarray(variance)[~known].flat[0]
        raise ValueError(f"{name}: the variance {wrong} is negative or NaN, which none can be")
