"""Private cross-attention from one Gaussian sketch of the memory.

If features φ have ⟨φ(x), φ(y)⟩ ≈ e^{⟨x, y⟩/scale}, the numerator and the denominator of softmax attention are
linear in one matrix that depends on the memory alone:

    M = Σ_i φ(λ(k_i − centre)) ⊗ [a₀, v_i],     attention(q) ≈ φ(q/λ)ᵀM[:, 1:] / (φ(q/λ)ᵀM[:, 0] / a₀).

M + σ·Gaussian is released once, and then every query, adaptive or not, is post-processing. `contribution`
proves the sensitivity of M. Here λ² = sup‖q‖/ρ with ρ = sup‖k − centre‖, and Z is the largest logit about the
centre.

A private n is covered too: M is all that is released. Answers use in place of n the noisy mass of the zero
query, for which all weights are 1, and an empty memory is treated as any other.

Error. The numerator of an answer has noise of std σ‖φ(q/λ)‖ ≤ m(ε, δ)·(Δ/√F)·T_s(Z), independent of n, r, s
and the number of queries, because λ makes the norms of the factors for keys and queries equal.
"""

import dataclasses
import functools
import math
from typing import Any

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
    traced_sums,
    whole_change,
    whole_sums,
    whole_unit,
    with_mass,
)
from dpx.privacy import PrivacyGuarantee, gaussian_guarantee, gaussian_noise_multiplier
from dpx.release import Partial, total


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["moments", "features"],
    meta_fields=["domain", "num_records", "noise_std", "guarantee"],
)
@dataclasses.dataclass(frozen=True)
class Sketch:
    """A released sketch. `query` is post-processing, for any number of queries, and works in `jit` and
    `vmap`.

    Attributes:
      moments: The noisy M, (..., r, 1 + d_v), with leading axes for heads.
      features: The feature map φ, which is public.
      domain: The declared bounds.
      num_records: n if it is public, otherwise None.
      noise_std: σ.
      guarantee: The guarantee for all heads and queries together.
    """

    moments: jax.Array
    features: Features
    domain: Domain
    num_records: int | None
    noise_std: float
    guarantee: PrivacyGuarantee

    @property
    def means(self) -> jax.Array:
        """M/n. If n is private, the noisy mass of the zero query, but at least 1, stands for it."""
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
          ValueError: for queries that are not real or, outside `jit`, for sums that overflow, as e^{logit}
            does in 32 bits beyond a logit of 88; `query` answers such queries. The error follows from the
            release and the queries alone.
        """
        check_real(Q, "Q")
        Q = jnp.asarray(Q, self.moments.dtype)
        scaled, unit = read(self.moments, Q, self.domain, self.features)
        sums = scaled * unit[..., None]
        check_finite(sums, "sums", "use query, or smaller queries")
        return sums


@promoting
def attend(moments: jax.Array, Q: jax.Array, domain: Domain, features: Features) -> jax.Array:
    """Answers from the released mean M/n: (..., r, 1 + d_v), (..., m, d) -> (..., m, d_v)."""
    bound = domain.logit_bounds(Q)  # every exact weight lies in e^{±bound}, and so does their mean
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

    One row of (K, V), across all heads, is the record; `domain.neighboring` says which memories are
    neighbours. `contribution` proves the sensitivity. Rows are streamed: beside K and V the memory is
    O(r·(1 + d_v)).

    Args:
      key: The JAX key of the noise; None with `secure`.
      K: Private keys (..., n, d) within the domain, with leading axes for heads. Or `dpx.release.Blocks` of
        (K, V), or a sum that `statistic` made of them.
      V: Private values (..., n, d_v) within the domain. None with blocks.
      domain: The declared bounds.
      features: Taylor features of even degree, or random features; see `choose_features`.
      epsilon: ε in (0, 1e8], for all heads together (their squared sensitivities add up).
      delta: δ in (0, 1).
      clip: Whether rows are clipped into the bounds; with False, a row outside raises an error.
      contribution_bound: B, the norm to which contributions of random features are rescaled if they are
        longer. None means √(a₀² + V²)·e^{Z/2}, the root mean square norm of the largest contribution.
        Contributions of Taylor features are bounded anyway.
      secure: Sums integers and draws discrete noise (`dpx.cross_attention.sketch.sums`).

    Returns:
      The sketch, in JAX's default float type. Before it is rounded to that type, sums and noise have 64 bits,
      except under a JAX transformation of the key or the data (`jit`, `vmap`). There they have the default
      type, in which the rounding of a long 32-bit sum may move it by more than Δ; the guarantee then assumes
      that sums are exact. `dpx.noise` says what floating point means for guarantees otherwise; with `secure`
      it has no effect.

    Raises:
      ValueError: for ε or δ out of range, rows outside the bounds (the first is named), odd degrees, or
        contributions that are too large.
    """
    options = {"domain": domain, "features": features, "clip": clip}
    multiplier = gaussian_noise_multiplier(epsilon, delta)
    noise.secure.check(key, secure)
    check_features(features, domain)
    largest = largest_contribution(domain, features, contribution_bound)
    if is_traced(K, V, features):
        if secure:
            raise ValueError("secure=True cannot be traced: call it outside jit and vmap")
        n = domain.check_memory(K, V)
        K, V = domain.enter(K, V, clip=clip)
        heads, sums = math.prod(K.shape[:-2]), traced_sums(K, V, features, domain, largest)
    else:
        summing = functools.partial(statistic, **options, contribution_bound=contribution_bound)
        summed = total(summing, K, V).check("attention sketch", **options, largest=largest)
        (sums,), n, heads = summed.sums, summed.num_records, math.prod(summed.options["heads"])
    # Traced sums get the noise of integers too, so that the guarantee does not depend on tracing.
    whole, unit = whole_change(features, domain, heads), whole_unit(largest)
    about = {"noise_multiplier": multiplier, "label": "attention sketch"}
    with wide_sums(key, sums):
        if is_traced(sums):
            assert key is not None  # as `secure` is refused
            moments = noise.release(key, sums, sensitivity=whole * unit, **about)
        else:
            moments = noise.release_integers(key, sums, sensitivity=whole, unit=unit, **about)
        moments = with_mass(jnp.asarray(moments), n, features, domain)
    kind = "taylor" if isinstance(features, PolynomialFeatures) else "random"
    split = f", budget split evenly over {heads} heads" if heads > 1 else ""
    guarantee = gaussian_guarantee(
        float(epsilon),
        float(delta),
        neighboring=domain.neighboring,
        unit="row of (K, V)",
        mechanism=f"Gaussian sketch of {features.num_features} {kind} features{split}, "
        "any number of queries",
        assumptions=(("the number of rows is public",) if domain.public_count else ())
        + (() if clip else ("data within the declared bounds",))
        + rounding_assumption(key, sums),
    )
    moments = noise.check_finite(moments.astype(jnp.result_type(float)), "the attention sketch")
    count = n if domain.public_count else None
    return Sketch(moments, features, domain, count, multiplier * (whole * unit), guarantee)


def statistic(
    block,
    *,
    domain: Domain,
    features: Features,
    clip: bool = False,
    contribution_bound: float | None = None,
) -> Partial:
    """The exact sum of the contributions of the rows (K, V) of a block. It is private data.

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
