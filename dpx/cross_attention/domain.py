"""The declared bounds of a private memory, and the numbers that follow from them for every mechanism.

Logits are ⟨q, k⟩/scale. Softmax does not change if all keys are shifted together, so that only keys relative
to their domain's centre matter: in ±R/2 for the box [0, R]^d, and in the ball itself otherwise.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting import NeighboringRelation
from jax.typing import ArrayLike

from dpx._numerics import into_ball, into_simplex, is_traced
from dpx._validate import check_choice, check_positive, check_real, check_relation
from dpx.privacy import ADD_OR_REMOVE_ONE, REPLACE_ONE

_ROUNDING = 1e-6  # float32 bounds may exceed their float64 declarations by this much


@dataclasses.dataclass(frozen=True)
class Domain:
    """Declared bounds of keys, queries and values.

    Attributes:
      kind: "box": keys in [0, key_bound]^d and queries in [0, query_bound]^d, as in the paper; "ball":
        ‖k‖₂ ≤ key_bound and ‖q‖₂ ≤ query_bound, any sign, as models produce them.
      dim: d.
      value_dim: d_v.
      key_bound: R.
      query_bound: The bound of queries. It affects accuracy only, since queries are public.
      value_bound: R_w, |v_j| ≤ R_w elementwise, or ‖v‖₂ ≤ R_w.
      scale: The number that logits are divided by.
      value_domain: "box": values within ±value_bound elementwise, as in the paper; "ball": ‖v‖₂ ≤
        value_bound, as for embeddings, with noise less by √d_v; "simplex": v ≥ 0 with Σ v = value_bound, as
        for one-hot labels and probabilities, with noise less by another √2.
      neighboring: REPLACE_ONE row, where the number of rows is public, or ADD_OR_REMOVE_ONE row, which has
        less noise and keeps that number private.

    Raises:
      ValueError: for an unknown kind or relation, a bound or scale that is not positive and finite, or a
        dimension less than 1.
    """

    kind: str
    dim: int
    value_dim: int
    key_bound: float
    query_bound: float
    value_bound: float
    scale: float
    value_domain: str = "box"
    neighboring: NeighboringRelation = REPLACE_ONE

    def __post_init__(self):
        check_choice(self.kind, "domain", ("box", "ball"))
        check_choice(self.value_domain, "value_domain", ("box", "ball", "simplex"))
        relation = check_relation(self.neighboring, "neighboring")
        if relation not in (REPLACE_ONE, ADD_OR_REMOVE_ONE):
            raise ValueError(
                f"neighboring={relation.name.lower()!r} must be 'replace_one' or "
                "'add_or_remove_one': use one of them"
            )
        object.__setattr__(self, "neighboring", relation)
        for name in ("key_bound", "query_bound", "value_bound", "scale"):
            object.__setattr__(self, name, check_positive(getattr(self, name), name))
        if min(self.dim, self.value_dim) < 1:
            raise ValueError(f"K and V have {self.dim} and {self.value_dim} columns: pass ≥ 1")

    @classmethod
    def declare(
        cls, k, v, *, neighboring: NeighboringRelation | str = REPLACE_ONE, **declared
    ) -> "Domain":
        """The domain of a memory K (..., n, d), V (..., n, d_v), of which only the shapes are used.

        Args: as `of_widths`.

        Raises:
          ValueError: as the class, or for arrays that do not fit together.
        """
        _, *widths = check_memory(k, v, neighboring)
        return cls.of_widths(*widths, neighboring=neighboring, **declared)

    @classmethod
    def of_widths(
        cls,
        dim: int,
        value_dim: int,
        *,
        key_bound: float,
        value_bound: float,
        query_bound: float | None = None,
        domain: str = "box",
        scale: float | None = None,
        value_domain: str = "box",
        neighboring: NeighboringRelation | str = REPLACE_ONE,
    ) -> "Domain":
        """The domain with the defaults of `dpx.cross_attention.build`.

        Args: as the attributes; `domain` is the kind, `query_bound` is `key_bound` if None, `scale` is d if
        None, and `neighboring` may be given by its lower-case name.
        """
        return cls(
            kind=domain,
            dim=dim,
            value_dim=value_dim,
            key_bound=key_bound,
            query_bound=key_bound if query_bound is None else query_bound,
            value_bound=value_bound,
            scale=dim if scale is None else scale,
            value_domain=value_domain,
            neighboring=check_relation(neighboring, "neighboring"),
        )

    @property
    def public_count(self) -> bool:
        """Whether the number of rows is public."""
        return self.neighboring is REPLACE_ONE

    @property
    def value_norm(self) -> float:
        """sup ‖v‖₂: √d_v·R_w for the box, R_w for the ball and the simplex."""
        return self.value_bound * (math.sqrt(self.value_dim) if self.value_domain == "box" else 1)

    @property
    def mass_weight(self) -> float:
        """a₀, the constant entry of a row whose sum is the denominator (`dpx.cross_attention.sketch`)."""
        if self.value_domain == "simplex":
            return 0.0  # values add up to a constant, so that their sum is the denominator
        return self.value_norm / (1 if self.public_count else self.value_dim**0.25)

    @property
    def key_radius(self) -> float:
        """ρ = sup ‖k − centre‖₂."""
        return self.key_bound * (math.sqrt(self.dim) / 2 if self.kind == "box" else 1)

    @property
    def query_radius(self) -> float:
        """sup ‖q‖₂."""
        return self.query_bound * (math.sqrt(self.dim) if self.kind == "box" else 1)

    @property
    def largest_logit(self) -> float:
        """Z = sup |⟨q, k − centre⟩|/scale, attained in both domains at parallel vectors."""
        return self.key_radius * self.query_radius / self.scale

    @property
    def centre(self) -> float:
        """The number that is subtracted from every entry of a key."""
        return self.key_bound / 2 if self.kind == "box" else 0.0

    def logit_bounds(self, q: jax.Array) -> jax.Array:
        """sup over keys of |⟨q, k − centre⟩|/scale for each query: (..., d) -> (...)."""
        if self.kind == "box":
            return self.key_bound / 2 / self.scale * jnp.abs(q).sum(-1)
        return self.key_bound / self.scale * jnp.linalg.norm(q, axis=-1)

    def enter(self, k: ArrayLike, v: ArrayLike, *, clip: bool) -> tuple[jax.Array, jax.Array]:
        """Keys and values, clipped into the bounds.

        Each row is clipped independently, so that neighbours stay neighbours: outside JAX's transformations
        its last bit does not depend on other rows either. A row that holds a NaN or an infinity becomes zero.
        With `clip=False` rows change by rounding only.

        Raises:
          ValueError: with `clip=False`, if a row is outside (the first is named), or under `jit`, where rows
            cannot be checked.
        """
        if not clip:
            if is_traced(k, v):
                raise ValueError(
                    "clip is False, but under jit or vmap values cannot be checked: pass clip=True"
                )
            self._check_rows("K", np.asarray(k), self.kind, self.key_bound, "key_bound")
            kind = "interval" if self.value_domain == "box" else self.value_domain
            self._check_rows("V", np.asarray(v), kind, self.value_bound, "value_bound")
        dtype, box = jnp.result_type(float), self.kind == "box"
        # XLA rounds norms in another way where the number of rows is no multiple of a vector's length. NumPy
        # sums each contiguous row alike; its warnings would reveal a row.
        xp: Any = jnp if is_traced(k, v) else np
        with np.errstate(all="ignore"):
            k, v = xp.asarray(k, dtype), xp.asarray(v, dtype)
            if xp is np:
                k, v = (np.ascontiguousarray(rows, np.float64) for rows in (k, v))
            k = xp.where(xp.isfinite(k).all(-1, keepdims=True), k, 0)
            v = xp.where(xp.isfinite(v).all(-1, keepdims=True), v, 0)
            k = xp.clip(k, 0, self.key_bound) if box else into_ball(k, self.key_bound, xp=xp)
            v = self.nearest_values(v, xp)
            return jnp.asarray(k, dtype), jnp.asarray(v, dtype)

    def nearest_values(self, v: Any, xp: Any = jnp) -> Any:
        """The point of the values' domain that is nearest to each vector (..., d_v).

        `xp` is the module that computes, jax.numpy or numpy.
        """
        if self.value_domain == "simplex":
            return into_simplex(v, self.value_bound, xp)
        if self.value_domain == "ball":
            return into_ball(v, self.value_bound, xp=xp)
        return xp.clip(v, -self.value_bound, self.value_bound)

    def check_memory(self, k, v) -> int:
        """The number of rows of K (..., n, d) and V (..., n, d_v).

        Raises:
          ValueError: if they do not fit together, or do not have the declared widths, for which the noise is
            calibrated.
        """
        n, *widths = check_memory(k, v, self.neighboring)
        if widths != [self.dim, self.value_dim]:
            raise ValueError(
                f"K and V have {widths[0]} and {widths[1]} columns, which must be the domain's "
                f"dim={self.dim} and value_dim={self.value_dim}: declare the domain of this memory"
            )
        return n

    def check_queries(self, q) -> jax.Array:
        """The queries as an array.

        Raises:
          ValueError: for a wrong last axis, numbers that are not real or, outside `jit`, queries beyond the
            bound. Under `jit` such queries pass; their answers are private, but not accurate.
        """
        check_real(q, "Q")
        if np.ndim(q) < 2 or np.shape(q)[-1] != self.dim:
            raise ValueError(f"Q has shape {np.shape(q)}: pass (m, {self.dim})")
        if not is_traced(q):
            self._check_rows("Q", np.asarray(q), self.kind, self.query_bound, "query_bound")
        return jnp.asarray(q, jnp.result_type(float))

    def ratio(self, sums: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
        """Attention from its noisy sums (..., 1 + d_v), of which the first is the mass times `value_norm`.

        The mass is clipped to its public range, and answers to the values' domain, which contains every mean
        of values. This is post-processing, and prevents useless answers where the mass is near zero or
        negative.
        With large logits, sums or quotients may overflow: they become the largest floats, with their signs,
        and NaN becomes zero.
        """
        sums = jnp.nan_to_num(sums)
        low = jnp.maximum(low, jnp.finfo(sums.dtype).tiny)
        mass = jnp.clip(sums[..., 0] / self.value_norm, low, high)
        return self.nearest_values(jnp.nan_to_num(sums[..., 1:] / mass[..., None]))

    @staticmethod
    def _check_rows(name: str, rows: np.ndarray, kind: str, bound: float, argument: str):
        limit = bound * (1 + _ROUNDING)
        if kind == "ball":
            inside = np.linalg.norm(rows.astype(np.float64), axis=-1) <= limit
            where = f"the ball of radius {bound}"
        elif kind == "simplex":
            off = np.abs(rows.sum(-1, dtype=np.float64) - bound)
            inside = (rows >= -bound * _ROUNDING).all(-1) & (
                off <= bound * _ROUNDING * rows.shape[-1]
            )
            where = f"the vectors of numbers ≥ 0 that add up to {bound}"
        else:
            low = 0.0 if kind == "box" else -bound
            inside = ((rows >= low - bound * _ROUNDING) & (rows <= limit)).all(-1)
            where = f"[{low}, {bound}]"
        if not inside.all():
            row = tuple(int(i) for i in np.argwhere(~inside)[0])
            row = row[0] if len(row) == 1 else row
            remedy = f"{'change' if kind == 'simplex' else 'raise'} {argument}"
            if kind == "box" and rows.min() < 0:
                remedy = 'build with domain="ball", where entries have any sign'
            remedy += "" if name == "Q" else " or pass clip=True"
            raise ValueError(
                f"{name} row {row} is outside {where}, as are {int((~inside).sum())} rows in all: {remedy}"
            )


def check_memory(
    k, v, neighboring: NeighboringRelation | str = REPLACE_ONE
) -> tuple[int, int, int]:
    """The sizes (n, d, d_v) of K (..., n, d) and V (..., n, d_v).

    Under ADD_OR_REMOVE_ONE, n may be 0: an empty memory has a neighbour with one row, and an error would tell
    the two apart.

    Raises:
      ValueError: if the two do not fit together, or hold anything but real numbers.
    """
    check_real(k, "K")
    check_real(v, "V")
    k_shape, v_shape = np.shape(k), np.shape(v)
    if len(k_shape) < 2 or len(k_shape) != len(v_shape) or k_shape[:-1] != v_shape[:-1]:
        raise ValueError(
            f"K has shape {k_shape} and V has shape {v_shape}: pass K (n, d) and V (n, d_v), "
            "with the same leading axes for heads"
        )
    if 0 in k_shape[:-2]:
        raise ValueError(f"K has shape {k_shape}, with no heads: pass at least one")
    if k_shape[-2] < 1 and check_relation(neighboring, "neighboring") is REPLACE_ONE:
        raise ValueError("K has no rows: an empty memory has no attention")
    return k_shape[-2], k_shape[-1], v_shape[-1]
