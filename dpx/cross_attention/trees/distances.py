"""The private trees of Ke et al. (arXiv 2407.14717) by themselves, Algorithms 2 and 4 to 6.

`DPTree` has sums over bins, and the others weighted ℓ_p^p distances; `node_sums` lists the corrections.

Neighbours replace one record (x_i, w_i); the number of records is public. Noise is drawn once, in `build`,
and answers are post-processing: adaptive queries cost nothing, and need neither copies nor medians. Noise has
its whole tail, and truncated Laplace noise its tail up to the bound, for any δ.

Leaves of distances are exact sums of integers (`leaf_sums`), so that they can be summed over blocks of
records (`dpx.release`). Noise has 64 bits, and what is released is then rounded to JAX's default float type.
Under `jit` or `vmap` sums are of floats, and sums and noise have the default type
(`dpx._numerics.wide_sums`). `dpx.noise` says what floating point means for guarantees otherwise.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpx._numerics import is_traced, promoting, rounding_assumption, wide_sums
from dpx._validate import (
    check_delta,
    check_epsilon,
    check_integer,
    check_key,
    check_number,
    check_positive,
    check_real,
)
from dpx.cross_attention.trees import leaf_sums
from dpx.cross_attention.trees.node_noise import calibrated, check_noise
from dpx.cross_attention.trees.node_sums import (
    distance_tables,
    distances,
    leaf_index,
    leaf_moments,
    num_bins,
    tabulate,
)
from dpx.noise import check_finite, check_size, secure
from dpx.privacy import REPLACE_ONE, PrivacyGuarantee
from dpx.release import Partial, are_summed, total


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["left", "right"],
    meta_fields=["bound", "guarantee"],
)
@dataclasses.dataclass(frozen=True)
class DPTree:
    """A private tree that answers with the sums of the bins left and right of a query (Algorithm 2).

    Attributes:
      left, right: The answers of `query` for each leaf, (2^L,).
      bound: R; the bins divide [0, R] into equal parts.
      guarantee: The guarantee of the tree.
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
          key: The JAX key of the noise.
          values: The bins' sums (n,), padded with zeros to a power of two.
          sensitivity: The sensitivity of the sums of one level, in l1 for "truncated_laplace" and in l2 for
            "gaussian"; for weights in ±R_w it is 2·R_w.
          epsilon, delta: The budget of the whole tree.
          noise: "gaussian" or "truncated_laplace".
          bound: R.

        Raises:
          ValueError: for a budget, bound or sensitivity out of range, an unknown noise, δ > 1/2 with
            truncated Laplace noise, or a sum that is not finite. Under `jit` such a sum counts as zero.
        """
        check_key(key)
        sensitivity = check_positive(sensitivity, "sensitivity")
        bound = check_positive(bound, "bound")
        epsilon, delta = check_epsilon(epsilon), check_delta(delta)
        if np.ndim(values) != 1 or not len(values):
            raise ValueError(f"values has shape {np.shape(values)}: pass the bins' sums, (n,)")
        check_real(values, "values")
        if not isinstance(values, Tracer) and not (known := np.isfinite(np.asarray(values))).all():
            raise ValueError(f"values[{int(np.argmin(known))}] is not finite: pass finite sums")
        bins = num_bins(None, len(values))
        depth = bins.bit_length() - 1
        nodes, event = calibrated(noise, np.ones(1), 0, depth, sensitivity, epsilon, delta)
        nodes = jax.tree.map(np.squeeze, nodes)
        dtype = jnp.result_type(float)
        with wide_sums(key, values):
            leaves = jnp.asarray(values, jnp.result_type(float))
            leaves = jnp.where(jnp.isfinite(leaves), leaves, 0)
            left, right = tabulate(key, jnp.pad(leaves, (0, bins - len(leaves))), nodes)
            left, right = check_finite((left.astype(dtype), right.astype(dtype)), "the tree")
        guarantee = _guarantee(epsilon, delta, noise, "tree of sums", event)
        return cls(left, right, bound, guarantee.assuming(*rounding_assumption(key, values)))

    def query(self, y) -> tuple[jax.Array, jax.Array]:
        """The noisy sums (left, right) of the bins before and after that of y ∈ [0, R], each of y's shape.

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
    """Private trees that answer Σ_i w_i ‖x_i − y‖_p^p for any query y, by coordinates (Algorithm 6).

    Attributes:
      table: `distance_tables` of the coordinates, (d, bins, p + 1, 1), for x scaled to [0, 1].
      bounds: R of each coordinate, (d,).
      guarantee: The guarantee of the trees.
    """

    table: jax.Array
    bounds: jax.Array
    guarantee: PrivacyGuarantee

    @classmethod
    def build(
        cls,
        key: jax.Array,
        x: Any,
        weights: Any = None,
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
          key: The JAX key of the noise.
          x: Records (n, d), in [0, bound]. Or `dpx.release.Blocks` of (x, weights), or a sum that `statistic`
            made of them; then `bins` has to be given.
          weights: (n,), in ±weight_bound. None with blocks.
          bound: R, one number or one for each coordinate.
          weight_bound: R_w.
          epsilon, delta: The budget of all trees.
          power: p ≥ 1.
          noise: "gaussian" or "truncated_laplace".
          bins: The number of leaves of a tree, rounded up to a power of two; the number of records if None.
            An answer leaves out the records in its own leaf, each of which adds at most (R/bins)^p.

        Raises:
          ValueError: for arguments out of range, arrays that do not fit, or records out of bounds (the first
            is named). Under `jit` such records are clipped, and those with NaN or infinity count as zero.
        """
        secure.check(key, False)
        bins = num_bins(bins, None if are_summed(x) else max([1, *np.shape(x)[:1]]))
        _check_bound(bound)
        weight_bound = check_positive(weight_bound, "weight_bound")
        power = check_integer(power, "power")
        about: dict[str, Any] = {"weight_bound": weight_bound, "power": power, "noise": noise}
        budget = {"epsilon": check_epsilon(epsilon), "delta": check_delta(delta)}
        check_noise(noise, budget["delta"])
        if is_traced(x, weights):
            inside, weights, bounds = _entered(cls._rows(x), weights, bound, weight_bound)
            known, unit = (key, inside, weights), 1.0
            sums = functools.partial(leaf_moments, weights=weights, power=power, bins=bins)
            with wide_sums(*known):
                leaves = jax.lax.map(sums, inside.T)
        else:
            summing = functools.partial(cls.statistic, bound=bound, bins=bins, **about)
            summed = total(summing, x, weights)
            summed.check("trees of distances", bound=np.ravel(bound), bins=bins, **about)
            leaves, bounds = summed.sums[0].astype(np.float64), summed.options["bounds"]
            known, unit = (key,), leaf_sums.unit(weight_bound)
        nodes, guarantee = _planned(bounds, bins, **about, **budget)
        dtype = jnp.result_type(float)
        with wide_sums(*known):
            table = distance_tables(jnp.expand_dims(key, 0), leaves, nodes, unit)[0]
            table = check_finite(table.astype(dtype), "a table of trees")
            assumed = rounding_assumption(*known)
            return cls(table, jnp.asarray(bounds, table.dtype), guarantee.assuming(*assumed))

    @classmethod
    def statistic(
        cls,
        block,
        *,
        bound,
        weight_bound: float,
        bins: int,
        power: int = 2,
        noise: str = "gaussian",
    ) -> Partial:
        """The exact sums of all leaves over the records (x, weights) of a block. They are private data.

        Args:
          block: x and weights, as in `build`.
          bound, weight_bound, bins, power, noise: As in `build`.
        """
        x, weights = block
        weight_bound = check_positive(weight_bound, "weight_bound")
        unit, weights, bounds = _entered(cls._rows(x), weights, bound, weight_bound)
        unit, weights = np.asarray(unit, np.float64), np.asarray(weights, np.float64)
        weights = np.clip(weights, -weight_bound, weight_bound)
        options = {"bound": np.ravel(bound), "bounds": bounds, "weight_bound": weight_bound}
        options |= {"bins": num_bins(bins), "power": check_integer(power, "power"), "noise": noise}
        return leaf_sums.partial("trees of distances", options, unit.T, weights, weight_bound)

    @classmethod
    def _rows(cls, x):
        return x

    @promoting
    def query(self, y) -> jax.Array:
        """The noisy Σ_i w_i ‖x_i − y‖_p^p, (m,), for queries y (m, d) in [0, R].

        Raises:
          ValueError: for a wrong last axis, or a query out of bounds; under `jit` it is clipped.
        """
        if np.shape(y)[-1:] != self.bounds.shape:
            raise ValueError(f"y has shape {np.shape(y)}: pass (m, {len(self.bounds)})")
        check_real(y, "y")
        if not isinstance(self.bounds, Tracer):
            _check_inside("y", y, 0, np.asarray(self.bounds), "clip the queries")
        unit = jnp.clip(jnp.asarray(y, self.bounds.dtype) / self.bounds, 0, 1)
        power = self.table.shape[-2] - 1
        return (distances(self.table, unit)[..., 0] * self.bounds**power).sum(-1)


class DPTreeDistance(DPTreeHighDim):
    """Private trees for Σ_i w_i |x_i − y|^p in one dimension (Algorithms 4 and 5): x (n,), queries (m,)."""

    @classmethod
    def _rows(cls, x):
        if np.ndim(x) != 1:
            raise ValueError(f"x has shape {np.shape(x)}: pass (n,), or use DPTreeHighDim")
        check_real(x, "x")
        return np.asarray(x)[:, None] if not isinstance(x, jax.Array) else x[:, None]

    def query(self, y) -> jax.Array:
        """The noisy Σ_i w_i |x_i − y|^p, (m,), for queries y (m,) in [0, R]."""
        check_real(y, "y")
        return super().query(jnp.asarray(y)[..., None])


jax.tree_util.register_dataclass(
    DPTreeDistance, data_fields=["table", "bounds"], meta_fields=["guarantee"]
)


def _planned(bounds, bins, weight_bound, power, noise, epsilon, delta):
    """The noise of the nodes, and the guarantee; raises ValueError for sizes that floats do not hold."""
    largest = bounds**power  # of an answer, per unit of weight
    least = jnp.finfo(jnp.result_type(float)).tiny
    if min(bounds.min(), weight_bound, np.min(weight_bound * largest)) < least:
        raise ValueError(
            f"bound={bounds.min():.3g} and weight_bound={weight_bound:.3g} are so small that floats hold no "
            "distances: use other units"
        )
    change = 2 * weight_bound + leaf_sums.rounding(weight_bound, 1)
    depth = bins.bit_length() - 1
    nodes, event = calibrated(noise, bounds, power, depth, change, epsilon, delta)
    check_size("tree nodes", [largest, *jax.tree.leaves(nodes)])
    return nodes, _guarantee(epsilon, delta, noise, f"{len(bounds)}·{power + 1} trees", event)


@promoting
def _entered(x, weights, bound, weight_bound):
    """x, checked and scaled to [0, 1], weights (n, 1), and the bounds (d,)."""
    if np.ndim(x) != 2 or np.shape(weights) != np.shape(x)[:1] or not np.shape(x)[0]:
        raise ValueError(
            f"x has shape {np.shape(x)} and weights {np.shape(weights)}: pass (n, d) and (n,)"
        )
    check_real(x, "x")
    check_real(weights, "weights")
    x, weights = (jnp.asarray(a, jnp.result_type(float)) for a in (x, weights))
    _check_bound(bound)
    if np.shape(bound) not in ((), (1,), x.shape[1:]):
        raise ValueError(
            f"bound has shape {np.shape(bound)} for x of shape {x.shape}: give one number, or one for each "
            "coordinate"
        )
    bounds = np.broadcast_to(np.asarray(bound, np.float64), x.shape[1:])
    _check_inside("x", x, 0, bounds)
    _check_inside("weights", weights, -weight_bound, weight_bound)
    # Clipping keeps NaN, and one such record would spoil every answer.
    usable = jnp.isfinite(x).all(1) & jnp.isfinite(weights)
    x, weights = jnp.where(usable[:, None], x, 0), jnp.where(usable, weights, 0)
    unit = jnp.clip(x / bounds, 0, 1)
    return unit, jnp.clip(weights, -weight_bound, weight_bound)[:, None], bounds


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


def _check_bound(bound) -> None:
    """Raises ValueError unless each number of R, one or one for each coordinate, is positive and finite."""
    for number in np.ravel(np.asarray(bound, object)):
        if not 0 < check_number(number, "bound") < math.inf:
            raise ValueError(f"bound={bound} must be positive and finite: declare a bound")


def _check_inside(name: str, rows, low, high, remedy: str = "raise the bound or clip") -> None:
    """Raises ValueError for rows that are not real, or, outside `jit`, an entry that is NaN or out of range.

    The error names the first such entry along the last axis.
    """
    check_real(rows, name)
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
