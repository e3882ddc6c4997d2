"""Prompts for in-context regression from texts: the 20 Newsgroups experiment (Section 7, arXiv 2504.16000).

The paper represents an article by its D largest TF-IDF scores in decreasing order, and predicts its length
from L other articles. Two of its choices would leak outside of the mechanism, and are replaced: document
frequencies come from a *public* corpus, and lengths are scaled by public constants instead of the mean and
deviation of the private corpus. A record is a prompt of non-empty documents.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpx.data import files
from dpx.data import text as own

_TOKEN = re.compile(r"[a-z]{2,}")


class DocumentFrequencies(NamedTuple):
    """The number of documents, among `num_documents` public ones, that hold each word."""

    counts: dict[str, int]
    num_documents: int

    def idf(self, word: str) -> float:
        """The smoothed inverse document frequency, log((1+n)/(1+df)) + 1; 0 for an unknown word."""
        count = self.counts.get(word, 0)
        return math.log((1 + self.num_documents) / (1 + count)) + 1 if count else 0.0


class TextPrompts(NamedTuple):
    """Prompts for in-context regression, made of documents: x (N, L+1, D) and y (N, L+1), float64."""

    x: np.ndarray
    y: np.ndarray


def tokenize(text: str) -> list[str]:
    """The words of a text that have two letters or more, in lower case."""
    return _TOKEN.findall(text.lower())


def document_frequencies(
    public_texts: Iterable[str], *, min_documents: int = 2
) -> DocumentFrequencies:
    """The vocabulary and the document frequencies of a public corpus: nothing here is private.

    Words in fewer than `min_documents` documents are left out; ValueError if none is left.
    """
    counts, total = Counter(), 0
    for text in public_texts:
        counts.update(set(tokenize(text)))
        total += 1
    kept = {word: count for word, count in counts.items() if count >= min_documents}
    if not kept:
        raise ValueError(
            f"the public corpus of {total} documents has no word in {min_documents} of them: use a larger one"
        )
    return DocumentFrequencies(kept, total)


def tfidf_top(text: str, frequencies: DocumentFrequencies | None, dim: int) -> np.ndarray:
    """The `dim` largest TF-IDF scores in decreasing order, (dim,), padded with zeros.

    Scores are divided by the l2 norm over all words, so that the vector lies in the unit ball. Without
    document frequencies the scores are term frequencies.
    """
    counts = Counter(tokenize(text))
    weigh = frequencies.idf if frequencies else lambda word: 1.0
    scores = np.array([count * weigh(word) for word, count in counts.items()])
    scores = scores[scores > 0]
    top = np.zeros(dim)
    if scores.size:
        largest = np.sort(scores)[::-1][:dim] / np.linalg.norm(scores)
        top[: largest.size] = largest
    return top


def text_prompts(
    texts: list[str],
    frequencies: DocumentFrequencies | None,
    *,
    dim: int = 30,
    length: int = 30,
    typical_tokens: float = 120.0,
    log_spread: float = 1.0,
    seed: int = 0,
) -> TextPrompts:
    """Groups documents into prompts of L + 1, shuffled with a public seed.

    A document is in one prompt, and its row depends on no other document, so that replacing a document
    replaces a prompt: a guarantee for prompts covers documents. It covers replacing a document with text by
    another one with text, since loaders drop empty ones and the grouping depends on the number that is left.
    It does not cover authors with documents in several prompts.

    Args:
      texts: The private documents.
      frequencies: Those of a public corpus; None if there is none.
      dim: D, the number of TF-IDF scores kept.
      length: L, the number of labelled documents in a prompt.
      typical_tokens: The public constant t₀.
      log_spread: The public constant u. The response is (log(1 + tokens) − log(1 + t₀)) / u.
      seed: The seed of the shuffle.

    Returns:
      Arrays in float64 with N = ⌊documents / (L+1)⌋ prompts; documents that are left over are dropped. Use
      them as `dpx.noisy_head.Prompts(*text_prompts(...))`.

    Raises:
      ValueError: for too few documents, or a size or constant out of range.
    """
    if dim < 1 or length < 1:
        raise ValueError(f"dim={dim} and length={length} must be at least 1")
    if not (typical_tokens > 0 and log_spread > 0):
        raise ValueError(
            f"typical_tokens={typical_tokens} and log_spread={log_spread} must be positive"
        )
    number = len(texts) // (length + 1)
    if number < 1:
        raise ValueError(f"{len(texts)} documents do not fill a prompt of {length + 1}: add some")
    order = np.random.default_rng(seed).permutation(len(texts))[: number * (length + 1)]
    x = np.stack([tfidf_top(texts[i], frequencies, dim) for i in order])
    tokens = np.array([len(tokenize(texts[i])) for i in order])
    y = (np.log1p(tokens) - math.log1p(typical_tokens)) / log_spread
    return TextPrompts(x.reshape(number, length + 1, dim), y.reshape(number, length + 1))


def load_texts(path: str | Path, *, column: str | None = None) -> list[str]:
    """Documents in order of file name or row; empty ones are dropped and are no records.

    Args:
      path: A folder, in which every file, also in folders below, is a document; or what `dpx.data.load_texts`
        takes, whose errors are raised.
      column: The table's column, as there.
    """
    path = Path(path)
    if not path.is_dir():
        return [one.text for one in own.load_texts(path, column=column)]
    texts = [files.read_text(file, errors="replace") for file in files.below(path)]
    texts = [one for one in texts if one.strip()]
    if not texts:
        raise ValueError(f"{path}: holds no text")
    return texts


def fetch_newsgroups(subset: str = "train") -> list[str]:
    """The texts of 20 Newsgroups without headers, footers and quotes, which scikit-learn downloads once.

    The test subset, from a later time, may serve as the public corpus of the train subset.
    """
    from sklearn.datasets import fetch_20newsgroups

    fetched = fetch_20newsgroups(subset=subset, remove=("headers", "footers", "quotes"))
    return [text for text in fetched.data if text.strip()]  # type: ignore[union-attr]
