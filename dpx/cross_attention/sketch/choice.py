"""The choice of a sketch's features, which depends on the declared bounds alone, never on the memory."""

import jax
import numpy as np

from dpx._validate import check_choice, check_integer, check_number, check_positive
from dpx.cross_attention.domain import Domain
from dpx.cross_attention.features import (
    Features,
    PolynomialFeatures,
    RandomFeatures,
    smallest_degree,
)

FEATURE_OPTIONS = ("features", "degree", "relative_error", "num_features", "directions")


def choose_features(
    domain: Domain,
    features: str = "taylor",
    *,
    degree: int | None = None,
    relative_error: float = 1e-4,
    num_features: int = 1024,
    directions: jax.Array | None = None,
) -> Features:
    """The feature map for logits ⟨q, k⟩/scale of a domain.

    Args:
      domain: The declared bounds.
      features: "taylor", or "random" for dimensions in which r = C(s + d, d) explodes.
      degree: The even degree s of Taylor features. If None, the smallest even one for which weights have at
        most `relative_error`.
      relative_error: Used if `degree` is None.
      num_features: The number r of random features.
      directions: Public directions (r, d) of random features; drawn with `jax.random.key(0)` if None.

    Raises:
      ValueError: for another name, an odd degree, too many features, or a number out of range.
    """
    check_choice(features, "features", ("taylor", "random"))
    if features == "taylor":
        degree = even_degree(degree, domain, relative_error)
        return PolynomialFeatures(domain.dim, degree, domain.scale)
    check_integer(num_features, "num_features")
    if directions is None:
        return RandomFeatures.draw(jax.random.key(0), num_features, domain.dim, domain.scale)
    if np.ndim(directions) != 2 or np.shape(directions)[1] != domain.dim:
        raise ValueError(f"directions of shape {np.shape(directions)} must be (r, {domain.dim})")
    return RandomFeatures(directions, domain.scale)


def even_degree(degree: int | None, domain: Domain, relative_error: float = 1e-4) -> int:
    """`degree`, or if None the smallest even degree with that relative error; ValueError for an odd one."""
    if degree is None:
        check_positive(relative_error, "relative_error")
        return smallest_degree(-domain.largest_logit, domain.largest_logit, relative_error)
    if check_number(degree, "degree") < 0 or degree % 2:
        raise ValueError(
            f"degree={degree} must be even, as odd truncations of the exponential turn negative, where the "
            f"sensitivity bound fails: use {max(degree, 0) + degree % 2}"
        )
    return degree
