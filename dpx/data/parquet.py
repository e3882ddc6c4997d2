"""A reader of the columns of a .parquet file, with the types that the file states, whatever its rows hold."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dpx.data.files import index_of


def read_columns(path: Path, names: Sequence[str]) -> list[np.ndarray | list]:
    """The columns of these names, which may include an index that pandas has saved.

    The types of the file are kept, whereas pandas would turn a column of integers into floats if one of them
    is missing.

    Returns:
      For each name its (E,) cells: an array of numbers if none is missing, an array of dates, in which NaT is
      missing, or a list of Python's values, in which None is missing.

    Raises:
      ValueError: naming the file, if it cannot be read or pyarrow is not installed, or for a column that is
        unknown or holds lists or structures.
    """
    try:
        from pyarrow import parquet, types
    except ImportError:
        raise ValueError(
            f"{path}: reading parquet needs pyarrow: pip install pyarrow, or save the table as .csv"
        ) from None
    try:
        file = parquet.ParquetFile(path)
        known = file.schema_arrow.names
        table = file.read(columns=[name for name in names if known.count(name) == 1])
    except Exception as error:  # pyarrow raises many types for files that it cannot use
        raise ValueError(
            f"{path}: not a parquet file that can be read ({type(error).__name__}): write it again"
        ) from None
    columns = []
    for name in names:
        index_of(path, name, known)
        column = table[name]
        if types.is_nested(column.type):
            raise ValueError(
                f"{path}: column {name!r} holds {column.type}, and must hold one value a row: make a row of "
                "each element, as DataFrame.explode does"
            )
        dates = types.is_timestamp(column.type) or types.is_date(column.type)
        plain = (types.is_integer, types.is_floating, types.is_boolean)
        numbers = any(is_one(column.type) for is_one in plain)
        whole = dates or (numbers and not column.null_count)
        columns.append(column.to_numpy() if whole else column.to_pylist())
    return columns
