"""What models of texts share: rows that are read as many at a time, and what is kept of reading them."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from dpx.nn import pretrained


def in_pieces(function: Callable[[np.ndarray], Any], count: int, size: int) -> np.ndarray:
    """What a function makes of rows 0 to count − 1, (count, ...), by pieces of `size` rows.

    All pieces have one shape, for which the last one is filled up with the first rows. In products of another
    shape a row would be rounded in another way, and how short a last piece is changes when a row leaves.

    Args:
      function: Of the numbers of rows, (size,); it returns a row for each.
      count: How many rows there are.
      size: How many are read at a time. It must not follow from a private number.
    """
    found = np.empty(0)
    for start in range(0, count, size):
        piece = np.asarray(function(np.arange(start, start + size) % count))
        if start == 0:  # one array: it can be large
            found = np.empty((count, *piece.shape[1:]), piece.dtype)
        found[start : start + size] = piece[: count - start]
    return found


def inputs(known: Any, tokens: np.ndarray) -> np.ndarray:
    """The predecessor of each token of records (n, L); that of the first is `known.start`."""
    first = np.full((len(tokens), 1), known.start, np.int32)
    return np.concatenate([first, tokens[:, :-1]], axis=1)


def weight(before, targets, mask):
    """The part of the width that one record fills, by which losses of records are averaged."""
    return mask.sum() / len(targets)


def bytes_of(path: Path | str) -> list[np.ndarray]:
    """The bytes of the files of a pretrained model: a run that resumes has to find the same ones."""
    return [np.memmap(file, np.uint8, "r") for file in pretrained.files(path)]


def once(read: Callable[[list[str]], np.ndarray]) -> Callable[[Sequence[str]], np.ndarray]:
    """A function that makes a row of each text and keeps it: all runs of a sweep read a text once."""
    kept: dict[str, np.ndarray] = {}

    def rows(texts: Sequence[str]) -> np.ndarray:
        new = [text for text in dict.fromkeys(texts) if text not in kept]
        if new:
            kept.update(zip(new, read(new), strict=True))
        return np.stack([kept[text] for text in texts])

    return rows


def kept(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function of a section of a config, which keeps what it has made of the last one."""

    @functools.lru_cache(maxsize=1)
    def made(section: str) -> Any:
        return make(ConfigDict(json.loads(section)))

    return lambda section: made(section.to_json())
