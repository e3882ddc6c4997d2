"""TinyShakespeare as windows of characters, where one window of the training set is one record.

Neighbours add or remove a window of the training set, after `encode` and `split_windows`; a window more in
the text itself could move others between the two sets.
"""

from pathlib import Path

import numpy as np

from dpx.data import files
from dpx.data.records import Texts

# Printable characters of English plays, chosen without looking at the text; the first ends lines.
ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
VOCAB_SIZE = len(ALPHABET)
START = 0  # the token that stands for the text before a window

_PUBLISHED = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)


def load_shakespeare(path: str | Path | None = None) -> str:
    """The text of the plays.

    Args:
      path: A text file; None downloads the one of char-rnn and checks its sha256.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: for an empty file.
    """
    path = files.published(path, *_PUBLISHED)
    text = files.read_text(path)
    if not text:
        raise ValueError(f"{path} is empty")
    return text


def encode(text: str, length: int) -> Texts:
    """Cuts a text into windows of `length` characters from its start; the rest at its end is dropped.

    The cuts do not depend on what is written, and each character is in one record.

    Raises:
      ValueError: for a character outside the alphabet, with its line, or a text shorter than one window.
    """
    if length < 1 or len(text) < length:
        raise ValueError(f"length={length} must be at least 1 and at most the text's {len(text)}")
    index = {character: token for token, character in enumerate(ALPHABET)}
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if unknown := set(line) - index.keys():
            raise ValueError(f"line {number}: {min(unknown)!r} is not in the alphabet {ALPHABET!r}")
    tokens = np.array([index[character] for character in text], np.int32)
    count = len(tokens) // length
    return Texts(tokens[: count * length].reshape(count, length), None)


def decode(tokens: np.ndarray) -> list[str]:
    """The windows as texts."""
    return ["".join(ALPHABET[t] for t in row) for row in np.asarray(tokens)]


def split_windows(windows: Texts, held_out: int) -> tuple[Texts, Texts]:
    """The windows to train on, and the last `held_out` ones to test on, which are from other plays."""
    if not 0 < held_out < len(windows):
        raise ValueError(f"held_out={held_out} must be between 1 and {len(windows) - 1}")
    return windows.take(slice(-held_out)), windows.take(slice(-held_out, None))
