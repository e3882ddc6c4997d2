"""The paper's data structures: private trees of sums, and weighted ℓ_p^p distances from them.

`DPTree`, `DPTreeDistance` and `DPTreeHighDim` are Algorithms 2 and 4 to 6 of Ke et al. (arXiv 2407.14717)
with the corrections that `dpx.cross_attention.node_sums` lists.

Neighbours replace one record (x_i, w_i); the number of records is public. Noise is drawn once, in `build`,
and answers are post-processing: adaptive queries cost nothing, and need neither copies nor medians.

Sums and noise have 64 bits, and what is kept is rounded to JAX's default float type afterwards. Under `jit`
or `vmap` they have the default type (`dpx._numerics.wide_sums`). Noise has all of its tail, or, if it is
truncated Laplace noise, all of it up to its bound, however small δ is. What floating point leaves of the
guarantees otherwise is said in `dpx.noise`.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpx._numerics import wide_sums
from dpx._validate import check_delta, check_epsilon, check_integer, check_number
from dpx.cross_attention.node_noise import distance_noise
from dpx.cross_attention.node_sums import (
    distance_table,
    distances,
    leaf_index,
    num_bins,
    tabulate,
)
from dpx.noise import check_finite, check_size
from dpx.privacy import REPLACE_ONE, PrivacyGuarantee


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
        nodes, event = distance_noise(noise, np.ones(1), 0, depth, sensitivity, epsilon, delta)
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
            the records of its own leaf, each of which adds at most (R/bins)^p.

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
        nodes, event = distance_noise(noise, bounds, power, depth, 2 * weight_bound, epsilon, delta)
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


def _check_bounds(**bounds) -> None:
    for name, value in bounds.items():
        known = [check_number(number, name) for number in np.ravel(np.asarray(value, object))]
        if not all(0 < number < math.inf for number in known):
            raise ValueError(f"{name}={value} must be positive and finite: declare a bound")


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
