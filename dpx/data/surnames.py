"""88,799 surnames of the US census of 1990, where one name of the training set is one record.

Neighbours add or remove a name of the training set, after `dpx.data.records.split`, which depends on the
number of names; a name more in the file itself could move others between the two sets.
"""

import string
from importlib import resources
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
    source = Path(str(resources.files("names") / "dist.all.last"))
    source = source if path is None else files.existing(path)

    def parse(line):
        name = line.split()[0].lower()
        if len(name) > MAX_LETTERS or not set(name) <= set(ALPHABET):
            raise ValueError(name)
        return name

    lines = files.read_text(source).split("\n")
    names = list(files.parse_lines(source, lines, parse, "a name of 1 to 13 letters"))
    if not names:
        raise ValueError(f"{source} holds no names")
    return names


def encode(names: list[str]) -> Texts:
    """Names as tokens.

    Raises:
      ValueError: for a name that is not at most 13 letters a–z.
    """
    tokens = np.full((len(names), MAX_LETTERS + 1), END, np.int32)
    for row, name in enumerate(names):
        if len(name) > MAX_LETTERS or not set(name) <= set(ALPHABET):
            raise ValueError(f"name {name!r} must be at most {MAX_LETTERS} letters a–z")
        tokens[row, : len(name)] = [ALPHABET.index(letter) for letter in name]
    return Texts(tokens, END)


def decode(tokens: np.ndarray) -> list[str]:
    """Names from tokens; tokens after the first END, or the 13th letter, are ignored."""
    letters = ALPHABET + "\0"
    kept = np.asarray(tokens)[:, :MAX_LETTERS]
    return ["".join(letters[t] for t in row).split("\0")[0] for row in kept]
