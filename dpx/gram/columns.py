"""The Gram matrix XXᵀ of columns that are projected onto a ball, for X that may be too wide for memory.

The sum is of integers: over d = 1e7 columns, the rounding error of a sum of 32-bit floats is as large as one
record's contribution, which the noise is calibrated to hide.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import sparse

from dpx._numerics import in_float64, into_ball, sum_entries
from dpx._validate import check_real
from dpx.noise import secure

_BLOCK_ENTRIES = 2**22  # 32 MiB in 64-bit floats
_ROUNDING = 1e-6  # a column of norm α that was rounded to 32 bits raises no error


def clipped_gram(X: Any, column_bound: float, *, clip: bool = True) -> tuple[np.ndarray, int]:
    """The sum of c(u)c(u)ᵀ over the columns u of X, where c projects onto the ball of radius α.

    The projection is 1-Lipschitz, so that columns at distance β stay within β. A column that holds NaN or an
    infinity counts as zero. Entries that a sparse column holds in one row are added up. Columns are divided
    by α/2¹⁸ and rounded to integers (`dpx.noise.secure`), so that the sum is exact.

    Args:
      X: (n, d): a NumPy array (memory-mapped too), a JAX array or a scipy sparse matrix, or an iterable
        of such blocks of columns (n, b). Beside X itself the peak memory is O(n² + n·block).
      column_bound: α > 0.
      clip: With False, a column longer than α raises an error. The projection is applied all the same, so
        that a column within rounding of α cannot exceed the bound.

    Returns:
      The matrix, (n, n) int64 with a trace below 2⁶², and d.

    Raises:
      ValueError: for an X of another type; for columns beyond the bound without `clip` (an error for the
        holder of the data alone, since it reveals a norm); for too many columns.
    """
    total, columns, longest = None, 0, 0.0
    for block in _blocks(X):
        gram = _sparse_gram if sparse.issparse(block) else _dense_gram
        matrix, largest = gram(block, column_bound)
        if total is not None and total.shape != matrix.shape:
            raise ValueError(
                f"column blocks of X have {total.shape[0]} and {matrix.shape[0]} rows: each block must hold "
                "all rows of its columns"
            )
        total = matrix if total is None else total + matrix
        columns += block.shape[1]
        longest = np.fmax(longest, largest) if np.isfinite(largest) else np.inf
        secure.check_sum(columns, secure.norm_bound(secure.FACTOR_STEPS, len(matrix)) ** 2)
    if total is None:
        raise ValueError("X holds no blocks of columns: give at least one, even of no columns")
    if not clip and longest > column_bound * (1 + _ROUNDING):
        raise ValueError(
            f"X has a column of norm {longest:.6g}, above column_bound={column_bound}: use clip=True, "
            "or a column_bound that is known without looking at the data"
        )
    return total, columns


def leading_rows(X: Any) -> tuple[int, Any]:
    """The number of rows n, and X with all of its blocks, since reading n takes the first from an iterator.

    A DataFrame becomes the array of its values, and a sparse matrix of dictionaries or lists one of arrays.
    """
    X = _values(X)
    if _is_many(X):
        blocks = iter(X)
        first = next(blocks, None)
        return leading_rows(first)[0], itertools.chain([first], blocks)
    _check_shape(X)
    return X.shape[0], X


def _values(X: Any) -> Any:
    if sparse.issparse(X):
        return X.tocoo() if X.format in ("dok", "lil") else X  # whose numbers are no array
    return X.to_numpy() if hasattr(X, "to_numpy") else X


def _is_many(X: Any) -> bool:
    """Whether X is an iterable of blocks. A string is not: its letters are strings again."""
    return not hasattr(X, "shape") and isinstance(X, Iterable) and not isinstance(X, str | bytes)


def _check_shape(block) -> None:
    if getattr(block, "ndim", None) != 2 or block.shape[0] < 1:
        shape = getattr(block, "shape", type(block).__name__)
        raise ValueError(f"X (or a block of its columns) is {shape}: give a matrix of shape (n, d)")
    check_real(block.data if sparse.issparse(block) else block, "X")


def _blocks(X: Any) -> Iterator[Any]:
    """Yields X in blocks of columns: slices of an array, a whole sparse matrix, or items of an iterable."""
    if _is_many(X):
        for block in map(_values, X):
            if not hasattr(block, "shape"):
                _check_shape(block)
            yield from _blocks(block)
        return
    _check_shape(X)
    if sparse.issparse(X):
        yield X
        return
    width = max(1, _BLOCK_ENTRIES // X.shape[0])
    for start in range(0, max(X.shape[1], 1), width):
        yield X[:, start : start + width]


# NumPy's warnings would reveal a column that is not finite, or a large one.
@np.errstate(over="ignore", invalid="ignore")
def _sparse_gram(block, column_bound: float) -> tuple[np.ndarray, float]:
    stored = block.tocoo()
    n, d = stored.shape
    entries, owner, rows = sum_entries(stored.data.astype(np.float64), stored.col, stored.row, n)
    peak = np.zeros(d)
    np.maximum.at(peak, owner, np.abs(entries))
    scale, finite = _safe_scale(peak)
    entries = np.where(finite[owner], entries / scale[owner], 0)
    norm = np.sqrt(np.bincount(owner, entries**2, d))
    entries *= np.minimum(scale, column_bound / np.maximum(norm, 1e-30))[owner]
    rounded = secure.whole(entries / column_bound, owner, secure.FACTOR_STEPS, n)
    whole = sparse.csc_array((rounded, (rows, owner)), shape=(n, d))
    return (whole @ whole.T).toarray(), _longest(scale, norm, finite)


@np.errstate(over="ignore", invalid="ignore")
def _dense_gram(block, column_bound: float) -> tuple[np.ndarray, float]:
    # With columns as contiguous rows, the rounding of a column's norm does not depend on other columns.
    rows = np.ascontiguousarray(np.asarray(block, np.float64).T)
    scale, finite = _safe_scale(np.abs(rows).max(axis=1))
    rows = np.where(finite[:, None], rows / scale[:, None], 0)
    norm = np.sqrt(np.square(rows).sum(axis=1))
    rows *= np.minimum(scale / column_bound, 1 / np.maximum(norm, 1e-30))[:, None]
    whole = secure.whole_rows(rows, secure.FACTOR_STEPS)
    return secure.product(whole, whole), _longest(scale, norm, finite)


@jax.jit
def traced_gram(X: jax.Array, column_bound: float) -> jax.Array:
    """The same sum of floats without rounding, for an X that a JAX transformation traces.

    It is as wide as JAX's default floats, by which the guarantee tells whether rounding counts.
    """
    columns = _finite(X.astype(jnp.promote_types(X.dtype, jnp.result_type(float))))
    columns = into_ball(columns, column_bound, axis=0)
    return jnp.matmul(columns, columns.T, precision=jax.lax.Precision.HIGHEST)


@in_float64
def traced_exact_gram(X: jax.Array, column_bound: float) -> jax.Array:
    """The sum of integers of `clipped_gram`, traced; ValueError under `jit` with 64-bit types off."""
    columns = _finite(jnp.asarray(X).astype(jnp.float64))
    rows = into_ball(columns, column_bound, axis=0).T / column_bound
    whole = secure.whole_rows(rows, secure.FACTOR_STEPS, jnp)
    secure.check_sum(len(rows), secure.norm_bound(secure.FACTOR_STEPS, rows.shape[1]) ** 2)

    def product(block):  # of at most 2¹⁶ rows, as in `secure.product`
        return jnp.matmul(block.T, block, precision=jax.lax.Precision.HIGHEST).astype(jnp.int64)

    size = max(1, min(len(rows), 2**16))
    blocks = jnp.pad(whole, ((0, -len(rows) % size), (0, 0)))
    return jax.lax.map(product, blocks.reshape(-1, size, rows.shape[1])).sum(axis=0)


def _finite(columns: jax.Array) -> jax.Array:
    """The columns, of which those that hold NaN or an infinity become zero."""
    return jnp.where(jnp.isfinite(columns).all(axis=0), columns, 0)


def _safe_scale(peak):
    """Each column's largest entry, or 1 if that is zero or not finite, and whether it is finite."""
    finite = np.isfinite(peak)
    return np.where(finite & (peak > 0), peak, 1), finite


def _longest(scale, norm, finite) -> float:
    """The largest norm, or infinity if it overflows, without a warning, which would reveal a column."""
    with np.errstate(over="ignore"):
        return float(np.max(np.where(finite, scale * norm, np.inf), initial=0.0))
