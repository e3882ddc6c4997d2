"""Reads records, as users of the library hold them, into a tree of arrays with one row a record."""

from typing import Any

import jax
import numpy as np

from dpx._numerics import native
from dpx._validate import check_real

_INFERRED = (
    "the types of the data are public: those of pandas follow from all records, and what the loss makes of "
    "every record may depend on them"
)


def inferred_types(data: Any) -> tuple[str, ...]:
    """The assumption of a guarantee where one record may change the type of all; none for plain arrays.

    In pandas, one missing value makes a column of integers one of floats, which are rounded to 32 bits.
    """
    leaves = jax.tree.leaves(data, is_leaf=lambda x: isinstance(x, list))
    known = np.ndarray | jax.Array | list  # a list holds numbers of one type
    given = all(isinstance(x, known) or hasattr(x, "toarray") for x in leaves)
    return () if given else (_INFERRED,)


def as_examples(data: Any) -> tuple[tuple, int]:
    """The arguments of the loss as trees of arrays with a row for each record, and the number of records.

    Args:
      data: A tree of arrays, pandas objects, sparse matrices and (nested) lists of numbers. A tuple holds
        several arguments, anything else is one.

    Raises:
      ValueError: naming the leaf that holds no numbers, or numbers of several types in one list, or whose
        number of records differs.
    """
    arguments = data if isinstance(data, tuple) and not hasattr(data, "_fields") else (data,)
    leaves, structure = jax.tree_util.tree_flatten_with_path(
        arguments, is_leaf=lambda x: isinstance(x, list)
    )
    if not leaves:
        raise ValueError(
            "data holds no array: pass one row a record, as in fit(loss, params, (x, y))"
        )
    arrays = {}
    for path, leaf in leaves:
        # Of data that are no tuple, the first step of the path is not the user's.
        name = "data" + jax.tree_util.keystr(path if arguments is data else path[1:])
        arrays[name] = _array(leaf, name)
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"data has {sizes} rows: every array must have one row a record")
    rows = next(iter(sizes.values()))
    if rows == 0:
        raise ValueError("data has no rows: pass at least one record")
    return jax.tree.unflatten(structure, list(arrays.values())), rows


def _array(leaf: Any, name: str) -> Any:
    if hasattr(leaf, "toarray"):
        leaf = leaf.toarray()
    try:
        check_real(leaf, name)
    except ValueError as error:
        hint = ", and several arrays go into a tuple, as (x, y)" if isinstance(leaf, list) else ""
        raise ValueError(f"{error}{hint}") from None
    if isinstance(leaf, list) and len(types := _types(leaf)) > 1:
        raise ValueError(
            f"{name} is a list that holds {' and '.join(sorted(map(str, types)))}, which must be of one "
            f"type, lest one record changes that of all: give np.asarray({name}, np.float32), or another type"
        )
    if not isinstance(leaf, jax.Array):
        leaf = native(np.asarray(leaf))
        _check_held(leaf, name)
    if not leaf.ndim:
        raise ValueError(f"{name}={leaf} must be an array with one row a record")
    return leaf


def _types(value: Any) -> set[np.dtype]:
    """The types of the numbers in a list, and in the lists and arrays within it."""
    if isinstance(value, list | tuple):
        return set().union(*map(_types, value))
    return {np.dtype(getattr(value, "dtype", type(value)))}


def _check_held(array: np.ndarray, name: str) -> None:
    """Raises ValueError for integers that JAX's types do not hold, of which it would keep the low bits."""
    held = np.dtype(jax.dtypes.canonicalize_dtype(array.dtype))
    if array.dtype.kind not in "iu" or held == array.dtype or not array.size:
        return
    limits = np.iinfo(held)
    for value in (array.min(), array.max()):
        if not limits.min <= int(value) <= limits.max:
            raise ValueError(
                f"{name} holds {value}, which {held} does not: number what it stands for from 0, or turn on "
                "jax_enable_x64"
            )
