"""Reading lines of text files, with errors that name the line."""

import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def existing(path: str | Path) -> Path:
    """The path, if there is a file; FileNotFoundError otherwise."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; check --config.data.path")
    return path


def parse_lines(
    path: Path, lines: Iterable[str], parse: Callable[[str], T], expected: str
) -> Iterator[T]:
    """Parses the lines that are not blank; a malformed one raises ValueError with its number."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield parse(line.rstrip("\r\n"))
        except (ValueError, IndexError):
            raise ValueError(
                f"{path}: line {number} is malformed, expected {expected}: {line.strip()[:60]!r}"
            ) from None


def zip_member(path: Path, name: str) -> Iterator[str]:
    """The lines of the file called `name`, in whatever folder of the archive it lies."""
    with zipfile.ZipFile(path) as archive:
        members = [entry for entry in archive.namelist() if entry.rsplit("/", 1)[-1] == name]
        if not members:
            raise ValueError(f"{path}: the archive holds no {name}")
        with archive.open(members[0]) as file:
            for line in file:
                yield line.decode("latin-1")


def download(url: str, sha256: str) -> Path:
    """The file at `url`, fetched once into the user's cache and checked against its sha256."""
    import pooch

    return Path(pooch.retrieve(url, known_hash=f"sha256:{sha256}", path=pooch.os_cache("dpx")))
