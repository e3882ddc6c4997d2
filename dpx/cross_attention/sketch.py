"""Private cross-attention from one Gaussian sketch of the memory.

With features φ for which ⟨φ(x), φ(y)⟩ follows e^{⟨x, y⟩/scale}, the numerator and the denominator of softmax
attention are linear in one matrix that depends on the memory alone:

    M = Σ_i φ(λ(k_i − centre)) ⊗ [a₀, v_i],     attention(q) ≈ φ(q/λ)ᵀM[:, 1:] / (φ(q/λ)ᵀM[:, 0] / a₀).

Release M + σ·Gaussian once and every query, adaptive or not, is post-processing. Neighbours: one row of
(K, V) replaced, n public. Let Z be the largest logit about the centre (`Domain.largest_logit`) and
V = sup‖v‖₂, and set a₀ = V and λ² = sup‖q‖/ρ with ρ = sup‖k − centre‖.

Sensitivity. A row contributes u = φ ⊗ w, w = [V, v], and ‖u − u'‖² = ‖φ‖²‖w‖² + ‖φ'‖²‖w'‖² − 2⟨φ, φ'⟩⟨w, w'⟩.
⟨w, w'⟩ = V² + ⟨v, v'⟩ ≥ 0 and ‖w‖² ≤ 2V². So, where ⟨φ, φ'⟩ ≥ 0 and ‖φ‖² ≤ F, the l2 sensitivity is at most

    Δ = 2·V·√F.

Taylor features of even degree s: ⟨φ(x), φ(x')⟩ = T_s(⟨x, x'⟩/scale) > 0 (an even truncation of the
exponential has no real zero; an odd one does, hence is refused), F = T_s(λ²ρ²/scale) = T_s(Z). Δ is
attained by a row at the domain's edge whose value flips sign, v' = −v. For the paper's box and scale d
this is Δ = 2·R_w·√(d_v·T_s(R²/2)). Random features are positive, and the contribution is rescaled to ‖u‖ ≤
B, so that Δ = √2·B.

Error. The answer's numerator has noise of std σ‖φ(q/λ)‖ ≤ m(ε, δ)·2V·T_s(Z), whatever n, r, s and the number
of queries: λ is what makes the factors for keys and queries equal.
"""

import dataclasses
import functools
import itertools
import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from dpx import noise
from dpx._numerics import wide_sums
from dpx._validate import check_integer, check_number, check_positive
from dpx.cross_attention.domain import Domain, check_memory
from dpx.cross_attention.features import (
    PolynomialFeatures,
    random_directions,
    random_rows,
    smallest_degree,
    truncated_exponential,
)
from dpx.privacy import (
    REPLACE_ONE,
    PrivacyGuarantee,
    gaussian_noise_multiplier,
)

_CHUNK_ELEMENTS = 2**21  # features in flight: 8 MiB, so that they stay in the cache
_LARGEST_CONTRIBUTION = 1e30  # of which 1e8 fit into a 32-bit float


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["moments", "directions"],
    meta_fields=["domain", "degree", "num_records", "noise_std", "guarantee"],
)
@dataclasses.dataclass(frozen=True)
class Sketch:
    """A released sketch: `query` is post-processing, `jit`- and `vmap`-able, for any number of queries.

    Attributes:
      moments: The noisy M, (..., r, 1 + d_v), leading axes for heads.
      directions: The public directions of random features, (r, d), or None for Taylor features.
      domain: The declared bounds.
      degree: The Taylor features' degree, or None.
      num_records: n, public.
      noise_std: σ.
      guarantee: What the release guarantees, for all heads and queries together.
    """

    moments: jax.Array
    directions: jax.Array | None
    domain: Domain
    degree: int | None
    num_records: int
    noise_std: float
    guarantee: PrivacyGuarantee

    def query(self, Q) -> jax.Array:
        """Private attention for queries Q (..., m, d): answers (..., m, d_v), within ±value_bound.

        Raises:
          ValueError: for queries of the wrong shape or, outside `jit`, beyond the declared bound.
        """
        Q = self.domain.check_queries(Q)
        return attend(
            self.moments / self.num_records,
            Q,
            domain=self.domain,
            degree=self.degree,
            directions=self.directions,
        )

    def sums(self, Q: jax.Array) -> jax.Array:
        """The noisy sums behind the answers: Σ_i [√d_v·R_w, v_i]·e^{⟨q, k_i − centre⟩/scale}.

        Args:
          Q: (..., m, d).

        Returns:
          (..., m, 1 + d_v).
        """
        Q = jnp.asarray(Q, self.moments.dtype)
        return _sums(self.moments, Q, self.domain, self.degree, self.directions)


