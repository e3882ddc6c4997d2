"""Reads records, as users of the library hold them, into a tree of arrays with one row a record."""

from typing import Any

import jax
import numpy as np

from dpx._numerics import native
from dpx._validate import check_real
from dpx.training import sources

_INFERRED = (
    "the types of the data are public: those of a frame follow from all records where pandas, or a reader of "
    "files, inferred them, and what the loss makes of every record may depend on them"
)


def assumed(data: Any) -> tuple[str, ...]:
    """What a guarantee assumes where one record may change how others are read; nothing for plain arrays.

    In pandas, one missing value makes a column of integers one of floats, which are rounded to 32 bits. A
    source runs a program of its own for each row.
    """
    leaves = jax.tree.leaves(data, is_leaf=lambda x: isinstance(x, list))
    known = np.ndarray | jax.Array | list  # a list holds numbers of one type
    read = [x for x in leaves if not (isinstance(x, known) or hasattr(x, "toarray"))]
    of_source = [sources.is_source(x) for x in read]
    inferred = () if all(of_source) else (_INFERRED,)
    return (*inferred, *((sources.ROW_BY_ROW,) if any(of_source) else ()))


def as_examples(data: Any) -> tuple[tuple, int]:
    """The arguments of the loss as trees of arrays with a row for each record, and the number of records.

    Args:
      data: A tree of arrays, frames, columns, sources (`dpx.training.sources`), sparse matrices and (nested)
        lists of numbers. A tuple holds several arguments, as does a source whose records are tuples; anything
        else is one.

    Raises:
      ValueError: naming the leaf that holds no numbers, or numbers of several types in one list, or whose
        number of records differs.
    """
    if sources.is_source(data):
        data = sources.read_source(data, "data")
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
        if sources.is_source(leaf):
            raise ValueError(
                f"{name} is a source, which must be all of the data: let it give records such as (x, y)"
            )
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
    elif sources.is_frame(leaf):
        leaf = sources.read_frame(leaf, name)
    # Of a column of arrow NumPy makes floats where one cell is null.
    for column in getattr(leaf, "columns", [leaf]):
        if isinstance(getattr(column, "null_count", None), int) and column.null_count:
            row = np.asarray(column.is_null()).argmax()
            raise ValueError(f"{name}, row {row} is missing: fill it in, or remove the row")
    try:
        check_real(leaf, name)
    except ValueError as error:
        hint = ", and several arrays go into a tuple, as (x, y)" if isinstance(leaf, list) else ""
        raise ValueError(f"{error}{hint}") from None
    types = _types(leaf) if isinstance(leaf, list) else set()
    if len(types) > 1:
        raise ValueError(
            f"{name} is a list that holds {' and '.join(sorted(map(str, types)))}, which must be of one "
            f"type, lest one record changes that of all: give np.asarray({name}, np.float32), or another type"
        )
    if not isinstance(leaf, jax.Array):
        leaf = native(np.asarray(leaf))
        if np.dtype(int) in types and leaf.dtype.kind != "i":
            raise ValueError(
                f"{name} is a list that holds a whole number beyond {np.dtype(int)}, for which NumPy makes "
                f"{leaf.dtype} of all: number what it stands for from 0, or give an array of your type"
            )
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
