"""Named columns of a table in a .csv, .tsv, .tab, .jsonl or .parquet file: each cell is read by itself.

All readers of tables go through `read`, so that they take the same kinds of files. What a cell means is the
reader's own, such as `dpx.data.cells.identifier`.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dpx.data import files, parquet

# Whether a line names columns, of whether each of its cells is a number; None where it may be a row.
Guess = Callable[[Sequence[bool]], bool | None]
_Rows = Iterator[tuple[int, list]]  # the number of a line, and its cells
_NAMED = (".jsonl", ".parquet")  # kinds that name the cells of every row
KINDS = (*files.SEPARATORS, *_NAMED)
_ORANGE_TYPES = {"d", "c", "s", "t", "discrete", "continuous", "string", "time", ""}
_OF_TEXTS = ("text", "content", "body", "article")


class Table(NamedTuple):
    """Columns of a file.

    Attributes:
      names: The name of each column.
      columns: For each name its (E,) cells: text, of .jsonl Python's values, of .parquet those of
        `dpx.data.parquet.read_columns`.
      where: A function that names the file and the line of a row.
    """

    names: list[str]
    columns: list
    where: Callable[[int], str]

    def place(self, row: int, column: int) -> str:
        """The name of a cell, for errors."""
        return f"{self.where(row)}, column {self.names[column]!r}"


def unless_numbers(numbers: Sequence[bool]) -> bool | None:
    """A line names columns unless it holds numbers alone, which may be names or a row."""
    return None if all(numbers) else True


def read(
    path: str | Path,
    names: Sequence[str | None],
    *,
    header: bool | None = None,
    separator: str | None = None,
    guess: Guess = unless_numbers,
    texts: bool = False,
) -> Table:
    """The columns of these names.

    Args:
      path: The table. Text is in UTF-8, and may be compressed, as in .csv.gz. A .jsonl file has a JSON object
        a line.
      names: The names of the columns, or their numbers from 1 if there is no header. With `texts`, None is
        the first column of a text file that is called text, content, body or article. The choice depends on
        no row, since a document must not decide what is read of others.
      header: Whether the first line of a text file names the columns; None for what `guess` says of it, but
        a line that counts from 0 or 1, as pandas and R name columns without names, may be a row.
      separator: The separator of cells, such as ";" or "::"; None is a comma, or a tab in a .tsv or .tab
        file. If it is given, a text file may have any name.
      guess: Whether a first line names the columns.
      texts: Whether it is a table of texts: its first line always names the columns, and a .tab file is a
        table of Orange, whose second and third line hold types and roles.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: naming the file, and the line, if there is one: for another kind of file, a column that is
        unknown, a line that cannot be read or lacks a cell, or no row.
    """
    path = files.existing(path)
    kind = files.kind(path)
    if kind not in KINDS and separator is None:
        or_else = "a folder of .txt files or one of them"
        if not texts:
            or_else = "say what separates its cells by --config.data.separator"
        raise ValueError(
            f"{path}: give a table whose name ends in {', '.join(KINDS)} (text may have .gz after that), or "
            f"{or_else}"
        )
    if kind in _NAMED and (header, separator) != (None, None):
        raise ValueError(
            f"{path}: {kind[1:]} names its columns: leave out config.data.header and config.data.separator"
        )
    if kind in _NAMED and None in names:
        raise _no_column(path)
    found: Any = list(names)
    if kind == ".parquet":
        columns, lines = parquet.read_columns(path, found), None
    else:
        if kind == ".jsonl":
            rows = _objects(path, found)
        else:
            known, named, rows = text_rows(path, header, separator, guess, texts)
            found = [_of_texts(path, known) if name is None else name for name in names]
            places = [_place(path, name, known, named, not texts) for name in found]
            rows = _chosen(path, rows, found, places)
        rows = list(rows)
        lines = [line for line, _ in rows]
        columns = [*zip(*(cells for _, cells in rows), strict=True)]
    if not columns or not len(columns[0]):
        raise _no_row(path)

    def where(row: int) -> str:
        return f"{path}: row {row + 1}" if lines is None else f"{path}: line {lines[row]}"

    return Table(found, columns, where)


def text_rows(
    path: Path, header: bool | None, separator: str | None, guess: Guess, texts: bool = False
) -> tuple[list[str], bool, _Rows]:
    """The first line of a text file, whether it names columns, and the rows, with it if it does not.

    Raises:
      ValueError: as `read` does; also if nothing says whether the first line is a row.
    """
    kind = files.kind(path)
    content = files.read_text(path, "utf-8-sig")
    rows = files.table_rows(path, content, separator or files.SEPARATORS[kind])
    if texts and kind == ".tab":
        rows = _of_orange(path, rows)
    if (first := next(rows, None)) is None:
        raise _no_row(path)
    known = [cell.strip() for cell in first[1]]
    named = True if texts else header
    counting = [[str(n + least) for n in range(len(known))] for least in (0, 1)]
    if named is None and known not in counting:
        named = guess([files.number(cell) is not None for cell in known])
    if named is None:
        raise ValueError(
            f"{path}: the first line, {', '.join(known)[:40]}, can be the names of columns or a row: say "
            "which by --config.data.header=True or False"
        )
    return known, named, rows if named else itertools.chain([first], rows)


def _no_row(path: Path) -> ValueError:
    return ValueError(f"{path}: the table holds no row: check --config.data.path")


def _objects(path: Path, names: Sequence[str]) -> _Rows:
    for line, text in enumerate(files.read_text(path, "utf-8-sig").split("\n"), start=1):
        if not text.strip():
            continue
        try:
            row = dict(json.loads(text).items())
        except (ValueError, AttributeError, RecursionError):
            raise ValueError(
                f"{path}: line {line} is no JSON object: write one object a line"
            ) from None
        if missing := [name for name in names if name not in row]:
            raise ValueError(
                f"{path}: line {line} has no column {missing[0]!r}: it has {', '.join(row)}"
            )
        yield line, [row[name] for name in names]


def _chosen(path: Path, rows: _Rows, names: Sequence[str], places: Sequence[int]) -> _Rows:
    for line, row in rows:
        if (last := max(places)) >= len(row):
            name = names[places.index(last)]
            raise ValueError(
                f"{path}: line {line} has {len(row)} cells and column {name!r} is number {last + 1}: "
                "complete the line, or quote cells that hold the separator"
            )
        yield line, [row[place] for place in places]


def _of_orange(path: Path, rows: _Rows) -> _Rows:
    """The rows of a table of Orange without the lines that hold types and roles."""
    for number, (line, row) in enumerate(rows):
        if number == 1 and not {cell.strip() for cell in row} <= _ORANGE_TYPES:
            raise ValueError(
                f"{path}: a .tab table must be Orange's, with types in its second line and roles in its "
                "third: save another one as .tsv"
            )
        if number == 0 or line > 3:
            yield line, row


def _of_texts(path: Path, known: Sequence[str]) -> str:
    """The column of texts."""
    name = next((name for name in known if name.lower() in _OF_TEXTS), None)
    if name is None:
        raise _no_column(path, known)
    return name


def _no_column(path: Path, known: Sequence[str] = ()) -> ValueError:
    one = f", one of {', '.join(known):.200}" if known else ""
    return ValueError(
        f"{path}: say which column holds the text: --config.data.column=NAME{one}"
        + files.other_separator(known, option=False)
    )


def _place(path: Path, name: str, known: Sequence[str], named: bool, settable: bool) -> int:
    """The index of a column, in a table whose first line holds `known`."""
    other = files.other_separator(known, option=settable)
    if named:
        numbers = ", or use --config.data.header=False and numbers from 1" if settable else ""
        return files.index_of(path, name, known, numbers + other)
    if not (name.isdecimal() and 1 <= int(name) <= len(known)):
        raise ValueError(
            f"{path}: has no header, so column {name!r} must be a number from 1 to {len(known)}{other}"
        )
    return int(name) - 1
