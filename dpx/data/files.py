"""Reading text files, with errors that name the file, and the line where there is one."""

import csv
import io
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
LONGEST_CELL = 2**24  # characters


def existing(path: str | Path) -> Path:
    """The path, if there is a file; FileNotFoundError otherwise."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; check --config.data.path")
    return path


def below(folder: Path) -> list[Path]:
    """All files below a folder, by name; a folder is none, whatever its name ends in."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a file; ValueError where it is not in that encoding."""
    try:
        return path.read_text(encoding=encoding)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte {error.start} is not {encoding.upper()}: save the file in that encoding"
        ) from None


def table_rows(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of each row of a table that is not blank, with the number of the line where it ends.

    What would mix up the rows of two people, or their columns, is refused. A quote that is not closed takes
    in the rows of others, and an unquoted separator moves a user's name into another column. Lines end where
    `csv` ends them: `str.splitlines` would also cut at U+2028, U+0085, form feeds and the like, which may
    stand in a cell.

    Raises:
      ValueError: naming the line, for quotes that are not those of a table, a cell of more than
        `LONGEST_CELL` characters, or a row with more cells than the first one.
    """
    csv.field_size_limit(LONGEST_CELL)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    begins, width = 1, 0
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                width = width or len(cells)
                if any(cell.strip() for cell in cells[width:]):
                    raise ValueError(
                        f"{path}: line {reader.line_num} has more cells than the first line: quote cells "
                        "that hold the separator"
                    )
                yield reader.line_num, cells
            begins = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}: line {begins} is malformed ({error}): mend the table") from None


def check_once(path: Path, names: Iterable[str], known: Sequence[str]) -> None:
    """Raises ValueError for a name that several columns of a table have: either could be meant."""
    for name in names:
        if known.count(name) > 1:
            raise ValueError(
                f"{path}: has {known.count(name)} columns {name!r}: give each a name of its own"
            )


def parse_lines(
    path: Path, lines: Iterable[str], parse: Callable[[str], T], expected: str
) -> Iterator[T]:
    """Parses the lines that are not blank; a malformed one raises ValueError with its number."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield parse(line.rstrip("\r\n"))
        except (ValueError, IndexError, OverflowError):
            raise ValueError(
                f"{path}: line {number} is malformed, expected {expected}: {line.strip()[:60]!r}"
            ) from None


def zip_member(path: Path, name: str) -> Iterator[str]:
    """The lines of the file called `name`, in whatever folder of the archive it lies.

    Raises:
      ValueError: for a file that is no archive, is cut off, damaged or encrypted, or holds no such file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = [entry for entry in archive.namelist() if entry.rsplit("/", 1)[-1] == name]
            if not members:
                raise ValueError(f"{path}: the archive holds no {name}: check --config.data.path")
            with archive.open(members[0]) as file:
                for line in file:
                    yield line.decode("latin-1")
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"{path}: not a zip archive that can be read ({error}): fetch it again"
        ) from None


def whole_number(word: str | int) -> int:
    """A whole number of at most 64 bits; ValueError for any other word."""
    number = int(word)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{word} has more than 64 bits")
    return number


def download(url: str, sha256: str) -> Path:
    """The file at `url`, fetched once into the user's cache and checked against its sha256."""
    import pooch

    return Path(pooch.retrieve(url, known_hash=f"sha256:{sha256}", path=pooch.os_cache("dpx")))
