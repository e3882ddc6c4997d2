"""Baselines of private cross-attention: the noisy mean of V, and attention with fresh noise per query."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import dpx.attention
from dpx import noise
from dpx._numerics import rounding_assumption, wide_sums
from dpx._validate import check_integer, check_real
from dpx.cross_attention.domain import Domain, check_memory
from dpx.privacy import (
    REPLACE_ONE,
    PrivacyGuarantee,
    gaussian_guarantee,
    gaussian_noise_multiplier,
)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["guarantee"]
)
@dataclasses.dataclass(frozen=True)
class Answers:
    """Private answers (m, d_v) and their guarantee."""

    values: jax.Array
    guarantee: PrivacyGuarantee


def mean_of_values(
    key: jax.Array,
    V,
    *,
    value_bound: float,
    epsilon: float,
    delta: float,
    value_domain: str = "box",
) -> Answers:
    """The noisy mean of V, which ignores keys and queries: (n, d_v) -> values (1, d_v).

    Neighbours replace one row, which moves the mean by at most 2·sup‖v‖₂/n in l2: 2·√d_v·R_w/n, or 2·R_w/n
    with `value_domain="ball"`. Values are clipped into their domain.

    Raises:
      ValueError: for a bound, ε or δ out of range, or a V that is not one matrix.
    """
    _check_one(V=V)
    n, _, value_dim = check_memory(V, V)
    domain = Domain("box", 1, value_dim, 1.0, 1.0, value_bound, 1.0, value_domain)
    multiplier = gaussian_noise_multiplier(epsilon, delta)
    dtype = jnp.result_type(float)
    with wide_sums(key, V):
        _, V = domain.enter(jnp.zeros((n, 1)), V, clip=True)
        values = noise.release(
            key,
            V.mean(0, keepdims=True),
            sensitivity=2 * domain.value_norm / n,
            noise_multiplier=multiplier,
            label="mean of V",
        )
        values = domain.nearest_values(values).astype(dtype)
    guarantee = _guarantee(epsilon, delta, "Gaussian mechanism on the mean of V")
    return Answers(values, guarantee.assuming(*rounding_assumption(key, V)))


def fresh_noise(
    key: jax.Array,
    Q,
    K,
    V,
    *,
    epsilon: float,
    delta: float,
    num_queries: int | None = None,
    clip: bool = False,
    **declared,
) -> Answers:
    """Exact attention with independent Gaussian noise for each of m queries, which share one budget.

    Sensitivity of one answer to replacing one row: the row's weight is at most
    p = e^z/(e^z + (n − 1)e^{−z}), where z bounds the query's logits about the keys' centre. Let ā be the
    answer without the row; with the row (k, v) it is ā + p₁(v − ā), p₁ ≤ p. For p₁ ≥ p₂ the two answers
    differ by p₁v − p₂v' − (p₁ − p₂)ā, of length at most 2·p·sup‖v‖₂. The noise of each query is scaled to
    that bound and to m-fold composition.

    Args: as `dpx.cross_attention.build`, with queries Q (m, d), and `num_queries`, the number of queries that
    the budget is divided among (m if None); the guarantee is that of so many answers. `declared` are the
    bounds: key_bound, value_bound, query_bound, domain, scale and value_domain.

    Returns:
      Answers (m, d_v), and the guarantee of all of them together.

    Raises:
      ValueError: as `dpx.cross_attention.build`, and for leading axes, which would not share the budget.
    """
    _check_one(Q=Q, K=K, V=V)
    n, _, _ = check_memory(K, V)
    bounds = Domain.declare(K, V, **declared, neighboring=REPLACE_ONE)
    Q = bounds.check_queries(Q)
    count = len(Q) if num_queries is None else check_integer(num_queries, "num_queries")
    if count < len(Q):
        raise ValueError(
            f"num_queries={count} must be at least the {len(Q)} rows of Q: count every query that is answered"
        )
    multiplier = gaussian_noise_multiplier(epsilon, delta)
    dtype = jnp.result_type(float)
    with wide_sums(key, Q, K, V):
        Q = Q.astype(jnp.result_type(float))
        K, V = bounds.enter(K, V, clip=clip)
        largest_weight = 1 / (1 + (n - 1) * jnp.exp(-2 * bounds.logit_bounds(Q)))
        exact = dpx.attention.dot_product_attention(Q, K, V, scale=1 / bounds.scale)
        # By √count, `count` answers are accounted as one release: a row may move each of them.
        change = math.sqrt(count) * 2 * bounds.value_norm * largest_weight
        values = noise.release(
            key,
            exact,
            sensitivity=change[:, None],
            noise_multiplier=multiplier,
            label="attention with fresh noise",
        )
        values = bounds.nearest_values(values).astype(dtype)
    what = f"exact attention with fresh Gaussian noise for each of {count} queries"
    guarantee = _guarantee(epsilon, delta, what)
    if not clip:
        guarantee = guarantee.assuming("data within the declared bounds")
    return Answers(values, guarantee.assuming(*rounding_assumption(key, Q, K, V)))


def _check_one(**arrays) -> None:
    """Raises ValueError for anything but matrices of real numbers: leading axes would share no budget."""
    for name, array in arrays.items():
        if np.ndim(array) != 2:
            raise ValueError(
                f"{name} has shape {np.shape(array)}, which must be one matrix: call it for each head or "
                "batch by itself, with a key and a share of the budget of its own"
            )
        check_real(array, name)


def _guarantee(epsilon: float, delta: float, mechanism: str) -> PrivacyGuarantee:
    return gaussian_guarantee(
        float(epsilon),
        float(delta),
        neighboring=REPLACE_ONE,
        unit="row of (K, V)",
        mechanism=mechanism,
        assumptions=("the number of rows is public",),
    )
