"""Symmetric attention from a Gram matrix."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dpx._validate import check_choice, check_positive, check_real

KERNELS = ("exp", "cosh")


def attention(matrix: ArrayLike, *, kernel: str = "exp", temperature: float = 1.0) -> jax.Array:
    """Row-normalised D(A)⁻¹ f(A/temperature), after Gao, Song, Yang, Zhou (arXiv:2305.04701, Definition 1.4).

    For A = XXᵀ, `exp` and temperature 1 this is softmax attention with Q = K = X and no 1/√D, as the paper
    has it. XXᵀ is a sum over columns: with thousands of them its diagonal stands so far out that attention is
    the identity to the last bit. A temperature such as the number of columns, which must be public, makes it
    attention by the mean of their products. From a release it is post-processing and costs no privacy.

    Args:
      matrix: A, (..., n, n); leading axes are batch axes (heads).
      kernel: f, "exp" or "cosh". Both are computed through their logarithm and never overflow.
      temperature: What the matrix is divided by.

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
