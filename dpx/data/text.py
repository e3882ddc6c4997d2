"""Texts of one's own as records of characters: lines, documents or windows, with their authors.

Nothing here is learned from the texts: the alphabet, the treatment of characters outside of it, and the
length of the longest record are given. Records are read in the order of the file.
"""

import dataclasses
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpx.data import cells, columns, files
from dpx.data.records import Texts

RECORDS = ("line", "document", "window")
OUTSIDE = ("refuse", "replace", "drop")
_REPLACEMENT = "\ufffd"


class Text(NamedTuple):
    """A text and its place, for errors; and, if they are read, its author and its label."""

    place: str
    text: str
    user: cells.Identifier | None = None
    label: cells.Identifier | None = None


@dataclasses.dataclass(frozen=True)
class Alphabet:
    """The characters that a model knows, and the treatment of others; both are public choices.

    Attributes:
      characters: The characters, each of which is a token, in order; None for the 256 bytes of UTF-8.
      outside: "refuse" raises an error for other characters, "replace" turns them into the last token, which
        is shown as U+FFFD, and "drop" leaves them out.
    """

    characters: str | None
    outside: str = "refuse"

    def __post_init__(self):
        if self.outside not in OUTSIDE:
            raise ValueError(f"outside={self.outside!r} must be one of {OUTSIDE}: choose one")
        if self.characters is not None and len(set(self.characters)) != len(self.characters):
            raise ValueError("alphabet must name each character once: remove the repeated ones")
        if self.characters == "":
            raise ValueError("alphabet='' must hold at least one character: give some")

    @property
    def size(self) -> int:
        """The number of different tokens."""
        if self.characters is None:
            return 256
        return len(self.characters) + (self.outside == "replace")

    def encode(self, text: str, place: str = "text") -> np.ndarray:
        """The tokens (n,) int32; raises ValueError, naming `place`, for a character that is refused."""
        if self.characters is None:
            _check_whole(text, place)
            return np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        index = {character: token for token, character in enumerate(self.characters)}
        if self.outside == "refuse":
            for column, character in enumerate(text, start=1):
                if character not in index:
                    raise ValueError(
                        f"{place}, character {column} is {character!r}, outside the alphabet: add it to "
                        "config.data.alphabet, or set config.data.outside=replace or drop"
                    )
        if self.outside == "drop":
            return np.array([index[c] for c in text if c in index], np.int32)
        return np.array([index.get(c, len(index)) for c in text], np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """The text of tokens without an end."""
        if self.characters is None:
            return bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")
        return "".join((self.characters + _REPLACEMENT)[t] for t in tokens)


def alphabet(name: str, outside: str = "refuse") -> Alphabet:
    """The alphabet of that name, or of the characters in `name`.

    "bytes" are the bytes of UTF-8; "ascii" is letters, digits, punctuation, space and newline.
    """
    if name == "bytes":
        return Alphabet(None, outside)
    if name == "ascii":
        name = "\n " + string.ascii_letters + string.digits + string.punctuation
    return Alphabet(name, outside)


def load_texts(
    path: str | Path,
    *,
    record: str = "document",
    column: str | None = None,
    user: str | None = None,
    label: str | None = None,
) -> Iterator[Text]:
    """Yields the texts of a file or folder, each with its place for errors.

    Args:
      path: A .txt file, a table as `dpx.data.columns.read` takes it, whose first line names its columns, or a
        folder of .txt files, which are read in order of name.
      record: With "line" each line is a record; lines end with a newline, a carriage return or both.
        Otherwise each document is one: a file, or a row of a table.
      column: The column of a table that holds the text; None is the first one of a text file that is called
        text, content, body or article.
      user: The column of authors, each a `dpx.data.cells.identifier`, who are the users of their texts.
      label: The column of labels, which are read as identifiers are.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: naming the file, and the line or column, for a text that cannot be read, or no text at all.
    """
    path = Path(path)
    empty = True
    for document in _documents(path, column, user, label):
        lines = record == "line"
        parts = re.split("\r\n?|\n", document.text) if lines else [document.text]
        for number, part in enumerate(parts, start=1):
            if part.strip():
                empty = False
                place = f"{document.place}: line {number}" if lines else document.place
                yield document._replace(place=place, text=part)
    if empty:
        raise ValueError(f"{path} holds no text: check --config.data.path")


def joined(texts: Iterable[Text]) -> Iterator[Text]:
    """Yields all texts of each user as one text, joined by newlines, in the order of users' first texts."""
    own: dict[cells.Identifier | None, list[Text]] = {}
    for text in texts:
        own.setdefault(text.user, []).append(text)
    for user, written in own.items():
        yield Text(written[0].place, "\n".join(one.text for one in written), user)


def numbered(users: Sequence[cells.Identifier | None]) -> np.ndarray | None:
    """The users of records as numbers, as in `Texts`; None if records have no users."""
    if not users or users[0] is None:
        return None
    return cells.identifiers(users, "users", lambda row: f"record {row}")[0]


def _documents(path: Path, column: str | None, user: str | None, label: str | None):
    """Yields each document as a `Text`; those without text are left out, whatever their other cells hold."""
    if path.is_dir():
        for file in files.below(path):
            if files.kind(file) == ".txt":
                yield from _documents(file, column, user, label)
        return
    path = files.existing(path)
    if files.kind(path) == ".txt":
        if (column, user, label) != (None, None, None):
            raise ValueError(
                f"{path}: a .txt file has no columns: leave out those of config.data, such as "
                "config.data.column and config.data.user"
            )
        yield Text(str(path), files.read_text(path, "utf-8-sig"))
        return
    named = [name for name in (user, label) if name is not None]
    table = columns.read(path, [column, *named], texts=True)
    for row, (cell, *others) in enumerate(zip(*table.columns, strict=True)):
        written = _text(cell, table.place(row, 0))
        if written.strip():
            ids = [
                cells.at(cells.identifier, x, row, lambda row, n=n: table.place(row, n))
                for n, x in enumerate(others, 1)
            ]
            whose, of = None if user is None else ids[0], None if label is None else ids[-1]
            yield Text(table.where(row), written, whose, of)


def _text(cell: Any, place: str) -> str:
    if cell is None:
        raise ValueError(f"{place} is empty: fill it in, or remove the line")
    if not isinstance(cell, str):
        raise ValueError(f"{place} holds {cell!r:.60}: write it as text, in quotes")
    _check_whole(cell, place)
    return cell


def _check_whole(text: str, place: str) -> None:
    """Raises ValueError for an unpaired surrogate, which JSON can hold and UTF-8 cannot."""
    if half := re.search("[\ud800-\udfff]", text):
        raise ValueError(
            f"{place}, character {half.start() + 1} is {half[0]!r}, half of a character: mend the text"
        )


def encode(texts: Iterable[Text], known: Alphabet, max_length: int) -> Texts:
    """Records (n, max_length + 1), which are cut to `max_length` tokens and followed by ends."""
    end = known.size
    rows, users = [], []
    for place, text, user, _ in texts:
        row = np.full(max_length + 1, end, np.int32)
        ids = known.encode(text, place)[:max_length]
        row[: len(ids)] = ids
        rows.append(row)
        users.append(user)
    return Texts(np.stack(rows), end, users=numbered(users))


def encode_windows(texts: Iterable[Text], known: Alphabet, length: int) -> Texts:
    """Records (n, length): windows of `length` characters of each text, whose rest at the end is dropped.

    Raises:
      ValueError: if no text is as long as a window.
    """
    texts = list(texts)
    parts = [known.encode(text, place) for place, text, *_ in texts]
    parts = [ids[: len(ids) // length * length].reshape(-1, length) for ids in parts]
    tokens = np.concatenate(parts)
    pairs = zip(texts, parts, strict=True)
    users = [text.user for text, windows in pairs for _ in windows]
    if not len(tokens):
        raise ValueError(f"length={length} must be at most the text's: use shorter windows")
    return Texts(tokens, None, users=numbered(users))
