"""Symmetric attention from a Gram matrix."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dpx._validate import check_choice, check_positive, check_real

KERNELS = ("exp", "cosh")


def attention(matrix: ArrayLike, *, kernel: str = "exp", temperature: float = 1.0) -> jax.Array:
    """The attention weights D(A)⁻¹ f(A/temperature) of Gao, Song, Yang, Zhou (arXiv:2305.04701, Def. 1.4).

    D(A) makes rows sum to 1. For A = XXᵀ, `exp` and temperature 1 this is softmax attention with Q = K = X
    and no 1/√D, as in the paper. XXᵀ is a sum over columns: with thousands of columns its diagonal is so
    large that attention is the identity to the last bit. With the number of columns as temperature, which
    must be public, logits are means over columns instead. Computed from a release, attention is
    post-processing and costs no privacy.

    Args:
      matrix: A, (..., n, n); leading axes are batch axes (heads).
      kernel: f, "exp" or "cosh". Both are computed through their logarithm and never overflow.
      temperature: The number that the matrix is divided by.

    Returns:
      The attention weights, (..., n, n); each row sums to 1.

    Raises:
      ValueError: for an unknown kernel, a temperature that is not positive, or a matrix that is not square.
    """
    check_real(matrix, "matrix")
    matrix = jnp.asarray(matrix)
    check_choice(kernel, "kernel", KERNELS)
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ValueError(f"matrix with shape={matrix.shape}: give square matrices (..., n, n)")
    matrix = matrix / check_positive(temperature, "temperature")
    # log 2cosh; the factor 2 cancels in the normalisation.
    logits = matrix if kernel == "exp" else jnp.logaddexp(matrix, -matrix)
    return jax.nn.softmax(logits, axis=-1)
