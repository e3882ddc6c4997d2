"""Private binary trees of sums, and weighted ℓ_p^p distances from them.

Ke et al. (arXiv 2407.14717), Algorithms 2 and 4 to 6, with what a correct implementation must mend:

- A tree over 2^L bins has L + 1 levels and the paper's budget is a share of ε for each of L: the root is
  never released, and no query reads it. All L levels below it are.
- A replaced record leaves one path and enters another, so that two nodes of a level may change. With values
  w·x^t, |w| ≤ R_w, x ∈ [0, R], the change of a level is at most 2·R_w·R^t, in l1 (each of two nodes moves by
  R_w·R^t at most) and in l2 (one node moves by 2·R_w·R^t if the records meet in it with opposite weights).
  `TruncatedLaplace` covers an l1 change however it is spread over the nodes.
- A value at the upper end of the range belongs to the last bin.

What a query can learn depends on its leaf alone, so that building tabulates, for every leaf, the sum of
the noisy nodes to its left and to its right: a query is one lookup, not a walk.

Neighbours replace one record (x_i, w_i); the number of records is public. Noise is drawn once, in `build`,
and answers are post-processing: adaptive queries cost nothing, and need neither copies nor medians.

Sums and noise are 64-bit, and what is kept is rounded to JAX's default float type afterwards; not so under
`jit` or `vmap` (`wide_sums`). Noise has all of its tail, truncated Laplace noise up to its bound, however
small δ is; what floating point leaves of the guarantees otherwise is said in `dpx.noise`.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from scipy import optimize

from dpx._numerics import wide_sums
from dpx._validate import check_delta, check_epsilon, check_integer, check_number
from dpx.noise import Gaussian, TruncatedLaplace, check_finite, check_size, release
from dpx.privacy import (
    REPLACE_ONE,
    PrivacyGuarantee,
    gaussian_noise_multiplier,
)

NOISES = ("gaussian", "truncated_laplace")


# ---------------------------------------------------------------------------------------------------------
# Budgets


def split_budget(epsilon: float, delta: float, count: int) -> tuple[float, float]:
    """(ε₀, δ₀) such that `count` mechanisms of that guarantee are together (ε, δ)-DP.

    The better of basic composition, (ε/k, δ/k), and advanced composition (Dwork & Roth 2014, Theorem 3.20)
    with half of δ for its slack δ': ε₀ solves kε₀(e^{ε₀} − 1) + ε₀√(2k log(1/δ')) = ε.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    basic = epsilon / count

    def excess(e):
        return advanced_composition(e, count, delta / 2) - epsilon

    if basic > 50 or excess(basic) >= 0:
        return basic, delta / count
    high = epsilon / math.sqrt(2 * count * math.log(2 / delta))
    advanced = float(optimize.brentq(excess, basic, high, rtol=1e-12))  # type: ignore[arg-type]
    return advanced * (1 - 1e-9), delta / (2 * count)


def advanced_composition(epsilon: float, count: int, slack: float) -> float:
    """ε of `count` ε-DP mechanisms with slack δ' (Dwork & Roth 2014, Theorem 3.20)."""
    return count * epsilon * math.expm1(epsilon) + epsilon * math.sqrt(
        2 * count * math.log(1 / slack)
    )


def gaussian_stds(
    ranges: np.ndarray, power: int, depth: int, sensitivity: float, multiplier: float
) -> np.ndarray:
    """Noise std of each coordinate's and moment's nodes, (coordinates, power + 1), for x in [0, 1].

    Every level of every tree changes by `sensitivity` at most in l2, and
    Σ levels·sensitivity²/std² = 1/multiplier² however the noise is spread over the trees. Moment t of
    coordinate a enters a distance with a coefficient of at most C(p, t)·R_a^p; std² inversely proportional
    to it minimises the variance of the worst answer (Lagrange).
    """
    worst = np.asarray(ranges, np.float64)[:, None] ** power * _binomials(power)
    return sensitivity * multiplier * np.sqrt(depth * worst.sum() / worst)


