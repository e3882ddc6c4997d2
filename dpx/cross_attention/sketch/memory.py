"""Private cross-attention from one Gaussian sketch of the memory.

With features φ for which ⟨φ(x), φ(y)⟩ follows e^{⟨x, y⟩/scale}, the numerator and the denominator of softmax
attention are linear in one matrix that depends on the memory alone:

    M = Σ_i φ(λ(k_i − centre)) ⊗ [a₀, v_i],     attention(q) ≈ φ(q/λ)ᵀM[:, 1:] / (φ(q/λ)ᵀM[:, 0] / a₀).

Release M + σ·Gaussian once and every query, adaptive or not, is post-processing. How far neighbours move M is
proven in `contribution`. λ² = sup‖q‖/ρ, with ρ = sup‖k − centre‖, and Z is the largest
logit about the centre.

What a private n leaves behind. Nothing but noise: M is the only thing released, the noisy mass of the zero
query, whose weights are all 1, stands for n in answers, and an empty memory is a memory like any other.

Error. The answer's numerator has noise of std σ‖φ(q/λ)‖ ≤ m(ε, δ)·(Δ/√F)·T_s(Z), whatever n, r, s and the
number of queries: λ is what makes the factors for keys and queries equal.
"""

import dataclasses
import functools
import math
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp

from dpx import noise
from dpx._numerics import is_traced, promoting, rounding_assumption, wide_sums
from dpx._validate import check_finite, check_real
from dpx.cross_attention.domain import Domain
from dpx.cross_attention.features import Features, PolynomialFeatures, check_features
from dpx.cross_attention.sketch.contribution import largest_contribution
from dpx.cross_attention.sketch.sums import (
    largest_whole,
    read,
    release_moments,
    release_whole_moments,
    whole_change,
    whole_sums,
    whole_unit,
)
from dpx.privacy import PrivacyGuarantee, gaussian_noise_multiplier
from dpx.release import Partial, total


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["moments", "features"],
    meta_fields=["domain", "num_records", "noise_std", "guarantee"],
)
@dataclasses.dataclass(frozen=True)
class Sketch:
    """A released sketch: `query` is post-processing, `jit`- and `vmap`-able, for any number of queries.

    Attributes:
      moments: The noisy M, (..., r, 1 + d_v), leading axes for heads.
      features: The feature map φ, which is public.
      domain: The declared bounds.
      num_records: n where it is public, otherwise None.
      noise_std: σ.
      guarantee: What the release guarantees, for all heads and queries together.
    """

    moments: jax.Array
    features: Features
    domain: Domain
    num_records: int | None
    noise_std: float
    guarantee: PrivacyGuarantee

    @property
    def means(self) -> jax.Array:
        """M/n, with the noisy mass of the zero query for n where that is private, at least 1."""
        if self.num_records is not None:
            return self.moments / self.num_records
        centre = jnp.zeros((*self.moments.shape[:-2], 1, self.domain.dim))
        count = self.sums(centre)[..., :1] / self.domain.value_norm
        return self.moments / jnp.maximum(count, 1)

    def query(self, Q) -> jax.Array:
        """Private attention for queries Q (..., m, d): answers (..., m, d_v), within the values' bound.

        Raises:
          ValueError: for queries of the wrong shape or, outside `jit`, beyond the declared bound.
        """
        Q = self.domain.check_queries(Q)
        return attend(self.means, Q, self.domain, self.features)

    def sums(self, Q: jax.Array) -> jax.Array:
        """The noisy sums behind the answers: Σ_i [V, v_i]·e^{⟨q, k_i − centre⟩/scale}.

        Args:
          Q: (..., m, d).

        Returns:
          (..., m, 1 + d_v).

        Raises:
          ValueError: for queries that are not real or, outside `jit`, for sums that are more than floats
            hold, as e^{logit} is in 32 bits beyond a logit of 88. `query` answers such queries. It follows
            from the release and the queries alone.
        """
        check_real(Q, "Q")
        Q = jnp.asarray(Q, self.moments.dtype)
        found, unit = read(self.moments, Q, self.domain, self.features)
        found = found * unit[..., None]
        check_finite(found, "sums", "use query, or smaller queries")
        return found


@promoting
def attend(moments: jax.Array, Q: jax.Array, domain: Domain, features: Features) -> jax.Array:
    """Answers from released moments for each record, M/n: (..., r, 1 + d_v), (..., m, d) -> (..., m, d_v)."""
    bound = domain.logit_bounds(Q)  # every true weight lies in e^{±bound}, and so does their mean
    sums, unit = read(moments, Q, domain, features)
    unit = jnp.log(unit)
    return domain.ratio(sums, jnp.exp(-bound - unit), jnp.exp(bound - unit))


