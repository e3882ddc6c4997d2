"""Weighted ℓ_p^p distances from private trees, Algorithms 4 to 6 of Ke et al. (arXiv 2407.14717).

Neighbours replace one record (x_i, w_i); the number of records is public. Noise is drawn once, in `build`,
and answers are post-processing: adaptive queries cost nothing, and need neither copies nor medians.

Leaves are exact sums of integers (`dpx.cross_attention.trees.leaf_sums`), so that they can be summed over
blocks of records (`dpx.release`). Noise has 64 bits, and the tables are then rounded to JAX's default float
type. Under `jit` or `vmap` sums are of floats, and sums and noise have the default type
(`dpx._numerics.wide_sums`).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpx._numerics import is_traced, promoting, rounding_assumption, wide_sums
from dpx._validate import check_delta, check_epsilon, check_integer, check_real
from dpx.cross_attention.trees import leaf_sums
from dpx.cross_attention.trees.node_noise import NodeNoise, check_noise, distance_noise
from dpx.cross_attention.trees.node_sums import distance_table, distances, leaf_moments, num_bins
from dpx.cross_attention.trees.sums import check_bounds, check_inside, tree_guarantee
from dpx.noise import check_finite, check_size, secure
from dpx.privacy import PrivacyGuarantee
from dpx.release import Partial, are_summed, total


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["table", "bounds"], meta_fields=["guarantee"]
)
@dataclasses.dataclass(frozen=True)
class DPTreeHighDim:
    """Private trees that answer Σ_i w_i ‖x_i − y‖_p^p for any query y, by coordinates (Algorithm 6).

    Attributes:
      table: `distance_table` of each coordinate, (d, bins, p + 1, 1), for x scaled to [0, 1].
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
        if are_summed(x):
            bins = num_bins(check_integer(bins, "bins"), 1)
        else:
            bins = num_bins(bins, max([1, *np.shape(x)[:1]]))
        check_bounds(weight_bound=weight_bound, bound=bound)
        weight_bound, power = float(weight_bound), check_integer(power, "power")
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
            table = _tables(key, leaves, nodes, unit)
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
        check_bounds(weight_bound=weight_bound)
        weight_bound = float(weight_bound)
        bins, power = num_bins(check_integer(bins, "bins"), 1), check_integer(power, "power")
        unit, weights, bounds = _entered(cls._rows(x), weights, bound, weight_bound)
        rows = np.clip(np.asarray(weights, np.float64), -weight_bound, weight_bound)
        sums = [
            leaf_sums.leaf_sums(np.asarray(column, np.float64), rows, weight_bound, power, bins)
            for column in unit.T
        ]
        options = {"bound": np.ravel(bound), "bounds": bounds, "weight_bound": weight_bound}
        options |= {"bins": bins, "power": power, "noise": noise}
        largest = leaf_sums.largest(len(sums), power, 1)
        return Partial("trees of distances", options, (np.stack(sums),), len(rows), largest)

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
            check_inside("y", y, 0, np.asarray(self.bounds), "clip the queries")
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


@jax.jit
def _tables(key, leaves, nodes: NodeNoise, unit: float) -> jax.Array:
    """The noisy tables of all coordinates: leaves (d, bins, p + 1, 1) -> the same shape."""

    def one(args):
        coordinate_key, leaves, own = args
        own = jax.tree.map(lambda a: a[:, None], own)
        return distance_table(coordinate_key, leaves, own, parts=count, unit=unit)

    count = len(leaves)
    return jax.lax.map(one, (jax.random.split(key, count), leaves, nodes))


def _planned(bounds, bins, weight_bound, power, noise, epsilon, delta):
    """The noise of the nodes, and the guarantee; raises ValueError for sizes that floats do not hold."""
    change = 2 * weight_bound + leaf_sums.rounding(weight_bound, 1)
    depth = bins.bit_length() - 1
    nodes, event = distance_noise(noise, bounds, power, depth, change, epsilon, delta)
    check_size("tree nodes", [bounds**power, *jax.tree.leaves(nodes)])
    return nodes, tree_guarantee(epsilon, delta, noise, f"{len(bounds)}·{power + 1} trees", event)


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
    check_bounds(weight_bound=weight_bound, bound=bound)
    if np.shape(bound) not in ((), (1,), x.shape[1:]):
        raise ValueError(
            f"bound has shape {np.shape(bound)} for x of shape {x.shape}: give one number, or one for each "
            "coordinate"
        )
    bounds = np.broadcast_to(np.asarray(bound, np.float64), x.shape[1:])
    check_inside("x", x, 0, bounds)
    check_inside("weights", weights, -weight_bound, weight_bound)
    # Clipping keeps NaN, and one such record would spoil every answer.
    usable = jnp.isfinite(x).all(1) & jnp.isfinite(weights)
    x, weights = jnp.where(usable[:, None], x, 0), jnp.where(usable, weights, 0)
    unit = jnp.clip(x / bounds, 0, 1)
    return unit, jnp.clip(weights, -weight_bound, weight_bound)[:, None], bounds