def attend(
    moments: jax.Array,
    Q: jax.Array,
    *,
    domain: Domain,
    degree: int | None,
    directions: jax.Array | None = None,
) -> jax.Array:
    """Answers from released moments for each record, M/n: (..., r, 1 + d_v), (..., m, d) -> (..., m, d_v)."""
    bound = domain.logit_bounds(Q)  # every true weight lies in e^{±bound}, and so does their mean
    sums = _sums(moments, Q, domain, degree, directions)
    return domain.ratio(sums, jnp.exp(-bound), jnp.exp(bound))


def build(
    key: jax.Array | None,
    K,
    V,
    *,
    key_bound: float,
    value_bound: float,
    epsilon: float,
    delta: float,
    query_bound: float | None = None,
    domain: str = "box",
    scale: float | None = None,
    clip: bool = False,
    features: str = "taylor",
    degree: int | None = None,
    relative_error: float = 1e-4,
    num_features: int = 1024,
    directions: jax.Array | None = None,
    contribution_bound: float | None = None,
    secure: bool = False,
) -> Sketch:
    """Releases the sketch of a private memory with (ε, δ)-differential privacy.

    One row of (K, V), across all heads, is the record; neighbours replace one. See the module's
    docstring for the sensitivity. Rows are streamed: memory is O(r·(1 + d_v)) beside K and V.

    Args:
      key: Secret randomness of the noise.
      K: Private keys (..., n, d), leading axes for heads; within the domain.
      V: Private values (..., n, d_v), ±value_bound elementwise.
      key_bound: R: keys in [0, R]^d, or ‖k‖₂ ≤ R for domain="ball".
      value_bound: R_w.
      epsilon: ε in (0, 1e8], for all heads together (their squared sensitivities add up).
      delta: δ in (0, 1).
      query_bound: The queries' bound, R if None. Not needed for privacy.
      domain: "box" or "ball".
      scale: What logits are divided by; d if None. Models use √d.
      clip: Clips rows into the bounds instead of raising.
      features: "taylor", or "random" for dimensions in which r = C(s + d, d) explodes.
      degree: s, even; if None the smallest even one whose weights are off by `relative_error` at most.
      relative_error: Used where `degree` is None.
      num_features: r for random features.
      directions: Public directions (r, d) of random features; `random_directions` with
        `jax.random.key(0)` if None.
      contribution_bound: B for random features; √2·V·e^{Z/2} if None, the root mean square norm of the
        largest contribution.
      secure: Sums integers and draws discrete noise (`_release_whole`); `key` must then be None.

    Returns:
      The sketch, in JAX's default float type. Sums over rows and noise are 64-bit until then, except under a
      JAX transformation of the key or the data (`jit`, `vmap`), where they are in the default type: rounding
      of a long 32-bit sum may differ between neighbours by more than Δ, which no noise here covers. What
      else floating point leaves of a guarantee is said in `dpx.noise`; with `secure` nothing is left out.

    Raises:
      ValueError: for bounds, ε or δ out of range, rows outside the bounds (the first is named), odd or
        unaffordable degrees, or arrays that do not fit together.
    """
    n, dim, value_dim = check_memory(K, V)
    bounds = Domain(
        kind=domain,
        dim=dim,
        value_dim=value_dim,
        key_bound=key_bound,
        query_bound=key_bound if query_bound is None else query_bound,
        value_bound=value_bound,
        scale=dim if scale is None else scale,
    )
    multiplier = gaussian_noise_multiplier(epsilon, delta)
    noise.secure.check(key, secure)
    if features == "taylor":
        degree, directions = choose_degree(degree, bounds, relative_error), None
        largest = math.sqrt(2) * bounds.value_norm * feature_norm(bounds, degree)
    elif features == "random":
        num_features = check_integer(num_features, "num_features")
        if contribution_bound is not None:
            check_positive(contribution_bound, "contribution_bound")
        if directions is None:
            directions = random_directions(jax.random.key(0), num_features, dim)
        degree = None
        if contribution_bound is None:
            exponent = min(bounds.largest_logit / 2, 300.0)  # e^300 is far too much already
            largest = math.sqrt(2) * bounds.value_norm * math.exp(exponent)
        else:
            largest = contribution_bound
    else:
        raise ValueError(f'features is {features!r}: use "taylor" or "random"')
    if largest > _LARGEST_CONTRIBUTION:
        raise ValueError(
            f"a row may contribute {largest:.3g} or more, too much for 32-bit floats: use smaller bounds or "
            "a larger scale"
        )
    K, V = bounds.enter(K, V, clip=clip)
    heads = math.prod(K.shape[:-2])
    change = math.sqrt(2 * heads) * largest
    with wide_sums(key, K, V, directions):
        if secure:
            moments, change = _release_whole(K, V, directions, bounds, degree, largest, multiplier)
        else:
            moments = _release(key, K, V, directions, bounds, degree, largest, change, multiplier)
    split = f", budget split evenly over {heads} heads" if heads > 1 else ""
    guarantee = PrivacyGuarantee(
        epsilon=float(epsilon),
        delta=float(delta),
        neighboring=REPLACE_ONE,
        unit="row of (K, V)",
        mechanism=f"Gaussian sketch of {_count(bounds, degree, directions)} {features} features{split}, "
        "any number of queries",
        assumptions=("the number of rows is public",)
        + (() if clip else ("data within the declared bounds",)),
        event=dp_accounting.GaussianDpEvent(multiplier),
    )
    moments = noise.check_finite(moments.astype(jnp.result_type(float)), "the attention sketch")
    return Sketch(moments, directions, bounds, degree, n, multiplier * change, guarantee)


