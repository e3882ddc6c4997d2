"""The contribution of one row to a memory's sketch, and the sensitivity of the sum.

A row contributes u = φ ⊗ w, where φ are its key's features and w = [a₀, v]. Its norm is
‖φ‖‖w‖ ≤ √F·√(a₀² + V²) with ‖φ‖² ≤ F and V = sup‖v‖₂. The constant a₀ is public (`Domain.mass_weight`).

- Replace one row, n public: ‖u − u'‖² = ‖u‖² + ‖u'‖² − 2⟨φ, φ'⟩⟨w, w'⟩ ≤ 2F(a₀² + V²), if both products are
  ≥ 0. For ⟨w, w'⟩ = a₀² + ⟨v, v'⟩ this holds if a₀ = V, which is the default, and then Δ = 2·V·√F.
- Add or remove one row, n private: Δ = sup‖u‖ = √F·√(a₀² + V²). The worst error of an answer has variance
  σ²(d_v + V²/a₀²), which is proportional to (a₀² + V²)(d_v + V²/a₀²) and least at a₀² = V²/√d_v.
- Values ≥ 0 that add up to R_w (`value_domain="simplex"`): the denominator is the sum of the numerators, so
  that a₀ = 0, and ⟨v, v'⟩ ≥ 0. Hence Δ = √2·V·√F for replacing a row, and V·√F for adding or removing one,
  which is half of what replacing a row costs if values have any sign.

No bound is smaller if all keys have the same length. For replacing a row it is attained by two rows with the
same key and v' = −v, and in the simplex by two different labels at any keys, since ⟨v, v'⟩ = 0.

Taylor features of even degree s have ⟨φ(x), φ(x')⟩ = T_s(⟨x, x'⟩/scale) > 0, because an even truncation of
the exponential has no real zero (an odd one has, and is refused), and F = T_s(λ²ρ²/scale) = T_s(Z). For the
paper's box and scale d this gives Δ = 2·R_w·√(d_v·T_s(R²/2)); for values in a ball of radius R_w, V = R_w and
there is no √d_v. Random features are positive, and contributions are rescaled to ‖u‖ ≤ B, so that Δ = √2·B
for replacing a row, and B for adding or removing one.
"""

import math

from dpx._validate import check_positive
from dpx.cross_attention.domain import Domain
from dpx.cross_attention.features import Features, PolynomialFeatures
from dpx.cross_attention.sketch.choice import even_degree

_LARGEST_CONTRIBUTION = 1e30  # a 32-bit float holds the sum of 1e8 of them


def largest_contribution(
    domain: Domain, features: Features, contribution_bound: float | None
) -> float:
    """A bound on the norm of a row's contribution."""
    largest = math.hypot(domain.mass_weight, domain.value_norm)
    largest *= features.norm(domain.largest_logit)
    if isinstance(features, PolynomialFeatures):
        even_degree(features.degree, domain)
    elif contribution_bound is not None:
        largest = check_positive(contribution_bound, "contribution_bound")
    if largest > _LARGEST_CONTRIBUTION:
        raise ValueError(
            f"a row may contribute {largest:.3g} or more, too much for 32-bit floats: use smaller bounds or "
            "a larger scale"
        )
    return largest


def sensitivity(domain: Domain, features: PolynomialFeatures) -> float:
    """Δ, the l2 sensitivity of the Taylor sketch of even degree s (see the module's docstring)."""
    largest = math.hypot(domain.mass_weight, domain.value_norm)
    relation = math.sqrt(2) if domain.public_count else 1
    return relation * largest * features.norm(domain.largest_logit)
