"""Differentially private cross-attention: a private memory (K, V) that answers any number of public queries.

Queries may be adaptive. Ke, Liang, Shi, Song, Zhang, "Provable Differentially Private Computation of the
Cross-Attention Mechanism" (arXiv 2407.14717), build trees. `mechanism="tree"` is their structure with its
errors corrected, and `as_printed` gives the settings of the paper. `mechanism="sketch"`, the default, is one
Gaussian release of a linear sketch, with far less noise for the same guarantee. `DPTree`, `DPTreeDistance`
and `DPTreeHighDim` are the paper's data structures by themselves.
"""

import math
from typing import Any

import jax
import numpy as np
from dp_accounting import NeighboringRelation

from dpx._validate import check_choice, check_integer, check_positive
from dpx.cross_attention import baselines, sketch, trees
from dpx.cross_attention.domain import Domain
from dpx.cross_attention.features import (
    PolynomialFeatures,
    RandomFeatures,
    truncated_exponential,
)
from dpx.cross_attention.sketch import Sketch, expected
from dpx.cross_attention.sketch.choice import FEATURE_OPTIONS
from dpx.cross_attention.sketch.expected import ExpectedError, MemoryWarning, expected_error
from dpx.cross_attention.trees import DPTree, DPTreeDistance, DPTreeHighDim, Trees
from dpx.privacy import REPLACE_ONE, gaussian_noise_multiplier

__all__ = [
    "DPTree",
    "DPTreeDistance",
    "DPTreeHighDim",
    "Domain",
    "ExpectedError",
    "MemoryWarning",
    "PolynomialFeatures",
    "RandomFeatures",
    "Sketch",
    "Trees",
    "as_printed",
    "baselines",
    "build",
    "expected_error",
    "sketch",
    "trees",
]

# The options of `choose_features` and of `build`, for each mechanism.
_OPTIONS = {
    "sketch": (
        FEATURE_OPTIONS,
        ("contribution_bound", "secure"),
    ),
    "tree": (("degree", "relative_error"), ("noise", "budget", "copies", "bins")),
}


def build(
    key: jax.Array | None,
    K,
    V,
    *,
    key_bound: float,
    value_bound: float,
    epsilon: float,
    delta: float,
    mechanism: str = "sketch",
    query_bound: float | None = None,
    domain: str = "box",
    scale: float | None = None,
    value_domain: str = "box",
    neighboring: NeighboringRelation | str = REPLACE_ONE,
    clip: bool = False,
    expected_records: int | None = None,
    **options,
) -> Sketch | Trees:
    """Releases a private memory that answers any number of queries. One row of (K, V) is the record.

    Args:
      key: The JAX key of the noise; None with `secure=True`.
      K: Private keys (n, d). The sketch also takes (..., n, d), with leading axes for heads.
      V: Private values (n, d_v), within `value_bound`.
      key_bound: R, declared without looking at the data: keys lie in [0, R]^d, or in the ball ‖k‖₂ ≤ R.
      value_bound: R_w, declared without looking at the data.
      epsilon, delta: The budget of the release, and so of all queries together.
      mechanism: "sketch" or "tree".
      query_bound: The bound of queries, which affects accuracy but not privacy; `key_bound` if None.
      domain: "box" or "ball"; trees take "box" only.
      scale: The number that logits are DIVIDED by, as in the paper: weights are proportional to
        e^{⟨q, k⟩/scale}. None means d, the paper's choice, or, with `features="auto"`, an automatic choice.
        Models use √d. (`dpx.attention.dot_product_attention` multiplies.)
      value_domain: "box" for values within ±value_bound elementwise. "ball" for ‖v‖₂ ≤ value_bound, as for
        unit vectors, with √d_v times less noise. "simplex" for v ≥ 0 that add up to `value_bound`, as for
        one-hot labels and probabilities, with another √2 times less.
      neighboring: "replace_one", where the number of rows is public, or, for the sketch, "add_or_remove_one",
        where it is private and the noise is up to 2 times less.
      clip: Whether each row is clipped into the bounds, independently of others; with False, a row outside
        raises an error.
      expected_records: A public guess of the number of rows, if that is private. `features="auto"` and the
        warnings use it.
      **options: The options of one mechanism.
        For the sketch: features ("taylor", "random" or "auto"), degree, relative_error, num_features and
        directions, as `sketch.choose_features`; contribution_bound and secure, as `sketch.build`. "auto"
        chooses by `expected_error`: among the features that tell values apart best, those of the sharpest
        attention whose error is small. If `scale` is None, it chooses the scale too.
        For the tree: degree and relative_error, as `trees.choose_features`; noise, budget, copies and bins,
        as `trees.build`.

    Returns:
      A pytree with `query(Q)`, (m, d) -> (m, d_v), and `guarantee`. Its leaves hold the release only.

    Warns:
      MemoryWarning: before a sketch is built if it is a constant, if the private mean of V is expected to be
        better, if its scale makes all weights nearly equal (as d does for keys in a ball of many dimensions),
        or if its sums take gigabytes.

    Raises:
      ValueError: for an unknown mechanism, an option of another mechanism, bounds, ε or δ out of range, rows
        outside the bounds (the first is named), or arrays that do not fit together.
    """
    check_choice(mechanism, "mechanism", tuple(_OPTIONS))
    of_features, of_release = _OPTIONS[mechanism]
    for name, value in options.items():
        if name not in of_features + of_release:
            raise ValueError(
                f"{name}={value!r} must be left out, as mechanism={mechanism!r} has no such option: use "
                f"{', '.join(of_features + of_release)}"
            )
    # Checked before random features are drawn, which takes long.
    if options.get("contribution_bound") is not None:
        check_positive(options["contribution_bound"], "contribution_bound")
    declared = Domain.declare(
        K,
        V,
        key_bound=key_bound,
        value_bound=value_bound,
        query_bound=query_bound,
        domain=domain,
        scale=scale,
        value_domain=value_domain,
        neighboring=neighboring,
    )
    module: Any = {"sketch": sketch, "tree": trees}[mechanism]
    chosen = {name: value for name, value in options.items() if name in of_features}
    if mechanism == "sketch":
        n = np.shape(K)[-2] if declared.public_count else expected_records
        heads = math.prod(np.shape(K)[:-2])
        multiplier = math.sqrt(heads) * gaussian_noise_multiplier(epsilon, delta)
        if chosen.get("features") == "auto":
            declared, features = _best(declared, n, multiplier, scale is None, chosen)
        else:
            features = sketch.choose_features(declared, **chosen)
        bound = options.get("contribution_bound")
        expected.warn_before(declared, features, n, multiplier, heads, bound)
    else:
        features = trees.choose_features(declared, **chosen)
    return module.build(
        key,
        K,
        V,
        domain=declared,
        features=features,
        epsilon=epsilon,
        delta=delta,
        clip=clip,
        **{name: value for name, value in options.items() if name in of_release},
    )


