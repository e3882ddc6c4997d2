"""The trees behind one private memory: their features, the contribution of a row, and the noise of nodes."""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dpx import _validate
from dpx.cross_attention.domain import Domain
from dpx.cross_attention.features import PolynomialFeatures, check_features
from dpx.cross_attention.trees import leaf_sums, node_noise
from dpx.cross_attention.trees.node_sums import distances, leaf_moments
from dpx.release import Partial

MOMENTS = 3  # the moments of each feature: p + 1 for p = 2


@dataclasses.dataclass(frozen=True)
class Structures:
    """One structure of trees for each feature; see `dpx.cross_attention.trees.memory`.

    Attributes:
      domain: The declared bounds.
      features: P.
      noise: "gaussian" or "truncated_laplace".
      budget: "exact" or "paper".

    Raises:
      ValueError: for a domain, features or options that trees do not support.
    """

    domain: Domain
    features: PolynomialFeatures
    noise: str = "gaussian"
    budget: str = "exact"

    def __post_init__(self):
        domain = self.domain
        if domain.kind != "box" or domain.query_bound != domain.key_bound:
            raise ValueError(
                f'domain={domain.kind!r} with query_bound={domain.query_bound} must be "box" with the bound '
                "of the keys, since trees need features ≥ 0 in one range: use the sketch for any other"
            )
        if not domain.public_count:
            raise ValueError(
                "neighboring='add_or_remove_one' must be 'replace_one' for trees, whose bins and "
                "denominators use the number of rows: use mechanism='sketch'"
            )
        check_features(self.features, domain)
        _validate.check_choice(self.budget, "budget", ("exact", "paper"))
        _validate.check_choice(self.noise, "noise", node_noise.NOISES)

    @property
    def parts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The feature of each structure, its range, and the range that bins and noise assume: (S,) each.

        The first structure, of the constant feature, gives Σ w. With the paper's budget there is another one
        for that feature, as for any other, and one range is assumed for all.
        """
        index = np.arange(self.features.num_features)
        own = self.features.ranges(self.domain.key_bound)
        if self.budget == "exact":
            return index, own, own
        index = np.insert(index, 0, 0)
        return index, own[index], np.full(len(index), own.max())

    @property
    def constant(self) -> float:
        """The constant weight of a row, whose sum is the number of rows times it."""
        return self.domain.value_norm if self.noise == "gaussian" else self.domain.value_bound

    @property
    def longest(self) -> float:
        """The largest norm of a row's weights, which are the constant and its value."""
        return math.hypot(self.constant, self.domain.value_norm)

    def nodes(self, depth: int, copies: int, epsilon: float, delta: float):
        """The noise of each structure, arrays (S, 3), and the DpEvent if there is one.

        Replacing a row moves a level by 2·V in l2, and each column of it by 2·R_w in l1, plus rounding.
        """
        gaussian, columns = self.noise == "gaussian", 1 + self.domain.value_dim
        rounding = leaf_sums.rounding(self.longest, columns if gaussian else 1)
        change = 2 * self.constant + rounding
        (_, _, ranges), power = self.parts, MOMENTS - 1
        if self.budget == "exact" or gaussian:
            shared = (change, epsilon, delta, columns, copies)
            return node_noise.calibrated(self.noise, ranges, power, depth, *shared)
        levels, others = depth * MOMENTS, len(ranges) - 1
        first, each = node_noise.paper_budget(epsilon, delta, others, columns * copies)
        shares = [(e / levels, d / levels) for e, d in [first] + [each] * others]
        return node_noise.laplace_nodes(shares, power, depth, change), None

    def partial(self, K, V, *, bins: int, clip: bool) -> Partial:
        """The exact sums of all leaves over the rows, which were clipped into the domain if `clip`."""
        domain, V = self.domain, np.asarray(V, np.float64)
        # Rows were clipped to bounds in 32 bits, which may exceed those in 64 bits.
        if domain.value_domain == "ball":
            length = np.sqrt(np.square(V).sum(axis=1, keepdims=True))
            V = V * (domain.value_bound / np.maximum(length, domain.value_bound))
        V = np.clip(V, -domain.value_bound, domain.value_bound)
        weights = np.concatenate([np.full((len(V), 1), self.constant), V], axis=1)
        options = vars(self) | {"bins": bins, "clip": clip, "power": MOMENTS - 1}
        x = self._shares(np.asarray(K, np.float64))
        return leaf_sums.partial("trees of a memory", options, x, weights, self.longest)

    def _shares(self, K: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the feature of each structure as a share of its range, (n,) within [0, 1]."""
        unit = np.clip(K / self.domain.key_bound, 0, 1)
        index, own, assumed = self.parts
        for exponents, share in zip(self.features.exponents[index], own / assumed, strict=True):
            x = np.full(len(unit), share)
            for coordinate, exponent in enumerate(exponents):
                for _ in range(exponent):
                    x = x * unit[:, coordinate]
            yield x

    @functools.partial(jax.jit, static_argnames=("self", "bins"))
    def traced_leaves(self, K, V, bins: int) -> jax.Array:
        """The same sums in the default float type, without rounding to integers: (S, bins, 3, 1 + d_v)."""
        mass = jnp.full((len(V), 1), self.constant, V.dtype)
        weights = jnp.concatenate([mass, V], axis=1)
        unit = K / self.domain.key_bound
        index, own, assumed = self.parts

        def structure(args):
            exponents, share = args
            x = share * jnp.prod(unit**exponents, axis=-1)
            return leaf_moments(x, weights, power=MOMENTS - 1, bins=bins)

        shares = jnp.asarray(own / assumed, K.dtype)
        return jax.lax.map(structure, (jnp.asarray(self.features.exponents[index]), shares))

    @functools.partial(jax.jit, static_argnames=("self", "n"))
    def read(self, tables: jax.Array, Q: jax.Array, n: int) -> jax.Array:
        """The noisy sums Σ_i [V, v_i]·e^{⟨q, k_i⟩/scale} of n rows: (m, d) -> (m, 1 + d_v)."""
        index, _, assumed = self.parts
        ranges = jnp.asarray(assumed, tables.dtype)

        def one_copy(table):
            # Σ w is the distance of all ones to 0.
            total = (ranges[0] ** 2 * table[0, 0, -1]).at[0].set(n * self.domain.value_norm)
            # With the paper's budget, the constant feature is read from its own structure, with more noise.
            known = jnp.zeros_like(total) if self.budget == "paper" else total

            def chunk(q):
                y = jnp.clip(self.features(q)[index] / ranges, 0, 1)[1:]
                distance = distances(table[1:], y)
                squares = table[1:, 0, -1]  # the distances to 0
                cosines = squares + jnp.square(y)[:, None] * total - distance
                highest = jax.lax.Precision.HIGHEST
                sums = jnp.einsum("a,ac->c", jnp.square(ranges[1:]), cosines, precision=highest)
                return known + 0.5 * sums

            return jax.lax.map(chunk, Q, batch_size=256)

        return jnp.median(jax.lax.map(one_copy, tables), axis=0)
