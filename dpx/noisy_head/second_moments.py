"""Second moments of rank-one features, and the ridge solution (2.7), without an N×D² design matrix."""

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_factor, cho_solve, solve_triangular
from jax.scipy.sparse.linalg import cg

from dpx._numerics import in_float64, norm
from dpx._validate import check_choice, check_positive
from dpx.noisy_head.prompts import Features, check_features

GRAM_MAX_DIM = 8  # up to this D, D²×D² matrices are cheaper than products with the factors
_CHUNK = 256

# One matrix at a time, also under `vmap`: on CPUs, as many batched calls of LAPACK as threads deadlock.
one_at_a_time = jax.custom_batching.sequential_vmap


@in_float64
def ridge(features: Features, regularization: float, *, method: str = "auto") -> jax.Array:
    """The ridge solution Γ* = argmin N⁻¹ Σ_k (t_k − ⟨Γ, Z_k⟩)² + λ‖Γ‖_F² of (2.7). It is not private.

    Args:
      features: query (N, D), context (N, D), target (N,).
      regularization: λ > 0.
      method: "gram" forms and solves the D²×D² normal equations, in O(ND⁴). "cg" solves them by conjugate
        gradients on the factors, in O(ND²) a step. "auto" is gram up to D = 8 and cg above. Both square the
        condition number, so that rows 1e8 times larger than the others hide them in rounding errors. "qr"
        does not: it triangularises the augmented design block by block, large rows first, which keeps
        Householder's method stable row by row (Cox & Higham 1998).

    Returns:
      Γ* (D, D) in float64.

    Raises:
      ValueError: for λ ≤ 0, an unknown method, shapes that do not fit or values that are not finite.
    """
    features = check_features(features)
    check_choice(method, "method", ("auto", "gram", "cg", "qr"))
    check_positive(regularization, "regularization")
    if method == "auto":
        method = "gram" if features.query.shape[1] <= GRAM_MAX_DIM else "cg"
    return _SOLVERS[method](features, regularization)


def second_moments(features: Features) -> tuple[jax.Array, jax.Array]:
    """The means over prompts H = N⁻¹ Σ vec(Z)vec(Z)ᵀ (D², D²) and h = N⁻¹ Σ tZ (D, D).

    H[(i,k),(j,l)] = N⁻¹ Σ q_i q_j s_k s_l is a product of two thin matrices of pairs, which is computed for
    a block of prompts at a time. vec is row-major: vec(Z)[i·D + k] = q_i s_k.
    """
    query, context, target = features
    num_prompts, dim = query.shape

    def add(total, block):
        q, s = block
        pairs_q = (q[:, :, None] * q[:, None, :]).reshape(-1, dim * dim)
        pairs_s = (s[:, :, None] * s[:, None, :]).reshape(-1, dim * dim)
        return total + pairs_q.T @ pairs_s, None

    zero = jnp.zeros((dim * dim, dim * dim), query.dtype)
    total, _ = jax.lax.scan(add, zero, (_blocks(query), _blocks(context)))
    H = total.reshape(dim, dim, dim, dim).transpose(0, 2, 1, 3).reshape(dim * dim, dim * dim)
    h = (query * target[:, None]).T @ context
    return H / num_prompts, h / num_prompts


def gradient_sum(features: Features):
    """The map Γ ↦ Σ_k (⟨Γ, Z_k⟩ − t_k) Z_k, by second moments or by the factors, whichever is cheaper."""
    query, context, target = features
    num_prompts, dim = query.shape
    if dim <= GRAM_MAX_DIM:
        H, h = second_moments(features)
        return lambda gamma: num_prompts * ((H @ gamma.reshape(-1)).reshape(dim, dim) - h)

    def by_factors(gamma):
        residual = jnp.sum((query @ gamma) * context, axis=1) - target
        return (query * residual[:, None]).T @ context

    return by_factors


@jax.jit
def _by_gram(features, regularization):
    H, h = second_moments(features)
    return _solve(H + regularization * jnp.eye(H.shape[0]), h.reshape(-1)).reshape(h.shape)


@one_at_a_time
def _solve(positive, right):
    return cho_solve(cho_factor(positive), right)


@jax.jit
def _by_cg(features, regularization):
    query, context, target = features
    num_prompts, dim = query.shape

    def normal_equations(gamma):
        predicted = jnp.sum((query @ gamma) * context, axis=1)
        return (query * predicted[:, None]).T @ context / num_prompts + regularization * gamma

    h = (query * target[:, None]).T @ context / num_prompts

    return cg(normal_equations, h, tol=1e-13, maxiter=20 * dim * dim)[0]


@one_at_a_time
def _triangular_factor(rows):
    return jnp.linalg.qr(rows, mode="r")


@one_at_a_time
def _solve_triangular(upper, right):
    return solve_triangular(upper, right)


@jax.jit
def _by_qr(features, regularization):
    query, context, target = features
    num_prompts, dim = query.shape
    order = jnp.argsort(-norm(query) * norm(context))

    def triangularize(triangle, block):
        q, s, t = block
        rows = (q[:, :, None] * s[:, None, :]).reshape(-1, dim * dim)
        rows = jnp.concatenate([rows, t[:, None]], axis=1)
        return _triangular_factor(jnp.concatenate([triangle, rows])), None

    size = dim * dim + 1
    blocks = (_blocks(query[order]), _blocks(context[order]), _blocks(target[order]))
    triangle, _ = jax.lax.scan(triangularize, jnp.zeros((size, size), query.dtype), blocks)
    penalty = jnp.sqrt(num_prompts * regularization) * jnp.eye(size - 1, size)
    triangle = _triangular_factor(jnp.concatenate([triangle, penalty]))
    return _solve_triangular(triangle[:-1, :-1], triangle[:-1, -1]).reshape(dim, dim)


_SOLVERS = {"gram": _by_gram, "cg": _by_cg, "qr": _by_qr}


def _blocks(rows: jax.Array) -> jax.Array:
    """The rows (N, ...) as (blocks, size, ...), padded with zero rows, which change no sum of products."""
    size = min(_CHUNK, rows.shape[0])
    padding = -rows.shape[0] % size
    rows = jnp.pad(rows, [(0, padding)] + [(0, 0)] * (rows.ndim - 1))
    return rows.reshape(-1, size, *rows.shape[1:])
