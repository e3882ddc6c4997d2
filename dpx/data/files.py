"""Reading text files, with errors that name the file, and the line where there is one."""

import csv
import io
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
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


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a file; ValueError where it is not in that encoding."""
    try:
        return path.read_text(encoding=encoding)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte {error.start} is not {encoding.upper()}: save the file in that encoding"
        ) from None


def table_lines(text: str) -> io.StringIO:
    """The lines of a table, for `csv.reader`, which takes cells of up to `LONGEST_CELL` from then on.

    `str.splitlines` would also cut at U+2028, U+0085, form feeds and the like, which may stand in a cell:
    the rest of one person's row would become rows of others.
    """
    csv.field_size_limit(LONGEST_CELL)
    return io.StringIO(text, newline="")


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