def build(
    key: jax.Array | None,
    K: Any,
    V: Any = None,
    *,
    domain: Domain,
    features: Features,
    epsilon: float,
    delta: float,
    clip: bool = False,
    contribution_bound: float | None = None,
    secure: bool = False,
) -> Sketch:
    """Releases the sketch of a private memory with (ε, δ)-differential privacy.

    One row of (K, V), across all heads, is the record; the domain says what neighbours are. See the
    module's docstring for the sensitivity. Rows are streamed: beside K and V the memory is O(r·(1 + d_v)).

    Args:
      key: Secret randomness of the noise; None with `secure`.
      K: Private keys (..., n, d), leading axes for heads; within the domain. Or `dpx.release.Blocks` of
        (K, V), or what `statistic` made of them.
      V: Private values (..., n, d_v); within the domain. None with blocks.
      domain: The declared bounds.
      features: Of even degree, or random; see `choose_features`.
      epsilon: ε in (0, 1e8], for all heads together (their squared sensitivities add up).
      delta: δ in (0, 1).
      clip: Clips rows into the bounds instead of raising.
      contribution_bound: B, to which the contributions of random features are rescaled. None means
        √(a₀² + V²)·e^{Z/2}, the root mean square norm of the largest contribution. Taylor features do not
        use it, since their contributions are bounded.
      secure: Sums integers and draws discrete noise (`dpx.cross_attention.sketch.sums`).

    Returns:
      The sketch, in JAX's default float type. Sums over rows and noise have 64 bits until then, except under
      a JAX transformation of the key or the data (`jit`, `vmap`), where they have the default type. There a
      long 32-bit sum may be rounded so that neighbours differ by more than Δ, which no noise here covers; the
      guarantee then assumes that sums are exact.
      What else floating point leaves of a guarantee is said in `dpx.noise`; with `secure` it takes nothing.

    Raises:
      ValueError: for ε or δ out of range, rows outside the bounds (the first is named), odd degrees, or
        contributions that are too large.
    """
    about = {"domain": domain, "features": features, "clip": clip}
    multiplier = gaussian_noise_multiplier(epsilon, delta)
    noise.secure.check(key, secure)
    check_features(features, domain)
    largest = largest_contribution(domain, features, contribution_bound)
    if is_traced(K, V, features):
        if secure:
            raise ValueError("secure=True cannot be traced: call it outside jit and vmap")
        n = domain.check_memory(K, V)
        K, V = domain.enter(K, V, clip=clip)
        heads, sums = math.prod(K.shape[:-2]), None
        assumed = rounding_assumption(key, K, V, features)
    else:
        summing = functools.partial(statistic, **about, contribution_bound=contribution_bound)
        found = total(summing, K, V).check("attention sketch", **about, largest=largest)
        (sums,), n, heads = found.sums, found.num_records, math.prod(found.options["heads"])
        assumed = rounding_assumption(key, sums)
    # The noise of integers: what is traced and what is not say the same of themselves.
    change = whole_change(features, domain, heads) * whole_unit(largest)
    if sums is None:
        moments = release_moments(key, K, V, features, domain, largest, change, multiplier)
    else:
        with wide_sums(key, sums):
            moments = release_whole_moments(key, sums, n, features, domain, largest, multiplier)
    kind = "taylor" if isinstance(features, PolynomialFeatures) else "random"
    split = f", budget split evenly over {heads} heads" if heads > 1 else ""
    guarantee = PrivacyGuarantee(
        epsilon=float(epsilon),
        delta=float(delta),
        neighboring=domain.neighboring,
        unit="row of (K, V)",
        mechanism=f"Gaussian sketch of {features.num_features} {kind} features{split}, "
        "any number of queries",
        assumptions=(("the number of rows is public",) if domain.public_count else ())
        + (() if clip else ("data within the declared bounds",))
        + assumed,
        event=dp_accounting.GaussianDpEvent(multiplier),
    )
    moments = noise.check_finite(moments.astype(jnp.result_type(float)), "the attention sketch")
    count = n if domain.public_count else None
    return Sketch(moments, features, domain, count, multiplier * change, guarantee)


def statistic(
    block,
    *,
    domain: Domain,
    features: Features,
    clip: bool = False,
    contribution_bound: float | None = None,
) -> Partial:
    """The exact sum of what the rows (K, V) of a block contribute: private data.

    Args:
      block: K (..., n, d) and V (..., n, d_v); blocks may have different n.
      domain, features, clip, contribution_bound: As in `build`.
    """
    K, V = block
    n = domain.check_memory(K, V)
    check_features(features, domain)
    largest = largest_contribution(domain, features, contribution_bound)
    K, V = domain.enter(K, V, clip=clip)
    with wide_sums(K, V, features):
        sums = whole_sums(K, V, features, domain, largest)
    options = {"domain": domain, "features": features, "clip": clip, "largest": largest}
    options["heads"] = K.shape[:-2]
    heads = math.sqrt(math.prod(K.shape[:-2]))
    largest = math.ceil(heads * largest_whole(features, domain))
    return Partial("attention sketch", options, (sums,), n, largest)
