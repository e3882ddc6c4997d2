"""A private tree of sums, Algorithm 2 of Ke et al. (arXiv 2407.14717).

`node_sums` lists the corrections, and `distances` has the structures that the paper builds of such trees.

Neighbours replace one record (x_i, w_i); the number of records is public. Noise is drawn once, in `build`,
and answers are post-processing: adaptive queries cost nothing, and need neither copies nor medians.

Sums and noise have 64 bits, and the tree is then rounded to JAX's default float type. Under `jit` or `vmap`
sums and noise have the default type (`dpx._numerics.wide_sums`). Noise has its whole tail, and truncated
Laplace noise its tail up to the bound, for any δ. `dpx.noise` says what floating point means for guarantees
otherwise.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpx._numerics import rounding_assumption, wide_sums
from dpx._validate import check_delta, check_epsilon, check_key, check_number, check_real
from dpx.cross_attention.trees.node_noise import distance_noise
from dpx.cross_attention.trees.node_sums import leaf_index, num_bins, tabulate
from dpx.noise import check_finite
from dpx.privacy import REPLACE_ONE, PrivacyGuarantee


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
        check_bounds(sensitivity=sensitivity, bound=bound)
        sensitivity, bound = float(sensitivity), float(bound)
        epsilon, delta = check_epsilon(epsilon), check_delta(delta)
        if np.ndim(values) != 1 or not len(values):
            raise ValueError(f"values has shape {np.shape(values)}: pass the bins' sums, (n,)")
        check_real(values, "values")
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
        guarantee = tree_guarantee(epsilon, delta, noise, "tree of sums", event)
        return cls(left, right, bound, guarantee.assuming(*rounding_assumption(key, values)))

    def query(self, y) -> tuple[jax.Array, jax.Array]:
        """The noisy sums (left, right) of the bins before and after that of y ∈ [0, R], each of y's shape.

        Raises:
          ValueError: for a query outside [0, R]; under `jit` it is clipped.
        """
        check_inside("y", y, 0, self.bound, "clip the queries")
        leaf = leaf_index(jnp.asarray(y) / self.bound, len(self.left))
        return self.left[leaf], self.right[leaf]


def tree_guarantee(epsilon, delta, noise, what, event) -> PrivacyGuarantee:
    return PrivacyGuarantee(
        epsilon=float(epsilon),
        delta=float(delta),
        neighboring=REPLACE_ONE,
        unit="record (x, w)",
        mechanism=f"{what} with {noise.replace('_', ' ')} noise in every node but the root",
        assumptions=("the number of records is public", "data within the declared bounds"),
        event=event,
    )


def check_bounds(**bounds) -> None:
    for name, value in bounds.items():
        known = [check_number(number, name) for number in np.ravel(np.asarray(value, object))]
        if not all(0 < number < math.inf for number in known):
            raise ValueError(f"{name}={value} must be positive and finite: declare a bound")


def check_inside(name: str, rows, low, high, remedy: str = "raise the bound or clip") -> None:
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