def _best(declared: Domain, n: int | None, multiplier: float, any_scale: bool, chosen: dict):
    """The domain and the features that `features="auto"` chooses."""
    for name in chosen:
        if name != "features":
            raise ValueError(
                f"{name}={chosen[name]!r} must be left out with features='auto', which chooses it: leave it "
                "out, or name the features"
            )
    if n is None:
        raise ValueError(
            "expected_records=None must be a public guess of the number of rows, which is private with "
            "neighboring='add_or_remove_one': features='auto' chooses by it"
        )
    best, features, _ = expected.choose(declared, n, multiplier, any_scale=any_scale)
    return best, features


def as_printed(
    dim: int,
    *,
    key_bound: float = 1.0,
    relative_error: float = 0.025,
    failure_probability: float = 0.01,
) -> dict[str, Any]:
    """The options with which `build` makes the trees as the paper prints them, in `dim` dimensions.

        cross_attention.build(key, K, V, ..., **cross_attention.as_printed(dim=2))

    These are truncated Laplace noise, nested shares of the budget, the smallest degree s with
    e^{R²} − T_s(R²) ≤ ε_s·T_s(R²), and the median of r·log(d·R/(ε_s·p_f)) copies (Theorem 4.1 and Algorithm
    7), where the constant in the paper's O(·) is 1. The defaults make 34 copies in one dimension, 90 in two
    and 339 in four. Where the paper's proofs are wrong, the structure is the corrected one.

    Args:
      dim: d, the dimension of keys and queries.
      key_bound: R.
      relative_error: ε_s, the accuracy of the features.
      failure_probability: p_f, the probability with which a query may exceed the paper's error bound.

    Raises:
      ValueError: for a dimension < 1, or a number that is not positive.
    """
    dim = check_integer(dim, "dim")
    check_positive(key_bound, "key_bound")
    check_positive(relative_error, "relative_error")
    check_positive(failure_probability, "failure_probability")
    degree = 1
    while truncated_exponential(key_bound**2, degree) * (1 + relative_error) < math.exp(
        key_bound**2
    ):
        degree += 1
    count = PolynomialFeatures(dim, degree).num_features
    copies = math.ceil(count * math.log(dim * key_bound / (relative_error * failure_probability)))
    return {
        "mechanism": "tree",
        "noise": "truncated_laplace",
        "budget": "paper",
        "degree": degree,
        "copies": max(1, copies),
    }
