"""Symmetric attention from a Gram matrix."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dpx._validate import check_choice

KERNELS = ("exp", "cosh")


def attention(matrix: ArrayLike, *, kernel: str = "exp") -> jax.Array:
    """Row-normalised D(A)⁻¹ f(A): Definition 1.4 of Gao, Song, Yang, Zhou (arXiv:2305.04701).

    For A = XXᵀ and `exp` this is softmax attention with Q = K = X and no 1/√D. From a release it is
    post-processing and costs no privacy.

    Args:
      matrix: A, (..., n, n); leading axes are batch axes (heads).
      kernel: f, "exp" or "cosh". Both are computed through their logarithm and never overflow.

    Returns:
      The attention weights, (..., n, n); each row sums to 1.

    Raises:
      ValueError: for an unknown kernel or a matrix that is not square.
    """
    matrix = jnp.asarray(matrix)
    check_choice(kernel, "kernel", KERNELS)
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ValueError(f"matrix with shape={matrix.shape}: give square matrices (..., n, n)")
    # log 2cosh; the factor 2 cancels in the normalisation.
    logits = matrix if kernel == "exp" else jnp.logaddexp(matrix, -matrix)
    return jax.nn.softmax(logits, axis=-1)