def sensitivity(domain: Domain, degree: int) -> float:
    """Δ = 2·V·√T_s(Z): the l2 sensitivity of the Taylor sketch of even degree s (module docstring)."""
    return 2 * domain.value_norm * feature_norm(domain, degree)


def feature_norm(domain: Domain, degree: int) -> float:
    """√T_s(Z) = sup ‖φ(λ(k − centre))‖ = sup ‖φ(q/λ)‖."""
    return math.sqrt(truncated_exponential(domain.largest_logit, degree))


def choose_degree(degree: int | None, domain: Domain, relative_error: float) -> int:
    """`degree`, or if None the smallest even one with that relative error.

    Raises:
      ValueError: for an odd degree, or one with too many features.
    """
    if degree is None:
        check_positive(relative_error, "relative_error")
        degree = smallest_degree(-domain.largest_logit, domain.largest_logit, relative_error)
    elif check_number(degree, "degree") < 0 or degree % 2:
        raise ValueError(
            f"degree is {degree}: the sketch needs an even one, as odd truncations of the exponential "
            f"turn negative and the sensitivity bound fails; use {max(degree, 0) + degree % 2}"
        )
    return PolynomialFeatures(domain.dim, int(degree), domain.scale).degree


def _rows(domain: Domain, degree: int | None, directions, x: jax.Array) -> jax.Array:
    """Features first: (d, ...) -> (r, ...)."""
    if degree is None:
        return random_rows(directions, x, domain.scale)
    return PolynomialFeatures(domain.dim, degree, domain.scale).rows(x)


def _count(domain: Domain, degree: int | None, directions) -> int:
    return len(directions) if degree is None else math.comb(degree + domain.dim, domain.dim)


def _stretch(domain: Domain) -> float:
    """λ: keys are multiplied by it and queries divided, which makes their largest norms equal."""
    return math.sqrt(domain.query_radius / domain.key_radius)