class NodeNoise(NamedTuple):
    """The noise of the nodes of each coordinate's and moment's tree, arrays (coordinates, power + 1).

    Attributes:
      law: The noise's law.
      sensitivity: What `dpx.noise.release` is promised, of all levels of the tree together: for Gaussian
        noise the squares of ‖Δ/sensitivity‖₂ add up to 1 over all trees; for truncated Laplace noise
        ‖Δ/sensitivity‖₁ ≤ 1 for each tree and set of weights.
    """

    law: Gaussian | TruncatedLaplace
    sensitivity: np.ndarray


def _node_noise(noise, ranges, power, depth, sensitivity, epsilon, delta):
    """The `NodeNoise`, and the guarantee's event."""
    if noise == "gaussian":
        multiplier = gaussian_noise_multiplier(epsilon, delta)
        unit = gaussian_stds(ranges, power, depth, sensitivity, 1.0)
        law = Gaussian(multiplier * unit)  # type: ignore[arg-type]
        return NodeNoise(law, unit), dp_accounting.GaussianDpEvent(multiplier)
    if noise != "truncated_laplace":
        raise ValueError(f"noise is {noise!r}: use one of {', '.join(NOISES)}")
    if delta > 0.5:
        raise ValueError(f"delta is {delta}: truncated Laplace noise needs delta ≤ 1/2")
    count = depth * (power + 1) * len(ranges)
    law = TruncatedLaplace.calibrate(sensitivity, *split_budget(epsilon, delta, count))
    return laplace_nodes([law] * len(ranges), power, depth * sensitivity), None


def laplace_nodes(laws: list[TruncatedLaplace], power: int, sensitivity: float) -> NodeNoise:
    """Truncated Laplace noise, one law for each coordinate, trees that move by `sensitivity` in l1."""
    scales, bounds = ([[getattr(law, f)] * (power + 1) for law in laws] for f in ("scale", "bound"))
    law = TruncatedLaplace(np.asarray(scales), np.asarray(bounds))  # type: ignore[arg-type]
    return NodeNoise(law, np.full((len(laws), power + 1), sensitivity))


def _guarantee(epsilon, delta, noise, what, event) -> PrivacyGuarantee:
    return PrivacyGuarantee(
        epsilon=float(epsilon),
        delta=float(delta),
        neighboring=REPLACE_ONE,
        unit="record (x, w)",
        mechanism=f"{what} with {noise.replace('_', ' ')} noise in every node but the root",
        assumptions=("the number of records is public", "data within the declared bounds"),
        event=event,
    )


# ---------------------------------------------------------------------------------------------------------
# The arithmetic of trees


def num_bins(bins: int | None, records: int) -> int:
    """The number of leaves: the least power of two ≥ `bins` (or ≥ the number of records), 2 at least.

    Raises:
      ValueError: for fewer than one bin, or a number that is not whole.
    """
    wanted = records if bins is None else check_integer(bins, "bins")
    return 2 ** max(1, math.ceil(math.log2(wanted)))


def leaf_index(x: jax.Array, bins: int) -> jax.Array:
    """The bin of x ∈ [0, 1]; 1 belongs to the last."""
    return jnp.clip(jnp.floor(x * bins).astype(jnp.int32), 0, bins - 1)


