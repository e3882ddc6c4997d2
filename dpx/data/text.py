"""Own texts as records of characters: lines, documents or windows, and who wrote each of them.

Nothing here is learned from the texts: the alphabet, what becomes of characters outside it, and the longest
record are given. Records are read in the order of the file.
"""

import dataclasses
import itertools
import json
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpx.data import cells, files
from dpx.data.records import Texts

RECORDS = ("line", "document", "window")
OUTSIDE = ("refuse", "replace", "drop")
_SUFFIXES = (".txt", ".csv", ".tsv", ".jsonl")
_REPLACEMENT = "\ufffd"


class Text(NamedTuple):
    """A text, its place for errors, and who wrote it, where that counts."""

    place: str
    text: str
    user: cells.Identifier | None = None


@dataclasses.dataclass(frozen=True)
class Alphabet:
    """The characters that a model knows, and what becomes of others: a public choice.

    Attributes:
      characters: Each a token, in this order; None for the 256 bytes of UTF-8.
      outside: "refuse" raises for other characters, "replace" makes them the last token, which is shown as
        U+FFFD, and "drop" leaves them out.
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
        """How many tokens a text is made of."""
        if self.characters is None:
            return 256
        return len(self.characters) + (self.outside == "replace")

    def encode(self, text: str, place: str = "text") -> np.ndarray:
        """(n,) int32 tokens; raises ValueError at `place` where `outside` is "refuse"."""
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
    """The alphabet of that name, or of these characters.

    "bytes" are those of UTF-8; "ascii" is letters, digits, punctuation, space and newline.
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
) -> Iterator[Text]:
    """The texts of a file or folder, each with its place for errors.

    Args:
      path: A .txt, .csv, .tsv or .jsonl file, which may end in .gz, or a folder of .txt files, which are read
        by name. The first line of a table names its columns.
      record: "line" for each line of a text, which a newline, a carriage return or both end and no other
        character, otherwise each document: a file, or a row of a table.
      column: The column that holds the text, of a table.
      user: A column of authors, each a `dpx.data.cells.identifier`, who are the users of their texts.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: naming the file, and the line or column, for what cannot be read, or no text at all.
    """
    path = Path(path)
    found = 0
    for place, text, author in _documents(path, column, user):
        parts = re.split("\r\n?|\n", text) if record == "line" else [text]
        for number, part in enumerate(parts, start=1):
            if part.strip():
                found += 1
                one = place if record != "line" else f"{place}: line {number}"
                yield Text(one, part, author)
    if not found:
        raise ValueError(f"{path} holds no text: check --config.data.path")


def joined(texts: Iterable[Text]) -> Iterator[Text]:
    """All that each user wrote as one text, joined by newlines, in the order of their first texts."""
    own: dict[cells.Identifier | None, list[Text]] = {}
    for text in texts:
        own.setdefault(text.user, []).append(text)
    for user, found in own.items():
        yield Text(found[0].place, "\n".join(one.text for one in found), user)


def numbered(users: Sequence[cells.Identifier | None]) -> np.ndarray | None:
    """The users of records as `Texts` has them; None where they are not said."""
    if not users or users[0] is None:
        return None
    return cells.identifiers(users, "users", lambda row: f"record {row}")[0]


def _documents(path: Path, column: str | None, user: str | None):
    """(place, text, author or None) of each document."""
    if path.is_dir():
        for file in files.below(path):
            if files.kind(file) == ".txt":
                yield from _documents(file, column, user)
        return
    path, kind = files.existing(path), files.kind(path)
    if kind not in _SUFFIXES:
        raise ValueError(
            f"{path}: must be a folder or one of {', '.join(_SUFFIXES)}, or these with .gz: rename it"
        )
    content = files.read_text(path, "utf-8-sig")
    if kind == ".txt":
        if column is not None or user is not None:
            raise ValueError(
                f"{path}: a .txt file has no columns: leave out config.data.column and config.data.user"
            )
        yield str(path), content, None
        return
    if column is None:
        raise ValueError(f"{path}: say which column holds the text: --config.data.column=NAME")
    for number, row in _rows(path, kind, content, [column, *([] if user is None else [user])]):
        place = f"{path}: line {number}"
        text = _cell(row, column, place)
        if not isinstance(text, str):
            raise ValueError(
                f"{place}, column {column!r} holds {text!r:.60}: write it as text, in quotes"
            )
        _check_whole(text, f"{place}, column {column!r}")
        yield place, text, None if user is None else _author(row, user, place)


def _cell(row: dict, name: str, place: str) -> Any:
    if name not in row:
        other = files.other_separator(list(row), option=False)
        raise ValueError(f"{place} has no column {name!r}: it has {', '.join(row)}{other}")
    if row[name] is None:
        raise ValueError(f"{place}, column {name!r} is empty: fill it in, or remove the line")
    return row[name]


def _author(row: dict, name: str, place: str) -> cells.Identifier:
    found = _cell(row, name, place)
    try:
        return cells.identifier(found)
    except ValueError as error:
        raise ValueError(f"{place}, column {name!r} {error}") from None


def _check_whole(text: str, place: str) -> None:
    """Raises ValueError for half of a pair of surrogates, which JSON can write and UTF-8 cannot."""
    if half := re.search("[\ud800-\udfff]", text):
        raise ValueError(
            f"{place}, character {half.start() + 1} is {half[0]!r}, half of a character: mend the text"
        )


def _rows(path: Path, kind: str, content: str, names: Sequence[str]):
    if kind != ".jsonl":
        lines = files.table_rows(path, content, "\t" if kind == ".tsv" else ",")
        _, header = next(lines, (0, []))
        header = [name.strip() for name in header]
        files.check_once(path, names, header)
        for number, row in lines:
            yield number, dict(itertools.zip_longest(header, row[: len(header)]))
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            try:
                yield number, dict(json.loads(line).items())
            except (ValueError, AttributeError):
                raise ValueError(
                    f"{path}: line {number} is no JSON object: write one object a line"
                ) from None


def encode(texts: Iterable[Text], known: Alphabet, max_length: int) -> Texts:
    """(n, max_length + 1): records that are cut to `max_length` tokens, then their ends."""
    end = known.size
    rows, users = [], []
    for place, text, user in texts:
        row = np.full(max_length + 1, end, np.int32)
        ids = known.encode(text, place)[:max_length]
        row[: len(ids)] = ids
        rows.append(row)
        users.append(user)
    return Texts(np.stack(rows), end, users=numbered(users))


def encode_windows(texts: Iterable[Text], known: Alphabet, length: int) -> Texts:
    """(n, length): each text is cut into windows of `length` characters; the rest at its end is dropped.

    Raises:
      ValueError: if no text is as long as a window.
    """
    texts = list(texts)
    parts = [known.encode(text, place) for place, text, _ in texts]
    parts = [ids[: len(ids) // length * length].reshape(-1, length) for ids in parts]
    tokens = np.concatenate(parts)
    pairs = zip(texts, parts, strict=True)
    users = [text.user for text, windows in pairs for _ in windows]
    if not len(tokens):
        raise ValueError(f"length={length} must be at most the text's: use shorter windows")
    return Texts(tokens, None, users=numbered(users))