def _contribution_sums(K, V, directions, domain: Domain, degree, largest) -> jax.Array:
    """M without noise for one head: K (n, d), V (n, d_v) -> (r, 1 + d_v), a chunk of rows at a time.

    Features keep the keys' dtype, being a map of each row alone; sums have the default one (`wide_sums`).
    """
    n = len(K)
    count = _count(domain, degree, directions)
    chunk = min(n, max(128, _CHUNK_ELEMENTS // count))
    K, V = (jnp.pad(a, ((0, -n % chunk), (0, 0))) for a in (K, V))
    real = jnp.arange(len(K)) < n

    def add(total, rows):
        K, V, real = rows
        phi, weights = _factors(
            K, V, directions, domain, degree=degree, largest=largest, dtype=total.dtype
        )
        weights = jnp.where(real[:, None], weights, 0)
        return total + jnp.matmul(phi, weights, precision=jax.lax.Precision.HIGHEST), None

    zero = jnp.zeros((count, 1 + domain.value_dim), jnp.result_type(float))
    chunks = tuple(a.reshape(-1, chunk, *a.shape[1:]) for a in (K, V, real))
    return jax.lax.scan(add, zero, chunks)[0]


@functools.partial(jax.jit, static_argnames=("domain", "degree", "largest", "dtype"))
def _factors(K, V, directions, domain: Domain, *, degree, largest, dtype):
    """φ (r, n) and w (n, 1 + d_v) of n rows, which contribute φ ⊗ w, of norm `largest` at most."""
    mass = jnp.full((len(K), 1), domain.value_norm, V.dtype)
    weights = jnp.concatenate([mass, V], axis=1).astype(dtype)
    keys = _stretch(domain) * (K - domain.centre)
    phi = _rows(domain, degree, directions, keys.T).astype(dtype)
    if degree is None:
        norms = jnp.linalg.norm(phi, axis=0) * jnp.linalg.norm(weights, axis=-1)
        # A key along a direction may overflow the exponential. Such a row counts as zero.
        phi = jnp.where(jnp.isfinite(norms), phi, 0)
        weights = weights * jnp.minimum(1, largest / jnp.maximum(norms, largest / 2))[:, None]
    return phi, weights


def _release_whole(K, V, directions, domain: Domain, degree, largest, multiplier):
    """The moments, released in exact arithmetic (`dpx.noise.secure`), and their sensitivity.

    A contribution φ ⊗ w is the product of φ/‖φ‖ and ‖φ‖w, which in units of 1 and of `largest` have norms of
    1 at most. With S = 2¹⁸ and B, B' the norms of the two factors after rounding, a product errs by
    e ≤ (B − S)·B' + S·(B' − S), so that two of them are √2·S² + 2e apart at most in each head.
    """
    heads, n = K.shape[:-2], K.shape[-2]
    K, V = (np.asarray(a, np.float64).reshape(-1, *a.shape[-2:]) for a in (K, V))
    steps, count = noise.secure.FACTOR_STEPS, _count(domain, degree, directions)
    bounds = [noise.secure.norm_bound(steps, size) for size in (count, 1 + domain.value_dim)]
    noise.secure.check_sum(n, math.prod(bounds))
    total = np.zeros((len(K), count, 1 + domain.value_dim), np.int64)
    chunk = max(128, _CHUNK_ELEMENTS // count)
    for head, start in itertools.product(range(len(K)), range(0, n, chunk)):
        rows = (a[head, start : start + chunk] for a in (K, V))
        options = {"degree": degree, "largest": largest, "dtype": jnp.float64}
        phi, weights = _factors(*rows, directions, domain, **options)
        phi, weights = np.asarray(phi).T, np.asarray(weights)
        norms = np.linalg.norm(phi, axis=1, keepdims=True)
        norms = np.where(np.isfinite(norms) & (norms > 0), norms, 1)
        pair = (phi / norms, weights * norms / largest)
        total[head] += noise.secure.product(*(noise.secure.whole_rows(a, steps) for a in pair))
    error = (bounds[0] - steps) * bounds[1] + steps * (bounds[1] - steps)
    change = math.sqrt(len(K)) * (math.sqrt(2) * steps**2 + 2 * error)
    noisy = noise.secure.release_whole(
        total, sensitivity=change, noise_multiplier=multiplier, label="attention sketch"
    )
    grid = largest / steps**2
    moments = (noisy * grid).reshape(*heads, count, -1)
    if degree is not None:  # the constant feature sums to n, which is public
        moments[..., 0, 0] = n * domain.value_norm
    return jnp.asarray(moments), change * grid


@functools.partial(jax.jit, static_argnames=("domain", "degree", "largest"))
def _release(key, K, V, directions, domain: Domain, degree, largest, change, multiplier):
    sums = functools.partial(
        _contribution_sums, directions=directions, domain=domain, degree=degree, largest=largest
    )
    heads, (n, _) = K.shape[:-2], K.shape[-2:]
    flat = [a.reshape(-1, *a.shape[-2:]) for a in (K, V)]
    moments = jax.lax.map(lambda head: sums(*head), tuple(flat))
    moments = moments.reshape(*heads, *moments.shape[1:])
    moments = noise.release(
        key, moments, sensitivity=change, noise_multiplier=multiplier, label="attention sketch"
    )
    if degree is not None:  # the constant feature sums to n, which is public
        moments = moments.at[..., 0, 0].set(n * domain.value_norm)
    return moments.astype(K.dtype)


@functools.partial(jax.jit, static_argnames=("domain", "degree"))
def _sums(moments, Q, domain: Domain, degree: int | None, directions) -> jax.Array:
    def sums(Q):
        y = jnp.moveaxis(Q, -1, 0) / _stretch(domain)
        phi = _rows(domain, degree, directions, y)
        return jnp.einsum("r...m,...rv->...mv", phi, moments, precision=jax.lax.Precision.HIGHEST)

    m = Q.shape[-2]
    chunk = max(128, _CHUNK_ELEMENTS // moments.shape[-2])
    if m <= chunk:
        return sums(Q)
    padding = [(0, 0)] * (Q.ndim - 2) + [(0, -m % chunk), (0, 0)]
    chunks = jnp.pad(Q, padding).reshape(*Q.shape[:-2], -1, chunk, Q.shape[-1])
    answers = jnp.moveaxis(jax.lax.map(sums, jnp.moveaxis(chunks, -3, 0)), 0, -3)
    return answers.reshape(*answers.shape[:-3], -1, answers.shape[-1])[..., :m, :]