def tabulate(
    key: jax.Array, leaves: jax.Array, nodes: NodeNoise, parts: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Noisy sums of the leaves to the left and to the right of every leaf.

    Args:
      key: Randomness of the noise, drawn once for every node but the root.
      leaves: Sums of the bins, (2^L, ...).
      nodes: The noise; its arrays broadcast to (...).
      parts: Of how many such trees one release consists.

    Returns:
      Two arrays like `leaves`: for each leaf the sum of the noisy siblings that hang left, and right, of its
      path from the root. The leaf itself belongs to neither.
    """
    levels = [leaves]
    while len(levels[-1]) > 2:
        pairs = levels[-1].reshape(-1, 2, *leaves.shape[1:])
        levels.append(pairs.sum(1))
    # One draw for all 2 + 4 + … + 2^L nodes: a draw for each level takes XLA many times longer to compile.
    gaussian = isinstance(nodes.law, Gaussian)
    released = release(
        key,
        jnp.concatenate(levels[::-1]),
        law=nodes.law,
        sensitivity=nodes.sensitivity,
        label="tree nodes",
        axis=None if gaussian else 0,
        parts=parts if gaussian else 1,
    )
    left = right = jnp.zeros((1, *leaves.shape[1:]), leaves.dtype)
    for level in reversed(levels):
        noisy = released[len(level) - 2 : 2 * len(level) - 2]
        pairs = noisy.reshape(-1, 2, *leaves.shape[1:])
        left = jnp.stack([left, left + pairs[:, 0]], 1).reshape(noisy.shape)
        right = jnp.stack([right + pairs[:, 1], right], 1).reshape(noisy.shape)
    return left, right


def distance_table(
    key: jax.Array,
    x: jax.Array,
    weights: jax.Array,
    *,
    power: int,
    bins: int,
    nodes: NodeNoise,
    parts: int,
) -> jax.Array:
    """All that distances to one coordinate need, leaf by leaf.

    Args:
      key: Randomness of the noise.
      x: (n,) in [0, 1].
      weights: (n, c), c sets of weights.
      power: p.
      bins: A power of two.
      nodes: The noise, arrays of shape (power + 1, 1).
      parts: Of how many such coordinates one release consists.

    Returns:
      (bins, power + 1, c): in row t the coefficients of C(p, t)·y^{p−t} in Σ_i w_i |x_i − y|^p, namely
      (−1)^t·left + (−1)^{p−t}·right for the trees of Σ w_i x_i^t (Lemma C.1). Sums and noise have the
      default float type (see `wide_sums`), the result that of x.
    """
    moments = jnp.arange(power + 1)
    contributions = (x[:, None] ** moments)[:, :, None] * weights[:, None, :]
    contributions = contributions.astype(jnp.result_type(float))
    leaves = jax.ops.segment_sum(contributions, leaf_index(x, bins), bins)
    left, right = tabulate(key, leaves, nodes, parts)
    signs = (-1.0) ** moments[:, None]
    return (signs * left + (-1.0) ** power * signs * right).astype(x.dtype)


def _binomials(power: int) -> np.ndarray:
    return np.array([math.comb(power, t) for t in range(power + 1)], np.float64)


def distances(table: jax.Array, y: jax.Array) -> jax.Array:
    """Σ_i w_i |x_i − y|^p: table (..., bins, p + 1, c), y (m, ...) in [0, 1] -> (m, ..., c)."""
    power = table.shape[-2] - 1
    lead = jnp.ogrid[tuple(slice(size) for size in table.shape[:-3])]
    rows = table[(*lead, leaf_index(y, table.shape[-3]))]
    terms = jnp.asarray(_binomials(power), table.dtype) * y[..., None] ** jnp.arange(power, -1, -1)
    return jnp.einsum("...t,...tc->...c", terms, rows, precision=jax.lax.Precision.HIGHEST)


# ---------------------------------------------------------------------------------------------------------
# The paper's data structures


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["left", "right"],
    meta_fields=["bound", "guarantee"],
)
@dataclasses.dataclass(frozen=True)
class DPTree:
    """Sums of the bins left and right of a query (Algorithm 2).

    Attributes:
      left, right: What `query` answers for each leaf, (2^L,).
      bound: R; the bins cut [0, R] into equal parts.
      guarantee: What building released.
    """

    left: jax.Array
    right: jax.Array
    bound: float
    guarantee: PrivacyGuarantee

    @classmethod
    def build(
        cls,
        key: jax.Array,
        values,
        *,
        sensitivity: float,
        epsilon: float,
        delta: float,
        noise: str = "gaussian",
        bound: float = 1.0,
    ) -> "DPTree":
        """Releases the tree over the bins' sums, (ε, δ)-DP.

        Args:
          key: Secret randomness of the noise.
          values: The bins' sums (n,), padded with zeros to a power of two.
          sensitivity: How far neighbours may move one level's sums, in l1 for "truncated_laplace" and in l2
            for "gaussian": 2·R_w for weights in ±R_w.
          epsilon, delta: The whole tree's budget.
          noise: "gaussian" or "truncated_laplace".
          bound: R.

        Raises:
          ValueError: for a budget, bound or sensitivity out of range, an unknown noise, δ > 1/2 with
            truncated Laplace noise, or a sum that is not finite; under `jit` such a sum counts as zero.
        """
        _check_bounds(sensitivity=sensitivity, bound=bound)
        check_epsilon(epsilon)
        check_delta(delta)
        if np.ndim(values) != 1 or not len(values):
            raise ValueError(f"values has shape {np.shape(values)}: pass the bins' sums, (n,)")
        if not isinstance(values, Tracer) and not (known := np.isfinite(np.asarray(values))).all():
            raise ValueError(f"values[{int(np.argmin(known))}] is not finite: pass finite sums")
        bins = num_bins(None, len(values))
        depth = bins.bit_length() - 1
        nodes, event = _node_noise(noise, np.ones(1), 0, depth, sensitivity, epsilon, delta)
        nodes = jax.tree.map(np.squeeze, nodes)
        dtype = jnp.result_type(float)
        with wide_sums(key, values):
            leaves = jnp.asarray(values, jnp.result_type(float))
            leaves = jnp.where(jnp.isfinite(leaves), leaves, 0)
            left, right = tabulate(key, jnp.pad(leaves, (0, bins - len(leaves))), nodes)
            left, right = check_finite((left.astype(dtype), right.astype(dtype)), "the tree")
        return cls(
            left, right, float(bound), _guarantee(epsilon, delta, noise, "tree of sums", event)
        )

    def query(self, y) -> tuple[jax.Array, jax.Array]:
        """(left, right): noisy sums of the bins before and after that of y ∈ [0, R], each like y.

        Raises:
          ValueError: for a query outside [0, R]; under `jit` it is clipped.
        """
        _check_inside("y", y, 0, self.bound, "clip the queries")
        leaf = leaf_index(jnp.asarray(y) / self.bound, len(self.left))
        return self.left[leaf], self.right[leaf]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["table", "bounds"], meta_fields=["guarantee"]
)
@dataclasses.dataclass(frozen=True)
class DPTreeHighDim:
    """Σ_i w_i ‖x_i − y‖_p^p for any query y, coordinate by coordinate (Algorithm 6).

    Attributes:
      table: `distance_table` of each coordinate, (d, bins, p + 1, 1), for x scaled to [0, 1].
      bounds: R of each coordinate, (d,).
      guarantee: What building released.
    """

    table: jax.Array
    bounds: jax.Array
    guarantee: PrivacyGuarantee

    @classmethod
    def build(
        cls,
        key: jax.Array,
        x,
        weights,
        *,
        bound,
        weight_bound: float,
        epsilon: float,
        delta: float,
        power: int = 2,
        noise: str = "gaussian",
        bins: int | None = None,
    ) -> "DPTreeHighDim":
        """Releases d·(p + 1) trees, (ε, δ)-DP together.

        Args:
          key: Secret randomness of the noise.
          x: Records (n, d), in [0, bound].
          weights: (n,), in ±weight_bound.
          bound: R, one number or one for each coordinate.
          weight_bound: R_w.
          epsilon, delta: The budget of all trees.
          power: p ≥ 1.
          noise: "gaussian" or "truncated_laplace".
          bins: Leaves of a tree, rounded up to a power of two; the number of records if None. A query errs by
            the records of its own leaf: (R/bins)^p each at most.

        Raises:
          ValueError: for arguments out of range, arrays that do not fit, or records out of bounds (the first
            is named); under `jit` such records are clipped, those with NaN or infinity count as zero.
        """
        x, weights = (jnp.asarray(a, jnp.result_type(float)) for a in (x, weights))
        if x.ndim != 2 or weights.shape != x.shape[:1] or not len(x):
            raise ValueError(
                f"x has shape {x.shape} and weights {weights.shape}: pass (n, d) and (n,)"
            )
        power = check_integer(power, "power")
        _check_bounds(weight_bound=weight_bound, bound=bound)
        bounds = np.broadcast_to(np.asarray(bound, np.float64), x.shape[1:])
        check_epsilon(epsilon)
        check_delta(delta)
        _check_inside("x", x, 0, bounds)
        _check_inside("weights", weights, -weight_bound, weight_bound)
        bins = num_bins(bins, len(x))
        depth = bins.bit_length() - 1
        nodes, event = _node_noise(noise, bounds, power, depth, 2 * weight_bound, epsilon, delta)
        check_size("tree nodes", [bounds**power, *jax.tree.leaves(nodes)])
        # Clipping passes NaN on, and one such record would spoil every answer.
        usable = jnp.isfinite(x).all(1) & jnp.isfinite(weights)
        x, weights = jnp.where(usable[:, None], x, 0), jnp.where(usable, weights, 0)
        unit = jnp.clip(x / bounds, 0, 1).T
        weights = jnp.clip(weights, -weight_bound, weight_bound)[:, None]
        with wide_sums(key, x, weights):
            table = _tables(key, unit, weights, nodes, power=power, bins=bins)
            table = check_finite(table, "a table of trees")
        released = _guarantee(epsilon, delta, noise, f"{len(bounds)}·{power + 1} trees", event)
        return cls(table, jnp.asarray(bounds, x.dtype), released)

    def query(self, y) -> jax.Array:
        """Noisy Σ_i w_i ‖x_i − y‖_p^p for queries y (m, d) in [0, R]: (m,).

        Raises:
          ValueError: for a wrong last axis, or a query out of bounds; under `jit` it is clipped.
        """
        if np.shape(y)[-1:] != self.bounds.shape:
            raise ValueError(f"y has shape {np.shape(y)}: pass (m, {len(self.bounds)})")
        if not isinstance(self.bounds, Tracer):
            _check_inside("y", y, 0, np.asarray(self.bounds), "clip the queries")
        unit = jnp.clip(jnp.asarray(y, self.bounds.dtype) / self.bounds, 0, 1)
        power = self.table.shape[-2] - 1
        return (distances(self.table, unit)[..., 0] * self.bounds**power).sum(-1)


class DPTreeDistance(DPTreeHighDim):
    """Σ_i w_i |x_i − y|^p in one dimension (Algorithms 4 and 5): x (n,), queries (m,)."""

    @classmethod
    def build(cls, key, x, weights, **options) -> "DPTreeDistance":
        """As `DPTreeHighDim.build`, with x (n,)."""
        if np.ndim(x) != 1:
            raise ValueError(f"x has shape {np.shape(x)}: pass (n,), or use DPTreeHighDim")
        return super().build(key, x[:, None], weights, **options)  # type: ignore[return-value]

    def query(self, y) -> jax.Array:
        """Noisy Σ_i w_i |x_i − y|^p for queries y (m,) in [0, R]: (m,)."""
        return super().query(jnp.asarray(y)[..., None])


jax.tree_util.register_dataclass(
    DPTreeDistance, data_fields=["table", "bounds"], meta_fields=["guarantee"]
)


@functools.partial(jax.jit, static_argnames=("power", "bins"))
def _tables(key, unit, weights, nodes, *, power: int, bins: int) -> jax.Array:
    def one(args):
        coordinate_key, x, own = args
        own = jax.tree.map(lambda a: a[:, None], own)
        return distance_table(
            coordinate_key, x, weights, power=power, bins=bins, nodes=own, parts=len(unit)
        )

    return jax.lax.map(one, (jax.random.split(key, len(unit)), unit, nodes))


def _check_bounds(**bounds) -> None:
    for name, value in bounds.items():
        known = [check_number(number, name) for number in np.ravel(np.asarray(value, object))]
        if not all(0 < number < math.inf for number in known):
            raise ValueError(f"{name} is {value}: declare a positive, finite number")


def _check_inside(name: str, rows, low, high, remedy: str = "raise the bound or clip") -> None:
    """Raises for a known entry outside [low, high] or NaN, by the place of the first along the last axis."""
    if isinstance(rows, Tracer):
        return
    rows, slack = np.asarray(rows), 1e-6 * np.asarray(high)
    outside = ~((rows >= low - slack) & (rows <= high + slack))
    if rows.ndim > 1:
        outside = outside.any(-1)
    if outside.any():
        where = ", ".join(str(i) for i in np.argwhere(outside)[0])
        place = f"{name}[{where}]" if where else name
        raise ValueError(f"{place} is outside [{low}, {high}] or NaN: {remedy}")
