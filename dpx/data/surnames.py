"""88,799 surnames of the US census of 1990, where one name of the training set is one record.

Neighbours add or remove a name of the training set, after `dpx.data.records.split`, which depends on the
number of names; a name more in the file itself could move others between the two sets.
"""

import string
from pathlib import Path

import numpy as np

from dpx.data import files
from dpx.data.records import Texts

ALPHABET = string.ascii_lowercase
END = len(ALPHABET)  # the token that ends a name, and stands before its first letter
VOCAB_SIZE = END + 1
MAX_LETTERS = 13


def load_surnames(path: str | Path | None = None) -> list[str]:
    """The names in lower case, the most frequent first.

    Args:
      path: A file whose lines begin with a name; None reads the `names` package's `dist.all.last`.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: for a name that is not 1 to 13 letters a–z, with its line number.
    """
    path = files.in_wheel("names", "dist.all.last") if path is None else files.existing(path)

    def parse(line: str) -> str:
        return _checked(line.split()[0].lower())

    expected = "a name of 1 to 13 letters"
    return files.parse_lines(path, files.read_text(path), parse, expected, "names")


def _checked(name: str) -> str:
    if len(name) > MAX_LETTERS or not set(name) <= set(ALPHABET):
        raise ValueError(f"name {name!r} must be at most {MAX_LETTERS} letters a–z")
    return name


def encode(names: list[str]) -> Texts:
    """Names as tokens.

    Raises:
      ValueError: for a name that is not at most 13 letters a–z.
    """
    tokens = np.full((len(names), MAX_LETTERS + 1), END, np.int32)
    for row, name in enumerate(names):
        tokens[row, : len(name)] = [ALPHABET.index(letter) for letter in _checked(name)]
    return Texts(tokens, END)


def decode(tokens: np.ndarray) -> list[str]:
    """Names from tokens; tokens after the first END, or the 13th letter, are ignored."""
    letters = ALPHABET + "\0"
    kept = np.asarray(tokens)[:, :MAX_LETTERS]
    return ["".join(letters[t] for t in row).split("\0")[0] for row in kept]
