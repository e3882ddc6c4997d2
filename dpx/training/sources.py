"""Frames of pandas and polars, and sources that give a record at a time, as arrays whose types no row chose.

The protocols are enough: neither library is imported, and any object that has them is read.
"""

from typing import Any

import jax
import numpy as np

from dpx._numerics import native
from dpx._validate import check_real

ROW_BY_ROW = (
    "each row of the source is one record, and follows from that record alone: the source repeats, batches "
    "and mixes no records"
)
_MOST = 2**31 - 1


def is_source(data: Any) -> bool:
    """Whether it is a source: an object with `__len__` and `__getitem__` that is no array and no mapping.

    So are those of PyGrain (`RandomAccessDataSource`, `MapDataset`), data sets of PyTorch that have a length,
    and data sets of Hugging Face.
    """
    if isinstance(data, str | bytes | list) or not jax.tree_util.all_leaves([data]):
        return False
    others = ("__array__", "dtype", "toarray", "keys")
    return all(hasattr(data, name) for name in ("__len__", "__getitem__")) and not _any(
        data, others
    )


def is_frame(data: Any) -> bool:
    """Whether it is a frame or a column of pandas or polars."""
    return hasattr(data, "to_numpy") and _any(data, ("columns", "name"))


def _any(data: Any, names: tuple[str, ...]) -> bool:
    return any(hasattr(data, name) for name in names)


def read_source(source: Any, name: str) -> Any:
    """The records of a source as one tree of arrays with a row for each, in memory; each is read once.

    A record is a tree of numbers, lists of numbers and arrays. All records have the same fields, types and
    shapes: a record that differs is refused, so that none changes how another one is read.

    Raises:
      ValueError: for a source without records or without an end; naming the row, for a record that holds no
        numbers or differs from the first one.
    """
    rows = len(source)
    if not 0 < rows <= _MOST:
        raise ValueError(
            f"{name} has {rows} records, which must be 1 to {_MOST}: give a source that holds each once, as "
            "a MapDataset does without repeat()"
        )
    first, arrays = None, []
    for row in range(rows):
        leaves, structure = jax.tree_util.tree_flatten_with_path(
            source[row], is_leaf=lambda x: isinstance(x, list)
        )
        read = {}
        for path, leaf in leaves:
            field = jax.tree_util.keystr(path)
            check_real(leaf, f"{name}: row {row}{field and f', field {field}'}")
            read[field] = native(np.asarray(leaf))
        if not read:
            raise ValueError(
                f"{name}: row {row} holds nothing: give numbers, and leave out what a filter has emptied"
            )
        kinds = {field: (array.dtype, array.shape) for field, array in read.items()}
        if first is None:
            first = kinds, structure
            arrays = [np.empty((rows, *array.shape), array.dtype) for array in read.values()]
        if (kinds, structure) != first:
            raise ValueError(
                f"{name}: row {row} holds {_shown(kinds)}, and row 0 {_shown(first[0])}: give every record "
                "the same fields, types and shapes, as by padding it and casting it to a type"
            )
        for array, of_row in zip(arrays, read.values(), strict=True):
            array[row] = of_row
    return jax.tree.unflatten(structure, arrays)


def _shown(kinds: dict[str, tuple]) -> str:
    return ", ".join(f"{f} {dtype} {shape}".strip() for f, (dtype, shape) in kinds.items())


def read_frame(frame: Any, name: str) -> np.ndarray:
    """A frame as a matrix (N, columns), or a column as an array with N rows, of the type that it declares.

    A missing value would make floats of a column of integers, in which large ones are rounded. It is refused;
    NaN is a number where the column is one of floats.

    Raises:
      ValueError: naming the column, and the row, if there is one: for a missing value, a column that holds no
        numbers, a frame with a column of arrays, or one without columns.
    """
    if not hasattr(frame, "columns"):
        return _column(frame, name)
    if not len(frame.columns):
        raise ValueError(f"{name} has no columns: pass at least one")
    if hasattr(frame, "get_columns"):  # polars
        columns = frame.get_columns()
    else:
        columns = [frame.iloc[:, number] for number in range(len(frame.columns))]
    arrays = [_column(column, name) for column in columns]
    for column, array in zip(columns, arrays, strict=True):
        if array.ndim != 1:
            raise ValueError(
                f"{_place(column, name)} holds an array a row, where a frame must hold numbers: pass the "
                "column by itself"
            )
    return np.stack(arrays, axis=1)


def _place(column: Any, name: str) -> str:
    return name if column.name is None else f"{name}, column {column.name!r}"


def _column(column: Any, name: str) -> np.ndarray:
    place = _place(column, name)
    array = column.to_numpy()
    declared = getattr(column, "iloc", column)[:0].to_numpy().dtype
    missing = np.zeros(len(array), bool)
    if not isinstance(column.dtype, np.dtype):  # a type that has missing values beside numbers
        of = column.is_null if hasattr(column, "is_null") else column.isna
        missing = np.array(of(), bool)
    if array.dtype != declared:  # missing values within a row's array
        holes = array != array if array.dtype.kind == "f" else np.equal(array, None)  # type: ignore[call-overload]
        missing |= holes.reshape(len(array), -1).astype(bool).any(axis=1)
    if missing.any():
        raise ValueError(
            f"{place}, row {missing.argmax()} is missing: fill it in, or remove the row"
        )
    check_real(array, place)
    return array
