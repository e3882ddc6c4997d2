"""Differentially private cross-attention: a private memory (K, V), public, adaptive, unlimited queries.

Ke, Liang, Shi, Song, Zhang, "Provable Differentially Private Computation of the Cross-Attention Mechanism"
(arXiv 2407.14717) builds trees; `mechanism="tree"` is theirs with its errata mended. `mechanism="sketch"`,
the default, is one Gaussian release of a linear sketch, with far less noise for the same guarantee.
"""

import jax

from dpx.cross_attention import baselines, sketch, tree
from dpx.cross_attention.sketch import Sketch
from dpx.cross_attention.tree import Trees

__all__ = ["Sketch", "Trees", "baselines", "build", "sketch", "tree"]


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
    **options,
) -> Sketch | Trees:
    """Releases a private memory, to be queried without limit.

    Args:
      key: Secret randomness of the noise.
      K: Private keys (n, d).
      V: Private values (n, d_v).
      key_bound, value_bound: Declared bounds R and R_w; they must not depend on the data.
      epsilon, delta: The budget of the release, and so of all queries; neighbours replace one row of (K, V).
      mechanism: "sketch" or "tree".
      **options: Those of `sketch.build` and `tree.build`: domain, scale, clip and degree of both,
        secure of the sketch.

    Returns:
      A pytree with `query(Q)`, (m, d) -> (m, d_v), and `guarantee`. Its leaves hold the release only.

    Raises:
      ValueError: for an unknown mechanism, or as `sketch.build` and `tree.build`.
    """
    builders = {"sketch": sketch.build, "tree": tree.build}
    if mechanism not in builders:
        raise ValueError(f"mechanism is {mechanism!r}: use one of {', '.join(builders)}")
    bounds = {"key_bound": key_bound, "value_bound": value_bound}
    return builders[mechanism](key, K, V, epsilon=epsilon, delta=delta, **bounds, **options)
