"""The arithmetic that guarantees rest on: scopes with 64-bit floats, and norms that do not overflow."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

_Function = TypeVar("_Function", bound=Callable)


_ROUNDED = (
    "sums over records count as exact: under a JAX transformation they have 32 bits, in which a record may "
    "move a long sum by more than the noise is made for"
)


def is_traced(*data) -> bool:
    """Whether some array of `data` is traced by a JAX transformation."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(data))


def rounding_assumption(*data) -> tuple[str, ...]:
    """The assumption, if any, that a release under `wide_sums(*data)` adds to its guarantee: one sentence."""
    return (_ROUNDED,) if is_traced(*data) and jnp.result_type(float) != np.float64 else ()


@contextlib.contextmanager
def _standard_promotion():
    """A scope in which types and ranks promote as JAX does by default, whatever the program has set."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def promoting(function: _Function) -> _Function:
    """Makes `function` run with JAX's default promotion of types and ranks."""
    return _standard_promotion()(function)


@contextlib.contextmanager
def wide_sums(*data):
    """A scope for sums over records: unless an array of `data` is traced, floats in it have 64 bits.

    The rounding error of a sum over n records depends on all of them. In 32 bits, one record of weight 1 can
    move a sum of 1e5 by 136; in 64 bits, by at most 1 + n²·2⁻⁵². Code in the scope runs at once, under `jit`
    too. If `data` is traced, the scope changes nothing but promotion: where the default float then has 32
    bits, the guarantee counts sums as exact, and says so (`rounding_assumption`). Types and ranks promote as
    JAX does by default.
    """
    with _standard_promotion():
        if is_traced(*data):
            yield
        else:
            with jax.ensure_compile_time_eval(), jax.enable_x64(True):
                yield


def in_float64(function: _Function) -> _Function:
    """Makes `function` run under a scoped `jax.enable_x64(True)`.

    An excess risk of 1e-7 beside a risk of 1 is too small for float32. The scope works eagerly and in `vmap`.
    A surrounding `jit` is lowered after the scope has closed, so whoever calls a jitted function has to open
    the scope around the call: the wrapper raises ValueError rather than let 64 bits be truncated. Types and
    ranks promote as JAX does by default.
    """

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        being_jitted = isinstance(jnp.zeros(()), Tracer)
        if being_jitted and not jax.config.read("jax_enable_x64"):
            raise ValueError(
                f"{function.__name__} computes in 64 bits and is being traced with 64-bit types off: "
                "call the jitted function under `with jax.enable_x64(True):`"
            )
        with jax.enable_x64(True), _standard_promotion():
            return function(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


def native(leaf: Any) -> Any:
    """A NumPy array converted to types that JAX knows: the machine's byte order, at most 64 bits."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iuf":
        wide = np.float64 if leaf.dtype == np.longdouble else leaf.dtype.newbyteorder("=")
        return leaf.astype(wide, copy=False)
    return leaf


def sum_entries(
    values: np.ndarray, owners: np.ndarray, cells: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sparse vectors, one for each owner, whose entries in one cell are added up: all (T,) -> all (U,).

    Entries are added in the order in which they are given, so that a sum depends on its owner's entries
    alone. scipy sorts the entries of all vectors, without keeping equal ones in order, if one is unsorted.
    The results are sorted by owners, counted from 0, and by cells, which are less than `size`.
    """
    places = np.asarray(owners, np.int64) * size + cells
    order = np.argsort(places, kind="stable")
    places = places[order]
    new = np.diff(places, prepend=-1) > 0
    sums = np.zeros(np.count_nonzero(new))
    np.add.at(sums, np.cumsum(new) - 1, values[order])
    return sums, *np.divmod(places[new], size)


def as_float64(array) -> jax.Array:
    """The array in float64. Call it only inside one of the scopes above."""
    return jnp.asarray(array, jnp.float64)


def norm(vectors: jax.Array, axis: int = -1) -> jax.Array:
    """The l2 norms along an axis. A norm is infinite only if it exceeds the largest float."""
    scaled, scale = _scaled(vectors, axis)
    return jnp.linalg.norm(scaled, axis=axis) * jnp.squeeze(scale, axis)


def into_ball(vectors: Any, radius: jax.typing.ArrayLike, axis: int = -1, xp: Any = jnp) -> Any:
    """The vectors along an axis, projected onto the l2 ball of that radius.

    Vectors inside the ball are returned bit for bit. All entries must be finite. `xp` is the module that
    computes, jax.numpy or numpy.
    """
    scaled, scale = _scaled(vectors, axis, xp)
    length = xp.linalg.norm(scaled, axis=axis, keepdims=True)
    return xp.where(length * scale > radius, scaled / length * radius, vectors)


def into_simplex(vectors: Any, total: float, xp: Any = jnp) -> Any:
    """The nearest vectors along the last axis with entries ≥ 0 that add up to `total`.

    The nearest point is max(x − t, 0) with one t for all entries (Duchi et al., ICML 2008). Entries more than
    `total` below the largest become zero whatever their size, so they are raised to that first, and nothing
    overflows. All entries must be finite. `xp` is the module that computes, jax.numpy or numpy.
    """
    shifted = xp.maximum(vectors - vectors.max(-1, keepdims=True), -total)
    ordered = -xp.sort(-shifted, axis=-1)
    counts = xp.arange(1, vectors.shape[-1] + 1)
    shifts = (xp.cumsum(ordered, axis=-1) - total) / counts
    kept = (ordered > shifts).sum(-1, keepdims=True)
    return xp.maximum(shifted - xp.take_along_axis(shifts, kept - 1, axis=-1), 0)


def _scaled(vectors: Any, axis: int, xp: Any = jnp) -> tuple[Any, Any]:
    """Vectors divided by a scale such that their squares neither overflow nor underflow, and that scale.

    The scale is a power of two, so that multiplying by it is exact. The largest entry cannot be the scale:
    compiled code multiplies by its reciprocal, which is zero for the largest floats.
    """
    _, exponent = xp.frexp(xp.abs(vectors).max(axis, keepdims=True))
    most = jnp.finfo(vectors.dtype).maxexp - 2  # the reciprocal of 2^most is a normal number
    exponent = xp.clip(exponent, -most, most)
    one = xp.ones((), vectors.dtype)
    return vectors * xp.ldexp(one, -exponent), xp.ldexp(one, exponent)
